"""The connections of a command, opened when they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from highwater.resources.schema_registry import schema_finder
from highwater.stream_files import declared, load_streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.schemas import Schema
    from highwater.settings import Settings


class Deployment:
    """The connections of this process's settings, opened when they are asked for.

    Args:
        settings: where everything is.
        declarations: the folder of the declared streams; the project's own if None.
    """

    def __init__(self, settings: Settings, declarations: Path | None = None) -> None:
        self.settings = settings
        self._declarations = declarations

    def streams(self) -> dict[str, Stream]:
        """The declared streams by name."""
        return load_streams(self._declarations)

    def stream(self, name: str) -> Stream:
        """One declared stream.

        Raises:
            ConfigurationError: none is declared under that name.
        """
        return declared(self.streams(), name)

    def ledger(self) -> Ledger:
        from highwater.resources.ledger import Ledger

        return Ledger(self.settings.ledger_url)

    def kafka(self) -> Kafka:
        from highwater.resources.kafka import Kafka

        return Kafka(self.settings.kafka_bootstrap, self.settings.kafka_config)

    def lake(self) -> Lake:
        from highwater.resources.lake import Lake

        return Lake(self.settings.lake)

    def work(self, stream: Stream, spark: SparkSession | None, log: Callable[[str], None]) -> Work:
        """All of them for work on a stream; without a session for what needs none."""
        from highwater.assets.work import Work

        opened = cast("SparkSession", spark), self.lake(), self.ledger(), self.kafka()
        return Work(stream, [], *opened, log, schemas=self.schemas())

    def schemas(self) -> Callable[[int | str], Schema | None] | None:
        """How schemas of the configured registry are found; None without one."""
        return schema_finder(self.settings.schema_registry_url, frozenset(self.settings.schema_registry_config.items()))
