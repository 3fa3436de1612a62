"""A test double for a session of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark

from highwater.resources.spark import SESSION_CONF, STATIC_CONF

if TYPE_CHECKING:
    from collections.abc import Mapping


ABSENT = "[DELTA_PATH_DOES_NOT_EXIST] /lake/x doesn't exist, or is not a Delta table."


class FakeReader:
    def __init__(self, faults: Mapping[str, str]) -> None:
        self._faults = faults
        self._name = ""

    def format(self, name: str) -> FakeReader:
        self._name = name
        return self

    def options(self, **_: str) -> FakeReader:
        return self

    def load(self, *_: str) -> FakeReader:
        return self

    @property
    def schema(self) -> str:
        if self._name in self._faults:
            raise OSError(self._faults[self._name])
        return ""


class FakeConf(dict[str, str]):
    """Settings of a session that runs."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


class FakeSession:
    """A session that answers without a JVM."""

    def __init__(
        self,
        conf: Mapping[str, str | None] | None = None,
        version: str = pyspark.__version__,
        faults: Mapping[str, str] | None = None,
    ) -> None:
        given = {**STATIC_CONF, **SESSION_CONF, **(conf or {})}
        self.conf = FakeConf({name: value for name, value in given.items() if value is not None})
        self.version = version
        self.read = FakeReader({"delta": ABSENT, **(faults or {})})
