"""Topics of the trial of `infer`: their records, and the rows that they make, computed apart from the product."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
BEGIN_MS = int(BEGIN.timestamp() * 1000)
SEED = 31
# Registers a schema under a subject, and returns its ID.
Register = Callable[[str, str, str], int]


class Sent(NamedTuple):
    """A record as a producer sends it."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass
class Account:
    """The expected contents of the tables.

    Args:
        events: rows of events, deletes among them.
        deletes: events that delete their key.
        rejects: rows of rejects.
        tombstones: records without a value that are no event.
        current: rows of current; None where the stream can have none.
        rows: by a query over the tables the rows that it must give, in any order.
    """

    events: int = 0
    deletes: int = 0
    rejects: int = 0
    tombstones: int = 0
    current: int | None = None
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Topic:
    """A topic that nobody prepared.

    Args:
        name: its name.
        write: gives its records, and completes the account meanwhile.
        stream: the name that `infer` gives its stream.
        registry: whether its values need a schema registry.
        config: its configuration.
    """

    name: str
    write: Callable[[int, Account, Register], Iterator[Sent]]
    stream: str
    registry: bool = False
    config: Mapping[str, str] = field(default_factory=dict)


def _chance() -> random.Random:
    """The same choices in each trial."""
    return random.Random(SEED)  # noqa: S311 - records are no secrets


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _iso(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _millis(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def debezium(records: int, account: Account, _: Register) -> Iterator[Sent]:
    """A snapshot of a table in PostgreSQL, then its changes; a tenth deletes a row, and a tombstone follows."""
    chance, lsn, next_id = _chance(), 24_000_000, 1
    live: dict[int, tuple[Any, ...]] = {}
    sent = 0
    while sent < records:
        in_snapshot = sent < records // 20
        lsn += 0 if in_snapshot else chance.randint(8, 400)
        at = BEGIN_MS + sent
        action = chance.random()
        if action < 0.001:
            broken = b'{"before":null,"after":{"id":1,"customer":'
            yield Sent(_json({"id": chance.randint(1, 9)}), broken, at)
            account.rejects += 1
            sent += 1
            continue
        if in_snapshot or action < 0.3 or not live:
            op, identity, next_id = ("r" if in_snapshot else "c"), next_id, next_id + 1
        else:
            op, identity = ("d" if action < 0.4 else "u"), chance.choice(list(live) if len(live) < 50 else _some(live))
        row, before = _row_of(identity, lsn, chance), None
        if op == "d":
            before = {"id": identity, "customer": "", "amount": None, "note": None, "created": 0, "day": 0}
            before["updated_at"] = "1970-01-01T00:00:00Z"
            del live[identity]
            account.deletes += 1
        else:
            live[identity] = (identity, row["customer"], row["note"], op, lsn, at - 5, row["day"])
        yield Sent(_json({"id": identity}), _json(_change(op, before, None if op == "d" else row, lsn, at)), at)
        account.events += 1
        sent += 1
        if op == "d" and sent < records:
            yield Sent(_json({"id": identity}), None, at)
            account.tombstones += 1
            sent += 1
    account.current = len(live)
    account.rows[
        "SELECT id, customer, note, op, lsn, epoch_ms(event_time), date_diff('day', DATE '1970-01-01', day) "
        "FROM current"
    ] = [*live.values()]


def _some(live: Mapping[int, Any]) -> list[int]:
    """Some of the rows: the latest fifty."""
    names = iter(reversed(live))
    return [next(names) for _ in range(50)]


def _row_of(identity: int, lsn: int, chance: random.Random) -> dict[str, Any]:
    cents = chance.randint(0, 10_000_000)
    amount = cents.to_bytes(max(1, (cents.bit_length() + 8) // 8), "big", signed=True)
    return {
        "id": identity,
        "customer": f"c{chance.randint(1, 999)}",
        "amount": base64.b64encode(amount).decode(),
        "note": None if chance.random() < 0.6 else f"gift ☕ {lsn}",
        "created": BEGIN_MS * 1000 + lsn,
        "day": 20_454 + identity % 90,
        "updated_at": _iso(BEGIN + timedelta(microseconds=lsn)),
    }


def _change(op: str, before: Any, after: Any, lsn: int, at: int) -> dict[str, Any]:
    source = {"version": "3.2.0.Final", "connector": "postgresql", "name": "shop", "ts_ms": at - 5, "snapshot": "false"}
    source |= {"db": "shop", "sequence": f'["{lsn - 9}","{lsn}"]', "ts_us": (at - 5) * 1000}
    source |= {"ts_ns": (at - 5) * 1_000_000, "schema": "public", "table": "orders", "txId": lsn // 300, "lsn": lsn}
    value = {"before": before, "after": after, "source": {**source, "xmin": None}, "transaction": None, "op": op}
    return {**value, "ts_ms": at, "ts_us": at * 1000, "ts_ns": at * 1_000_000}


def github(records: int, account: Account, _: Register) -> Iterator[Sent]:
    """Events whose payload differs by type; half of them without a record key."""
    chance, rows = _chance(), []
    for number in range(records):
        at = BEGIN + timedelta(seconds=number)
        kind = chance.choice(["PushEvent", "WatchEvent", "IssuesEvent", "ForkEvent", "ReleaseEvent"])
        actor, repo = chance.randint(1, 5_000), chance.randint(1_000, 2_000)
        login = f"user{actor}"
        value: dict[str, Any] = {"id": str(22_249_084_964 + number), "type": kind}
        value["actor"] = {"id": actor, "login": login, "display_login": login, "gravatar_id": ""}
        value["actor"]["url"] = f"https://api.example/users/{login}"
        value["repo"] = {"id": repo, "name": f"octo/r{repo}", "url": f"https://api.example/repos/octo/r{repo}"}
        value["payload"] = _payload(kind, number, chance)
        value |= {"public": True, "created_at": _iso(at)}
        org = f"org{repo % 7}" if chance.random() < 0.3 else None
        if org is not None:
            value["org"] = {"id": repo % 7, "login": org}
        body, key = _json(value), str(repo).encode() if number % 2 else None
        if chance.random() < 0.001:
            account.rejects += 1
            body = body[: len(body) // 2]
        else:
            rows.append((value["id"], kind, login, repo, f"octo/r{repo}", _millis(at), org))
        yield Sent(key, body, _millis(at))
    account.events = len(rows)
    account.rows["SELECT id, type, actor_login, repo_id, repo_name, epoch_ms(created_at), org_login FROM events"] = rows


def _payload(kind: str, number: int, chance: random.Random) -> dict[str, Any]:
    if kind == "PushEvent":
        commit = {"sha": f"{chance.getrandbits(64):016x}", "message": f"fix ü {number}", "distinct": True}
        return {"push_id": 10_115_855_396 + number, "size": 1, "ref": "refs/heads/main", "commits": [commit]}
    if kind == "IssuesEvent":
        return {"action": "opened", "issue": {"number": number % 99, "labels": [], "body": None, "the": 1, "The": 2}}
    if kind == "ForkEvent":
        return {"forkee": {"id": number, "name": f"fork{number}", "private": False, "stars": 0}}
    if kind == "ReleaseEvent":
        return {"action": "published", "release": {"tag_name": f"v{number}", "draft": False, "assets": [{"size": 9}]}}
    return {"action": "started"}


def telemetry(records: int, account: Account, _: Register) -> Iterator[Sent]:
    """Readings of sensors, keyed by six bytes; some have NaN, and some the time in seconds, which are rejects."""
    chance, newest, devices = _chance(), {}, 2_000
    for number in range(records):
        device = number % devices
        at = BEGIN_MS + number * 7
        value: dict[str, Any] = {"device": f"s-{device}", "seq": 100 + number // devices, "ts": at}
        value["temp"] = chance.choice([21, round(chance.uniform(-20, 40), 3), 21.500000000000004])
        value["hum"] = chance.choice([None, 1e-05, 45.5])
        value["rssi"] = -chance.randint(40, 90)
        place = {"lat": round(chance.uniform(-90, 90), 6), "lon": round(chance.uniform(-180, 180), 6)}
        value["pos"] = None if chance.random() < 0.05 else place
        if device % 3 == 0:
            value["fw"] = "1.2.0"
        temperature: float | None = float(value["temp"])
        if chance.random() < 0.01:
            value["temp"], temperature = float("nan"), None
        key = b"\xa4\xcf\x12\xff" + device.to_bytes(2, "big")
        if chance.random() < 0.002:
            value["ts"] = at // 1000
            account.rejects += 1
        else:
            account.events += 1
            where = value["pos"] or {"lat": None, "lon": None}
            row = (value["device"], value["seq"], at, temperature, value["hum"], value["rssi"], *where.values())
            newest[device] = row
        yield Sent(key, json.dumps(value).encode(), at)
    account.current = len(newest)
    query = "SELECT device, seq, epoch_ms(ts), temp, hum, rssi, pos_lat, pos_lon FROM current"
    account.rows[query] = [*newest.values()]


def order_lines(records: int, account: Account, _: Register) -> Iterator[Sent]:
    """Orders with an array of lines where one may lack what another has; prices are texts or numbers."""
    chance, newest, orders = _chance(), {}, max(1, records // 4)
    for number in range(records):
        order, version = f"o-{number % orders}", number // orders + 1
        at = BEGIN + timedelta(seconds=number)
        lines = [_line(chance) for _ in range(chance.randint(0, 4))]
        total = Decimal(chance.randint(0, 10**7)) / 100
        value: dict[str, Any] = {"order_id": order, "version": version, "currency": "EUR", "total": f"{total:.2f}"}
        value |= {"status": ("placed", "paid", "sent", "canceled", "closed")[version - 1], "updated_at": _iso(at)}
        value["lines"] = lines
        if number % 10 == 0:
            value["coupon"] = None if number % 20 else "SPRING"
        body = _json(value)
        if chance.random() < 0.001:
            account.rejects += 1
            body = body.replace(b'"version":', b'"version":"x",', 1) if number % 2 else body[:-3]
        else:
            account.events += 1
            quantity = sum(line["qty"] for line in lines)
            gifts = sum(line.get("gift", False) for line in lines)
            row = (order, version, value["status"], total, _millis(at), value.get("coupon"), len(lines))
            newest[order] = (*row, quantity, gifts)
        yield Sent(order.encode(), body, _millis(at))
    account.current = len(newest)
    account.rows[
        "SELECT order_id, version, status, total, epoch_ms(updated_at), coupon, len(lines), "
        "coalesce(list_sum(list_transform(lines, lambda x: x.qty)), 0), "
        "len(list_filter(lines, lambda x: coalesce(x.gift, false))) FROM current"
    ] = [*newest.values()]


def _line(chance: random.Random) -> dict[str, Any]:
    price = chance.randint(1, 9_999) / 100
    line = {"sku": chance.choice("ABCDEF"), "qty": chance.randint(1, 5), "price": f"{price:.2f}"}
    if chance.random() < 0.2:
        line |= {"price": price, "gift": True}
    return line


_DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
_INVOICE: dict[str, Any] = {
    "type": "record",
    "name": "Invoice",
    "namespace": "billing",
    "fields": [
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "amount", "type": ["null", _DECIMAL], "default": None},
        {"name": "issued_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "seen_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "due", "type": {"type": "int", "logicalType": "date"}},
        {"name": "tags", "type": {"type": "map", "values": "string"}},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["STANDARD", "CREDIT"]}},
        {"name": "checksum", "type": {"type": "fixed", "name": "Crc", "size": 4}},
    ],
}
_CURRENCY = {"name": "currency", "type": "string", "default": "EUR"}


def avro(records: int, account: Account, register: Register) -> Iterator[Sent]:
    """Invoices of two writers' schemas, keyed by framed Avro; a tombstone deletes its invoice."""
    newer = {**_INVOICE, "fields": [*_INVOICE["fields"], _CURRENCY]}
    ids = [register("invoices-value", json.dumps(schema), "AVRO") for schema in (_INVOICE, newer)]
    key_id = register("invoices-key", '"string"', "AVRO")
    encoders = [_avro_encoder(_INVOICE), _avro_encoder(newer)]
    write_key = _avro_encoder("string")
    chance, invoices = _chance(), max(1, records // 4)
    newest: dict[str, tuple[Any, ...]] = {}
    for number in range(records):
        identity = f"7f1c3c1e-0000-4000-8000-{number % invoices:012d}"
        at = BEGIN + timedelta(milliseconds=37 * number)
        key = _framed(key_id, write_key(identity))
        if number >= invoices and chance.random() < 0.02:
            newest.pop(identity, None)
            account.deletes += 1
            account.events += 1
            yield Sent(key, None, _millis(at))
            continue
        second = int(number >= records // 2)
        value, row = _invoice(identity, at, number, second, chance)
        body = _framed(ids[second], encoders[second](value))
        if chance.random() < 0.001:
            account.rejects += 1
            body = body[:-6]
        else:
            account.events += 1
            newest[identity] = row
        yield Sent(key, body, _millis(at))
    account.current = len(newest)
    account.rows[
        "SELECT id, amount, epoch_ms(issued_at), epoch_us(seen_at), due, len(map_keys(tags)), note, kind, "
        "hex(checksum), currency FROM current"
    ] = [*newest.values()]


def _invoice(
    identity: str, at: datetime, number: int, second: int, chance: random.Random
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    amount = None if chance.random() < 0.1 else Decimal(chance.randint(-(10**6), 10**9)) / 100
    seen = at - timedelta(microseconds=chance.randint(1, 10**6))
    due = date(2026, 1, 1) + timedelta(days=number % 60)
    tags = dict.fromkeys("abc"[: chance.randint(0, 3)], "ö")
    value: dict[str, Any] = {
        "id": identity,
        "amount": amount,
        "issued_at": at,
        "seen_at": seen,
        "due": due,
        "tags": tags,
    }
    value |= {"note": chance.choice([None, "", f"n{number}"]), "kind": chance.choice(["STANDARD", "CREDIT"])}
    value["checksum"] = chance.getrandbits(32).to_bytes(4, "big")
    currency = "EUR"
    if second:
        currency = chance.choice(["EUR", "USD", "CHF"])
        value["currency"] = currency
    row = (identity, amount, _millis(at), round((seen - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)))
    return value, (*row, due, len(tags), value["note"], value["kind"], value["checksum"].hex().upper(), currency)


def _avro_encoder(schema: Any) -> Callable[[Any], bytes]:
    import io

    import fastavro

    parsed = fastavro.parse_schema(schema)

    def encode(value: Any) -> bytes:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, value)
        return out.getvalue()

    return encode


def _framed(schema_id: int, payload: bytes) -> bytes:
    return b"\x00" + schema_id.to_bytes(4, "big") + payload


_REGISTERED = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {
        "order_id": {"type": "string"},
        "version": {"type": "integer"},
        "amount": {"type": "number"},
        "placed_at": {"type": "string", "format": "date-time"},
        "coupon": {"type": ["string", "null"]},
    },
    "required": ["order_id", "version", "amount", "placed_at"],
}
_UNKNOWN_SCHEMA = 987_654


def registered_json(records: int, account: Account, register: Register) -> Iterator[Sent]:
    """JSON after the registry's framing, or with the schema's ID in a header; a few name a schema that is unknown."""
    schema = register("receipts-value", json.dumps(_REGISTERED), "JSON")
    chance, newest, orders = _chance(), {}, max(1, records // 3)
    for number in range(records):
        order, version = f"o-{number % orders}", number // orders + 1
        at = BEGIN + timedelta(seconds=number)
        value: dict[str, Any] = {"order_id": order, "version": version, "placed_at": _iso(at)}
        value["amount"] = chance.choice([12.5, 1e-07, round(chance.uniform(0, 1000), 2), 7])
        if number % 4 == 0:
            value["coupon"] = None if number % 8 else "SPRING"
        body, headers = _json(value), tuple[tuple[str, bytes], ...]()
        fault = chance.random()
        if fault < 0.0005:
            account.rejects += 1
            body = _framed(_UNKNOWN_SCHEMA, body)
        elif fault < 0.001:
            account.rejects += 1
            body = _framed(schema, body[:-2])
        else:
            account.events += 1
            newest[order] = (order, version, float(value["amount"]), _millis(at), value.get("coupon"))
            if number % 10 == 9:
                headers = (("__value_schema_id", _framed(schema, b"")),)
            else:
                body = _framed(schema, body)
        yield Sent(order.encode(), body, _millis(at), headers)
    account.current = len(newest)
    account.rows["SELECT order_id, version, amount, epoch_ms(placed_at), coupon FROM current"] = [*newest.values()]


TOPICS: Mapping[str, Topic] = {
    "debezium": Topic("shop.public.orders", debezium, "shop_public_orders"),
    "avro": Topic("invoices", avro, "invoices", registry=True, config={"cleanup.policy": "compact"}),
    "github": Topic("github.events", github, "github_events"),
    "telemetry": Topic("telemetry", telemetry, "telemetry"),
    "order-lines": Topic("shop.order-lines", order_lines, "shop_order_lines"),
    "registered-json": Topic("receipts", registered_json, "receipts", registry=True),
}
