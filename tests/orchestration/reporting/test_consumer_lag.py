"""How old is what is not in raw, planned or not; on a ledger and a lake of their own, with a cluster that is played."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.alerting import Condition
from highwater.declaration import Alerts, Foreign
from highwater.errors import DependencyUnavailableError, TopicAbsentError
from highwater.orchestration import observation
from highwater.orchestration.reporting import alert_conditions, alert_inputs, alerts, consumer_lag, topic_conditions
from highwater.orchestration.reporting import audit as audit_page
from highwater.orchestration.reporting.consumer_lag import RecordAges
from highwater.orchestration.reporting.plan_status import read_topic_status
from highwater.plans import Generation, Loss
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.pauses import Pause
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice
from highwater.topic_rules import Setting
from tests.helpers.lagging import Deployed, FakeAgedTopics
from tests.helpers.written_tables import NOW, STREAM, TIER


class FakeFortyPartitions(FakeAgedTopics):
    """Of forty partitions the last lags least, by three records that are six days old; the others lag by minutes."""

    OLD = 39

    def read_topic_state(self, topic: str) -> TopicState:
        seen = {p: PartitionState(0, 100, 100, 1) for p in range(self.OLD)}
        return TopicState(topic, "A", {**seen, self.OLD: PartitionState(0, 63, 63, 1)})

    def _age(self, partition: int, offset: int) -> timedelta:
        return timedelta(days=6) if partition == self.OLD else timedelta(minutes=100 - offset)

    def read_offsets_at(self, topic: str, timestamp_ms: int, state: TopicState) -> dict[int, int]:
        at = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
        now, ends = datetime.now(UTC), {p: seen.last_stable or 0 for p, seen in state.partitions.items()}
        return {p: next((o for o in range(end) if now - self._age(p, o) >= at), end) for p, end in ends.items()}

    def read(self, _: str, ranges: Mapping[int, OffsetRange], **__: object) -> Iterator[Any]:
        [(partition, offsets)] = ranges.items()
        made = datetime.now(UTC) - self._age(partition, offsets.start)
        return iter([SimpleNamespace(timestamp=lambda: (1, round(made.timestamp() * 1000)))])


@pytest.fixture
def deployed(tmp_path: Path) -> Deployed:
    return Deployed(tmp_path)


def minutes(ages: RecordAges) -> dict[int, int]:
    return {p: round(age / timedelta(minutes=1)) for p, age in ages.by_partition.items()}


def test_planned_and_read_records_are_not_unread(deployed: Deployed) -> None:
    deployed.read(*range(6))
    ages = deployed.ages()
    assert (ages.starts, ages.waiting, ages.sure, minutes(ages)) == ({0: 60, 1: 60}, [], True, {0: 40, 1: 40})


def test_a_slice_that_was_never_read_is_as_old_as_its_first_record(deployed: Deployed) -> None:
    """It aged past retention with no alert, since it was planned."""
    deployed.read(0, 1, 3, 5)
    ages = deployed.ages()
    assert (ages.starts, ages.waiting) == ({0: 20, 1: 20}, ["orders@0000002", "orders@0000004"])
    assert minutes(ages) == {0: 80, 1: 80}


def test_each_partition_begins_where_its_own_first_slice_does(deployed: Deployed) -> None:
    rest = {0: OffsetRange(60, 60), 1: OffsetRange(60, 70)}
    more = {0: OffsetRange(60, 70), 1: OffsetRange(70, 70)}
    deployed.slices += [replace(deployed.slices[0], ordinal=n, ranges=r) for n, r in ((6, more), (7, rest))]
    deployed.slices[6:] = [
        replace(deployed.slices[6], ranges={0: OffsetRange(60, 70), 1: OffsetRange(60, 60)}),
        replace(deployed.slices[7], ranges={0: OffsetRange(70, 70), 1: OffsetRange(60, 70)}),
    ]
    deployed.ledger.add(deployed.slices[6:])
    deployed.read(*range(6), 7)
    assert deployed.ages().starts == {0: 60, 1: 70}


@pytest.mark.parametrize("partitions", [32, 1])
def test_oldest_of_many_partitions_are_read_even_with_little_lag(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """Those with most unread were asked: one that hung with three records of six days passed for read."""
    monkeypatch.setattr(consumer_lag, "PARTITIONS_ASKED", partitions)
    deployed.kafka = FakeFortyPartitions()
    deployed.slices.append(replace(deployed.slices[0], ordinal=6, ranges={p: OffsetRange(0, 60) for p in range(40)}))
    deployed.ledger.add(deployed.slices[6:])
    deployed.read(*range(7))
    ages = deployed.ages()
    assert (round((ages.oldest or timedelta(0)) / timedelta(hours=1)), ages.sure) == (6 * 24, True)
    assert len(ages.by_partition) == partitions


def test_partitions_with_markers_alone_hide_no_record_behind_them(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_lag, "PARTITIONS_ASKED", 1)
    deployed.read(*range(6))
    deployed.kafka.read_offsets_at = lambda *_: {0: 100, 1: 100}
    assert deployed.ages().sure
    deployed.kafka.read = lambda *_, **__: iter(())
    assert not deployed.ages().sure


def test_recorded_losses_are_not_waited_for(deployed: Deployed) -> None:
    deployed.read(*range(1, 6))
    lost = [Loss("orders", "orders", 0, p, OffsetRange(0, end), "expired", "ann", NOW) for p, end in ((0, 10), (1, 4))]
    deployed.ledger.record_loss(lost)
    assert deployed.ages().starts == {0: 60, 1: 4}


def test_without_the_lake_that_is_unread_that_nobody_tried(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise DependencyUnavailableError("the lake does not answer", remedy="mount it")

    deployed.read(0, 1)
    deployed.ledger.allocate_attempts(["orders@0000002"])
    monkeypatch.setattr(Lake, "list_slice_keys", unavailable)
    ages = deployed.ages()
    assert (ages.starts, ages.sure) == ({0: 30, 1: 30}, False)


def test_oldest_of_very_many_slices_are_read(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_lag, "SLICES_ASKED", 2)
    deployed.read(0)
    assert (deployed.ages().starts, len(deployed.ages().waiting)) == ({0: 10, 1: 10}, 2)


def test_lost_slices_hide_no_later_ones(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that were looked at some are lost: what lies after the last passed for read."""
    monkeypatch.setattr(consumer_lag, "SLICES_ASKED", 2)
    hole = OffsetRange(0, 20)
    deployed.ledger.record_loss([Loss("orders", "orders", 0, p, hole, "expired", "ann", NOW) for p in (0, 1)])
    ages = deployed.ages()
    assert (ages.starts, minutes(ages)) == ({0: 20, 1: 20}, {0: 80, 1: 80})


def test_where_no_more_are_unread_than_are_looked_at_the_rest_is_read(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_lag, "SLICES_ASKED", 2)
    deployed.read(*range(2, 6))
    hole = Loss("orders", "orders", 0, 0, OffsetRange(0, 20), "expired", "ann", NOW)
    deployed.ledger.record_loss([hole])
    assert deployed.ages().starts == {0: 60, 1: 0}


def alert_of(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> Any:
    stored = str(90 * 60_000)
    monkeypatch.setattr(topic_conditions, "fetch_topic_settings", lambda *_: {"retention.ms": Setting(stored, "x")})
    stream = replace(STREAM, alerts=Alerts(retention_left=timedelta(minutes=30), retries_late=timedelta(minutes=30)))
    stream = replace(stream, tiers=()) if deployed.topic == "orders" else stream
    asked = alert_inputs.StreamInputs(deployed.ledger, deployed.kafka, deployed.lake, stream)
    return (
        topic_conditions.measure_retention_left(asked)
        if deployed.topic == "orders"
        else alert_conditions._measure_retry_age(asked)
    )


def test_the_alert_of_retention_names_the_slice_that_nobody_reads(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed.read(0, 1, 2)
    over = alert_of(deployed, monkeypatch)
    assert (over.over, over.remedy.startswith("highwater explain orders@0000003 shows why")) == (True, True)
    assert over.value.startswith("0:19:") or over.value.startswith("0:20:")
    deployed.read(3, 4, 5)
    under = alert_of(deployed, monkeypatch)
    assert (under.over, "explain" in under.remedy) == (False, False)


FOREIGN = "connect.dlq"


class FakeExistingTopics(FakeAgedTopics):
    """Of these topics alone are there any; no broker's clock stamps them."""

    def __init__(self, *there: str) -> None:
        self.there = there

    def read_topic_state(self, topic: str) -> TopicState:
        if topic not in self.there:
            raise TopicAbsentError(f"topic {topic!r} does not exist", remedy="create it")
        return super().read_topic_state(topic)


def retention_left(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, stored: Mapping[str, Mapping[str, int]]
) -> Condition | None:
    """The alert of a stream with tiers and a foreign topic, all of whose main topic is read, with these settings."""
    deployed.read(*range(6))

    def settings(_: object, topic: str) -> Mapping[str, Setting] | None:
        deployed.kafka.read_topic_state(topic)  # one that is not there has none
        found = {name.replace("_", "."): Setting(str(value), "x") for name, value in stored.get(topic, {}).items()}
        return found or None

    monkeypatch.setattr(topic_conditions, "fetch_topic_settings", settings)
    stream = replace(
        STREAM,
        foreign=(Foreign(FOREIGN, timedelta(minutes=10)),),
        alerts=Alerts(retention_left=timedelta(minutes=30)),
    )
    return topic_conditions.measure_retention_left(
        alert_inputs.StreamInputs(deployed.ledger, deployed.kafka, deployed.lake, stream)
    )


DAY_MS = 24 * 3_600_000
ALL, A_DAY, TOO_SHORT = {"retention_ms": -1}, {"retention_ms": DAY_MS}, {"retention_ms": 120 * 60_000}


@pytest.mark.parametrize("topic", [TIER, FOREIGN])
@pytest.mark.parametrize("main", [ALL, A_DAY], ids=["stored", "a day"])
def test_a_retry_that_retention_is_about_to_take_is_reported(
    topic: str, main: Mapping[str, int], deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main topic alone was asked: a stopped sensor or a long pause was reported when the offsets were gone."""
    deployed.kafka = FakeExistingTopics("orders", TIER, FOREIGN)
    stored = {"orders": main, TIER: A_DAY, FOREIGN: A_DAY, topic: TOO_SHORT}
    found = retention_left(deployed, monkeypatch, stored)
    assert found is not None
    assert found.over
    assert found.value.startswith(("0:19:", "0:20:"))
    assert found.value.endswith(f"takes the oldest unread record of {topic}")
    assert all(text in found.remedy for text in ("the sensor dlq_retries runs", f"raise retention.ms of {topic}"))
    assert not (retention_left(deployed, monkeypatch, {**stored, topic: A_DAY}) or found).over


def test_a_tier_that_is_not_there_or_may_not_be_looked_at_hides_no_other(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed.kafka = FakeExistingTopics("orders", FOREIGN)
    found = retention_left(deployed, monkeypatch, {"orders": A_DAY})
    assert found is not None
    assert (found.over, "of orders" in found.value) == (False, True)
    assert retention_left(deployed, monkeypatch, {FOREIGN: A_DAY}) is None, "nothing is known of the main topic"
    over = retention_left(deployed, monkeypatch, {FOREIGN: TOO_SHORT})
    assert over is not None
    assert over.over


def test_a_topic_that_is_limited_by_size_does_not_keep_all(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed.kafka = FakeExistingTopics("orders", TIER)
    sized = {**ALL, "retention_bytes": 9}
    for stored, expected in (
        ({"orders": sized}, "no age ends a record; when retention.bytes=9 of orders takes one is not known"),
        (
            {"orders": ALL, TIER: sized},
            f"no age ends a record; when retention.bytes=9 of {TIER} takes one is not known",
        ),
        ({"orders": {**ALL, "retention_bytes": -1}}, "the topics keep all"),
    ):
        found = retention_left(deployed, monkeypatch, stored)
        assert found is not None
        assert (found.over, found.value) == (False, expected)
    found = retention_left(deployed, monkeypatch, {"orders": {**A_DAY, "retention_bytes": 9}})
    assert found is not None
    assert found.value.endswith("of orders; retention.bytes=9 of orders may take it before")


def test_raw_is_opened_once_a_tick(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two measures that need it opened it."""
    monkeypatch.setattr(
        topic_conditions, "fetch_topic_settings", lambda *_: {"retention.ms": Setting("1000000000", "x")}
    )
    monkeypatch.setattr(
        alerts, "CONDITIONS", (topic_conditions.measure_retention_left, alert_conditions._measure_retry_age)
    )
    opened: list[str] = []
    holds = Lake.list_slice_keys

    def counted(lake: Lake, stream: str, table: str) -> set[str]:
        opened.append(table)
        return holds(lake, stream, table)

    monkeypatch.setattr(Lake, "list_slice_keys", counted)
    deployed.read(*range(6))
    lines: list[str] = []
    found = [*alerts._measure_stream(deployed.ledger, deployed.kafka, deployed.lake, STREAM, lines, [])]
    assert ([one.what for one in found], lines) == (["retention before unread records", "age of retries"], [])
    assert opened == ["raw"]


def test_a_retry_that_is_planned_and_not_read_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(STREAM), "delays", property(lambda _: {TIER: timedelta(minutes=20)}))
    tier = Deployed(tmp_path, TIER, slices=10)
    tier.read(*range(9))
    assert not alert_of(tier, monkeypatch).over
    (tmp_path / "other").mkdir()
    other = Deployed(tmp_path / "other", TIER, slices=10)
    other.read(0, *range(2, 10))
    late = alert_of(other, monkeypatch)
    assert late.over, "its first record came 90 minutes ago"
    assert late.value.startswith(f"the oldest retry, on {TIER}, is ")
    assert late.remedy.startswith(f"highwater explain {TIER}@0000001 shows why it is planned and not read")


@pytest.mark.parametrize(
    ("paused", "remedy"),
    [
        (TIER, f"{TIER} is paused by ann .*: highwater resume-tier orders {TIER} ends that"),
        ("retries", "the retries of orders is paused by ann .*: highwater resume orders retries ends that"),
        ("", "stream orders is paused by ann .*: highwater resume orders ends that"),
    ],
)
def test_the_alert_of_paused_retries_names_the_pause(
    paused: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sent people to sensors that ran."""
    monkeypatch.setattr(type(STREAM), "delays", property(lambda _: {TIER: timedelta(minutes=20)}))
    deployed = Deployed(tmp_path, TIER, slices=10)
    pauses, pause = deployed.ledger.paused, Pause(paused, NOW, "ann")
    if paused == TIER:
        pauses.pause("orders", pause)
    else:
        pauses.pause_part("orders", paused, pause)
    assert re.fullmatch(remedy, alert_of(deployed, monkeypatch).remedy)


class FakeHeldBackTopics(FakeAgedTopics):
    """Of some topics an open transaction holds back partition 0, from this offset on."""

    bootstrap = "here:9092"

    def __init__(self, **first: int) -> None:
        self.first = {name.replace("_", "."): offset for name, offset in first.items()}

    def read_topic_state(self, topic: str) -> TopicState:
        stable = self.first.get(topic, 100)
        return TopicState(topic, "A", {0: PartitionState(0, stable, 100, 1), 1: PartitionState(0, 100, 100, 1)})

    def read(self, _: str, ranges: Mapping[int, OffsetRange], **asked: object) -> Iterator[Any]:
        topic, committed = _, asked.get("committed", True)
        for partition, offsets in ranges.items():
            last = 100 if not committed or partition else self.first.get(topic, 100)
            if offsets.start < min(offsets.end, last):
                made = datetime.now(UTC) - timedelta(minutes=100 - offsets.start)
                time = 1, round(made.timestamp() * 1000)
                yield SimpleNamespace(timestamp=lambda time=time: time, partition=lambda at=partition: at)


def test_records_behind_an_open_transaction_have_an_age_and_a_count(deployed: Deployed) -> None:
    """The lag was 0, and nothing was old: what follows an open transaction was no record yet."""
    deployed.read(*range(6))
    deployed.kafka = FakeHeldBackTopics(orders=60)
    ages = deployed.ages()
    held = ages.held_back
    assert {p: (one.offset, one.offsets) for p, one in held.items()} == {0: (60, 40)}
    assert round((held[0].age or timedelta(0)) / timedelta(minutes=1)) == 40
    assert (minutes(ages), ages.sure) == ({0: 40, 1: 40}, True)
    look = observation.build_topic_metadata(observation.observe_positions(deployed.kafka, deployed.ledger, STREAM))
    assert (look["lag"].value, look["held_back"].value, look["largest_lag"].value) == (80, 40, 40)
    status = read_topic_status(deployed.kafka, STREAM, deployed.ledger.topics.read_planned_topic("orders", "orders"))
    assert [(one.lag, one.held_back) for one in status.partitions] == [(40, 40), (40, 0)]
    assert "lag 80, 40 of it held back by open transactions" in status.lines[0]
    plain = status.to_plain()
    assert (plain["held_back"], [one["held_back"] for one in plain["partitions"]]) == (40, [40, 0])


@pytest.mark.parametrize(
    ("first", "stored", "over", "reported"),
    [
        ({}, 10_000, False, None),
        ({"orders": 90}, 10_000, False, ("orders", 90, 10)),
        ({"orders": 80}, 10_000, True, ("orders", 80, 20)),
        ({"orders": 90}, 16, True, ("orders", 90, 10)),
        ({"orders": 90, TIER.replace(".", "_"): 70}, 10_000, True, (TIER, 70, 30)),
    ],
    ids=["none", "young", "old", "half of a short retention", "the oldest of all topics"],
)
def test_an_open_transaction_is_an_alert_that_names_its_place(
    deployed: Deployed,
    monkeypatch: pytest.MonkeyPatch,
    first: dict[str, int],
    stored: int,
    over: bool,
    reported: tuple[str, int, int] | None,
) -> None:
    """Retention deleted 99,999 records after one open record, with no alert before or after.

    The limit is a quarter of an hour, and half of the retention in minutes where that is less.
    """
    monkeypatch.setattr(
        topic_conditions, "fetch_topic_settings", lambda *_: {"retention.ms": Setting(str(stored * 60_000), "x")}
    )
    deployed.kafka = FakeHeldBackTopics(**first)
    deployed.ledger.topics.open_generation(Generation("orders", TIER, "A", 0, {0: 0, 1: 0}, NOW))
    found = topic_conditions.measure_open_transaction(
        alert_inputs.StreamInputs(deployed.ledger, deployed.kafka, deployed.lake, STREAM)
    )
    assert found is not None
    assert found.over == over
    assert topic_conditions.measure_open_transaction in alert_conditions.CONDITIONS
    if reported is not None:
        topic, offset, offsets = reported
        assert found.value.startswith(f"{topic} partition 0: {offsets} offsets from offset {offset} on are held back")
        minutes_old = re.search(r"first record is 0:(\d+):\d+ old", found.value)
        # A record of 20 minutes may be shown a millisecond younger.
        assert minutes_old is not None
        assert int(minutes_old[1]) in {100 - offset, 99 - offset}
        place = f"--topic {topic} --partition 0"
        assert f"--bootstrap-server here:9092 describe-producers {place} names the producer ID" in found.remedy
        assert f"abort {place} --start-offset {offset}" in found.remedy


def test_unread_records_that_retention_deleted_are_an_alert(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing unread was left, so nothing was late, and nobody heard that records were lost."""
    state = {0: PartitionState(63, 100, 100, 1), 1: PartitionState(50, 100, 100, 1)}
    deployed.read(*range(6))
    monkeypatch.setattr(deployed.kafka, "read_topic_state", lambda topic: TopicState(topic, "A", state))
    found = alert_of(deployed, monkeypatch)
    assert (found.over, found.value) == (True, "retention deleted unread records of orders: partition 0: [60, 63)")
    deployed.ledger.record_loss([Loss("orders", "orders", 0, 0, OffsetRange(60, 63), "expired", "ann", NOW)])
    assert not alert_of(deployed, monkeypatch).over


def test_the_audit_counts_what_is_planned_and_not_read(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_page, "_check_main_topic", lambda *_: ([], None, []))
    monkeypatch.setattr(audit_page, "check_producers", lambda *_: ({}, []))
    deployed.read(0, 1, 2, 4)
    hole = Loss("orders", "orders", 0, 0, OffsetRange(7, 9), "expired", "ann", NOW)
    deployed.ledger.record_loss([hole, replace(hole, generation=1), replace(hole, topic=TIER)])
    page = audit_page.audit(deployed.ledger, deployed.kafka, deployed.lake, STREAM)
    [table] = [one for one in page.tables if one[0] == "Partitions"]
    assert [dict(zip(table[1], row, strict=True))["lost"] for row in table[2]] == ["4", "0"]
    assert [one.unread for one in page.partitions] == [60, 60]
    assert [round((one.age or timedelta(0)) / timedelta(minutes=1)) for one in page.partitions] == [70, 70]


def test_no_slice_commit_and_no_other_plan_is_opened(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100,000 slices that would take minutes."""

    def opened(*_: object, **__: object) -> None:
        pytest.fail("all slices are read")

    deployed.read(0, 1, 2, 4)
    got: list[str] = []
    get = Ledger.get
    monkeypatch.setattr(Lake, "load_commits_and_version", opened)
    monkeypatch.setattr(Ledger, "list_slices", opened)

    def counted(ledger: Ledger, keys: list[str]) -> list[Slice]:
        got.extend(keys)
        return get(ledger, keys)

    monkeypatch.setattr(Ledger, "get", counted)
    assert deployed.ages().starts == {0: 30, 1: 30}
    assert got == ["orders@0000003", "orders@0000005"]


def test_the_audit_says_that_no_check_was_asked(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without a word of checks read as if they had passed."""
    monkeypatch.setattr(audit_page, "_check_main_topic", lambda *_: ([], None, []))
    monkeypatch.setattr(audit_page, "check_producers", lambda *_: ({}, []))

    def reported(red: dict[str, int] | None, checked: int = 0) -> list[str]:
        page = audit_page.audit(deployed.ledger, deployed.kafka, deployed.lake, STREAM, red)
        page = replace(page, checked=checked)
        return [line for line in page.head if line.startswith("checks of slices: ")]

    [line] = reported(None)
    assert "DAGSTER_HOME" in line
    assert "--slices N" in line
    assert "--slices N" not in reported(None, checked=2)[0]
    assert reported({}) == []
