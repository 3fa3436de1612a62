"""Settings of a session hold for a block, and are restored whatever happens in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

import pytest

from highwater.errors import DependencyUnavailableError
from highwater.resources.session_settings import session_settings
from highwater.resources.spark import ADAPTIVE
from highwater.resources.spark_tables import AS_PLANNED
from tests.helpers.fake_session import FakeConf, FakeSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def session_with(adaptive: str) -> SparkSession:
    return cast("SparkSession", FakeSession({ADAPTIVE: adaptive}))


def fail(session: SparkSession, text: str) -> None:
    with pytest.raises(OSError, match=re.escape(text)), session_settings(session, AS_PLANNED):
        raise OSError(text)


def test_a_setting_is_restored_after_the_block_and_after_its_error() -> None:
    session = session_with("true")
    with session_settings(session, AS_PLANNED):
        assert session.conf.get(ADAPTIVE) == "false"
    assert session.conf.get(ADAPTIVE) == "true"
    fail(session, "ConcurrentTransactionException: another commit took the number")
    assert session.conf.get(ADAPTIVE) == "true"


@pytest.mark.parametrize("wanted", [AS_PLANNED, {}])
def test_next_block_restores_settings_after_spark_was_unavailable(wanted: dict[str, str]) -> None:
    """A server that is unavailable would be waited for again, for a minute."""
    session = session_with("true")
    fail(session, "StatusCode.UNAVAILABLE")
    assert session.conf.get(ADAPTIVE) == "false"
    with session_settings(session, wanted):
        assert session.conf.get(ADAPTIVE) == wanted.get(ADAPTIVE, "true")
    assert session.conf.get(ADAPTIVE) == "true"


def test_a_session_that_was_set_up_so_is_left_so() -> None:
    session = session_with("false")
    with session_settings(session, AS_PLANNED):
        assert session.conf.get(ADAPTIVE) == "false"
    assert session.conf.get(ADAPTIVE) == "false"


class FailingConf(FakeConf):
    """Settings after a server that is unavailable while `unavailable` is set."""

    unavailable = False

    def set(self, name: str, value: str) -> None:
        if self.unavailable:
            raise OSError("StatusCode.UNAVAILABLE")
        super().set(name, value)


def test_a_spark_that_is_unavailable_as_a_block_begins_is_named_and_as_it_ends_fails_nothing() -> None:
    session = session_with("true")
    conf = FailingConf({ADAPTIVE: "true"})
    vars(session)["conf"] = conf
    conf.unavailable = True
    with pytest.raises(DependencyUnavailableError), session_settings(session, AS_PLANNED):
        raise AssertionError("it began")
    conf.unavailable = False
    with session_settings(session, AS_PLANNED):
        conf.unavailable = True
    assert session.conf.get(ADAPTIVE) == "false"
    conf.unavailable = False
    with session_settings(session, {}):
        assert session.conf.get(ADAPTIVE) == "true"
