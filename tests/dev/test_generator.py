"""The generator: what a seed decides, what each fault is, and that the account says what the broker holds."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from decimal import Decimal
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from dev.account import Account, account_file, digest
from dev.customers import add_customers, customers_path
from dev.faults import BURST, Source
from dev.generator import SOURCES, Order, Target, create_topic, generate, main, release_customers
from dev.intended import EVENT, INVALID, MALFORMED, TOMBSTONE, UNRESOLVED, Intended, microseconds
from dev.orders import ORDERS, customer_ids
from dev.payments import PAYMENTS
from dev.readings import Place, read_topic
from dev.script import Script
from highwater.errors import ConfigurationError
from tests.conftest import TopicFactory

FIELDS = {"order_id", "version", "status", "customer_id", "amount", "event_time"}
NEXT = {"placed": {"paid", "canceled"}, "paid": {"refunded"}, "refunded": set(), "canceled": set()}


def records(script: Script) -> list[Intended]:
    return [made for batch in script.batches() for made in batch]


def with_fault(fault: str, source: Any = ORDERS, lives: int = 60) -> list[list[Intended]]:
    """Lives that all have one fault."""
    script = Script(source, seed=5, rates={**dict.fromkeys(source.faults, 0.0), fault: 1.0})
    return list(islice(script.lives(), lives))


def faulty(fault: str, source: Any = ORDERS) -> list[Intended]:
    return [made for life in with_fault(fault, source) for made in life if made.fault == fault]


def value(made: Intended) -> dict[str, Any]:
    found = json.loads(made.value or b"", parse_float=Decimal)
    assert isinstance(found, dict)
    return found


def test_a_seed_decides_every_byte() -> None:
    assert records(Script(ORDERS, 7, records=2000)) == records(Script(ORDERS, 7, records=2000))
    assert records(Script(ORDERS, 7, records=50)) != records(Script(ORDERS, 8, records=50))


def test_another_run_of_a_seed_writes_other_orders() -> None:
    first = {made.entity for made in records(Script(ORDERS, 7, run=0, records=500))}
    second = {made.entity for made in records(Script(ORDERS, 7, run=1, records=500))}
    assert not first & second


def test_every_fault_occurs_even_in_a_short_run() -> None:
    assert {made.fault for made in records(Script(ORDERS, 1, records=100))} == {*ORDERS.faults, "none"}
    assert {made.fault for made in records(Script(PAYMENTS, 1, records=100))} == {*PAYMENTS.faults, "none"}


def test_rates_are_shares_of_keys() -> None:
    script = Script(ORDERS, 1, rates={**dict.fromkeys(ORDERS.faults, 0.0), "tombstone": 0.2, "conflict": 0.05})
    faults = Counter(
        max((made.fault for made in life), key=lambda f: f != "none") for life in islice(script.lives(), 4000)
    )
    assert faults["tombstone"] / 4000 == pytest.approx(0.2, abs=0.02)
    assert faults["conflict"] / 4000 == pytest.approx(0.05, abs=0.01)
    assert faults.keys() == {"none", "tombstone", "conflict"}


def test_as_many_records_as_asked_up_to_a_life() -> None:
    assert 1000 <= len(records(Script(ORDERS, 1, records=1000))) < 1005


@pytest.mark.parametrize("rates", [{"no_such": 0.1}, {"tombstone": -0.1}, {"tombstone": 0.9, "conflict": 0.2}])
def test_rates_that_make_no_sense_are_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        Script(ORDERS, 1, rates=rates)


def test_neighbours_are_mostly_of_different_orders() -> None:
    made = records(Script(ORDERS, 1, records=3000))
    same = sum(a.entity == b.entity for a, b in pairwise(made) if not a.transaction)
    assert same < 60


def test_a_sound_order_is_what_the_design_says() -> None:
    lives = [
        life
        for life in islice(Script(ORDERS, 3, rates=dict.fromkeys(ORDERS.faults, 0.0)).lives(), 500)
        if life[0].fault == "none"
    ]
    assert len(lives) == 500
    for life in lives:
        states = [value(made) for made in life]
        assert [s["version"] for s in states] == list(range(1, len(states) + 1))
        assert states[0]["status"] == "placed"
        assert all(b["status"] in NEXT[a["status"]] for a, b in pairwise(states))
        assert all(set(state) >= FIELDS for state in states)
        assert all(state["customer_id"] in customer_ids() for state in states)
        assert all(Decimal(0) <= Decimal(state["amount"]) == round(Decimal(state["amount"]), 2) for state in states)
        assert all(made.key == state["order_id"].encode() for made, state in zip(life, states, strict=True))
        assert all(made.ending == EVENT for made in life)
        times = [microseconds(state["event_time"]) for state in states]
        assert times == sorted(times)


def test_a_sound_payment_has_a_key_of_two_fields_and_a_time_as_version() -> None:
    for life in islice(Script(PAYMENTS, 3, rates=dict.fromkeys(PAYMENTS.faults, 0.0)).lives(), 300):
        states = [value(made) for made in life]
        assert all(
            made.key == f"{state['account_id']}|{state['payment_id']}".encode()
            for made, state in zip(life, states, strict=True)
        )
        versions = [microseconds(state["booked_at"]) for state in states]
        assert [made.version for made in life] == versions
        assert all(a < b for a, b in pairwise(versions))


def is_object(made: Intended) -> bool:
    try:
        return isinstance(json.loads((made.value or b"").decode()), dict)
    except ValueError:
        return False


def test_malformed_json_is_no_json_object_in_any_reading() -> None:
    found = faulty("malformed_json")
    assert len(found) == 60
    assert not any(is_object(made) for made in found)
    assert all(made.ending == MALFORMED and made.value is not None for made in found)
    assert any(made.value == b"" for made in found)


@pytest.mark.parametrize("source", [ORDERS, PAYMENTS])
def test_a_burst_is_of_records_that_nobody_can_read_under_keys_of_their_own(source: Source) -> None:
    script = Script(source, 7, records=2000)
    burst = [made for batch in script.poison(300) for made in batch]
    assert len(burst) == 300
    assert not any(is_object(made) for made in burst)
    assert {(made.fault, made.ending, made.version, made.transaction) for made in burst} == {
        (BURST, MALFORMED, None, None)
    }
    assert len({made.key for made in burst} - {made.key for made in records(script)}) == 300
    assert burst == [made for batch in Script(source, 7).poison(300) for made in batch]
    assert burst[0] != next(iter(Script(source, 7, run=1).poison(1)))[0]
    assert BURST not in source.faults, "a burst is asked for by itself, not by a rate"


def test_a_missing_field_is_left_out_or_null() -> None:
    found = [value(made) for made in faulty("missing_field")]
    assert len(found) == 60
    assert all(sum(state.get(name) is None for name in FIELDS) == 1 for state in found)
    assert {name for state in found for name in FIELDS if state.get(name) is None} == FIELDS
    assert any(name in state for state in found for name in FIELDS if state.get(name) is None)


def test_an_unknown_status_and_values_out_of_bounds_are_invalid_for_ever() -> None:
    statuses = faulty("unknown_status")
    assert all(value(made)["status"] not in NEXT for made in statuses)
    bounds = faulty("out_of_bounds")
    assert all(value(made)["amount"] < 0 or value(made)["version"] < 1 for made in bounds)
    assert {made.ending for made in (*statuses, *bounds)} == {INVALID}


def test_a_forbidden_transition_is_made_of_events() -> None:
    for life in with_fault("forbidden_transition"):
        statuses = [value(made)["status"] for made in life]
        allowed = statuses[0] == "placed" and all(b in NEXT[a] for a, b in pairwise(statuses))
        assert not allowed
        assert {made.ending for made in life} == {EVENT}
        assert [made.version for made in life] == list(range(1, len(life) + 1))


def test_out_of_order_versions_and_a_missing_one_are_events() -> None:
    for life in with_fault("out_of_order"):
        versions = [made.version or 0 for made in life]
        assert versions != sorted(versions)
        assert sorted(versions) == list(range(1, len(versions) + 1))
        assert {made.ending for made in life} == {EVENT}
    for life in with_fault("missing_version"):
        assert [made.version for made in life] == [1, 3]
        assert {made.ending for made in life} == {EVENT}


def test_a_second_delivery_is_equal_byte_by_byte_and_a_conflict_is_not() -> None:
    for life in with_fault("second_delivery"):
        again = next(made for made in life if made.fault == "second_delivery")
        assert [made.value for made in life].count(again.value) == 2
    backdated = 0
    for life in with_fault("conflict"):
        other = next(made for made in life if made.fault == "conflict")
        twin = next(made for made in life if made.version == other.version and made is not other)
        assert value(twin)["amount"] != value(other)["amount"]
        assert {twin.ending, other.ending} == {EVENT}
        backdated += other.backdated_ms > 0
    assert 0 < backdated < 60


def test_keys_that_are_missing_or_of_others() -> None:
    assert {(made.key, made.ending) for made in faulty("null_key")} == {(None, MALFORMED)}
    assert {made.partition for made in faulty("null_key")} == {0, 1, 2}
    for made in faulty("wrong_key"):
        assert made.key is not None
        assert made.key != value(made)["order_id"].encode()
        assert made.ending == MALFORMED
    assert {(made.value, made.ending) for made in faulty("tombstone")} == {(None, TOMBSTONE)}


def test_late_customers_are_not_among_the_known() -> None:
    found = faulty("late_customer")
    assert {made.ending for made in found} == {UNRESOLVED}
    assert not {value(made)["customer_id"] for made in found} & set(customer_ids())
    assert all(made.waits_for == value(made)["customer_id"] for made in found)


def test_a_large_record_is_half_a_megabyte_and_an_event() -> None:
    life = with_fault("large_record", lives=1)[0]
    assert 500_000 <= len(life[-1].value or b"") < 600_000
    assert life[-1].ending == EVENT
    assert set(value(life[-1])) >= FIELDS


@pytest.mark.parametrize("fate", ["committed", "aborted"])
def test_a_transaction_holds_a_whole_life(fate: str) -> None:
    script = Script(ORDERS, 1, records=100, rates={f"{fate}_transaction": 0.3})
    batches = [batch for batch in script.batches() if batch[0].transaction == fate]
    lives = [life for life in script.lives() if life[0].transaction == fate]
    assert sorted(batches, key=lambda b: b[0].entity) == sorted(lives, key=lambda b: b[0].entity)


def test_some_records_have_headers_null_and_repeated_ones_too() -> None:
    headers = [made.headers for made in records(Script(ORDERS, 1, records=1000))]
    assert 0.5 < headers.count(()) / len(headers) < 0.9
    assert any(("nothing", None) in found and ("empty", b"") in found for found in headers)
    assert any([name for name, _ in found].count("source") == 2 for found in headers)


def test_customers_are_added_once(tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    assert add_customers(lake, ["b", "a", "b"]) == ["a", "b"]
    assert add_customers(lake, ["c", "a"]) == ["c"]
    assert add_customers(lake, ["c"]) == []
    assert sorted(row["customer_id"] for row in rows_of(customers_path(lake))) == ["a", "b", "c"]


def rows_of(path: str) -> Sequence[dict[str, Any]]:
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    found = QueryBuilder().register("t", DeltaTable(path)).execute("SELECT * FROM t")
    rows: list[dict[str, Any]] = pa.table(found).to_pylist()
    return rows


# From here on against a real broker.


def murmur2_partition(key: bytes, partitions: int) -> int:
    """The partition that Kafka's Java clients choose: `Utils.murmur2` of Apache Kafka, written from its definition."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = (0x9747B28C ^ len(key)) & mask
    whole = len(key) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ k >> 24) * m & mask)
    if key[whole:]:
        h = (h ^ int.from_bytes(key[whole:], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return ((h ^ h >> 15) & 0x7FFFFFFF) % partitions


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["orders", "payments"])
def test_the_account_says_what_the_broker_holds(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, stream: str
) -> None:
    source = SOURCES[stream]
    name = topic(stream, partitions=source.partitions)
    target = Target(bootstrap, tmp_path, str(tmp_path / "lake"), topic=name)
    rates = {"aborted_transaction": 0.02, "committed_transaction": 0.02}
    summary = generate(source, target, Order(seed=4, records=3000, rates=rates, burst=40))
    held = read_topic(bootstrap, name)
    account = Account(account_file(tmp_path, stream))
    written = account.written(name)
    account.close()

    assert summary.records == len(written) >= 3040
    assert [w.fault == BURST for w in written[:41]] == [True] * 40 + [False], "the burst comes first"
    committed = {Place(w.partition or 0, w.offset or 0): w for w in written if w.visible}
    assert committed.keys() == held.keys()
    for place, entry in committed.items():
        stored = held[place]
        assert (entry.key, entry.timestamp) == (stored.key, stored.timestamp)
        assert entry.value_hash == (None if stored.value is None else digest(stored.value))
    aborted = [w for w in written if w.visible is False]
    assert {w.fault for w in aborted} == {"aborted_transaction"}
    assert all(Place(w.partition or 0, w.offset or 0) not in held for w in aborted)
    assert {w.fault for w in committed.values()} == {*source.faults, "none", BURST} - {"aborted_transaction"}


@pytest.mark.slow
def test_keys_lie_where_java_clients_put_them_and_in_their_order(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    name = topic("orders", partitions=3)
    generate(ORDERS, Target(bootstrap, tmp_path, str(tmp_path / "lake"), topic=name), Order(seed=9, records=1000))
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for place, stored in sorted(read_topic(bootstrap, name).items()):
        if stored.key is not None:
            assert place.partition == murmur2_partition(stored.key, 3)
            by_key[stored.key].append(place.offset)
    assert len(by_key) > 300


@pytest.mark.slow
def test_late_customers_become_known_later(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    target = Target(bootstrap, tmp_path, lake, topic=topic("orders", partitions=3))
    generate(ORDERS, target, Order(records=300, rates={"late_customer": 0.2}))
    known = {row["customer_id"] for row in rows_of(customers_path(lake))}
    account = Account(account_file(tmp_path, "orders"))
    waited = {w.waits_for for w in account.written(target.topic or "") if w.waits_for}
    assert waited
    assert not waited & known
    assert set(release_customers(account, lake)) == waited
    assert release_customers(account, lake) == []
    assert {row["customer_id"] for row in rows_of(customers_path(lake))} == known | waited
    account.close()


@pytest.mark.slow
def test_it_goes_on_at_its_rate_until_it_is_stopped(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    target = Target(bootstrap, tmp_path, str(tmp_path / "lake"), topic=topic("payments", partitions=4))
    stop = threading.Event()
    timer = threading.Timer(3, stop.set)
    timer.start()
    rates = dict.fromkeys(PAYMENTS.faults, 0.0)
    summary = generate(PAYMENTS, target, Order(rate=100, rates=rates, burst=1_000), stop)
    timer.join()
    assert 1_000 < summary.records <= 1_330, "the burst is as fast as it goes, and nothing waits for it"
    assert len(read_topic(bootstrap, target.topic or "")) == summary.records


@pytest.mark.parametrize(
    ("name", "value"), [("acks", "1"), ("group.id", "mine"), ("delivery.timeout.ms", "5000"), ("retries", "0")]
)
def test_a_weakening_property_is_refused_before_a_client_opens(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic was created first, by a client that nothing had checked."""
    opened: list[object] = []
    for client in ("confluent_kafka.admin.AdminClient", "confluent_kafka.Producer", "confluent_kafka.Consumer"):
        monkeypatch.setattr(client, lambda *reported, **more: opened.append((reported, more)))
    target = Target("nowhere:1", tmp_path, str(tmp_path), {name: value})
    with pytest.raises(ConfigurationError, match=rf"{name} must not be {value}: "):
        generate(ORDERS, target, Order(records=1))
    assert opened == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_topic_with_too_few_partitions_is_refused(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    name = topic("orders", partitions=2)
    with pytest.raises(ConfigurationError, match=r"stored: 3; found: 2"):
        create_topic(Target(bootstrap, tmp_path, str(tmp_path)), name, 3)


@pytest.mark.slow
def test_the_program_writes_what_it_is_asked(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = topic("orders", partitions=3)
    options = ["--bootstrap", bootstrap, "--topic", name, "--home", str(tmp_path), "--records", "50"]
    assert main([*options, "--no-faults", "--fault", "tombstone=1"]) == 0
    assert "tombstone" in capsys.readouterr().out
    held = read_topic(bootstrap, name).values()
    assert sum(stored.value is None for stored in held) == len({stored.key for stored in held})
    assert main([*options, "--fault", "no_such=0.1"]) == 1
    assert "no_such" in capsys.readouterr().err
