"""Breakers in the ledger: of streams and dependencies, how slices were judged, and rejects that a person accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from highwater.breaker import CLOSED, OPEN, Circuit
from highwater.errors import LeaseHeldError
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.engine import read_slice_rows

# Each time somebody else changed the same breaker meanwhile: more than ever run at once.
TRIES = 20


@dataclass(frozen=True)
class Judgement:
    """The breaker's judgement of a slice of the main topic.

    Args:
        slice_key: the slice.
        stream: its stream.
        run: the run that attempted it first; empty outside of runs.
        records: number of its raw records.
        rejects: number of records that were rejected, or would have been.
        failed: whether its first attempt ended in an error of another kind.
        refused: whether it was over the limit at the last attempt, and left undecided.
        judged_at: when that was, in UTC.
        reasons: how many of the rejects have which reason.
    """

    slice_key: str
    stream: str
    run: str
    judged_at: datetime
    records: int = 0
    rejects: int = 0
    failed: bool = False
    refused: bool = False
    reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AcceptedSlice:
    """A person's leave for a slice to pass however many of its records are rejected."""

    slice_key: str
    because: str
    accepted_by: str
    accepted_at: datetime


@dataclass(frozen=True)
class AcceptedReason:
    """A person's decision that rejects for a reason open the breaker no more, in slices of the main topic from one on.

    Args:
        reason: the reason, `malformed` for example.
        from_slice: the first of the slices.
        from_ordinal: its ordinal.
        because: why.
        accepted_by: the person's name.
        accepted_at: when, in UTC.
    """

    reason: str
    from_slice: str
    from_ordinal: int
    because: str
    accepted_by: str
    accepted_at: datetime

    @property
    def text(self) -> str:
        """The decision in a sentence."""
        why = f": {self.because}" if self.because else ""
        return (
            f"rejects for {self.reason} are accepted from {self.from_slice} on, by {self.accepted_by} "
            f"at {self.accepted_at:%Y-%m-%d %H:%M} UTC{why}"
        )

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "accepted_at": self.accepted_at.isoformat()}


@dataclass(frozen=True)
class Dependency:
    """The state of a dependency's breaker, in the words of pybreaker.

    Args:
        name: the dependency.
        state: `closed`, `open` or `half-open`.
        failures: calls in a row that failed while it was closed.
        successes: calls in a row that succeeded while it was half-open.
        since: when it was opened, or its probe began last, in UTC; None if it never was.
        probe: names the process that makes the probe; empty if none does.
        why: the failure that opened it.
        closed: when it closed last, in UTC; None if it never was anything but closed.
    """

    name: str
    state: str = CLOSED
    failures: int = 0
    successes: int = 0
    since: datetime | None = None
    probe: str = ""
    why: str = ""
    closed: datetime | None = None

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        times = {"since": self.since, "closed": self.closed}
        return {**vars(self), **{name: None if at is None else at.isoformat() for name, at in times.items()}}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Dependency:
        """The reverse of `to_plain`."""
        times = {name: plain.get(name) for name in ("since", "closed")}
        return cls(**{**plain, **{n: None if at is None else datetime.fromisoformat(at) for n, at in times.items()}})


Decide = Callable[[Circuit, Mapping[str, Judgement]], tuple[Circuit, Sequence[Judgement]]]


class Breakers(LedgerPart):
    """The breakers of a deployment."""

    def read_circuit(self, stream: str) -> Circuit:
        """The state of a stream's breaker."""
        with self._database.reading() as connection:
            return _read_circuit(connection, stream)[0]

    def list_unclosed_streams(self) -> set[str]:
        """The streams whose breaker is not closed."""
        table, begin = schema.breakers, _build_stream_name("")
        query = select(table.c.name).where(table.c.name.startswith(begin), table.c.state != CLOSED)
        with self._database.reading() as connection:
            return {name.removeprefix(begin) for name in connection.execute(query).scalars()}

    def update(self, stream: str, keys: Sequence[str], decide: Decide) -> Circuit:
        """Change a stream's breaker, and how slices were judged, in one transaction.

        Args:
            stream: the stream's name.
            keys: the slices whose judgements are looked at.
            decide: makes the state and the judgements from the stored ones; asked again when they changed meanwhile.

        Raises:
            LeaseHeldError: others changed the breaker again and again.
        """
        for _ in range(TRIES):
            try:
                with self._database.writing() as connection:
                    before, revision = _read_circuit(connection, stream)
                    after, judgements = decide(before, _read_judgements(connection, keys))
                    if after != before and not _keep(connection, _build_stream_name(stream), after, revision):
                        continue
                    _replace(connection, judgements)
                    return after
            except IntegrityError:
                continue
        raise LeaseHeldError(
            f"the breaker of {stream} was changed by others {TRIES} times",
            remedy="lower max_concurrent_runs in dagster.yaml, then request the slice again",
        )

    def read_dependency(self, name: str) -> Dependency:
        """The state of a dependency's breaker."""
        with self._database.reading() as connection:
            return _read_dependency(connection, name)[0]

    def list_dependencies(self) -> list[Dependency]:
        """All dependencies whose breakers were ever changed."""
        table = schema.breakers
        query = select(table.c.value).where(table.c.name.startswith(_build_dependency_name(""))).order_by(table.c.name)
        with self._database.reading() as connection:
            return [Dependency.from_plain(value) for value in connection.execute(query).scalars()]

    def change(self, name: str, change: Callable[[Dependency], Dependency]) -> Dependency:
        """Change a dependency's breaker by compare-and-set; `change` is asked again when it was changed meanwhile.

        Raises:
            LeaseHeldError: others changed it again and again.
        """
        for _ in range(TRIES):
            try:
                with self._database.writing() as connection:
                    before, revision = _read_dependency(connection, name)
                    after = change(before)
                    if after == before or _keep(connection, _build_dependency_name(name), after, revision):
                        return after
            except IntegrityError:
                continue
        raise LeaseHeldError(
            f"the breaker of {name} was changed by others {TRIES} times", remedy="nothing to do: it is tried again"
        )

    def read_judgements(self, keys: Sequence[str]) -> dict[str, Judgement]:
        """The last judgement of each slice; those that never had one are left out."""
        with self._database.reading() as connection:
            return _read_judgements(connection, keys)

    def list_refused(self, stream: str) -> list[Judgement]:
        """The slices that were over the limit and are undecided, in the order in which they were tried last."""
        table = schema.judgements
        query = select(table).where(table.c.stream == stream, table.c.refused.is_(True))
        with self._database.reading() as connection:
            return _with_reasons(connection, connection.execute(query.order_by(table.c.judged_at)).all())

    def accept(self, stream: str, acceptances: Iterable[AcceptedSlice]) -> int:
        """Record that slices are let through; returns how many are new. A repeated permission counts from now."""
        table = schema.acceptances
        given = {one.slice_key: one for one in acceptances}

        def write(connection: Connection) -> int:
            known = _read_accepted_slices(connection, list(given))
            for key in known:
                connection.execute(delete(table).where(table.c.slice_key == key))
            if given:
                connection.execute(insert(table), [{**vars(one), "stream": stream} for one in given.values()])
            return len(given.keys() - known.keys())

        return self._database.write_again(write)

    def read_accepted_slices(self, keys: Sequence[str]) -> dict[str, AcceptedSlice]:
        """The slices that a person lets through."""
        with self._database.reading() as connection:
            return _read_accepted_slices(connection, keys)

    def accept_reason(self, stream: str, accepted: AcceptedReason) -> None:
        """Store that a reason is accepted; an earlier acceptance or revocation of it is replaced.

        A stream whose breaker is open is probed at once.
        """
        table = schema.accepted_reasons
        is_reason = (table.c.stream == stream) & (table.c.reason == accepted.reason)

        def write(connection: Connection) -> None:
            connection.execute(delete(table).where(is_reason))
            connection.execute(insert(table).values(stream=stream, **vars(accepted)))

        self._database.write_again(write)

        def end_cool_down(circuit: Circuit, _: Mapping[str, Judgement]) -> tuple[Circuit, Sequence[Judgement]]:
            return (replace(circuit, until=accepted.accepted_at) if circuit.state == OPEN else circuit), ()

        self.update(stream, (), end_cool_down)

    def revoke_reason(self, stream: str, reason: str, by: str, at: datetime) -> bool:
        """Store that a reason is accepted no more; False if it was not."""
        table = schema.accepted_reasons
        is_accepted = (table.c.stream == stream) & (table.c.reason == reason) & table.c.revoked_at.is_(None)
        with self._database.writing() as connection:
            return (
                connection.execute(update(table).where(is_accepted).values(revoked_by=by, revoked_at=at)).rowcount == 1
            )

    def read_accepted_reasons(self, stream: str) -> dict[str, AcceptedReason]:
        """The reasons that are accepted for a stream, revoked ones left out."""
        table = schema.accepted_reasons
        query = select(table).where(table.c.stream == stream, table.c.revoked_at.is_(None)).order_by(table.c.reason)
        return {
            r.reason: AcceptedReason(r.reason, r.from_slice, r.from_ordinal, r.because, r.accepted_by, r.accepted_at)
            for r in self._database.read(query)
        }


def _read_circuit(connection: Connection, stream: str) -> tuple[Circuit, int]:
    table = schema.breakers
    row = connection.execute(select(table).where(table.c.name == _build_stream_name(stream))).first()
    return (Circuit(), 0) if row is None else (Circuit.from_plain(row.value), row.revision)


def _read_dependency(connection: Connection, name: str) -> tuple[Dependency, int]:
    table = schema.breakers
    row = connection.execute(select(table).where(table.c.name == _build_dependency_name(name))).first()
    return (Dependency(name), 0) if row is None else (Dependency.from_plain(row.value), row.revision)


def _keep(connection: Connection, name: str, value: Circuit | Dependency, revision: int) -> bool:
    """Compare and set the revision; False if somebody else was first."""
    table = schema.breakers
    values = {"revision": revision + 1, "state": value.state, "value": value.to_plain()}
    if revision == 0:
        connection.execute(insert(table).values(name=name, **values))
        return True
    seen = (table.c.name == name) & (table.c.revision == revision)
    return connection.execute(update(table).where(seen).values(values)).rowcount == 1


def _build_stream_name(stream: str) -> str:
    return f"stream {stream}"


def _build_dependency_name(name: str) -> str:
    return f"dependency {name}"


def _with_reasons(connection: Connection, rows: Sequence[Any]) -> list[Judgement]:
    reasons: dict[str, dict[str, int]] = {row.slice_key: {} for row in rows}
    for row in read_slice_rows(connection, schema.judged_reasons, [*reasons]):
        reasons[row.slice_key][row.reason] = row.rejects
    return [
        Judgement(**row._mapping, reasons=reasons[row.slice_key])  # noqa: SLF001 - SQLAlchemy's public name
        for row in rows
    ]


def _read_judgements(connection: Connection, keys: Sequence[str]) -> dict[str, Judgement]:
    found = _with_reasons(connection, [*read_slice_rows(connection, schema.judgements, keys)])
    return {one.slice_key: one for one in found}


def _replace(connection: Connection, judgements: Sequence[Judgement]) -> None:
    table, reasons = schema.judgements, schema.judged_reasons
    for one in judgements:
        connection.execute(delete(table).where(table.c.slice_key == one.slice_key))
        connection.execute(delete(reasons).where(reasons.c.slice_key == one.slice_key))
    if judgements:
        rows = [{name: value for name, value in vars(one).items() if name != "reasons"} for one in judgements]
        connection.execute(insert(table), rows)
    if counts := [
        {"slice_key": one.slice_key, "reason": reason, "rejects": count}
        for one in judgements
        for reason, count in one.reasons.items()
        if count
    ]:
        connection.execute(insert(reasons), counts)


def _read_accepted_slices(connection: Connection, keys: Sequence[str]) -> dict[str, AcceptedSlice]:
    rows = read_slice_rows(connection, schema.acceptances, keys)
    return {r.slice_key: AcceptedSlice(r.slice_key, r.because, r.accepted_by, r.accepted_at) for r in rows}
