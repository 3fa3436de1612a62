"""Timestamps, dates and times of day of declared fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from highwater.assets.field_parts import FieldPart
from highwater.declaration_parts import UNITS

if TYPE_CHECKING:
    from datetime import date

    from pyspark.sql import Column

    from highwater.declaration import Field

# ISO 8601 date and time with a zone, as RFC 3339 narrows it; Spark reads no time without seconds, and would cut off
# what it cannot hold: two versions would be one. To Java's `$` a line break may follow the end.
_SECONDS = r"^\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}"
_LOCAL = _SECONDS + r"(\.\d{1,6}0*+)?"
_ISO = _LOCAL + r"([Zz]|[+-]\d{2}(?::?\d{2})?)\z"
FINER_THAN_MICROS = _SECONDS + r"\.\d{6}\d*[1-9]"
_DATE = r"^\d{4}-\d{2}-\d{2}\z"
_TIME = r"^((?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)(?:\.(\d{1,6})0*+)?\z"
WHOLE_NUMBER = r"^-?[0-9]{1,19}\z"
DAYS = (-719_162, 2_932_896)  # of the years 1 to 9999
_DAY_US = 86_400_000_000


def convert_timestamp(part: FieldPart) -> Column:
    """A timestamp; null where the text is none, or the number is outside the plausible range."""
    from pyspark.sql import functions as F

    declared, text = part.declared, part.text
    if declared.unit is not None:
        read = _convert_to_timestamp(part)
    else:
        read = F.when(text.rlike(_ISO), F.try_to_timestamp(F.upper(text)))
        if declared.zone is not None:
            local = F.to_utc_timestamp(F.try_to_timestamp(F.concat(F.upper(text), F.lit("Z"))), declared.zone)
            read = F.when(text.rlike(_LOCAL + r"\z"), local).otherwise(read)
    moment = F.when(part.kind == "TIMESTAMP", part.get_as("timestamp")).otherwise(read)
    # In UTC: a zone moves the first and the last hours into years that other readers' times do not have.
    return F.when(F.year(moment).between(1, 9999), moment)


def convert_local_timestamp(part: FieldPart) -> Column:
    """A timestamp without a zone."""
    from pyspark.sql import functions as F

    if part.declared.unit is not None:
        read = _convert_to_timestamp(part)
    else:
        text = part.text
        read = F.when(text.rlike(_LOCAL + r"\z"), F.try_to_timestamp(F.concat(F.upper(text), F.lit("Z"))))
    read = read.cast("timestamp_ntz")
    moment = F.when(part.kind == "TIMESTAMP_NTZ", part.get_as("timestamp_ntz")).otherwise(read)
    return F.when(F.year(moment).between(1, 9999), moment)


def _convert_to_timestamp(part: FieldPart) -> Column:
    from pyspark.sql import functions as F

    micros = convert_to_micros(part)
    return F.when(micros.between(*compute_plausible_micros(part.declared)), F.timestamp_micros(micros))


def compute_plausible_micros(declared: Field) -> tuple[int, int]:
    """The first and the last microsecond since 1970 of the plausible days of a number."""
    first, last = (_convert_day_to_micros(day) for day in declared.plausible)
    return first, last + _DAY_US - 1


def convert_to_micros(part: FieldPart) -> Column:
    """The microseconds since 1970 of a number; what nanoseconds have beyond them is cut off."""
    from pyspark.sql import functions as F

    unit = part.declared.unit
    assert unit is not None
    number = part.number
    exact = F.when(number.rlike(r"^-?[0-9]{1,19}(\.[0-9]{1,9})?\z"), number.try_cast("decimal(28,9)"))
    if unit == "ns":
        return F.floor(exact / F.lit(1000).cast("decimal(4,0)")).cast("bigint")
    micros = exact * F.lit(int(UNITS[unit])).cast("decimal(7,0)")
    return F.when(micros == F.floor(micros), micros.try_cast("bigint"))


def _convert_day_to_micros(day: date) -> int:
    return (day.toordinal() - 719_163) * _DAY_US


def convert_date(part: FieldPart) -> Column:
    """A date from ISO text, or from days since 1970; null where it is neither or out of range."""
    from pyspark.sql import functions as F

    if part.declared.unit is not None:
        days = F.when(part.number.rlike(WHOLE_NUMBER), part.number.try_cast("int"))
        read = F.when(days.between(*DAYS), F.date_from_unix_date(days))
    else:
        day = F.when(part.text.rlike(_DATE), part.text.try_cast("date"))
        read = F.when(F.year(day) >= 1, day)
    typed = part.get_as("date")
    return F.when((part.kind == "DATE") & F.year(typed).between(1, 9999), typed).otherwise(read)


def convert_time_of_day(part: FieldPart) -> Column:
    """A time of day as text, `HH:MM:SS`, with six digits more where it has microseconds."""
    from pyspark.sql import functions as F

    if part.declared.unit is not None:
        micros = convert_to_micros(part)
        clock = F.date_format(F.timestamp_micros(micros).cast("timestamp_ntz"), "HH:mm:ss")
        rest = F.lpad(F.pmod(micros, F.lit(1_000_000)).cast("string"), 6, "0")
        fits = micros.between(0, _DAY_US - 1)
    else:
        clock = F.regexp_extract(part.text, _TIME, 1)
        rest = F.rpad(F.regexp_extract(part.text, _TIME, 2), 6, "0")
        fits = part.text.rlike(_TIME)
    more = F.when(rest == "000000", F.lit("")).otherwise(F.concat(F.lit("."), rest))
    return F.when(fits, F.concat(clock, more))
