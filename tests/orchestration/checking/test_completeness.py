"""Raw against the topic by a second reader: what Kafka serves and raw lacks, or has otherwise, is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from highwater.orchestration.checking.completeness import TopicComparison, compare_with_topic
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.resources.lake import Lake
from highwater.slices import Slice
from tests.helpers.commits import store_raw
from tests.helpers.scene import Scene
from tests.helpers.support import read_messages

if TYPE_CHECKING:
    from tests.conftest import TopicFactory

pytestmark = pytest.mark.slow


def write_raw(lake: Lake, scene: Scene, slice_: Slice) -> list[dict[str, Any]]:
    """The rows of raw as a plain consumer reads them, with the slice's commit record; returns the records."""
    rows = [
        {
            "slice": slice_.key,
            "partition": 0,
            "offset": message.offset(),
            "timestamp_ms": message.timestamp()[1],
            "timestamp_type": 0,
            "key": message.key(),
            "value": message.value(),
        }
        for message in read_messages(scene.bootstrap, scene.topic)
    ]
    store_raw(lake, slice_, rows)
    return rows


def test_every_record_that_kafka_serves_must_be_in_raw_as_it_is(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    scene, lake = Scene(bootstrap, topic(), tmp_path), Lake(str(tmp_path / "lake"))
    scene.write(9)
    [slice_] = scene.tick().slices
    rows = write_raw(lake, scene, slice_)

    def held(of: Slice = slice_) -> TopicComparison:
        [found] = compare_with_topic(scene.ledger, scene.kafka, lake, scene.stream, [of])
        return found

    assert (held().records, held().error, held().gone) == (9, None, 0)
    assert "9 records of the topic are in raw" in scene.run("audit", "orders", "--slices", "3").output

    store_raw(lake, slice_, [row for row in rows if row["offset"] != 4])
    assert held().lacking == [(0, 4)]
    reported = scene.run("audit", "orders", "--slices", "1")
    assert reported.exit_code == EXIT_PERMANENT
    assert "1 records that Kafka serves are not in raw: partition 0 offset 4" in reported.output

    headers = {"headers": [{"key": "h", "value": b"1"}]}
    time, kind = {"timestamp_ms": rows[0]["timestamp_ms"] - 5_000}, {"timestamp_type": 1}
    for change in ({"value": b"other"}, {"key": b"k"}, time, kind, headers):
        store_raw(lake, slice_, [{**row, **(change if row["offset"] == 2 else {})} for row in rows])
        assert held().altered == [(0, 2)], change

    store_raw(lake, slice_, rows)
    scene.delete_before(3)
    assert (held().records, held().gone, held().error) == (6, 3, None)
    assert held(replace(slice_, topic_id="B" * 22)).skipped == "the topic was recreated since"

    [opened] = scene.ledger.topics.list_generations("orders", scene.topic)
    later = replace(opened, number=1, starts={0: 5}, first_ordinal=1)
    assert scene.ledger.topics.open_generation(later, seen=opened)
    assert held().skipped == "other records occupy its offsets now, which was accepted"


def test_a_timestamp_of_the_broker_is_none_of_the_producer(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    """The client numbers the types otherwise than Spark does."""
    scene = Scene(bootstrap, topic(**{"message.timestamp.type": "LogAppendTime"}), tmp_path)
    lake = Lake(str(tmp_path / "lake"))
    scene.write(1)
    [slice_] = scene.tick().slices
    rows = write_raw(lake, scene, slice_)
    for kind, altered in ((0, [(0, 0)]), (1, [])):
        store_raw(lake, slice_, [{**rows[0], "timestamp_type": kind}])
        [found] = compare_with_topic(scene.ledger, scene.kafka, lake, scene.stream, [slice_])
        assert found.altered == altered
