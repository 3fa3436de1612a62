"""What a run keeps of the records that it classified, and for which decisions it counts."""

from __future__ import annotations

from typing import Any, cast

from highwater.assets.classified import SharedFrames


class FakeFrame:
    """A test double for records that Spark keeps."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.cached, self.refuses = True, refuses

    def unpersist(self) -> None:
        self.cached = False
        if self.refuses:
            raise RuntimeError("Spark is gone")


def stored(*frames: tuple[Any, dict[str, int], dict[str, int]]) -> SharedFrames:
    found = SharedFrames()
    for frame, published, attempts in frames:
        found.keep(frame, published, 1)
        found.record_attempts(attempts)
    return found


def test_records_of_several_decisions_are_each_taken_from_where_they_were_decided() -> None:
    first, second = FakeFrame(), FakeFrame()
    shared: Any = stored((first, {"a": 0, "b": 0}, {"a": 1, "b": 1}), (second, {"a": 0}, {"a": 2}))
    assert shared.select_frames({"a": 2, "b": 1}, {}) == [(first, ["b"]), (second, ["a"])]
    assert shared.select_frames({"a": 1}, {}) == [(first, ["a"])]


def test_their_size_is_that_of_all_of_them() -> None:
    """A stage takes the records of several decisions together."""
    found, frame = SharedFrames(), cast("Any", FakeFrame())
    assert found.size == 0
    found.keep(frame, {"a": 0}, 5)
    found.keep(frame, {"b": 0}, 7)
    assert found.size == 12
    found.release()
    assert found.size == 0


def test_records_of_another_attempt_or_of_before_a_publication_do_not_count() -> None:
    shared: Any = stored((FakeFrame(), {"a": 3, "b": 0}, {"a": 4}))
    assert shared.select_frames({"a": 4}, {"a": 3}) != []
    assert shared.select_frames({"a": 5}, {"a": 3}) == [], "another run decided"
    assert shared.select_frames({"a": 4}, {"a": 4}) == [], "its rejects were published since"
    assert shared.select_frames({"a": 4, "b": 1}, {"a": 3}) == [], "b was not committed here"
    assert shared.select_frames({"c": 1}, {}) == []


def test_nothing_is_noted_where_every_slice_retained_its_decision() -> None:
    shared = SharedFrames()
    shared.record_attempts({})
    assert shared.select_frames({"a": 1}, {}) == []


def test_released_frames_are_dropped_even_if_spark_refuses() -> None:
    first, second = FakeFrame(refuses=True), FakeFrame()
    shared: Any = stored((first, {"a": 0}, {"a": 1}), (second, {"b": 0}, {"b": 1}))
    shared.release()
    assert (first.cached, second.cached) == (False, False)
    assert shared.select_frames({"a": 1}, {}) == []
