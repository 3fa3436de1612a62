"""Accepted events on a real broker: once and in order for a foreign reader, wherever the process is killed (I6, I7)."""

from __future__ import annotations

import json
import signal
import uuid
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from highwater.assets import dlq, events, published, rejects, slice_classification
from highwater.declaration import Accepted
from highwater.errors import RetractionError
from highwater.orchestration.checking.published_checks import check_events_published
from highwater.resources.dlq_topics import check_accepted, ensure_accepted
from highwater.resources.ledger import schema
from highwater.resources.ledger.breakers import AcceptedSlice
from tests.conftest import create_topic
from tests.helpers.accept_child import FENCED, LAPSED, POINTS
from tests.helpers.accepted import Event, Tables
from tests.helpers.bench_records import published as read
from tests.helpers.support import Children, order_message

if TYPE_CHECKING:
    from tests.helpers.support import Bench

pytestmark = [pytest.mark.slow, pytest.mark.crash]

# For each slice and partition the offsets in it.
SLICES = ({0: (0, 9), 1: (0, 8)}, {0: (9, 16), 1: (8, 10)}, {0: (16, 20), 1: (10, 23)})


class Publishing:
    """Slices whose events are in the lake, and processes that send them."""

    def __init__(self, folder: Path, topic: str, bootstrap: str) -> None:
        create_topic(bootstrap, topic, 2, {})
        self.topic, self.bootstrap = topic, bootstrap
        self.tables = Tables(folder, topic, bootstrap=bootstrap)
        self.slices = [self.tables.plan(n, p0=ranges[0], p1=ranges[1]) for n, ranges in enumerate(SLICES)]
        # They finish out of order.
        for n in (2, 0, 1):
            rows = [Event(p, at, f"o{p}-{at}", minute=at) for p, b in SLICES[n].items() for at in range(*b)]
            self.tables.decide(self.slices[n], reversed(rows))

        task = {
            "folder": str(folder),
            "topic": topic,
            "slices": [slice_.key for slice_ in self.slices],
            "bootstrap": bootstrap,
        }
        self.children = Children("tests.helpers.accept_child", task)

    def ensure_each_once_in_order(self) -> None:
        found: dict[int, list[int]] = {0: [], 1: []}
        for partition, key, value, headers in read(self.bootstrap, f"{self.topic}.accepted"):
            reported = dict(headers)
            offset = int(reported["highwater.origin.offset"] or b"")
            assert reported["highwater.origin.partition"] == str(partition).encode()
            assert key == f"o{partition}-{offset}".encode()
            assert json.loads(value or b"")["order_id"] == f"o{partition}-{offset}"
            assert "highwater.late" not in reported
            found[partition].append(offset)
        assert found == {0: [*range(20)], 1: [*range(23)]}


@pytest.fixture
def publishing(tmp_path: Path, bootstrap: str, request: pytest.FixtureRequest) -> Publishing:
    return Publishing(tmp_path, f"accepting.{request.node.name[:40]}.{uuid.uuid4().hex[:8]}", bootstrap)


def test_killed_at_every_point_each_event_goes_out_once_and_in_order(publishing: Publishing) -> None:
    """What the ledger knows of it is lost after half of the deaths: Kafka's mark shows it."""
    for number, point in enumerate(POINTS):
        assert publishing.children.end(point) == -signal.SIGKILL, f"{point} was not reached"
        if number % 2:
            with publishing.tables.ledger.database.writing() as connection:
                connection.execute(schema.publications.delete())
    assert publishing.children.end() == 0
    publishing.ensure_each_once_in_order()
    shape = ensure_accepted(publishing.tables.kafka, publishing.tables.stream)
    assert (shape.partitions, shape.config["cleanup.policy"]) == (2, "delete")
    assert check_accepted(publishing.tables.kafka, publishing.tables.stream) == "2 partitions, safe settings"


@pytest.mark.parametrize(
    ("point", "ended"),
    [
        pytest.param("half", LAPSED, id="the first: its lock ran out"),
        pytest.param("half of the second", FENCED, id="a later one: by Kafka"),
    ],
)
def test_a_run_that_was_stopped_in_its_transaction_is_fenced_off(
    publishing: Publishing, point: str, ended: int
) -> None:
    """The one that hangs knows nothing of the other, and goes on: not a record of it is seen."""
    assert publishing.children.stop_and_overtake(point, publishing.ensure_each_once_in_order) == ended


def test_a_stricter_rule_takes_nothing_back_that_was_sent_unless_a_person_lets_it(bench: Bench) -> None:
    """The run of events fails before it commits, so that nothing goes to the DLQ that readers hold as accepted."""
    target = f"{bench.stream.topic}.accepted"
    bench.stream = replace(bench.stream, publishes=Accepted(target))
    bench.send(*[order_message(f"o{n}", 1, n % 3, amount=n) for n in range(6)])
    slice_ = bench.plan(0, p0=(0, 2), p1=(0, 2), p2=(0, 2))
    bench.materialise(slice_)
    [report] = published.materialise(bench.work(slice_))
    assert (report.rows, report.counts["sent"]) == (6, 6)
    assert Counter(key for _, key, _, _ in read(bench.bootstrap, target)) == Counter(f"o{n}".encode() for n in range(6))
    fields = [replace(one, at_least=5) if one.name == "amount" else one for one in bench.stream.fields]
    bench.stream = replace(bench.stream, fields=tuple(fields))
    with pytest.raises(RetractionError, match=f"5 events of {slice_.key} were sent"):
        events.materialise(bench.work(slice_))
    assert len(bench.rows("events")) == 6
    bench.ledger.breakers.accept("orders", [AcceptedSlice(slice_.key, "too small", "ann", datetime.now(UTC))])
    for stage in (events, rejects, dlq):
        stage.materialise(bench.work(slice_))
    [report] = published.materialise(bench.work(slice_))
    assert (report.counts["sent"], report.counts["retracted"], report.counts["sent_now"]) == (1, 5, 5)
    taken = [(key, dict(headers)) for _, key, value, headers in read(bench.bootstrap, target) if value is None]
    assert {key for key, _ in taken} == {f"o{n}".encode() for n in range(5)}
    assert {(reported["highwater.retracted"], reported["highwater.revision"]) for _, reported in taken} == {
        (b"true", b"1")
    }
    result = check_events_published(bench.ledger, bench.lake, bench.stream, [slice_.key])["events_published"][
        slice_.key
    ]
    assert (result.passed, result.numbers["retracted"]) == (True, 5)


def test_events_sent_during_a_decision_are_detected_before_its_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision had looked while nothing was sent, and committed: an event was on both topics."""
    bench.stream = replace(bench.stream, publishes=Accepted(f"{bench.stream.topic}.accepted"))
    bench.send(*[order_message(f"o{n}", 1, n % 3, amount=n) for n in range(6)])
    slice_ = bench.plan(0, p0=(0, 2), p1=(0, 2), p2=(0, 2))
    bench.materialise(slice_)
    fields = [replace(one, at_least=5) if one.name == "amount" else one for one in bench.stream.fields]
    strict = replace(bench.stream, fields=tuple(fields))
    see = slice_classification._ensure_decidable

    def meanwhile(*given: Any) -> None:
        see(*given)
        [report] = published.materialise(bench.work(slice_))
        assert report.counts["sent_now"] == 6

    monkeypatch.setattr(slice_classification, "_ensure_decidable", meanwhile)
    with pytest.raises(RetractionError, match=f"5 events of {slice_.key} were sent"):
        events.materialise(replace(bench.work(slice_), stream=strict))
    assert len(bench.rows("events")) == 6
    assert "sending orders" not in bench.ledger.read_leases()
