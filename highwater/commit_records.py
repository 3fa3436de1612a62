"""Commit records: what one commit of a Delta table says about the slices in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any

from highwater.slice_commits import SliceCommit
from highwater.slices import SliceKey

FORMAT = 1


@dataclass(frozen=True)
class CommitRecord:
    """One slice in one commit.

    Args:
        slice_key: the slice.
        attempt: the attempt whose rows the commit holds.
        rows: the slice's number of rows in the table, or for `current` the number of events in the commit; None if the
            commit does not have it.
        batch: the name of the commit.
        run: the Dagster run that committed; empty outside of Dagster.
        version: the version of the table that the commit made; -1 before the commit.
        committed_at: when, in UTC; None before the commit.
        slice_commit: ranges and counts of the slice; None for `current`, whose commits name slices and attempts alone.
    """

    slice_key: str
    attempt: int
    rows: int | None
    batch: str
    run: str = ""
    version: int = -1
    committed_at: datetime | None = None
    slice_commit: SliceCommit | None = None


@dataclass(frozen=True)
class OrdinalSpan:
    """Consecutive ordinals of one topic, ends included, with one attempt number."""

    first: int
    last: int
    attempt: int


def build_spans(attempts: Mapping[str, int]) -> dict[str, list[OrdinalSpan]]:
    """Slices and their attempts in a short form: neighbours with one attempt number become one span.

    Args:
        attempts: by slice key.
    """
    slices = sorted((SliceKey.parse(key).topic, SliceKey.parse(key).ordinal, n) for key, n in attempts.items())
    found: dict[str, list[OrdinalSpan]] = {}
    # Consecutive ordinals minus their place in the list are equal.
    numbered = enumerate(slices)
    for (topic, attempt, _), group in groupby(numbered, key=lambda one: (one[1][0], one[1][2], one[1][1] - one[0])):
        ordinals = [slice_[1] for _, slice_ in group]
        found.setdefault(topic, []).append(OrdinalSpan(ordinals[0], ordinals[-1], attempt))
    return found


def expand_spans(spans: Mapping[str, Iterable[OrdinalSpan]]) -> dict[str, int]:
    """The inverse of `build_spans`."""
    return {
        str(SliceKey(topic, ordinal)): span.attempt
        for topic, of_topic in spans.items()
        for span in of_topic
        for ordinal in range(span.first, span.last + 1)
    }


def to_user_metadata(
    records: Sequence[CommitRecord], number: int, *, batch: str = "", run: str = "", replaces: bool = False
) -> str:
    """The `userMetadata` of the commit that holds these slices.

    Args:
        records: records of one batch.
        number: the number of the commit among the numbered commits of the table; 0 for one without a number.
        batch: the name of the commit, where there is no record.
        run: the Dagster run, where there is no record.
        replaces: the commit replaces the whole table, so earlier records no longer count.
    """
    short = build_spans({record.slice_key: record.attempt for record in records if record.slice_commit is None})
    plain = {
        "format": FORMAT,
        "batch": records[0].batch if records else batch,
        "number": number,
        "replaces": replaces,
        "run": records[0].run if records else run,
        "slices": {topic: [[s.first, s.last, s.attempt] for s in of_topic] for topic, of_topic in short.items()},
        "records": [record.slice_commit.to_plain() for record in records if record.slice_commit is not None],
    }
    return json.dumps({"highwater": plain}, separators=(",", ":"), sort_keys=True)


def from_user_metadata(text: str | None, version: int, committed_at: datetime | None) -> list[CommitRecord]:
    """The records in the `userMetadata` of a commit; none where the text is not ours.

    Args:
        text: the `userMetadata`, None for a commit without one.
        version: the table's version.
        committed_at: in UTC.

    Raises:
        ValueError: a newer version of Highwater wrote them.
    """
    plain = _parse_user_metadata(text)
    if plain is None:
        return []
    spans = {topic: [OrdinalSpan(*span) for span in of_topic] for topic, of_topic in plain["slices"].items()}
    base = CommitRecord("", 0, None, plain["batch"], plain["run"], version, committed_at)
    short = [replace(base, slice_key=key, attempt=attempt) for key, attempt in expand_spans(spans).items()]
    return [*short, *(with_slice_commit(base, SliceCommit.from_plain(one)) for one in plain["records"])]


def with_slice_commit(record: CommitRecord, slice_commit: SliceCommit) -> CommitRecord:
    """The record `record` with the slice of a slice commit."""
    return replace(
        record,
        slice_key=slice_commit.key,
        attempt=slice_commit.attempt,
        rows=slice_commit.rows,
        slice_commit=slice_commit,
    )


def parse_number(text: str) -> int:
    """The number of the commit that carries this `userMetadata`."""
    plain = _parse_user_metadata(text)
    return 0 if plain is None else int(plain["number"])


def parse_batch_id(text: str | None) -> str:
    """The batch ID of the commit that carries this `userMetadata`; empty where the text is not ours."""
    plain = _parse_user_metadata(text)
    return "" if plain is None else str(plain["batch"])


def replaces_table(text: str | None) -> bool:
    """Whether the commit that carries this `userMetadata` replaced the whole table."""
    plain = _parse_user_metadata(text)
    return plain is not None and bool(plain["replaces"])


def _parse_user_metadata(text: str | None) -> dict[str, Any] | None:
    """Our JSON in `userMetadata`; None where the text is not ours."""
    try:
        plain: dict[str, Any] = json.loads(text or "")["highwater"]
        written = plain["format"]
    except (ValueError, KeyError, TypeError):
        return None
    if written != FORMAT:
        raise ValueError(f"commit record of format {written!r}; this version reads format {FORMAT}")
    return plain


def select_newest_records(
    version: int, records: Iterable[CommitRecord], restores: Mapping[int, int]
) -> dict[str, CommitRecord]:
    """The newest record of each slice that one version of a table holds.

    Args:
        version: the table's version.
        records: all of the table, in any order.
        restores: by version the version that a `RESTORE` went back to; -1 for a commit that replaced the table, whose
            own records count.
    """
    ordered, found, at = sorted(records, key=lambda record: -record.version), dict[str, CommitRecord](), version
    while at >= 0:
        since = max((one for one in restores if one <= at), default=-1)
        for record in ordered:
            if since <= record.version <= at:
                found.setdefault(record.slice_key, record)
        at = restores.get(since, -1)
    return found
