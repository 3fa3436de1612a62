"""Spark servers that hang or end a session."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from dev.processes import LOOPBACK, free_port, wait_until
from highwater.errors import DependencyUnavailableError
from highwater.orchestration.resources import close_session, open_session
from highwater.resources.spark import close, connect, delta_errors
from highwater.resources.spark_tables import write_slices
from highwater.settings import SPARK_REMOTE, Settings
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import (
    BOUNDED,
    shorten_timeouts,
)


@contextmanager
def stopped() -> Iterator[str]:
    """A Connect server that hangs as soon as it is asked for more than settings; its address."""
    server = subprocess.Popen([sys.executable, "-m", "tests.helpers.connect_child"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"sc://{LOOPBACK}:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_spark_server_that_hangs_at_a_commit_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request before the write was reported in Spark's words, and counted against the stream's breaker."""
    shorten_timeouts(monkeypatch, seconds=2)
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    slice_ = Slice("orders", "orders", "A" * 22, 0, 0, {0: OffsetRange(0, 1)}, datetime.now(UTC))
    with stopped() as remote:
        session = open_session(Settings.from_environment({SPARK_REMOTE: remote}))
        with pytest.raises(DependencyUnavailableError, match="Spark failed at a/table"):
            write_slices("a/table", session.range(1), [slice_.key], {}, replace=True, files=1, spread="id")
        close_session(session)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_spark_server_that_hangs_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither refused nor answered, and PySpark waited for it for ever: the run looked alive, with its lease."""
    shorten_timeouts(monkeypatch, seconds=2)
    # Set by PySpark for all that follows in this process.
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with stopped() as remote:
        session = open_session(Settings.from_environment({SPARK_REMOTE: remote}))
        began = time.monotonic()
        with (
            pytest.raises(DependencyUnavailableError, match="Spark failed at a table") as caught,
            delta_errors("a table"),
        ):
            session.sql("SELECT 1").collect()
        assert "SPARK_REMOTE" in str(caught.value.remedy)
        close_session(session)
        assert time.monotonic() - began < BOUNDED
        with pytest.raises(DependencyUnavailableError, match="Spark failed at 127"):
            open_session(Settings.from_environment({SPARK_REMOTE: remote}))


def test_a_session_that_is_over_leaves_the_threads_of_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may come at any time, in any thread, to one that was closed or could not be prepared."""
    from pyspark.sql.connect.client.reattach import ExecutePlanResponseReattachableIterator as Answers
    from pyspark.sql.connect.logging import logger

    shorten_timeouts(monkeypatch, seconds=2)
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    # The client logs the error of its last request, and pytest keeps it for the report: with its frames, and so the
    # session. Its logger is off, until Dagster's setup of logging turns on each that exists.
    monkeypatch.setattr(logger, "disabled", True)
    made: list[Any] = []

    def connected(remote: str) -> Any:
        made.append(connect(remote))
        return made[-1]

    monkeypatch.setattr("highwater.resources.spark.connect", connected)
    unavailable = f"sc://{LOOPBACK}:{free_port()}"
    with pytest.raises(DependencyUnavailableError):
        open_session(Settings.from_environment({SPARK_REMOTE: unavailable}))
    assert made.pop().is_stopped, "it is not left to the collector"
    over = connect(unavailable)
    close(over)
    seen = weakref.ref(over)
    # Made by the session of another that works meanwhile.
    threads = Answers._get_or_create_release_thread_pool()
    del over
    # A call does nothing while another thread collects, such as the sessions of a server that hung.
    wait_until(lambda: gc.collect() >= 0 and seen() is None, 20, "the end of the session")
    assert threads.submit(int).result(timeout=60) == 0
    Answers.shutdown()
