"""Addresses that the ledger refuses, and the remedy of each cause for which its database is unavailable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.engine import translate_errors

SECRET = "planted-password"


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ('FATAL:  password authentication failed for user "high"', "refuses the login; .*; remedy: correct the login"),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "high", SSL off', "refuses the login"),
        ("FATAL:  sorry, too many clients already", "has no free connection; .* max_connections"),
        ('could not extend file "base/1": No space left on device', "cannot write to its disk; .*; remedy: free"),
        ("database or disk is full", "cannot write to its disk; .*; remedy: free"),
        ("cannot execute INSERT in a read-only transaction", "takes no writes; .* primary"),
        ("SSL error: certificate verify failed", "settings of TLS; .* sslmode"),
        ("SSL SYSCALL error: EOF detected", "does not answer; .* whether its server runs"),
        ('connection to server at "db", port 5432 failed: Connection refused', "does not answer; .* start its server"),
        ("database is locked", "does not answer; .* holds its lock"),
    ],
)
def test_a_ledger_that_is_unavailable_has_the_remedy_of_its_cause(reason: str, text: str) -> None:
    """A wrong password and a full disk had the remedy of a lock."""
    engine = sa.create_engine("sqlite://")
    with pytest.raises(DependencyUnavailableError, match=text), translate_errors(engine):
        raise sa.exc.OperationalError("INSERT", {}, Exception(reason))


def test_a_process_without_a_free_connection_has_a_remedy_of_its_own() -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.QueuePool, pool_size=1, max_overflow=0, pool_timeout=0.01)
    text = "has no free connection in this process; .*; remedy: wait for the other work"
    with engine.connect(), pytest.raises(DependencyUnavailableError, match=text), translate_errors(engine):
        engine.connect()


@pytest.mark.slow
def test_a_server_without_the_database_or_without_writes_is_reported(postgresql: Callable[[], str]) -> None:
    url = postgresql()
    with pytest.raises(DependencyUnavailableError, match=r"does not exist; .* create the database"):
        Ledger(f"{url}_of_nobody").count_slices()
    database = sa.engine.make_url(url).database
    with sa.create_engine(url, isolation_level="AUTOCOMMIT").connect() as connection:
        Ledger(url).count_slices()
        connection.exec_driver_sql(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    ledger = Ledger(url)
    assert ledger.count_slices() == {}
    with pytest.raises(DependencyUnavailableError, match="takes no writes"), ledger.lease("any", seconds=5):
        pass


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (f"postgresql://high:{SECRET}@db:port/ledger", "cannot be read"),
        (f"postgresql+asyncpg://high:{SECRET}@db/ledger", "knows no driver 'asyncpg'"),
        ("sqlite+aiosqlite:////ledger", "knows no driver 'aiosqlite'"),
    ],
)
def test_an_address_that_sqlalchemy_refuses_is_a_fault_of_the_setting(url: str, problem: str) -> None:
    """Commands ended with a traceback."""
    with pytest.raises(ConfigurationError, match=f"{problem}.*HIGHWATER_LEDGER_URL") as caught:
        Ledger(url)
    assert SECRET not in str(caught.value)


@pytest.mark.slow
def test_an_option_that_no_client_knows_is_a_fault_of_the_setting(postgresql: Callable[[], str]) -> None:
    with pytest.raises(ConfigurationError, match=r"refuses its address; found: invalid dsn: .*after `\?`"):
        Ledger(f"{postgresql()}?foo=bar").count_slices()
