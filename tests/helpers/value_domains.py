"""Values of each type: those at its edges, and what draws others."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from highwater.assets.documents import EXACT

CHARACTERS = "aZ0 \t\"'\\,;{}[]:/\xe4\xdf\u20ac\u4e2d\u2028\U0001f600\x01\x7f\0"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_MICROS, LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999
_DAY_MICROS = 86_400_000_000


@dataclass(frozen=True)
class Domain:
    """The values of a type.

    Args:
        edges: those at its edges.
        draw: draws another one.
    """

    edges: tuple[Any, ...]
    draw: Callable[[random.Random], Any]


def draw_text(chance: random.Random, characters: str = CHARACTERS) -> str:
    return "".join(chance.choice(characters) for _ in range(chance.randrange(9)))


def draw_whole(chance: random.Random, bits: int) -> int:
    """A whole number with up to this number of bits; short ones are as frequent as long ones."""
    most: int = 2 ** chance.randint(1, bits)
    return chance.randrange(-most, most)


def draw_double(chance: random.Random) -> float:
    return chance.choice([0.1, float(chance.randrange(99)), chance.uniform(-1e6, 1e6), chance.uniform(-1, 1) * 1e300])


def to_single(value: float) -> float:
    """The nearest number of single precision."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


def build_decimals(precision: int, scale: int) -> Domain:
    most, unit = 10**precision - 1, Decimal(1).scaleb(-scale)

    def draw(chance: random.Random) -> Decimal:
        return _scaled(chance.randint(-(10 ** chance.randint(1, precision)) + 1, most), scale)

    edges = (Decimal(0), unit, -unit, _scaled(most, scale), _scaled(-most, scale), _scaled(most // 10, scale))
    return Domain(edges, draw)


def _scaled(unscaled: int, scale: int) -> Decimal:
    """A number by its unscaled value; the usual context would round it to 28 digits."""
    return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))


def moment_of(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def micros_of(moment: datetime) -> int:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - EPOCH) // timedelta(microseconds=1)


_DAYS = ("2024-02-29T23:59:59", "1900-02-28T12:00", "1582-10-10T01:02:03", "1582-10-04T23:59:59.999999")
_MOMENTS = (
    *(FIRST_MICROS, LAST_MICROS, 0, -1, 1, 1_767_225_600_250_000),
    *(micros_of(datetime.fromisoformat(day)) for day in (*_DAYS, "1883-11-18", "2038-01-19T03:14:08")),
)


def build_moments(step: int = 1, first: int = FIRST_MICROS, last: int = LAST_MICROS, *, zoned: bool = True) -> Domain:
    """Times of whole steps in microseconds, in UTC or without a zone."""

    def at(micros: int) -> datetime:
        moment = moment_of(min(max(micros, first), last) // step * step)
        return moment if zoned else moment.replace(tzinfo=None)

    return Domain(tuple(map(at, _MOMENTS)), lambda chance: at(chance.randint(first, last)))


def build_lists(one: Domain, most: int = 3) -> Domain:
    draw = lambda chance: [pick(one, chance) for _ in range(chance.randrange(most))]  # noqa: E731
    return Domain(([], list(one.edges), [one.edges[0]]), draw)


def build_maps(one: Domain, keys: Domain) -> Domain:
    draw = lambda chance: {pick(keys, chance): pick(one, chance) for _ in range(chance.randrange(3))}  # noqa: E731
    return Domain(({}, dict.fromkeys(keys.edges, one.edges[0])), draw)


def build_structs(**members: Domain) -> Domain:
    def draw(chance: random.Random) -> dict[str, Any]:
        return {name: pick(one, chance) for name, one in members.items()}

    longest = max(len(one.edges) for one in members.values())
    edges = ({name: one.edges[at % len(one.edges)] for name, one in members.items()} for at in range(longest))
    return Domain(tuple(edges), draw)


def pick(domain: Domain, chance: random.Random) -> Any:
    """A value at an edge or another one."""
    return chance.choice(domain.edges) if chance.random() < 0.3 else domain.draw(chance)


def or_null(domain: Domain) -> Domain:
    return Domain((None, *domain.edges), lambda chance: None if chance.random() < 0.2 else domain.draw(chance))


# Texts that the pipeline itself uses as marks are among them.
_TEXTS = (
    "",
    "\0",
    "a\0b",
    "\U0001f600\uffff",
    "\\\U0001f600",
    "e\u0301",
    '"\\/"',
    " x ",
    "true",
    "null",
    "7",
    "NaN",
    '{"a":1}',
    "''",
)
# Texts that the pipeline itself uses as marks.
_MARKS = (f"{EXACT}1", "\ue001", "end of the value", "end of the key", "\xf1high\xf2w\xf3", "x" * 3000)
TEXT = Domain((*_TEXTS, "a\nb\r\n", *_MARKS), draw_text)
LINE_TEXT = Domain((*_TEXTS[1:], *_MARKS), lambda chance: draw_text(chance) or "-")
NAMES = Domain(("a", "", "\xfc", "a.b", "\U0001f600"), lambda chance: draw_text(chance, "ab\xe4\U0001f600."))
FLAG = Domain((True, False), lambda chance: chance.random() < 0.5)
INTEGER = Domain((0, -1, 2**31 - 1, -(2**31)), lambda chance: draw_whole(chance, 31))
LONG = Domain((0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)), lambda chance: draw_whole(chance, 63))
UNSIGNED_INTEGER = Domain((0, 2**32 - 1), lambda chance: chance.randrange(2**32))
UNSIGNED_LONG = Domain((0, 2**63, 2**64 - 1), lambda chance: chance.randrange(2**64))
_LARGEST, _LEAST = 3.4028234663852886e38, 1.401298464324817e-45
SINGLE = Domain(
    (0.0, 0.5, to_single(0.1), _LARGEST, -_LARGEST, _LEAST), lambda chance: to_single(chance.uniform(-1e6, 1e6))
)
DOUBLE = Domain(
    (0.0, 0.1, 5e-324, 1.7976931348623157e308, -1.7976931348623157e308, 1e22, 1e23, 2.0**53, 1e-7, -2.5), draw_double
)
ANY_DOUBLE = Domain((*DOUBLE.edges, float("nan"), float("inf"), float("-inf")), draw_double)
MONEY, FINE, WHOLE, UNIT = (
    build_decimals(12, 2),
    build_decimals(38, 10),
    build_decimals(38, 0),
    build_decimals(38, 38),
)
DAY = Domain(
    tuple(
        map(date.fromisoformat, ("0001-01-01", "9999-12-31", "2024-02-29", "1970-01-01", "1969-12-31", "1582-10-10"))
    ),
    lambda chance: date.fromordinal(chance.randint(1, date.max.toordinal())),
)


def build_clock(step: int) -> Domain:
    """Times of day of whole steps in microseconds."""

    def at(micros: int) -> time:
        return moment_of(micros // step * step).time()

    edges = (0, _DAY_MICROS - 1, 1, 34_200_250_000, 43_200_000_000)
    return Domain(tuple(map(at, edges)), lambda chance: at(chance.randrange(_DAY_MICROS)))


CLOCK, CLOCK_MS = build_clock(1), build_clock(1000)
MOMENT, MOMENT_MS, MOMENT_S = build_moments(), build_moments(1000), build_moments(10**6)
LOCAL, LOCAL_MS = build_moments(zoned=False), build_moments(1000, zoned=False)
# In Berlin: local mean time, an hour that no clock showed, one that clocks showed twice, the last hours of 9999.
_IN_BERLIN = ("0001-01-02T00:00:00", "1893-03-31T12:00:00", "2026-03-29T02:30:00", "2026-10-25T02:30:00.000001")
BERLIN = Domain(
    (*map(datetime.fromisoformat, (*_IN_BERLIN, "9999-12-31T23:59:59.999999", "2024-02-29T00:00:00")),),
    build_moments(first=FIRST_MICROS + _DAY_MICROS, zoned=False).draw,
)
# Nanoseconds since 1970 in 64 bits; the least is one second later, since the microseconds are rounded down.
NANOS = Domain(
    (0, -1, 999, 1_767_225_600_123_456_789, 2**63 - 1, -(2**63) + 10**9),
    lambda chance: chance.randrange(-(2**63) + 10**9, 2**63),
)
BINARY = Domain(
    (b"", b"\0", b"\xff\xfe", bytes(range(256)), b"a"), lambda chance: chance.randbytes(chance.randrange(20))
)


def build_documents(*numbers: Any) -> Domain:
    """Any JSON but null, with these numbers."""
    deep: Any = "x"
    for at in range(100):
        deep = [deep] if at % 2 else {"d": deep}
    scalars = ("", "\0\U0001f600", f"{EXACT}7", True, *numbers)

    def draw(chance: random.Random, depth: int = 0) -> Any:
        kind = chance.randrange(4 if depth < 3 else 2)
        if kind == 2:
            return [draw(chance, depth + 1) for _ in range(chance.randrange(4))]
        if kind == 3:
            return {pick(NAMES, chance): draw(chance, depth + 1) for _ in range(chance.randrange(4))}
        return chance.choice((*scalars, None)) if depth else chance.choice(scalars)

    return Domain(({}, [], [None, False], {"": None, "a": list(numbers)}, deep, *scalars), draw)
