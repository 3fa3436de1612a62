"""Types of fields, guessed from sampled JSON documents or from texts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal

from highwater.declaration import Field
from highwater.declaration_parts import UNITS
from highwater.second_reader import InfiniteNumber

Path = tuple[str, ...]

# Objects below this depth become JSON text: a table with a column for each leaf of a deep tree has no readers.
MAX_DEPTH = 4
# An object with more rarely filled names than this is another object in each record, such as a payload by event type.
MAX_RARE_NAMES = 12
COMMON_SHARE = 0.5
# At most one implausible value in twenty is a fault of the data, and not of the guess.
PLAUSIBLE_SHARE = 0.95

_SECONDS = r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d{1,6}0*)?"
_LOCAL_TIME = re.compile(_SECONDS)
_ZONED_TIME = re.compile(_SECONDS + r"([Zz]|[+-]\d{2}(?::?\d{2})?)")
_BEGIN_OF_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")
_PLAIN_DECIMAL = re.compile(r"-?(?P<whole>0|[1-9][0-9]*)\.([0-9]+)\Z")
_COMMA_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]{3})*,[0-9]+\Z")
# A number of 38 digits has 16 bytes at the most, which are 24 characters.
_BASE64 = re.compile(r"(?=.{4,24}$)([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_TIME_WORDS = frozenset(
    {
        "ts",
        "time",
        "timestamp",
        "datetime",
        "date",
        "at",
        "created",
        "updated",
        "modified",
        "changed",
        "occurred",
        "happened",
        "expires",
        "expiry",
        "epoch",
        "when",
        "since",
        "until",
    }
)
_DURATION_WORDS = frozenset({"duration", "elapsed", "timeout", "latency", "uptime", "ttl", "interval", "age", "delay"})
_BIRTH_WORDS = frozenset({"birth", "birthday", "birthdate", "dob", "born"})
_DAY_WORDS = frozenset({"day", "date", "due"}) | _BIRTH_WORDS
_MONEY_WORDS = frozenset(
    {
        "amount",
        "total",
        "subtotal",
        "price",
        "cost",
        "sum",
        "fee",
        "fees",
        "tax",
        "vat",
        "balance",
        "discount",
        "payment",
    }
)

Unit = Literal["s", "ms", "us", "ns"]
_UNITS: tuple[Unit, ...] = ("s", "ms", "us", "ns")

_LARGEST_LONG = 2**63 - 1
_MAX_DIGITS = 38
# Digits before the point of a guessed decimal, so that larger amounts than those of the sample fit too.
_ROOM = 16
_MIN_SCALE = 2


@dataclass(frozen=True)
class FormatHints:
    """The facts that the format gives for all values.

    Args:
        textual: the format has texts alone, such as CSV.
        debezium: a row of a database: numbers of a time have no zone, and days are numbers.
    """

    textual: bool = False
    debezium: bool = False


@dataclass
class SampledValues:
    """The values of a sample at one place."""

    times: int = 0
    nulls: int = 0
    objects: int = 0
    arrays: int = 0
    scalars: list[Any] = field(default_factory=list)
    members: dict[str, SampledValues] = field(default_factory=dict)
    elements: SampledValues | None = None

    def add(self, value: Any) -> None:
        """Count one more value."""
        self.times += 1
        if value is None:
            self.nulls += 1
        elif isinstance(value, Mapping):
            self.objects += 1
            for name, inner in value.items():
                self.members.setdefault(name, SampledValues()).add(inner)
        elif isinstance(value, list):
            self.arrays += 1
            for inner in value:
                self.elements = self.elements or SampledValues()
                self.elements.add(inner)
        else:
            self.scalars.append(value)

    @property
    def is_polymorphic(self) -> bool:
        """Whether the objects of this place differ so much that they share no columns."""
        common = sum(inner.times >= COMMON_SHARE * self.objects for inner in self.members.values())
        rare = len(self.members) - common
        return rare > MAX_RARE_NAMES or rare > max(2 * common, 0)


def collect_statistics(documents: Iterable[Any]) -> SampledValues:
    """The statistics of some documents."""
    found = SampledValues()
    for one in documents:
        found.add(one)
    return found


@dataclass
class TypeGuesser:
    """Guesses the type of each place, and notes why.

    Args:
        hints: the format's hints.
        reasons: why a type was chosen, by the path of the place.
    """

    hints: FormatHints = FormatHints()
    reasons: dict[Path, str] = field(default_factory=dict)

    def guess_tree(self, seen: SampledValues, path: Path = ()) -> Field:
        """The field of a place; its name is the last name of the path, as it is written."""
        guessed, reason = self._guess(seen, path)
        if reason:
            self.reasons[path] = reason
        return replace(guessed, nullable=guessed.nullable or seen.nulls > 0)

    def _guess(self, seen: SampledValues, path: Path) -> tuple[Field, str]:
        name = path[-1] if path else ""
        if seen.times == seen.nulls:
            return Field(
                name, "string" if self.hints.textual else "json"
            ), "always null in the sample, so the type is not known"
        if bool(seen.objects) + bool(seen.arrays) + bool(seen.scalars) > 1:
            return Field(name, "json"), "objects, arrays or single values in turn"
        if seen.objects:
            return self._guess_object(seen, path)
        if seen.arrays:
            return self._guess_array(seen, path)
        return guess_scalar(name, seen.scalars, self.hints)

    def _guess_object(self, seen: SampledValues, path: Path) -> tuple[Field, str]:
        name = path[-1] if path else ""
        if path and seen.is_polymorphic:
            return Field(name, "json"), f"the shape differs: {len(seen.members)} names, most of them rarely filled"
        if len(path) >= MAX_DEPTH:
            return Field(name, "json"), "nested deep"
        if path and not seen.members:
            return Field(name, "json"), "always an empty object in the sample"
        members = []
        for inner, found in seen.members.items():
            member = self.guess_tree(found, (*path, inner))
            members.append(replace(member, optional=found.times < seen.objects))
        return Field(name, "struct", of=tuple(members)), ""

    def _guess_array(self, seen: SampledValues, path: Path) -> tuple[Field, str]:
        name = path[-1] if path else ""
        if seen.elements is None:
            return Field(name, "json"), "always an empty array in the sample"
        element = self.guess_tree(seen.elements, (*path, ""))
        if element.type == "json":
            return Field(name, "json"), "an array whose elements differ in shape"
        return Field(name, "array", of=replace(element, name="element")), ""


def guess_scalar(name: str, values: Sequence[Any], hints: FormatHints) -> tuple[Field, str]:
    """The field for single values, none of them null, and why."""
    texts = [value for value in values if isinstance(value, str)]
    flags = [value for value in values if isinstance(value, bool)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    infinite = [value for value in values if isinstance(value, InfiniteNumber)]
    if len(texts) == len(values):
        return _guess_from_texts(name, texts, hints)
    if len(flags) == len(values):
        return Field(name, "boolean"), ""
    if flags or not all(map(_NUMBER.fullmatch, texts)):
        return Field(name, "json"), "values of several types: " + _format_kinds(texts, flags, numbers)
    if not texts:
        return _guess_from_numbers(name, numbers, infinite, hints)
    numbers += [int(one) if _WHOLE.fullmatch(one) else float(one) for one in texts]
    found, _ = _guess_from_numbers(name, numbers, infinite, FormatHints(), plain=True)
    share = f"{len(texts):,} of {len(values):,} numbers are written as text"
    return (replace(found, text=True), share) if found.is_number else (found, share)


def _format_kinds(texts: Sequence[str], flags: Sequence[bool], numbers: Sequence[float]) -> str:
    named = {"text": texts, "boolean": flags, "number": numbers}
    return ", ".join(kind for kind, some in named.items() if some)


def _guess_from_texts(name: str, texts: Sequence[str], hints: FormatHints) -> tuple[Field, str]:
    if hints.textual:
        if {*texts} <= {"true", "false"}:
            return Field(name, "boolean"), ""
        if all(map(_NUMBER.fullmatch, texts)):
            return _guess_from_numbers(name, [int(t) if _WHOLE.fullmatch(t) else float(t) for t in texts], [], hints)
    if all(_is_time(one, _ZONED_TIME) for one in texts):
        return Field(name, "timestamp"), ""
    if all(_is_time(one, _LOCAL_TIME) for one in texts):
        return Field(name, "timestamp_ntz"), "times without a zone"
    if all(map(_is_date, texts)):
        return Field(name, "date"), ""
    if hints.debezium and _MONEY_WORDS & split_words(name) and all(map(_BASE64.fullmatch, texts)):
        reason = (
            "perhaps a decimal in base64, whose scale no record says: with the scale it is decimal(p,s), unscaled=True"
        )
        return Field(name, "string"), reason
    return _guess_amount(name, texts) or (Field(name, "string"), _explain_text(name, texts))


def _explain_text(name: str, texts: Sequence[str]) -> str:
    """What texts look like without being it; empty where they are plain texts."""
    forms = {
        _BEGIN_OF_TIME: "times of several forms, or with more than six digits of a second: an expression reads them",
        _COMMA_DECIMAL: "numbers with a decimal comma: an expression reads them",
        _PLAIN_DECIMAL: "numbers in text: a decimal(p,s) with text=True reads them as numbers",
    }
    if split_words(name) & _TIME_WORDS and all(map(_WHOLE.fullmatch, texts)):
        units = {find_plausible_unit(int(one)) for one in texts}
        return f"numbers of {units.pop()} in text: an expression reads times" if len(units - {None}) == 1 else ""
    return next((reason for form, reason in forms.items() if all(map(form.match, texts))), "")


def _is_time(text: str, form: re.Pattern[str]) -> bool:
    try:
        found = datetime.fromisoformat(text.upper()) if form.fullmatch(text) else None
        return found is not None and (found.tzinfo is None or bool(found.astimezone(UTC)))
    except (ValueError, OverflowError):
        return False


def _is_date(text: str) -> bool:
    try:
        return bool(_DATE.fullmatch(text)) and bool(date.fromisoformat(text))
    except ValueError:
        return False


def _guess_amount(name: str, texts: Sequence[str]) -> tuple[Field, str] | None:
    """A decimal for amounts that are written as text with digits after the point."""
    found = [_PLAIN_DECIMAL.fullmatch(one) for one in texts]
    if not texts or not all(found) or not _MONEY_WORDS & split_words(name):
        return None
    scale = max(_MIN_SCALE, *(len(one[2]) for one in found if one))
    room = max(_ROOM, *(len(one["whole"]) for one in found if one))
    if scale + room > _MAX_DIGITS:
        return None
    reason = f"texts of at most {scale} digits after the point"
    return Field(name, f"decimal({scale + room},{scale})", text=True), reason


def _guess_from_numbers(
    name: str, numbers: Sequence[float], infinite: Sequence[InfiniteNumber], hints: FormatHints, *, plain: bool = False
) -> tuple[Field, str]:
    fractions = [one for one in numbers if isinstance(one, float)]
    if infinite:
        total = len(infinite) + len(numbers)
        reason = f"NaN or infinities in {len(infinite):,} of {total:,} values, which become null"
        return Field(name, "double", nan="null"), reason
    if not plain and (timed := _guess_time(name, numbers, hints)):
        return timed
    if fractions:
        mixed = len(fractions) < len(numbers)
        return Field(name, "double"), "whole and fractional numbers" if mixed else ""
    largest = max(map(abs, numbers))
    if largest <= _LARGEST_LONG:
        return Field(name, "long"), "" if plain else _describe_units(name, numbers)
    if largest < 10**_MAX_DIGITS:
        return Field(name, f"decimal({_MAX_DIGITS},0)"), "numbers that do not fit 64 bits"
    return Field(name, "json"), f"numbers of more than {_MAX_DIGITS} digits"


def _guess_time(name: str, numbers: Sequence[float], hints: FormatHints) -> tuple[Field, str] | None:
    """A timestamp or a date, where the name says time and the numbers are plausible."""
    name_words = split_words(name)
    first = _FIRST_BIRTH if name_words & _BIRTH_WORDS else _PLAUSIBLE[0]
    if hints.debezium and name_words & _DAY_WORDS and all(_is_plausible_day(one, first) for one in numbers):
        return Field(name, "date", unit="days"), "plausible days since 1970"
    if name_words & _DURATION_WORDS or not name_words & _TIME_WORDS:
        return None
    units = [find_plausible_unit(one) for one in numbers]
    unit = max(_UNITS, key=units.count)
    if len(units) - units.count(None) < PLAUSIBLE_SHARE * len(units) or units.count(unit) * 2 <= len(units):
        return None
    others = len(units) - units.count(unit)
    reason = f"the name says time, and the numbers are plausible in {unit}"
    reason += f"; {others:,} of {len(units):,} are not, and will be rejected" if others else ""
    kind = "timestamp_ntz" if hints.debezium else "timestamp"
    return Field(name, kind, unit=unit), reason


def _describe_units(name: str, numbers: Sequence[float]) -> str:
    """Why numbers are no times although the name says so; empty where they would be none in any unit."""
    units = [find_plausible_unit(one) for one in numbers] if split_words(name) & _TIME_WORDS else []
    found = {unit: count for unit in _UNITS if (count := units.count(unit))}
    if len(found) < 2 or sum(found.values()) < COMMON_SHARE * len(units):
        return ""
    shares = ", ".join(f"{count:,} in {unit}" for unit, count in found.items())
    return f"times in several units ({shares}), and a field has one: an expression reads them"


_PLAUSIBLE = tuple(datetime(d.year, d.month, d.day, tzinfo=UTC).timestamp() for d in Field("", "timestamp").plausible)
_DAY_SECONDS = 86_400
_FIRST_BIRTH = datetime(1900, 1, 1, tzinfo=UTC).timestamp()


def find_plausible_unit(number: float) -> Unit | None:
    """The unit in which a number is a plausible time since 1970; the units' ranges do not overlap."""
    if not math.isfinite(number):
        return None
    for unit in _UNITS:
        micros = Decimal(str(number)) * UNITS[unit].numerator / UNITS[unit].denominator
        if _PLAUSIBLE[0] <= micros / 10**6 < _PLAUSIBLE[1] + _DAY_SECONDS:
            return unit if unit == "ns" or micros == int(micros) else None
    return None


def _is_plausible_day(number: float, first: float) -> bool:
    return isinstance(number, int) and first <= number * _DAY_SECONDS < _PLAUSIBLE[1]


def split_words(name: str) -> frozenset[str]:
    """The words of a name in lower case: `createdAt` and `created_at` have the same."""
    return frozenset(word.lower() for word in _WORD.findall(name))


def select_leaves(tree: Field, path: Path = (), *, optional: bool = False) -> list[tuple[Path, Field]]:
    """The columns of a struct: each member, where objects within objects are columns by their paths.

    Args:
        tree: a field of type `struct` whose members have names as they are written.
        path: where the struct is.
        optional: whether the struct may be absent or null, and so each of its members absent.
    """
    found: list[tuple[Path, Field]] = []
    for member in tree.members:
        at = (*path, member.name)
        absent = optional or member.optional
        if member.type == "struct" and member.members:
            found += select_leaves(member, at, optional=absent or member.nullable)
        else:
            found.append((at, replace(member, optional=absent)))
    return found
