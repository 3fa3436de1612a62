"""Settings of a Spark session that hold for the queries of a block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from highwater.errors import DependencyUnavailableError, HighwaterError
from highwater.resources.spark import delta_errors, translate_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SESSION = "the settings of the session"
# For each session the initial values of settings, and the settings that a block could not restore.
_initial: WeakKeyDictionary[SparkSession, dict[str, str]] = WeakKeyDictionary()
_unrestored: WeakKeyDictionary[SparkSession, set[str]] = WeakKeyDictionary()


@contextmanager
def session_settings(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    """Have settings of a session in force for the block, and restore those with which it was set up.

    After an error which says that Spark is unavailable nothing is restored, since the server would be waited for again;
    the next block does it. A server that is unavailable only as the block ends is no error: what the block did is done.

    Args:
        spark: the session.
        wanted: the values by name; of settings that Spark lets a running session change.

    Raises:
        DependencyUnavailableError: Spark is unavailable as the block begins.
    """
    _restore(spark, _unrestored.pop(spark, set()) - wanted.keys())
    initial = _initial.setdefault(spark, {})
    with delta_errors(_SESSION):
        for name in wanted.keys() - initial.keys():
            initial[name] = str(spark.conf.get(name))
    changed = {name: value for name, value in wanted.items() if initial[name] != value}
    try:
        with delta_errors(_SESSION):
            for name, value in changed.items():
                spark.conf.set(name, value)
        yield
    except Exception as error:
        known = error if isinstance(error, HighwaterError) else translate_error("", f"{type(error).__name__}: {error}")
        if isinstance(known, DependencyUnavailableError):
            _unrestored.setdefault(spark, set()).update(changed)
        else:
            _restore(spark, changed)
        raise
    _restore(spark, changed)


def _restore(spark: SparkSession, names: Collection[str]) -> None:
    try:
        with delta_errors(_SESSION):
            for name in names:
                spark.conf.set(name, _initial[spark][name])
    except DependencyUnavailableError:
        _unrestored.setdefault(spark, set()).update(names)
