"""Settings of a Spark session that hold for the queries of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from highwater.errors import DependencyAwayError
from highwater.resources.spark import translated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Of each session the value with which a setting was set up, and the settings that a block could not restore.
_usual: WeakKeyDictionary[SparkSession, dict[str, str]] = WeakKeyDictionary()
_left: WeakKeyDictionary[SparkSession, set[str]] = WeakKeyDictionary()


@contextmanager
def session_settings(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    """Have settings of a session in force for the block, and restore those with which it was set up.

    After an error which says that Spark is away nothing is restored, since the server would be waited for again; the
    next block does it.

    Args:
        spark: the session.
        wanted: the values by name; of settings that Spark lets a running session change.
    """
    _restore(spark, _left.pop(spark, set()) - wanted.keys())
    usual = _usual.setdefault(spark, {})
    for name in wanted.keys() - usual.keys():
        usual[name] = str(spark.conf.get(name))
    changed = {name: value for name, value in wanted.items() if usual[name] != value}
    for name, value in changed.items():
        spark.conf.set(name, value)
    try:
        yield
    except Exception as error:
        if isinstance(translated("", f"{type(error).__name__}: {error}"), DependencyAwayError):
            _left.setdefault(spark, set()).update(changed)
        else:
            _restore(spark, changed)
        raise
    _restore(spark, changed)


def _restore(spark: SparkSession, names: Iterable[str]) -> None:
    for name in names:
        spark.conf.set(name, _usual[spark][name])
