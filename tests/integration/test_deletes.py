"""Deletes: a version that removes its key from `current`, whatever the order of arrival (I6)."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from highwater.declaration import Deletes, Field, Stream
from highwater.orchestration.checking.follower_checks import check_current_follows_events
from highwater.orchestration.checking.version_checks import check_stream_versions
from highwater.sources import Key, Meta
from tests.helpers.support import Message, make_stream

if TYPE_CHECKING:
    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow

FIELDS = (
    Field("id", "string"),
    Field("op", "string"),
    Field("lsn", "long"),
    Field("at", "timestamp"),
    Field("name", "string"),
    Field("size", "integer", optional=True, default=7),
)


def changes(topic: str, **more: Any) -> Stream:
    """A stream of changes whose operation `d` deletes."""
    ours: dict[str, Any] = {
        "fields": FIELDS,
        "key": ("id",),
        "version": "lsn",
        "event_time": "at",
        "deletes": Deletes("op", ("d",)),
        "record_key": "ignore",
        "first_version": None,
        "transitions": None,
        "lookup": None,
    }
    return make_stream(topic, **{**ours, **more})


def change(key: str, version: int, op: str = "u", **fields: Any) -> Message:
    """A record; one that deletes has no name."""
    value = {
        "id": key,
        "lsn": version,
        "op": op,
        "at": f"2026-03-01T10:{version // 60:02d}:{version % 60:02d}Z",
        **fields,
    }
    if op != "d":
        value = {"name": f"{key}{version}", **value}
    return Message(b"other", json.dumps(value).encode())


def sent(bench: Bench, *groups: list[Message]) -> list[Any]:
    """Each group as a planned slice of partition 0."""
    found, at = [], 0
    for ordinal, group in enumerate(groups):
        bench.send(*group)
        found.append(bench.plan(ordinal, p0=(at, at + len(group))))
        at += len(group)
    return found


def versions(bench: Bench) -> dict[str, int]:
    """The versions in `current` by key."""
    return {key: row["version"] for key, row in bench.current().items()}


@dataclass
class Story:
    """A stream of changes after four slices, and `current` after each of them."""

    bench: Bench
    seen: list[dict[str, int]]


@pytest.fixture(scope="module")
def story(module_bench: Bench) -> Story:
    """One history for the tests that only look at it: a key for each of them."""
    bench = module_bench
    bench.stream = changes(bench.stream.topic)
    without_version = Message(b"lacks", b'{"id": "lacks", "op": "d", "at": "2026-03-01T10:00:00Z"}')
    slices = sent(
        bench,
        [change("a", 1), change("b", 1), change("newer", 4), change("lacks", 1), without_version],
        [
            change("a", 5, "d"),
            change("newer", 3, "d"),
            change("null", 1),
            change("null", 2, "d"),
            Message(b"null", None),
        ],
        [change("a", 3)],
        [change("a", 6), change("b", 2)],
    )
    seen = []
    for slice_ in slices:
        bench.materialise(slice_)
        seen.append(versions(bench))
    return Story(bench, seen)


def test_a_late_older_event_does_not_revive_a_deleted_key(story: Story) -> None:
    """A delete of version 5, then version 3 in a later slice: no row; version 6 brings the key back."""
    assert [seen.get("a") for seen in story.seen] == [1, None, None, 6]
    assert [seen["b"] for seen in story.seen] == [1, 1, 1, 2]


def test_a_delete_that_comes_late_leaves_a_newer_row(story: Story) -> None:
    """A delete of version 3 after version 4 in `current` does nothing."""
    assert [seen["newer"] for seen in story.seen] == [4, 4, 4, 4]


def test_missing_fields_of_a_delete_are_null_in_events(story: Story) -> None:
    """A delete has its key and its version; other fields may be absent, and have no default."""
    rows = sorted((row for row in story.bench.rows("events") if row["id"] == "null"), key=lambda row: row["version"])
    assert [(row["deleted"], row["name"], row["size"]) for row in rows] == [(False, "null1", 7), (True, None, None)]
    assert not [seen for seen in story.seen if "null" in seen]


def test_a_delete_without_its_version_is_a_reject(story: Story) -> None:
    """Nothing else may be lacking: the key, the version and the event time are needed."""
    assert [(row["key"], row["detail"]) for row in story.bench.rows("rejects")] == [(b"lacks", "field lsn is missing")]
    assert [seen["lacks"] for seen in story.seen] == [1, 1, 1, 1]


def test_every_check_passes_on_deletes(story: Story) -> None:
    assert not story.bench.failing()


def test_rebuilding_leaves_deleted_keys_out(story: Story) -> None:
    """`current` made from the events alone has the same rows."""
    from highwater.assets.current_rebuild import RebuildSnapshot, compare_with_events, rebuild

    work = story.bench.work()
    assert compare_with_events(work, RebuildSnapshot.take(work)).none
    assert rebuild(work) == 4
    assert versions(story.bench) == story.seen[-1] == {"a": 6, "b": 2, "newer": 4, "lacks": 1}


def test_tombstones_delete_by_key_and_offset(bench: Bench) -> None:
    """A compacted topic: the key is the record's, the offset orders, and a record without a value deletes."""
    fields = (Field("id", "string", source=Key()), Field("at", "long", source=Meta("offset")), Field("name", "string"))
    bench.stream = changes(
        bench.stream.topic, fields=fields, version="at", event_time=None, deletes=Deletes(tombstones=True)
    )
    named = [Message(key, b'{"name": "x"}') for key in (b"a", b"b", b"c")]
    first, second = sent(bench, [*named, Message(b"a", None), Message(b"\xff", None)], [Message(b"b", None)])
    bench.materialise(second)
    bench.materialise(first)
    assert versions(bench) == {"c": 2}
    deleted = {row["key"]: row["version"] for row in bench.rows("events") if row["deleted"]}
    assert deleted == {"a": 3, "b": 5}
    # Not UTF-8, so nobody knows which key it deletes.
    assert [(row["reason"], row["value"]) for row in bench.rows("rejects")] == [("malformed", None)]
    assert not bench.failing()


def test_a_slice_decided_again_takes_its_deletes_back(bench: Bench) -> None:
    """A delete that is none any more gives the key back what was there before it."""
    topic = bench.stream.topic
    bench.stream = changes(topic)
    first, second = sent(bench, [change("a", 1), change("b", 1)], [change("a", 2, "d"), change("b", 2, "x")])
    bench.materialise(first)
    bench.materialise(second)
    assert versions(bench) == {"b": 2}
    # `name` is lacking in what was a delete: a reject now; and `x` deletes.
    bench.stream = changes(topic, deletes=Deletes("op", ("x",)))
    bench.materialise(second)
    assert versions(bench) == {"a": 1}
    assert not bench.failing()


def test_checks_find_a_key_that_came_back(bench: Bench) -> None:
    """A row of `current` below a delete is found by the check of the slice, and by the audit over all."""
    from deltalake import DeltaTable, write_deltalake

    bench.stream = changes(bench.stream.topic)
    [slice_] = sent(bench, [change("a", 1), change("b", 1)])
    bench.materialise(slice_)
    path = bench.lake.build_table_path(bench.stream.name, "current")
    [row] = [one for one in DeltaTable(path).to_pyarrow_table().to_batches()[0].to_pylist() if one["key"] == "a"]
    bench.send(change("a", 5, "d"))
    deletes = bench.plan(1, p0=(2, 3))
    bench.materialise(deletes)
    assert not bench.failing()
    import pyarrow as pa

    write_deltalake(path, pa.Table.from_pylist([row], DeltaTable(path).to_pyarrow_table().schema), mode="append")
    reported = check_current_follows_events(bench.lake, bench.stream, [deletes.key, slice_.key])
    assert "deleted at a higher version" in reported[deletes.key].text
    assert not reported[deletes.key].passed
    assert check_stream_versions(bench.lake, bench.stream)["versions_in_order"].numbers["revived"] == 1


def test_any_order_of_slices_ends_in_the_same_table(bench: Bench) -> None:
    """200 changes of ten keys in 6 slices in a random order, some together: the highest version counts."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    bench.stream = changes(bench.stream.topic)
    all_ = [(f"k{chance.randrange(10)}", version, chance.choice("uuud")) for version in range(1, 201)]
    mixed = [*all_]
    chance.shuffle(mixed)
    groups = [mixed[at : at + 34] for at in range(0, 200, 34)]
    slices = sent(bench, *[[change(*one) for one in group] for group in groups])
    chance.shuffle(slices)
    while slices:
        some, slices = slices[: (many := chance.choice([1, 1, 2]))], slices[many:]
        bench.materialise(*some)
    highest = {key: (version, op) for key, version, op in sorted(all_, key=lambda one: one[1])}
    assert versions(bench) == {key: version for key, (version, op) in highest.items() if op != "d"}, f"seed {seed}"
    assert not bench.failing()


def test_a_stream_that_declares_deletes_later(bench: Bench) -> None:
    """Events from before have no such column: they delete nothing."""
    topic = bench.stream.topic
    bench.stream = changes(topic, deletes=None)
    first, second = sent(bench, [change("a", 1), change("b", 1)], [change("a", 2, "d")])
    bench.materialise(first)
    bench.stream = changes(topic)
    bench.materialise(second)
    assert versions(bench) == {"b": 1}
    assert not bench.failing()


def test_a_stream_with_deletes_gets_fields_and_wider_types(bench: Bench) -> None:
    """Its table of events named a boolean column for statistics: Delta refused every added column, in every run."""
    narrow = tuple(replace(field, type="integer") if field.name == "lsn" else field for field in FIELDS)
    bench.stream = changes(bench.stream.topic, fields=narrow)
    newest = change("b", 2**40, at="2026-03-01T11:00:00Z", more="x")
    first, second, third = sent(
        bench, [change("a", 1), change("b", 1)], [change("a", 2, "d")], [newest, change("a", 1)]
    )
    bench.materialise(first)
    bench.materialise(second)
    bench.stream = changes(bench.stream.topic, fields=(*FIELDS, Field("more", "string", optional=True)))
    bench.materialise(third)
    assert {key: (row["version"], row["more"]) for key, row in bench.current().items()} == {"b": (2**40, "x")}
    assert not bench.failing()


def test_without_a_version_a_stream_is_append_only(bench: Bench) -> None:
    """Every event is a row, there is no `current`, and no check misses it."""
    bench.stream = changes(bench.stream.topic, version=None, event_time=None, deletes=None, key=())
    [slice_] = sent(bench, [change("a", 1), change("a", 1), change("a", 2, "d", name="n"), Message(None, b"{}")])
    bench.materialise(slice_)
    rows = bench.rows("events")
    assert [(row["id"], row["key"], row["lsn"]) for row in rows] == [("a", None, 1), ("a", None, 1), ("a", None, 2)]
    assert all(row["event_time"] == row["origin_timestamp"] for row in rows)
    assert "version" not in rows[0]
    assert not bench.failing()
    assert bench.lake.open_stream_table(bench.stream.name, "current") is None


def test_records_with_another_key_are_reported(bench: Bench) -> None:
    """By default the key of the fields counts, and a check warns of records that have another one."""
    from highwater.orchestration.checking.key_checks import check_record_keys

    bench.stream = changes(bench.stream.topic, record_key="warn")
    [slice_] = sent(bench, [change("a", 1), replace(change("b", 1), key=b"b"), replace(change("c", 1), key=None)])
    bench.materialise(slice_)
    assert versions(bench) == {"a": 1, "b": 1, "c": 1}
    result = check_record_keys(bench.lake, bench.stream, [slice_.key])[slice_.key]
    assert (result.passed, result.numbers) == (False, {"events": 3, "unlike": 2})
    assert [row["key"] for row in result.samples] == ["a", "c"]
    bench.stream = changes(bench.stream.topic, record_key="strict")
    bench.materialise(slice_)
    assert versions(bench) == {"b": 1}


def test_a_delete_reclaimed_while_an_older_event_came_between(bench: Bench) -> None:
    """The delete's slice was reprocessed, an older version was merged, then the slice was merged: version 2 stayed."""
    topic = bench.stream.topic
    bench.stream = changes(topic)
    third, deletes, older = sent(bench, [change("k", 3)], [change("k", 5, "d")], [change("k", 2)])
    bench.materialise(third)
    bench.materialise(deletes)
    assert versions(bench) == {}
    bench.stream = changes(topic, deletes=Deletes("op", ("x",)))
    from highwater.assets import current, dlq, events, raw, rejects

    # What was a delete lacks a name now.
    for stage in (events, rejects, dlq):
        stage.materialise(bench.work(deletes))
    for stage in (raw, events, rejects, dlq, current):
        stage.materialise(bench.work(older))
    current.materialise(bench.work(deletes))
    assert versions(bench) == {"k": 3}
    assert "versions_in_order" not in {name.split()[0] for name in bench.failing()}


def test_deletes_stay_deletes_when_the_stream_declares_none_any_more(bench: Bench) -> None:
    """Rebuilding and late events gave deleted keys a row of nulls, or an older one."""
    from highwater.assets.current_rebuild import RebuildSnapshot, compare_with_events

    topic = bench.stream.topic
    bench.stream = changes(topic)
    first, second, late = sent(bench, [change("a", 1), change("b", 1)], [change("a", 5, "d")], [change("a", 3)])
    bench.materialise(first)
    bench.materialise(second)
    bench.stream = changes(topic, deletes=None)
    bench.materialise(late)
    assert versions(bench) == {"b": 1}
    work = bench.work()
    assert compare_with_events(work, RebuildSnapshot.take(work)).none
    assert not bench.failing()


def test_checks_before_the_first_slice_with_deletes(bench: Bench) -> None:
    """The table of events gets its column with the next slice: until then the checks found no such column."""
    topic = bench.stream.topic
    bench.stream = changes(topic, deletes=None)
    [slice_] = sent(bench, [change("a", 1)])
    bench.materialise(slice_)
    bench.stream = changes(topic)
    assert not bench.failing()
    assert check_stream_versions(bench.lake, bench.stream)["versions_in_order"].passed


def test_a_delete_needs_its_version_also_where_there_is_a_default(bench: Bench) -> None:
    """It was accepted with the version null, and deleted nothing."""
    fields = tuple(one if one.name != "lsn" else Field("lsn", "long", optional=True, default=1) for one in FIELDS)
    bench.stream = changes(bench.stream.topic, fields=fields)
    without = Message(b"a", b'{"id": "a", "op": "d", "at": "2026-03-01T10:00:00Z"}')
    [slice_] = sent(bench, [change("a", 0), without])
    bench.materialise(slice_)
    assert versions(bench) == {}
    assert {row["version"] for row in bench.rows("events") if row["deleted"]} == {1}


def test_tombstones_that_delete_from_now_on(bench: Bench) -> None:
    """Older slices keep their decisions: their tombstones were reported as lost."""
    fields = (Field("id", "string", source=Key()), Field("at", "long", source=Meta("offset")), Field("name", "string"))
    ours = {"fields": fields, "version": "at", "event_time": None}
    topic = bench.stream.topic
    bench.stream = changes(topic, **ours, deletes=None)
    before, after = sent(bench, [Message(b"a", b'{"name": "x"}'), Message(b"a", None)], [Message(b"a", None)])
    bench.materialise(before)
    bench.stream = changes(topic, **ours, deletes=Deletes(tombstones=True))
    bench.materialise(after)
    assert versions(bench) == {}
    assert not bench.failing()
