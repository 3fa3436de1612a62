"""The connections of a command, opened when they are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from highwater.resources.object_store import drop_empty_variables
from highwater.resources.schema_registry import build_schema_finder
from highwater.settings import Settings
from highwater.stream_files import Declarations, find_declared_stream, read_streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.schemas import Schema


def read_process_settings() -> Settings:
    """The settings of this process, read now: every command, tick and run begins here.

    Raises:
        ConfigurationError: a setting cannot be used.
    """
    drop_empty_variables(os.environ)
    return Settings.from_environment(os.environ)


class Deployment:
    """The connections of this process's settings, opened when they are asked for.

    Args:
        settings: where everything is.
        declarations: the folder of the declared streams; the project's own if None.
        warn: gets a line for each stream file with a fault, when the files are read.
    """

    def __init__(
        self, settings: Settings, declarations: Path | None = None, warn: Callable[[str], None] | None = None
    ) -> None:
        self.settings = settings
        self._declarations = declarations
        self._warn = warn

    @cached_property
    def declarations(self) -> Declarations:
        """The declared streams, and the files with a fault."""
        found = read_streams(self._declarations)
        if self._warn is not None:
            for line in found.describe_faults():
                self._warn(f"warning: {line}")
        return found

    def list_streams(self) -> Mapping[str, Stream]:
        """The declared streams by name, without those of files with a fault."""
        return self.declarations.streams

    def find_stream(self, name: str) -> Stream:
        """One declared stream.

        Raises:
            ConfigurationError: none is declared under that name.
        """
        return find_declared_stream(self.list_streams(), name)

    def open_ledger(self) -> Ledger:
        """The ledger; the same one for the whole command, so that there is one pool of connections."""
        return self._ledger

    @cached_property
    def _ledger(self) -> Ledger:
        from highwater.resources.ledger import Ledger

        return Ledger(self.settings.ledger_url)

    def open_kafka(self) -> Kafka:
        """The cluster of the settings."""
        from highwater.resources.kafka import Kafka

        return Kafka(self.settings.kafka_bootstrap, self.settings.kafka_config)

    def open_lake(self) -> Lake:
        """The lake of the settings."""
        from highwater.resources.lake import Lake

        return Lake(self.settings.lake, self.settings.catalog)

    def open_work(self, stream: Stream, spark: SparkSession | None, log: Callable[[str], None]) -> Work:
        """All of them for work on a stream; without a session for what needs none."""
        from highwater.assets.work import Work

        opened = cast("SparkSession", spark), self.open_lake(), self.open_ledger(), self.open_kafka()
        return Work(stream, [], *opened, log, schemas=self.open_schema_finder())

    def open_schema_finder(self) -> Callable[[int | str], Schema | None] | None:
        """The finder of schemas in the configured registry; None without one."""
        return build_schema_finder(self.settings.schema_registry_url, self.settings.schema_registry_config)
