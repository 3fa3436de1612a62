"""Leases: locks in the ledger's database that end by themselves when their holder dies."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Float, cast, delete, func, insert, literal, select, update
from sqlalchemy.exc import IntegrityError

from highwater.errors import HighwaterError, LeaseHeldError
from highwater.resources.ledger import schema

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection

    from highwater.resources.ledger.database import Database

_TABLE = schema.leases
# Four renewals fit into a term, so that two which fail do no harm: a term of 60 s is renewed every 15 s.
RENEWALS_PER_TERM = 4


class Lease:
    """A lease that this process holds.

    Args:
        database: the ledger's.
        name: the name of the lock.
        seconds: its term.
    """

    def __init__(self, database: Database, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self._database = database
        self._owner = uuid.uuid4().hex
        self._sure_until = 0.0
        # Whether it is left to run out at the end of its block: what it protects may go on without its holder.
        self.left = False

    def take(self) -> bool:
        """Take or renew it; False if somebody else holds it."""
        return self._track_renewal(self._take)

    def renew(self) -> bool:
        """Renew it; False if somebody else has had it since, also one that gave it back: their work came in between."""
        return self._track_renewal(self._extend_term)

    def _track_renewal(self, renew: Callable[[], bool]) -> bool:
        before = time.monotonic()
        ours = renew()
        # Counted from before the call: in the database the term began later.
        self._sure_until = before + self.seconds if ours else 0.0
        return ours

    def _take(self) -> bool:
        try:
            with self._database.writing() as connection:
                now = _read_clock(connection)
                if self._update_row(connection, (_TABLE.c.owner == self._owner) | (_TABLE.c.until < now)):
                    return True
                if connection.execute(select(_TABLE.c.name).where(_TABLE.c.name == self.name)).first():
                    return False
                values = {"owner": self._owner, "until": now + self.seconds}
                connection.execute(insert(_TABLE).values(name=self.name, **values))
                return True
        except IntegrityError:
            return False

    def _extend_term(self) -> bool:
        with self._database.writing() as connection:
            return self._update_row(connection, _TABLE.c.owner == self._owner)

    def _update_row(self, connection: Connection, where: ColumnElement[bool]) -> bool:
        values = {"owner": self._owner, "until": _read_clock(connection) + self.seconds}
        return connection.execute(update(_TABLE).where(_TABLE.c.name == self.name, where).values(values)).rowcount == 1

    def give_back(self) -> None:
        """Let go of it, if it is still ours."""
        self._sure_until = 0.0
        with self._database.writing() as connection:
            connection.execute(delete(_TABLE).where(_TABLE.c.name == self.name, _TABLE.c.owner == self._owner))

    @property
    def held(self) -> bool:
        """Whether it is surely ours now."""
        return time.monotonic() < self._sure_until

    def check(self) -> None:
        """Ensure that it is still ours, just before what it protects.

        Raises:
            LeaseHeldError: it could not be renewed in time, so that somebody else may hold it.
        """
        if not self.held:
            raise LeaseHeldError(
                f"the lease {self.name!r} ran out before its work was done",
                stored=f"a term of {self.seconds:g} s",
                remedy="nothing was done without it; try again, and see why this process or the ledger hung",
            )


def _read_clock(connection: Connection) -> Any:
    """The database's clock in seconds: holders on several machines need not agree on the time."""
    if connection.dialect.name == "postgresql":
        return connection.execute(select(cast(func.extract("epoch", func.clock_timestamp()), Float(53)))).scalar_one()
    return literal(time.time())


def measure_clock_skew(connection: Connection) -> timedelta:
    """How far the database's clock is ahead of this process's; nothing for SQLite, which has no clock of its own."""
    clock = connection.execute(select(_read_clock(connection))).scalar_one()
    return timedelta(seconds=float(clock) - time.time())


def read_current_leases(connection: Connection) -> dict[str, datetime]:
    """The leases that somebody holds now, and when each ends unless it is renewed."""
    query = (
        select(_TABLE.c.name, _TABLE.c.until).where(_TABLE.c.until >= _read_clock(connection)).order_by(_TABLE.c.name)
    )
    return {row.name: datetime.fromtimestamp(row.until, UTC) for row in connection.execute(query)}


def delete_expired_leases(connection: Connection, over_for: float) -> None:
    """Delete leases that expired this many seconds ago: each run has a name of its own, so these would grow."""
    connection.execute(delete(_TABLE).where(_TABLE.c.until < _read_clock(connection) - over_for))


class Heartbeat:
    """A lease as a sign of life: kept alive by a thread, and left to run out when this process dies or hangs.

    A ledger that is unavailable does the work no harm, and the lease runs out.
    Nothing is protected by it: see `acquire_lease`.

    Args:
        database: the ledger's, which connects when it is first needed.
        name: the process or run that is alive.
        seconds: its term.
    """

    def __init__(self, database: Database, name: str, seconds: float) -> None:
        self._database, self._name, self._seconds = database, name, seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run_heartbeat, name=f"heartbeat {name}", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing. The lease is left to expire: its holder may still have to say how it ended."""
        self._done.set()
        self._thread.join()

    def _run_heartbeat(self) -> None:
        lease: Lease | None = None
        while not self._done.is_set():
            try:
                lease = lease or Lease(self._database, self._name, self._seconds)
                lease.take()
            except HighwaterError:
                pass  # tried again at the next beat; a reader meanwhile sees the lease expire
            self._done.wait(self._seconds / RENEWALS_PER_TERM)


@contextmanager
def acquire_lease(database: Database, name: str, seconds: float, wait: float) -> Iterator[Lease]:
    """Hold a lease while the block runs; see `Ledger.lease`."""
    lease = Lease(database, name, seconds)
    _wait_for(lease, wait)
    done = threading.Event()
    renewing = threading.Thread(target=_renew, args=(lease, done), name=f"lease {name}", daemon=True)
    renewing.start()
    try:
        yield lease
    finally:
        done.set()
        renewing.join()
        if not lease.left:
            _try_give_back(lease)


def _wait_for(lease: Lease, wait: float) -> None:
    deadline = time.monotonic() + wait
    while not lease.take():
        left = deadline - time.monotonic()
        if left <= 0:
            raise LeaseHeldError(
                f"the lease {lease.name!r} is held by somebody else",
                found=f"not given back within {wait:g} s",
                remedy=f"try again; a holder that died keeps it for {lease.seconds:g} s at the most",
            )
        time.sleep(min(left, random.uniform(0.05, 0.25)))  # noqa: S311 - spreads the waiting, hides nothing


def _renew(lease: Lease, done: threading.Event) -> None:
    """Renew until done; a failed renewal is tried again, and `check` shows when it was too late."""
    while not done.wait(lease.seconds / RENEWALS_PER_TERM):
        try:
            if not lease.renew():
                return
        except HighwaterError:
            continue


def _try_give_back(lease: Lease) -> None:
    """A lease that cannot be given back ends by itself; the error of the block matters more."""
    try:
        lease.give_back()
    except HighwaterError:
        return
