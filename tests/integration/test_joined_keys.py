"""Keys of several fields: two entities never share one, whatever their fields hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from assets.streams.orders import STREAM as ORDERS
from assets.streams.payments import STREAM as PAYMENTS
from highwater.assets.events import KEY_PROPERTY, ensure_same_key_and_version, format_key_and_version
from highwater.assets.parsing import build_key
from highwater.declaration import Field
from highwater.errors import ConfigurationError
from highwater.resources.delta_rs_writes import create
from highwater.resources.lake import Lake
from tests.helpers.support import Bench, Message, order_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Half of them of what could be mistaken for a separator.
PARTS = st.text("\\|:ab", max_size=6) | st.text(max_size=4)
# Few queries of many pairs each, and none to find a smaller example: a query costs more than the pairs.
PAIRS = st.lists(st.tuples(PARTS, PARTS), min_size=200, max_size=300)


def parted(key: str, separator: str) -> list[str]:
    """The parts of a key, by a reading of its own: a backslash takes the next character as it is."""
    parts, at = [""], 0
    while at < len(key):
        if key[at] == "\\":
            parts[-1] += key[at + 1]
            at += 2
        elif key.startswith(separator, at):
            parts.append("")
            at += len(separator)
        else:
            parts[-1] += key[at]
            at += 1
    return parts


def joined(spark: SparkSession, separator: str, pairs: list[tuple[str | None, str | None]]) -> list[str | None]:
    rows = [(number, *pair) for number, pair in enumerate(pairs)]
    given_ = spark.createDataFrame(rows, "n INT, field_account_id STRING, field_payment_id STRING")
    keys = given_.select("n", build_key(replace(PAYMENTS, key_separator=separator)).alias("key")).collect()
    return [key for _, key in sorted((row["n"], row["key"]) for row in keys)]


@pytest.mark.parametrize("separator", ["|", "::", "a|"])
@settings(max_examples=3, phases=[Phase.generate])
@given(pairs=PAIRS)
def test_the_fields_can_be_read_from_their_key(
    spark: SparkSession, separator: str, pairs: list[tuple[str | None, str | None]]
) -> None:
    """So no two pairs have one key: what is joined without escaping is `a|b|c` for (`a|b`, `c`) and (`a`, `b|c`)."""
    for pair, key in zip(pairs, joined(spark, separator, pairs), strict=True):
        assert tuple(parted(str(key), separator)) == pair


def test_a_key_without_special_characters_is_joined_as_it_is(spark: SparkSession) -> None:
    pairs: list[tuple[str | None, str | None]] = [("a17", "p4"), ("", ""), ("ö :", "x"), (None, "p4"), ("a17", None)]
    assert joined(spark, "|", pairs) == ["a17|p4", "|", "ö :|x", None, None]
    one = spark.createDataFrame([("a|\\b",)], "field_order_id STRING")
    assert one.select(build_key(ORDERS).alias("key")).collect()[0]["key"] == "a|\\b", "a field alone needs no escaping"


def booking(key: str, account: str | None, payment: str, currency: str) -> Message:
    plain = {"account_id": account, "payment_id": payment, "amount": 1.5, "currency": currency}
    return Message(key.encode(), json.dumps(plain | {"booked_at": "2026-03-01T10:00:00Z"}).encode())


def test_entities_whose_fields_hold_the_separator_stay_apart(bench: Bench) -> None:
    """They had one key: the later booking took the place of another account's, or was reported as its conflict."""
    bench.stream = replace(PAYMENTS, topic=bench.stream.topic)
    bench.send(
        booking("a\\|b|c", "a|b", "c", "EUR"),
        booking("a|b\\|c", "a", "b|c", "CHF"),
        booking("a\\\\|b", "a\\", "b", "SEK"),
        booking("a|b|c", "a", "b|c", "NOK"),
        booking("b", None, "b", "DKK"),
    )
    slice_ = bench.plan(0, p0=(0, 5))
    bench.materialise(slice_)
    fields = {(row["account_id"], row["payment_id"]): row["currency"] for row in bench.current().values()}
    assert fields == {("a|b", "c"): "EUR", ("a", "b|c"): "CHF", ("a\\", "b"): "SEK"}
    details = {row["origin_offset"]: row["detail"] for row in bench.rows("rejects")}
    assert details == {
        3: "the record's key differs from account_id|payment_id with \\ before each \\ and | of a field",
        4: "field account_id is null",
    }
    assert not bench.failing()


@pytest.mark.parametrize(
    "changes",
    [
        {"key": ("payment_id", "account_id")},
        {"key_separator": "-"},
        {"key": ("payment_id",)},
        {"version": "other"},
    ],
)
def test_a_key_or_version_that_changes_after_the_first_slice_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A key then had two rows in `current`, only one was ever replaced, and every new slice passed."""
    lake, declared = Lake(str(tmp_path)), replace(PAYMENTS, fields=(*PAYMENTS.fields, Field("other", "long")))
    path, properties = lake.build_table_path("payments", "events"), {KEY_PROPERTY: format_key_and_version(declared)}
    create(path, pa.schema([("slice", pa.string())]), configuration=properties)
    ensure_same_key_and_version(lake, replace(declared, fields=(*declared.fields, Field("more", "long"))))
    with pytest.raises(ConfigurationError, match="another key or version than its events have"):
        ensure_same_key_and_version(lake, replace(declared, first_version=None, **changes))


@pytest.mark.slow
def test_a_slice_with_another_key_is_not_committed(bench: Bench) -> None:
    bench.send(order_message("o1", 1), order_message("o1", 2))
    slices = [bench.plan(n, p0=(n, n + 1)) for n in range(2)]
    bench.materialise(slices[0])
    declared = bench.stream
    bench.stream = replace(declared, key=("order_id", "customer_id"), record_key="ignore", first_version=None)
    with pytest.raises(ConfigurationError, match="another key or version"):
        bench.materialise(slices[1])
    bench.stream = declared
    bench.materialise(slices[1])
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 2}
