"""The jobs with which an operator decides: the commands of the same names, as runs in the UI.

What belongs here: their configuration, and handing it on. What does not: what comes of a decision
(`orchestration.operating.acceptance`, `orchestration.operating.parked`, `orchestration.operating.reclaiming`,
`orchestration.operating.accepting_rejects`, `orchestration.operating.releasing_holds`,
`orchestration.operating.rebuilding`, `orchestration.operating.rebuilding_current`,
`orchestration.operating.rebuilding_all`, `orchestration.operating.retiring`, `orchestration.operating.erasing`).
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg

from highwater.errors import ConfigurationError
from highwater.log_fields import fields
from orchestration.failures import told_to_dagster
from orchestration.stream_assets import STREAM_TAG, work_of

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from orchestration.operating.parked import Choice

_RECORD = dg.Field(bool, default_value=False, description="Do it; without it only what would be done is shown.")
_BY = dg.Field(str, default_value="", description="Who decides it; goes into the record.")
_DECISION: dict[str, Any] = {
    "record": _RECORD,
    "by": _BY,
    "because": dg.Field(str, default_value="", description="Why; goes into the record."),
}

_ASKED: dict[str, Any] = {
    "record": _RECORD,
    "by": _BY,
    "topic": dg.Field(str, default_value="", description="The tier that is meant; the main topic if empty."),
    "partitions": dg.Field([int], default_value=[], description="Only these partitions; all if empty."),
}


def acceptance_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_accept_loss` and `<stream>_accept_divergence`: the commands of the same names, in the UI."""
    return [
        _operators_job(stream, "accept_loss", _ASKED, partial(_accept, divergence=False)),
        _operators_job(stream, "accept_divergence", _ASKED, partial(_accept, divergence=True)),
    ]


_MEANT: dict[str, Any] = {
    "record": _RECORD,
    "by": _BY,
    "reasons": dg.Field([str], default_value=[], description="Only what was rejected for these reasons; all if empty."),
    "slices": dg.Field([str], default_value=[], description="Only what these slices rejected; all if empty."),
    "keys": dg.Field([str], default_value=[], description="Only records with these keys; all if empty."),
    "since": dg.Field(str, default_value="", description="Published at this moment or later: ISO 8601, UTC."),
    "until": dg.Field(str, default_value="", description="Published before this moment: ISO 8601, UTC."),
    "most": dg.Field(int, default_value=0, description="The oldest so many of those that are meant; all if 0."),
}
_BECAUSE = {"because": _DECISION["because"]}
_ON: dict[str, Any] = {
    "topics": dg.Field([str], default_value=[], description="Only what was published to these last; all if empty."),
}


def parked_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_redrive_parked`, `…_discard_parked` and `…_reclaim`: the commands of the same names, in the UI."""
    return [
        _operators_job(stream, "redrive_parked", _MEANT, _settle_parked),
        _operators_job(stream, "discard_parked", {**_MEANT, **_BECAUSE}, _settle_parked),
        _operators_job(stream, "reclaim", {**_MEANT, **_BECAUSE, **_ON}, _reclaim),
    ]


_LET_THROUGH: dict[str, Any] = {
    **_DECISION,
    "slices": dg.Field([str], default_value=[], description="The slices whose rejects are accepted."),
    "reasons": dg.Field([str], default_value=[], description="Or the reasons, for all slices from one on."),
    "from_slice": dg.Field(str, default_value="", description="With reasons: the first slice."),
    "revoke": dg.Field(bool, default_value=False, description="With reasons: let them open the breaker again."),
}


def breaker_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_accept_rejects`: the command of the same name, in the UI."""
    return [_operators_job(stream, "accept_rejects", _LET_THROUGH, _accept_rejects)]


def _accept_rejects(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating.accepting_rejects import Asked, AskedReasons, accept_reasons, act

    asked = context.op_config
    if asked["reasons"]:
        names = ("reasons", "from_slice", "revoke", "record", "by", "because")
        ask = AskedReasons(*(asked[name] for name in names))
        accept_reasons(context.resources.ledger.open(), stream, ask, datetime.now(UTC), context.log.info)
        return
    act(
        context.resources.ledger.open(),
        [stream.name],
        Asked(asked["slices"], asked["record"], asked["by"], asked["because"]),
        datetime.now(UTC),
        context.log.info,
    )


_RELEASE: dict[str, Any] = {
    **_DECISION,
    "slice": dg.Field(str, description="The slice that is held."),
    "park": dg.Field(bool, default_value=False, description="Park the records that hold it, instead of retrying them."),
}


def hold_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_release_hold`: the command of the same name, in the UI."""
    return [_operators_job(stream, "release_hold", _RELEASE, _release_hold)]


def _release_hold(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating.releasing_holds import Asked, act

    asked = context.op_config
    act(
        context.resources.ledger.open(),
        {stream.name: stream},
        Asked(asked["slice"], asked["park"], asked["record"], asked["by"], asked["because"]),
        datetime.now(UTC),
        context.log.info,
    )


_RETRY: dict[str, Any] = {**_DECISION, "slice": dg.Field(str, description="The slice that was given up.")}


def retry_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_retry_slice`: the command of the same name, in the UI."""
    return [_operators_job(stream, "retry_slice", _RETRY, _retry_slice)]


def _retry_slice(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating.retrying_slices import Asked, act

    asked = context.op_config
    act(
        context.resources.ledger.open(),
        {stream.name: stream},
        Asked(asked["slice"], asked["record"], asked["by"], asked["because"]),
        datetime.now(UTC),
        context.log.info,
    )


_TOPIC = dg.Field(str, description="The tier, or another system's topic.")
_PAUSE: dict[str, Any] = {**_DECISION, "topic": _TOPIC}
_RESUME: dict[str, Any] = {
    "record": _RECORD,
    "by": dg.Field(str, default_value="", description="Who decides it; stands in the run's log."),
    "topic": _TOPIC,
}


def pause_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_pause_tier` and `<stream>_resume_tier`: the commands of the same names, in the UI."""
    return [
        _operators_job(stream, "pause_tier", _PAUSE, partial(_pause, resume=False)),
        _operators_job(stream, "resume_tier", _RESUME, partial(_pause, resume=True)),
    ]


def _pause(context: dg.OpExecutionContext, stream: "Stream", *, resume: bool) -> None:
    from orchestration.operating.pausing import Asked, act

    asked = context.op_config
    wanted = Asked(asked["topic"], resume, asked["record"], asked["by"], asked.get("because", ""))
    act(context.resources.ledger.open(), stream, wanted, datetime.now(UTC), context.log.info)


_KEYS: dict[str, Any] = {
    "record": _RECORD,
    "first": dg.Field(str, description="The first slice."),
    "last": dg.Field(str, description="The last one, of the same topic."),
}


def key_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_recall_keys`: the command of the same name, in the UI."""
    return [_operators_job(stream, "recall_keys", _KEYS, _recall_keys)]


def _recall_keys(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating.retiring import recall

    asked, ledger = context.op_config, context.resources.ledger.open()
    meant = (asked["first"], asked["last"])
    recall(context.instance, ledger, stream, *meant, datetime.now(UTC), context.log.info, sure=asked["record"])


_ERASE: dict[str, Any] = {
    **_DECISION,
    "digest": dg.Field(str, description="SHA-256 of the key's bytes, in hexadecimal: printf %s KEY | sha256sum."),
}


def erasure_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_erase`: the command of the same name, in the UI; it takes a digest, since a run keeps its config."""
    return [_operators_job(stream, "erase", _ERASE, _erase, spark=True)]


def _erase(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating.erasing import Asked, act

    asked = context.op_config
    wanted = Asked(asked["digest"], asked["record"], asked["by"], asked["because"])
    _log_table(context, act(work_of(context, stream), context.instance, wanted, datetime.now(UTC)).table)


_REBUILD: dict[str, Any] = {"record": _RECORD}
_REBUILD_ALL: dict[str, Any] = {
    "record": _RECORD,
    "by": _BY,
    "accepted_again": dg.Field(
        bool, default_value=False, description="Let the topic of accepted events get all of them once more."
    ),
}


def rebuild_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_rebuild_ledger`, `<stream>_rebuild_current` and `<stream>_rebuild_all`: the commands of these names.

    A stream without `current` has no job for it. A rebuild of `current` takes its turn with the slices that are written
    there, so neither is tried twice.
    """
    found = [
        _operators_job(stream, "rebuild_ledger", _REBUILD, _rebuild_ledger),
        _operators_job(stream, "rebuild_all", _REBUILD_ALL, _rebuild_all),
    ]
    if stream.versioned:
        pool = f"{stream.name}_current"
        found.append(_operators_job(stream, "rebuild_current", _REBUILD, _rebuild_current, spark=True, pool=pool))
    return found


def _rebuild_current(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating import rebuilding_current

    found = rebuilding_current.act(work_of(context, stream), sure=context.op_config["record"])
    _log_table(context, rebuilding_current.table(found))


def _rebuild_ledger(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating import rebuilding

    rebuilding.act(
        context.resources.ledger.open(),
        context.resources.lake.open(),
        context.resources.kafka.open(),
        stream,
        context.instance.get_dynamic_partitions(stream.partitions_name),
        context.log.info,
        sure=context.op_config["record"],
    )


def _rebuild_all(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating import rebuilding_all

    rebuilding_all.act(
        context.resources.ledger.open(),
        context.resources.lake.open(),
        context.resources.kafka.open(),
        stream,
        context.instance.get_dynamic_partitions(stream.partitions_name),
        context.log.info,
        sure=context.op_config["record"],
        by=context.op_config["by"],
        again=context.op_config["accepted_again"],
    )


def _operators_job(
    stream: "Stream",
    name: str,
    asked: dict[str, Any],
    act: Callable[[dg.OpExecutionContext, "Stream"], None],
    *,
    spark: bool = False,
    pool: str | None = None,
) -> dg.JobDefinition:
    """A job of one op that does what the command of its name does; with Spark, and in turn with others, where asked."""
    about = f"`highwater {name.replace('_', '-')} {stream.name}` as a run; a dry run unless `record` is set."

    @dg.op(
        name=f"{stream.name}_{name}_op",
        description=about,
        config_schema=asked,
        required_resource_keys={"kafka", "ledger", "lake", *(["spark"] if spark else [])},
        out=dg.Out(dg.Nothing),
        pool=pool,
    )
    def decide(context: dg.OpExecutionContext) -> None:
        with told_to_dagster(context.retry_number, context.resources.spark.interrupt if spark else lambda: None):
            act(context, stream)

    @dg.job(
        name=f"{stream.name}_{name}",
        description=about,
        executor_def=dg.in_process_executor,
        tags={STREAM_TAG: stream.name},
    )
    def job() -> None:
        decide()

    return job


def _reclaim(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating import reclaiming

    asked = context.op_config
    found = reclaiming.act(
        context.resources.ledger.open(),
        context.resources.lake.open(),
        stream,
        reclaiming.Asked(
            _choice(asked), asked["most"] or None, asked["record"], asked["by"], asked["because"], asked["topics"]
        ),
        context.log.info,
    )
    _log_table(context, found.table)


def _choice(asked: dict[str, Any]) -> "Choice":
    from orchestration.operating.parked import Choice

    return Choice(asked["reasons"], asked["slices"], asked["keys"], _moment(asked["since"]), _moment(asked["until"]))


def _settle_parked(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating import parked

    asked = context.op_config
    found = parked.act(
        context.resources.ledger.open(),
        context.resources.kafka.open(),
        context.resources.lake.open(),
        stream,
        parked.Asked(_choice(asked), asked["most"] or None, asked["record"], asked["by"], asked.get("because")),
        context.log.info,
    )
    _log_table(context, found.table)


def _log_table(context: dg.OpExecutionContext, table: tuple[list[str], list[list[str]]]) -> None:
    names, rows = table
    for row in rows:
        record = dict(zip(names, row, strict=True))
        with fields(**{name: record[name] for name in ("origin", "slice") if name in record}):
            context.log.info(", ".join(f"{name} {value}" for name, value in record.items()))


def _moment(text: str) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            "a moment cannot be read", found=text, remedy="write it as 2026-03-01 or 2026-03-01T10:00:00"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _accept(context: dg.OpExecutionContext, stream: "Stream", *, divergence: bool) -> None:
    from orchestration.operating.accepting_losses import Asked, act

    asked = context.op_config
    if asked["record"] and not asked["by"]:
        raise ConfigurationError(
            "nobody is named who accepts it", remedy="set `by` in the run's configuration to a person's name"
        )
    found, lines = act(
        context.resources.ledger.open(),
        context.resources.kafka.open(),
        context.resources.lake.open(),
        stream,
        Asked(asked["topic"] or None, set(asked["partitions"]) or None, divergence, asked["record"], asked["by"]),
        datetime.now(UTC),
    )
    for line in lines or ["there is nothing to accept"]:
        context.log.info(line)
    recorded = asked["record"] and not found.nothing
    context.log.info("recorded" if recorded else "nothing was recorded")
