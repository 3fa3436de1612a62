"""Log lines of runs and ticks as JSON, for those who ship them to a collector."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from highwater.log_fields import build_slice_fields
from highwater.orchestration.run_tags import PARTITION, RANGE_END, RANGE_START, STREAM_TAG
from highwater.settings import read_log_format

if TYPE_CHECKING:
    import dagster as dg

Line = MutableMapping[str, Any]


def install(environment: Mapping[str, str]) -> None:
    """Let this process write JSON lines if `HIGHWATER_LOG_FORMAT` asks for them; else nothing changes.

    Dagster makes the console logger of each run and each tick again, of the class that `logging.getLoggerClass` names,
    and no setting of its reaches them: not `--log-format`, and loggers of the definitions only in runs whose
    configuration names them.

    Raises:
        ConfigurationError: the variable has another value than those it may have.
    """
    if read_log_format(environment) != "json":
        return
    logging.setLoggerClass(JsonLogger)
    there = [logging.root, *(known for known in logging.root.manager.loggerDict.values())]
    for handler in [handler for known in there if isinstance(known, logging.Logger) for handler in known.handlers]:
        _use_json(handler)


class JsonLogger(logging.Logger):
    """A logger that writes JSON to the console, with any of its handlers."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - overrides
        """Take the handler, with the other formatter if it writes to the console."""
        _use_json(hdlr)
        super().addHandler(hdlr)


def _use_json(handler: logging.Handler) -> None:
    if getattr(handler, "stream", None) in {sys.stdout, sys.stderr}:
        handler.setFormatter(build_formatter())


def build_formatter() -> logging.Formatter:
    """Makes a record into one line of JSON."""
    from structlog import contextvars, processors, stdlib

    return stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
            stdlib.add_log_level,
            stdlib.add_logger_name,
            _add_dagster_fields,
            contextvars.merge_contextvars,
        ],
        processors=[
            stdlib.ProcessorFormatter.remove_processors_meta,
            processors.EventRenamer("message"),
            processors.format_exc_info,
            processors.JSONRenderer(default=str),
        ],
    )


def _add_dagster_fields(_logger: object, _method: str, line: Line) -> Line:
    """The fields that Dagster hangs on a record, in place of the prefix that it writes before the text."""
    meta: Mapping[str, Any] = getattr(line["_record"], "dagster_meta", None) or {}
    tags: Mapping[str, str] = meta.get("job_tags") or {}
    keys = [tags[name] for name in (PARTITION, RANGE_START, RANGE_END) if name in tags]
    found = {
        "run": meta.get("run_id"),
        "job": meta.get("job_name"),
        "step": meta.get("step_key"),
        "tick": meta.get("name"),
        "stream": tags.get(STREAM_TAG),
        **build_slice_fields(list(dict.fromkeys(keys))),
    }
    line.update({name: value for name, value in found.items() if value is not None})
    line["event"] = meta.get("orig_message", line["event"])
    if meta.get("dagster_event") is not None:
        line.update(_select_event_fields(meta["dagster_event"]))
    return line


def _select_event_fields(event: dg.DagsterEvent) -> Iterator[tuple[str, Any]]:
    """The facts of an event of Dagster's beyond its text: its kind, its error, and of a slice its numbers."""
    import dagster as dg

    yield "dagster_event", event.event_type_value
    data = event.event_specific_data
    error = getattr(data, "error", None)
    if error is not None:
        yield "error", error.to_string()
    subject = getattr(data, "materialization", data)
    if isinstance(subject, dg.AssetMaterialization | dg.AssetCheckEvaluation):
        yield "asset", subject.asset_key.to_user_string()
        if subject.partition is not None:
            yield "slice", subject.partition
        yield from _select_numbers(subject.metadata).items()
    if isinstance(subject, dg.AssetCheckEvaluation):
        yield from {"check": subject.check_name, "passed": subject.passed, "found": subject.description}.items()


def _select_numbers(metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The numbers of a slice, those of its phases apart."""
    numbers = {name: value.value for name, value in metadata.items() if isinstance(value.value, int | float)}
    seconds = {name.removeprefix("seconds/"): took for name, took in numbers.items() if name.startswith("seconds/")}
    counts = {name: count for name, count in numbers.items() if not name.startswith("seconds/")}
    return {"numbers": counts, **({"seconds": seconds} if seconds else {})}
