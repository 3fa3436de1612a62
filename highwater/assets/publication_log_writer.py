"""A run's view of `published` and `_sending`: what was sent, and each batch, recorded before and after it is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.assets import accepted_copies
from highwater.assets.commit import take_commit_turn
from highwater.assets.publication_log import (
    BATCH,
    INCOMPLETE,
    LOOK_AGAIN,
    SENDING,
    TABLE,
    BatchUnderWay,
    build_schema,
    build_sending_schema,
    list_sending_slices,
    read_batch,
    read_last_published,
    read_last_settled,
)
from highwater.envelope import ORIGIN, Origin
from highwater.errors import (
    ConfigurationError,
    DependencyUnavailableError,
    SupersededAttemptError,
    TopicAbsentError,
    TopicRecreatedError,
)
from highwater.publishing import EventState, RecordedOutcome
from highwater.resources.commit_log import get_table_id, read_slice_commits
from highwater.resources.commit_log_writer import replace_slices
from highwater.resources.delta import open_table, query, query_all, query_arrow, slice_is_one_of
from highwater.resources.delta_rs_writes import open_or_create_table, replace_all
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.assets.work import Work
    from highwater.slices import Slice

# Columns with hardly two equal rows: as it is written, a dictionary would cost more than it saves.
UNLIKE = ("origin_offset", "fingerprint", "number")


def delete_origins(work: Work, origins: Mapping[str, Collection[Origin]]) -> None:
    """Remove what became of origins of erased keys, so that nobody misses them among the events.

    The attempts stay: a slice whose decision has changed is looked at again, and sends nothing for them.

    Args:
        work: the connections.
        origins: for each slice those that leave its events.

    Raises:
        SupersededAttemptError: slices of them are being sent, or another writer was first; it may be tried again.
        DependencyUnavailableError: the storage or the ledger is unavailable.
    """
    path = work.lake.build_table_path(work.stream.name, TABLE)
    table = open_table(path) if origins else None
    if table is None:
        return
    _ensure_not_under_way(work, origins)
    accepted_copies.delete_copies(work.lake, work.stream, {one for some in origins.values() for one in some})
    parts, found = [], {}
    for key, slice_commit in read_slice_commits(table, [*origins]).items():
        rows = _read_rows(table, [key])
        remaining = rows.filter(_is_none_of(rows, origins[key]))
        if len(remaining) < len(rows):
            found[key] = replace(
                _build_slice_commit(slice_commit.slice_, slice_commit.attempt, remaining), extra=slice_commit.extra
            )
            parts.append(remaining)
    if found:
        # A batch is written down in the same turn, so none begins between this look and the commit.
        _commit(work, table, parts, found, lambda: _ensure_not_under_way(work, origins))


def _ensure_not_under_way(work: Work, keys: Collection[str]) -> None:
    """Validate that no batch that is written down has records of the slices.

    Raises:
        SupersededAttemptError: one has.
    """
    if sending := list_sending_slices(work.lake, work.stream).intersection(keys):
        raise SupersededAttemptError(
            f"{', '.join(sorted(sending))}: a publication of them is under way, or broke off",
            remedy=f"let it end, or materialise {work.stream.name}/{TABLE} of these slices; then erase the key again",
        )


@dataclass(frozen=True)
class _SettledBatch:
    """The remainder of a batch that ended or broke off: commits of slices, their rows, and its number."""

    slice_commits: Mapping[str, SliceCommit]
    rows: Sequence[pa.Table]
    batch: BatchUnderWay


class PublicationLog:
    """The table, as one run reads and writes it: it takes the version after the one it has read, or fails.

    Args:
        work: the connections.
        topic_id: ID of the target topic.

    Raises:
        ConfigurationError: another topic was published to before.
        TopicRecreatedError: the topic was created again since.
        DependencyUnavailableError: the storage is unavailable.
    """

    def __init__(self, work: Work, topic_id: str) -> None:
        assert work.stream.publishes is not None, "only streams that publish have the table"
        self._work = work
        self._topic, self._topic_id = work.stream.publishes.topic, topic_id
        path = work.lake.build_table_path(work.stream.name, TABLE)
        about = "what was sent to the topic of accepted events"
        self._table: DeltaTable = open_or_create_table(path, build_schema(), about)
        self._sending = open_table(self._path_of_sending)
        found = read_batch(self._sending, self._table)
        self.sending = found or BatchUnderWay(read_last_settled(self._table), self._topic, self._topic_id)
        self._ensure_holds(self.sending.settled)
        self.before = accepted_copies.open_copies(work.lake, work.stream)
        # The number of the batch in `_sending`. Without records a batch has no place there, and its number comes again.
        self._in_sending = self.sending.attempt
        # The batch that this run has taken up.
        self._taken_up: pa.Table | None = None
        # The settled part of the previous batch, until it is committed.
        self._settled: _SettledBatch | None = None
        self._ensure_same_topic()

    @property
    def _path_of_sending(self) -> str:
        return self._work.lake.build_table_path(self._work.stream.name, SENDING)

    def _ensure_holds(self, settled: Mapping[str, int]) -> None:
        """Validate that the table holds what an earlier batch left in it.

        Raises:
            ConfigurationError: somebody restored an older version of it.
        """
        held = read_slice_commits(self._table, [*settled])
        for key, batch in settled.items():
            found = held[key].extra.get(BATCH, 0) if key in held else 0
            if found < batch:
                raise ConfigurationError(
                    f"the table {TABLE} of {self._work.stream.name} is older than what was sent",
                    stored=f"batch {batch} was settled, with {key}",
                    found=f"batch {found} of that slice",
                    remedy="restore the table's newest version: an older one would send events again",
                )

    @property
    def identity(self) -> str:
        """The table's own ID: a mark of another table counts other records."""
        return str(self._table.metadata().id)

    @property
    def version(self) -> int:
        """The version that was read or written last."""
        return int(self._table.version())

    def _ensure_same_topic(self) -> None:
        path = self._work.lake.build_table_path(self._work.stream.name, TABLE)
        revised = f"to send everything to it, delete the table {path} and start the sensor again"
        if self.sending.topic != self._topic:
            raise ConfigurationError(
                f"stream {self._work.stream.name} published to another topic before",
                stored=self.sending.topic,
                found=self._topic,
                remedy=f"declare that topic again; or, {revised}",
            )
        if self.sending.topic_id != self._topic_id:
            self._ensure_recreated()
            raise TopicRecreatedError(
                f"topic {self._topic} is not the one that was published to",
                stored=f"topic ID {self.sending.topic_id}",
                found=f"topic ID {self._topic_id}",
                remedy=f"check that HIGHWATER_KAFKA_BOOTSTRAP names the right cluster; if it does, {revised}",
            )

    def _ensure_recreated(self) -> None:
        """Look at the topic a second time: the remedy sends everything again.

        Raises:
            DependencyUnavailableError: the second look does not show the same topic as the first, or no broker
                answered.
        """
        try:
            again = self._work.kafka.look_again(self._topic).topic_id
        except TopicAbsentError:
            again = "no such topic"
        if again != self._topic_id:
            raise DependencyUnavailableError(
                f"two looks at topic {self._topic} disagree",
                stored=f"first: topic ID {self._topic_id}",
                found=f"then: {again}",
                remedy="nothing was sent; it is tried again",
            )

    def load_slice_commits(self, keys: Sequence[str]) -> dict[str, SliceCommit]:
        """The commits of slices, those among them whose first publication is not complete."""
        if self._settled is not None and not self._settled.slice_commits.keys().isdisjoint(keys):
            self.commit_settled()
        return read_slice_commits(self._table, keys)

    def load_last_published(self) -> str | None:
        """As the function of this name, of the table as it was read or written last."""
        return read_last_published(self._whole, self._work.stream.topic)

    def load_outcomes(self, where: str) -> dict[Origin, RecordedOutcome]:
        """The outcome of the origins that a condition picks."""
        return _group_outcomes(query(self._whole, f"SELECT {_KNOWN} FROM t p WHERE {where}"))

    def load_outcomes_among(
        self, events: DeltaTable, origins: str, keys: Sequence[str] | None = None
    ) -> dict[Origin, RecordedOutcome]:
        """The outcome of the origins that a question to events, named `e` in it, gives.

        Args:
            events: the table.
            origins: the question.
            keys: the slices under which they are looked up; all of them if None.
        """
        same = " AND ".join(f"p.{name} = o.{name}" for name in ORIGIN)
        where = "" if keys is None else f" WHERE {slice_is_one_of(keys, 'p.slice')}"
        sql = f"SELECT {_KNOWN} FROM p LEFT SEMI JOIN ({origins}) o ON {same}{where}"
        found = _group_outcomes(query_all({"p": self._whole, "e": events}, sql))
        return found if self.before is None else self.before.merge_earlier_copies(found, events, origins)

    def follow(self, batch: int) -> None:
        """Let batches be numbered from the one after this on: the last that a table had sent which was lost."""
        self.sending = replace(self.sending, attempt=max(batch, self.sending.attempt))
        self.commit_settled()
        self._write_down([], self.sending)

    def ensure_sending_table(self) -> None:
        """Create `_sending` where it was lost; the caller has seen that no batch that broke off was in it."""
        if self._sending is None and self.sending.attempt:
            self._write_down([], self.sending)

    def load_second_deliveries(self, keys: Collection[str]) -> set[tuple[str, Origin]]:
        """The second deliveries of slices, by slice and origin."""
        if not keys:
            return set()
        sql = f"SELECT slice, {', '.join(ORIGIN)} FROM t WHERE {_LEFT_OUT} AND {slice_is_one_of([*keys])}"
        return {(str(row["slice"]), Origin.from_row(row)) for row in query(self._whole, sql)}

    def begin(self, rows: pa.Table, slices: Mapping[str, int], batch: int) -> None:
        """Take up a batch, which `write_down` writes; one without any record is only kept in mind."""
        total = len(rows) - rows["number"].null_count
        settled = self.sending.settled
        self.sending = BatchUnderWay(batch, self._topic, self._topic_id, total, dict(slices), settled)
        self._taken_up = rows

    def write_down(self) -> None:
        """Write the batch down: before the first record of it is committed, which may be under way already."""
        assert self._taken_up is not None, "a batch begins before it is written down"
        self.commit_settled()
        self._write_down([self._taken_up], self.sending)

    def settle(self, sent: int, slices: Mapping[str, Slice]) -> None:
        """Take over what was sent of the batch that is written down.

        It is committed as the next batch is written down, by `commit_settled`, or when the table is asked for it: what
        dies before finds the batch written down and its mark, and settles it again.

        A slice that was not read to its end keeps its old attempt, so that it is read again. So is any slice with
        second deliveries of contents that are retracted or revised: these are forgotten.

        Args:
            sent: records of it that were sent, by the mark.
            slices: its slices.
        """
        import pyarrow.compute as pc

        self.commit_settled()
        rows = self._read_sending_rows() if self._taken_up is None else self._taken_up
        before_by_slice = self.load_slice_commits([*self.sending.slices])
        settled: dict[str, tuple[Slice, int, pa.Table]] = {}
        lost: set[str] = set()
        for key, attempt in self.sending.slices.items():
            slice_rows = rows.filter(pc.equal(rows["slice"], key))
            last = pc.max(slice_rows["number"]).as_py()
            whole = last is None or last < sent
            if not whole:
                slice_rows = slice_rows.filter(pc.fill_null(pc.less(slice_rows["number"], sent), False))
            before = before_by_slice.get(key)
            if whole or len(slice_rows):
                former = build_schema().empty_table() if before is None else self._read_slice_rows([key])
                at = attempt if whole else before.attempt if before else INCOMPLETE
                lost |= self._find_replaced_fingerprints(slice_rows, former)
                settled[key] = slices[key], at, self._merge_rows(slice_rows, former)
            if not whole:
                break
        if lost:
            settled |= self._drop_second_deliveries(lost, settled)
        extra = {BATCH: self._in_sending}
        found = {key: replace(_build_slice_commit(*one), extra=extra) for key, one in settled.items()}
        self.sending, self._taken_up = replace(self.sending, total=0, slices={}), None
        self._settled = _SettledBatch(found, [one[2] for one in settled.values()], self.sending)

    def commit_settled(self) -> None:
        """Commit the settled part, if that was not done; for a batch that sent nothing only `_sending` says so."""
        settled = self._settled
        if settled is None:
            return
        if settled.slice_commits:
            version = _commit(self._work, self._table, settled.rows, settled.slice_commits)
            if self.version != version:  # another writer came first, and this batch does not rest on its commit
                self._table.load_as_version(version)
            self.sending = replace(self.sending, settled={next(iter(settled.slice_commits)): self._in_sending})
        else:
            self._write_down([], settled.batch)
        self._settled = None

    def _write_down(self, rows: Sequence[pa.Table], sending: BatchUnderWay) -> None:
        """Replace the batch in `_sending`; the one before is settled."""
        import pyarrow as pa

        batch = pa.Table.from_pylist([{"batch": sending.to_json()}], build_sending_schema())
        numbered = [part.append_column("batch", pa.nulls(len(part), pa.string())) for part in rows]
        with _take_turn(self._work):
            self._ensure_newest()
            if self._sending is None or self._sending.metadata().description != self.identity:
                self._sending = open_or_create_table(self._path_of_sending, build_sending_schema(), self.identity)
            replace_all(self._sending, pa.concat_tables([*numbered, batch]), unlike=UNLIKE)
        self._sending.update_incremental()
        self._in_sending = sending.attempt

    def _ensure_newest(self) -> None:
        """Validate that nobody committed to `published` since it was read: what goes out rests on it.

        Raises:
            SupersededAttemptError: another writer did.
        """
        now = self._work.lake.open_existing_table(self._work.stream.name, TABLE)
        if (get_table_id(now), now.version()) != (self.identity, self.version):
            raise SupersededAttemptError(
                f"another writer of {TABLE} of {self._work.stream.name} was first",
                stored=f"version {self.version}",
                found=f"version {now.version()}",
                remedy="nothing to do: the publication is tried again",
            )

    def _read_sending_rows(self) -> pa.Table:
        assert self._sending is not None, "a batch that is not taken up was read there"
        names = ", ".join(f'"{name}"' for name in build_sending_schema().names if name != "batch")
        found = query_arrow({"t": self._sending}, f"SELECT {names} FROM t WHERE batch IS NULL")
        return found.cast(build_sending_schema().remove(build_sending_schema().get_field_index("batch")))

    def _find_replaced_fingerprints(self, sent_rows: pa.Table, stored: pa.Table) -> set[str]:
        """The fingerprints of contents that rows of a slice replace.

        Args:
            sent_rows: the rows.
            stored: the rows before.
        """
        import pyarrow.compute as pc

        revised = sent_rows.filter(pc.greater(sent_rows["revision"], 0))
        now = dict(zip(_build_origins(revised), revised["fingerprint"].to_pylist(), strict=True))
        if not now:
            return set()
        had = stored.filter(pc.equal(stored["state"], EventState.SENT.value))
        was = dict(zip(_build_origins(had), had["fingerprint"].to_pylist(), strict=True))
        if elsewhere := now.keys() - was.keys():  # another slice has sent them
            offsets = ", ".join(str(one.offset) for one in elsewhere)
            found = self.load_outcomes(f"p.state = '{EventState.SENT.value}' AND p.origin_offset IN ({offsets})")
            was |= {origin: one.fingerprint for origin, one in found.items() if origin in elsewhere}
        return {was[one] for one in now.keys() & was.keys() if was[one] != now[one]}

    def _drop_second_deliveries(
        self, lost: Collection[str], settled: Mapping[str, tuple[Slice, int, pa.Table]]
    ) -> dict[str, tuple[Slice, int, pa.Table]]:
        """Slices with second deliveries of such contents, without these, to be looked at again."""
        import pyarrow as pa

        rows = query(self._whole, f"SELECT slice, fingerprint FROM t WHERE {_LEFT_OUT}")
        others = {str(row["slice"]) for row in rows if row["fingerprint"] in lost} - settled.keys()
        slice_commits = self.load_slice_commits([*others]) if others else {}
        stored = {key: (one.slice_, one.attempt, self._read_slice_rows([key])) for key, one in slice_commits.items()}
        found = {}
        for key, (slice_, attempt, slice_rows) in {**settled, **stored}.items():
            states_and_prints = zip(slice_rows["state"].to_pylist(), slice_rows["fingerprint"].to_pylist(), strict=True)
            stays = [state != EventState.AGAIN.value or print_ not in lost for state, print_ in states_and_prints]
            if not all(stays):
                at = attempt if attempt == INCOMPLETE else LOOK_AGAIN
                found[key] = slice_, at, slice_rows.filter(pa.array(stays, pa.bool_()))
        return found

    @staticmethod
    def _merge_rows(sent_rows: pa.Table, before: pa.Table) -> pa.Table:
        """The rows of a slice: those of before whose origins are not decided again, and the new ones that say more."""
        import pyarrow as pa
        import pyarrow.compute as pc

        now = pa.scalar(datetime.now(UTC), pa.timestamp("us", "UTC"))
        times = pc.coalesce(sent_rows["published_at"], now)
        sent_rows = sent_rows.set_column(
            sent_rows.schema.get_field_index("published_at"), "published_at", times
        ).drop_columns("number")
        fresh = set(_build_origins(sent_rows)) if len(before) else set()
        stays = before.filter(_is_none_of(before, fresh))
        return pa.concat_tables([stays, sent_rows.filter(pc.not_equal(sent_rows["state"], EventState.GONE.value))])

    def _read_slice_rows(self, keys: Sequence[str]) -> pa.Table:
        return _read_rows(self._whole, keys)

    @property
    def _whole(self) -> DeltaTable:
        """The table with all that is settled."""
        self.commit_settled()
        return self._table


def _read_rows(table: DeltaTable, keys: Sequence[str]) -> pa.Table:
    names = ", ".join(f'"{name}"' for name in build_schema().names)
    return query_arrow({"t": table}, f"SELECT {names} FROM t WHERE {slice_is_one_of(keys)}").cast(build_schema())


def _is_none_of(rows: pa.Table, origins: Collection[tuple[Any, ...]]) -> pa.Array:
    import pyarrow as pa

    return pa.array([place not in origins for place in _build_origins(rows)], pa.bool_())


def _build_origins(rows: pa.Table) -> Iterator[Origin]:
    return map(Origin._make, zip(*(rows[name].to_pylist() for name in ORIGIN), strict=True))


def _commit(
    work: Work,
    table: DeltaTable,
    parts: Sequence[pa.Table],
    slice_commits: Mapping[str, SliceCommit],
    look: Callable[[], object] = lambda: None,
) -> int:
    """Replace slices in the turn of the writers, after a last `look`; returns the version of the commit."""
    import pyarrow as pa

    with _take_turn(work):
        look()
        rows = pa.concat_tables([build_schema().empty_table(), *parts])
        return replace_slices(table, rows, sorted(slice_commits), [*slice_commits.values()], work.run, unlike=UNLIKE)


@contextmanager
def _take_turn(work: Work) -> Iterator[None]:
    """The turn of those who write the table, after the last look whether it is still held."""
    with take_commit_turn(work, TABLE) as lease:
        work.before_commit()
        lease.check()
        yield


_KNOWN = ", ".join(f"p.{name}" for name in ("slice", *ORIGIN, "state", "revision", "fingerprint", "published_at"))
_LEFT_OUT = f"state = '{EventState.AGAIN.value}'"


def _group_outcomes(rows: Sequence[Mapping[str, Any]]) -> dict[Origin, RecordedOutcome]:
    """The rows by origin; of one that several slices hold, what was sent last, which has the highest revision."""
    found: dict[Origin, RecordedOutcome] = {}
    for row in rows:
        state = EventState(row["state"])
        one = RecordedOutcome(state, row["revision"], row["fingerprint"], row["slice"], row["published_at"])
        other = found.get(Origin.from_row(row))
        if other is None or _rank(one) > _rank(other):
            found[Origin.from_row(row)] = one
    return found


def _rank(one: RecordedOutcome) -> tuple[bool, int]:
    return one.state is not EventState.AGAIN, one.revision


def _build_slice_commit(slice_: Slice, attempt: int, rows: pa.Table) -> SliceCommit:
    import pyarrow.compute as pc

    def count_in_state(state: EventState) -> int:
        return int(pc.sum(pc.equal(rows["state"], state.value)).as_py() or 0)

    counts = {
        "sent": count_in_state(EventState.SENT),
        "second_deliveries": count_in_state(EventState.AGAIN),
        "retracted": count_in_state(EventState.RETRACTED),
        "late": len(rows) - rows["late"].null_count,
        "revisions": int(pc.sum(rows["revision"]).as_py() or 0),
    }
    return SliceCommit(slice_, attempt, len(rows), counts)
