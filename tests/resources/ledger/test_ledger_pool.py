"""The ledger's connections to PostgreSQL: a pool for each process, nothing left on a connection, few rights."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from dev import postgresql as servers
from dev.postgresql import Server
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.plans import Loss
from highwater.resources.ledger import Ledger, creation
from highwater.resources.ledger.database import Database
from highwater.resources.ledger.engine import POOL_OVERFLOW, POOL_SIZE
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import BOUNDED

pytestmark = pytest.mark.slow

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
PLANNED = Slice("orders", "orders", "A", 0, 0, {0: OffsetRange(0, 5)}, NOON)
PAGE = Path(__file__).parents[3] / "docs" / "deployment" / "postgresql.md"


def backend(ledger: Ledger) -> int:
    """The server's process that serves the ledger's connection."""
    with ledger.database.reading() as connection:
        return int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())


def ask(url: str, statement: str) -> object:
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        return connection.exec_driver_sql(statement).scalar_one()


def test_a_connection_serves_again(postgresql: Callable[[], str]) -> None:
    ledger = Ledger(postgresql())
    assert len({backend(ledger) for _ in range(5)}) == 1


def test_a_connection_that_the_server_closed_is_replaced(postgresql: Callable[[], str]) -> None:
    url = postgresql()
    ledger = Ledger(url)
    before = backend(ledger)
    assert ask(url, f"SELECT pg_terminate_backend({before}, 5000)") is True
    assert ledger.add([PLANNED])
    assert backend(ledger) != before


def test_a_process_that_is_forked_off_has_connections_of_its_own(postgresql: Callable[[], str]) -> None:
    ledger = Ledger(postgresql())
    before = backend(ledger)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(backend(ledger)).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(reading, 100)) != before
    os.close(reading)
    os.close(writing)
    assert backend(ledger) == before, "the child's end does not close the parent's connection"


def test_a_pool_that_is_used_up_is_unavailable_after_a_bounded_wait(postgresql: Callable[[], str]) -> None:
    ledger = Ledger(postgresql(), wait_seconds=0.3)
    engine = ledger.database.engine
    taken = [engine.connect() for _ in range(POOL_SIZE + POOL_OVERFLOW)]
    began = time.monotonic()
    with pytest.raises(DependencyUnavailableError):
        ledger.count_slices()
    assert time.monotonic() - began < BOUNDED
    for connection in taken:
        connection.close()
    assert ledger.count_slices() == {}


def test_a_transaction_bounds_its_waits_by_itself(pgbouncer: Callable[[], str]) -> None:
    with Ledger(pgbouncer(), wait_seconds=3).database.reading() as connection:
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "3s"
        assert connection.exec_driver_sql("SHOW statement_timeout").scalar_one() == "12s"


def test_pgbouncer_refuses_what_the_ledger_once_sent(pgbouncer: Callable[[], str]) -> None:
    """The waits were startup options: this is a PgBouncer that takes none."""
    engine = sa.create_engine(pgbouncer(), connect_args={"options": "-c lock_timeout=5000"}, poolclass=sa.NullPool)
    with pytest.raises(sa.exc.OperationalError, match="unsupported startup parameter"):
        engine.connect()


def test_nothing_of_the_ledger_is_left_on_a_connection(postgresql_server: Server) -> None:
    """With one connection to the server, the next client gets the one that the ledger had."""
    with servers.pgbouncer(postgresql_server, pool_size=1) as bouncer, postgresql_server.databases() as create:
        url = bouncer.url(create())
        ledger = Ledger(url)
        ledger.add([PLANNED])
        with ledger.lease("commit", seconds=30):
            used = backend(ledger)
        assert ask(url, "SELECT pg_backend_pid()") == used
        assert ask(url, "SHOW lock_timeout") == "0"
        assert ask(url, "SHOW statement_timeout") == "0"
        mine = f"WHERE pid = {used} AND locktype = 'advisory'"
        assert ask(url, f"SELECT count(*) FROM pg_locks {mine}") == 0
        assert ask(url, "SELECT count(*) FROM pg_prepared_statements") == 0
        assert ask(url, "SELECT count(*) FROM pg_listening_channels()") == 0


def test_more_processes_than_connections_take_turns(postgresql_server: Server) -> None:
    """Two ledgers with a lease each, and one connection to the server."""
    with servers.pgbouncer(postgresql_server, pool_size=1) as bouncer, postgresql_server.databases() as create:
        url = bouncer.url(create())
        first, second = Ledger(url), Ledger(url)
        with first.lease("a", seconds=30) as one, second.lease("b", seconds=30) as other:
            assert [first.allocate_attempts([]), second.allocate_attempts([])] == [{}, {}]
            one.check()
            other.check()
            assert {*first.read_leases()} == {"a", "b"}


def grants() -> list[str]:
    """The statements that the page gives, each in a line or more."""
    [block] = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [statement.strip() for statement in block.split(";") if statement.strip()]


def test_the_grants_of_the_page_are_enough_for_work_and_too_few_for_the_schema(postgresql_server: Server) -> None:
    with postgresql_server.databases() as create:
        database = create()
        owner = postgresql_server.url(database)
        postgresql_server.execute("DROP ROLE IF EXISTS highwater_owner")
        postgresql_server.execute("DROP ROLE IF EXISTS highwater")
        try:
            for statement in grants():
                own = statement.replace("'…'", "'secret'").replace("DATABASE highwater", f"DATABASE {database}")
                postgresql_server.execute(own, database)
            owner, writer = (owner.replace("high@", f"{role}:secret@") for role in ("highwater_owner", "highwater"))
            with pytest.raises(ConfigurationError, match="may not do this") as caught:
                Ledger(writer).count_slices()
            assert "highwater ledger upgrade" in caught.value.remedy
            made = Database(owner, 5.0)
            creation.upgrade(made.unchecked, 5.0)
            ledger = Ledger(writer)
            assert ledger.add([PLANNED])
            assert ledger.record_loss([Loss("orders", "orders", 0, 0, OffsetRange(9, 12), "expired", "ann", NOON)])
            with ledger.lease("commit", seconds=30) as lease:
                lease.check()
            ledger.alerts.record({})
            with pytest.raises(sa.exc.ProgrammingError, match="must be owner"):
                ask(writer, "ALTER TABLE slices ADD COLUMN note TEXT")
            made.unchecked.dispose()
            ledger.database.unchecked.dispose()
        finally:
            for role in ("highwater", "highwater_owner"):
                postgresql_server.execute(f"DROP OWNED BY {role} CASCADE", database)
                postgresql_server.execute(f"ALTER DATABASE {database} OWNER TO {servers.OWNER}")
                postgresql_server.execute(f"DROP ROLE {role}")
