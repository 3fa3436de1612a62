"""The jobs with which an operator decides, once for all streams: commands of the same names as runs in the UI."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import dagster as dg
from pydantic import Field

from highwater.assets.work import do_nothing
from highwater.errors import ConfigurationError
from highwater.log_fields import bind_log_fields
from highwater.operator_actions import OperatorAction, build_recorded_arguments
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.failures import translate_errors
from highwater.orchestration.jobs import build_one_op_job
from highwater.orchestration.operations.recorded_action import recorded_action
from highwater.orchestration.resources import read_settings
from highwater.orchestration.run_tags import AUDIT_PRIORITY, PRIORITY, STREAM_TAG
from highwater.orchestration.stream_assets import build_work
from highwater.stream_files import find_declared_stream

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.operations.parked import ParkedSelection
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

# Dagster's tag for the person who launched a run; a proxy or a wrapper of the launch may set it.
USER_TAG = "user"


class StreamConfig(dg.Config):
    """Configuration of a job that works on one stream."""

    stream: str = Field(description="Name of the stream.")


class AuditConfig(StreamConfig):
    """Configuration of `audit`."""

    slices: int = Field(default=10, description="Number of the newest slices to read from Kafka again; 0 for none.")


class OperatorConfig(StreamConfig):
    """Configuration of a job that changes nothing unless `dry_run` is false, and records who decided, and why."""

    dry_run: bool = Field(default=True, description="Only show what the run would do, which is the default.")
    by: str = Field(default="", description="Name of the person who decides, or the run's tag `user`; recorded.")
    because: str = Field(default="", description="Reason; recorded.")


class AcceptConfig(OperatorConfig):
    """Configuration of `accept_loss` and `accept_divergence`."""

    topic: str = Field(default="", description="Tier, or foreign DLQ topic; the main topic if empty.")
    partitions: list[int] = Field(default=[], description="Only these partitions; all if empty.")


class ParkedRecordsConfig(OperatorConfig):
    """Configuration of `redrive_parked`, `discard_parked` and `reclaim`: which records they select."""

    reasons: list[str] = Field(default=[], description="Only records rejected for these reasons; all if empty.")
    rules: list[str] = Field(default=[], description="Only invalid records that these rules refused; all if empty.")
    slices: list[str] = Field(default=[], description="Only records that these slices rejected; all if empty.")
    keys: list[str] = Field(default=[], description="Only records with these keys; all if empty.")
    since: str = Field(default="", description="Parked at this time or later: ISO 8601, UTC.")
    until: str = Field(default="", description="Parked before this time: ISO 8601, UTC.")
    most: int = Field(default=0, description="At most this number of matching records, oldest first; all if 0.")

    @property
    def choice(self) -> "ParkedSelection":
        """The selected records.

        Raises:
            ConfigurationError: a time cannot be read, or rules are selected with a reason that has none.
        """
        from highwater.orchestration.operations.parked import ParkedSelection

        times = _parse_time(self.since), _parse_time(self.until)
        return ParkedSelection(self.reasons, self.rules, self.slices, self.keys, *times)


class ReclaimConfig(ParkedRecordsConfig):
    """Configuration of `reclaim`."""

    topics: list[str] = Field(default=[], description="Only records last published to these topics; all if empty.")
    since: str = Field(default="", description="Last published to the DLQ at this time or later: ISO 8601, UTC.")
    until: str = Field(default="", description="Last published to the DLQ before this time: ISO 8601, UTC.")


class AcceptRejectsConfig(OperatorConfig):
    """Configuration of `accept_rejects`."""

    slices: list[str] = Field(default=[], description="The slices whose rejects are accepted.")
    reasons: list[str] = Field(default=[], description="Or the reasons, for all slices of the stream from one on.")
    from_slice: str = Field(default="", description="With reasons: the first slice.")
    revoke: bool = Field(default=False, description="With reasons: let such rejects open the breaker again.")


class RetrySliceConfig(OperatorConfig):
    """Configuration of `retry_slice`."""

    slice: str = Field(description="Key of the slice.")


class ReleaseHoldConfig(RetrySliceConfig):
    """Configuration of `release_hold`."""

    park: bool = Field(default=False, description="Park the records that hold the slice, instead of retrying them.")


class PauseTierConfig(OperatorConfig):
    """Configuration of `pause_tier` and `resume_tier`."""

    topic: str = Field(description="Topic of the tier, or another system's topic.")


class PausePartConfig(OperatorConfig):
    """Configuration of `pause` and `resume`."""

    part: str = Field(default="", description="planner, retries or publisher; the whole stream if empty.")


class RecallKeysConfig(OperatorConfig):
    """Configuration of `recall_keys`."""

    first: str = Field(description="Key of the first slice.")
    last: str = Field(description="Key of the last slice, of the same topic.")


class EraseConfig(OperatorConfig):
    """Configuration of `erase`; it takes a digest, since Dagster stores the configuration of a run."""

    digest: str = Field(description="SHA-256 of the key's bytes, in hexadecimal: printf %s KEY | sha256sum.")


class RebuildAllConfig(OperatorConfig):
    """Configuration of `rebuild_all`."""

    accepted_again: bool = Field(default=False, description="Publish all accepted events again.")


@dataclass(frozen=True)
class JobRun:
    """A run of an operator job: the stream and the connections.

    Args:
        context: the context of the op.
        stream: the stream that the configuration names.
    """

    context: dg.OpExecutionContext
    stream: "Stream"

    @property
    def ledger(self) -> "Ledger":
        """The ledger."""
        return cast("Ledger", self.context.resources.ledger.open())

    @property
    def kafka(self) -> "Kafka":
        """The brokers."""
        return cast("Kafka", self.context.resources.kafka.open())

    @property
    def lake(self) -> "Lake":
        """The lake."""
        return cast("Lake", self.context.resources.lake.open())

    @property
    def slice_keys(self) -> list[str]:
        """The slice keys that Dagster has of the stream."""
        return [*self.context.instance.get_dynamic_partitions(self.stream.partitions_name)]

    def log(self, line: str) -> None:
        """Write a line to the log of the run."""
        self.context.log.info(line)

    def log_table(self, table: tuple[list[str], list[list[str]]]) -> None:
        """Write each row of a table to the log of the run."""
        names, rows = table
        for row in rows:
            record = dict(zip(names, row, strict=True))
            with bind_log_fields(**{name: record[name] for name in ("origin", "slice") if name in record}):
                self.log(", ".join(f"{name} {value}" for name, value in record.items()))


def accept_loss(run: JobRun, config: AcceptConfig) -> None:
    """Accept that offsets of the topic are lost."""
    _accept(run, config, divergence=False)


def accept_divergence(run: JobRun, config: AcceptConfig) -> None:
    """Accept that the topic holds other records under planned offsets than before."""
    _accept(run, config, divergence=True)


def _accept(run: JobRun, config: AcceptConfig, *, divergence: bool) -> None:
    from highwater.orchestration.operations.accepting_losses import AcceptLossRequest, accept_topic_losses

    request = AcceptLossRequest(
        config.topic or None, set(config.partitions) or None, divergence, config.dry_run, config.by
    )
    found, lines = accept_topic_losses(run.ledger, run.kafka, run.lake, run.stream, request, datetime.now(UTC))
    for line in lines or ["there is nothing to accept"]:
        run.log(line)
    run.log("recorded" if not (config.dry_run or found.nothing) else "nothing was recorded")


def redrive_parked(run: JobRun, config: ParkedRecordsConfig) -> None:
    """Send parked records back to the first tier."""
    _redrive_or_discard(run, config, None)


def discard_parked(run: JobRun, config: ParkedRecordsConfig) -> None:
    """Discard parked records."""
    _redrive_or_discard(run, config, config.because)


def _redrive_or_discard(run: JobRun, config: ParkedRecordsConfig, because: str | None) -> None:
    from highwater.orchestration.operations.parked import ParkedRequest, redrive_or_discard

    request = ParkedRequest(config.choice, config.most or None, config.dry_run, config.by, because)
    run.log_table(redrive_or_discard(run.ledger, run.kafka, run.lake, run.stream, request, run.log).table)


def reclaim(run: JobRun, config: ReclaimConfig) -> None:
    """Take published records back from the DLQ, for a backfill of their slices."""
    from highwater.orchestration.operations.reclaiming import ReclaimRequest, reclaim_records

    request = ReclaimRequest(
        config.choice, config.most or None, config.dry_run, config.by, config.because, config.topics
    )
    run.log_table(reclaim_records(run.ledger, run.lake, run.stream, request, run.log).table)


def accept_rejects(run: JobRun, config: AcceptRejectsConfig) -> None:
    """Let slices, or all rejects for some reasons, pass the circuit breaker."""
    from highwater.orchestration.operations.accepting_rejects import (
        AcceptReasonsRequest,
        AcceptSlicesRequest,
        accept_reasons,
        accept_slices,
    )

    decision, now = (config.dry_run, config.by, config.because), datetime.now(UTC)
    if config.reasons:
        request = AcceptReasonsRequest(config.reasons, config.from_slice, config.revoke, *decision)
        accept_reasons(run.ledger, run.stream, request, now, run.log)
    else:
        accept_slices(run.ledger, [run.stream.name], AcceptSlicesRequest(config.slices, *decision), now, run.log)


def release_hold(run: JobRun, config: ReleaseHoldConfig) -> None:
    """Let a slice go on although records hold it."""
    from highwater.orchestration.operations.releasing_holds import ReleaseRequest, release_slice

    request = ReleaseRequest(config.slice, config.park, config.dry_run, config.by, config.because)
    release_slice(run.ledger, {run.stream.name: run.stream}, request, datetime.now(UTC), run.log)


def retry_slice(run: JobRun, config: RetrySliceConfig) -> None:
    """Let a slice be requested again that failed all its attempts."""
    from highwater.orchestration.operations.retrying_slices import RetryRequest, release_for_retries

    request = RetryRequest(config.slice, config.dry_run, config.by, config.because)
    release_for_retries(run.ledger, {run.stream.name: run.stream}, request, datetime.now(UTC), run.log)


def pause_tier(run: JobRun, config: PauseTierConfig) -> None:
    """Plan nothing more of a tier until it is resumed."""
    _pause_or_resume_tier(run, config, resume=False)


def resume_tier(run: JobRun, config: PauseTierConfig) -> None:
    """Plan the due records of a paused tier again."""
    _pause_or_resume_tier(run, config, resume=True)


def _pause_or_resume_tier(run: JobRun, config: PauseTierConfig, *, resume: bool) -> None:
    from highwater.orchestration.operations.pausing import TierPauseRequest, pause_or_resume_tier

    request = TierPauseRequest(config.topic, resume, config.dry_run, config.by, "" if resume else config.because)
    pause_or_resume_tier(run.ledger, run.stream, request, datetime.now(UTC), run.log)


def pause(run: JobRun, config: PausePartConfig) -> None:
    """Plan and request nothing more of a stream, or of a part of it, until it is resumed."""
    _pause_or_resume(run, config, resume=False)


def resume(run: JobRun, config: PausePartConfig) -> None:
    """Plan and request a paused stream, or a part of it, again."""
    _pause_or_resume(run, config, resume=True)


def _pause_or_resume(run: JobRun, config: PausePartConfig, *, resume: bool) -> None:
    from highwater.orchestration.operations.pausing import PauseRequest, pause_or_resume

    request = PauseRequest(config.part, resume, config.dry_run, config.by, "" if resume else config.because)
    pause_or_resume(run.ledger, run.stream, request, datetime.now(UTC), run.log)


def recall_keys(run: JobRun, config: RecallKeysConfig) -> None:
    """Bring retired slice keys back to Dagster, for a backfill."""
    from highwater.orchestration.operations.key_retirement import recall

    instance, now = run.context.instance, datetime.now(UTC)
    recall(instance, run.ledger, run.stream, config.first, config.last, now, run.log, dry_run=config.dry_run)


def erase(run: JobRun, config: EraseConfig) -> None:
    """Remove all records of one key from all tables."""
    from highwater.orchestration.operations.erasing import ErasureRequest, erase_key

    request = ErasureRequest(config.digest, config.dry_run, config.by, config.because)
    run.log_table(
        erase_key(build_work(run.context, run.stream), run.context.instance, request, datetime.now(UTC)).table
    )


def rebuild_ledger(run: JobRun, config: OperatorConfig) -> None:
    """Rebuild the plans of a lost ledger from the lake."""
    from highwater.orchestration.operations.rebuilding import rebuild_from_lake

    rebuild_from_lake(run.ledger, run.lake, run.kafka, run.stream, run.slice_keys, run.log, dry_run=config.dry_run)


def rebuild_current(run: JobRun, config: OperatorConfig) -> None:
    """Recompute the table `current` from the events."""
    from highwater.orchestration.operations.rebuilding_current import build_difference_table, rebuild_from_events

    run.log_table(
        build_difference_table(rebuild_from_events(build_work(run.context, run.stream), dry_run=config.dry_run))
    )


def rebuild_all(run: JobRun, config: RebuildAllConfig) -> None:
    """Rebuild a stream from Kafka whose ledger and lake are both lost."""
    from highwater.orchestration.operations.rebuilding_all import rebuild_from_kafka

    connections = run.ledger, run.lake, run.kafka
    options: dict[str, Any] = {"dry_run": config.dry_run, "by": config.by, "resend": config.accepted_again}
    rebuild_from_kafka(*connections, run.stream, run.slice_keys, run.log, **options)


def audit(run: JobRun, config: AuditConfig) -> None:
    """Audit the stream; the page is an observation of its events, and the run fails if the page has errors."""
    from highwater.orchestration.checking.check_results import count_failing_slices
    from highwater.orchestration.reporting.audit import audit as audit_stream
    from highwater.orchestration.reporting.audit import find_audit_error

    failing = count_failing_slices(run.context.instance, run.stream)
    number = max(0, config.slices)
    page = audit_stream(
        run.ledger, run.kafka, run.lake, run.stream, failing, records_of=number, versions=True, keys=True
    )
    ends = page.ends
    metadata: dict[str, int | dg.MarkdownMetadataValue] = {
        "audit": dg.MetadataValue.md(page.markdown),
        "errors": len(page.errors),
        "incomplete slices": len(page.unfinished),
        "accepted": ends.accepted,
        "waiting": sum(ends.waiting.values()),
        "parked": ends.parked,
        "discarded": ends.discarded,
    }
    run.context.log_event(dg.AssetObservation(build_table_key(run.stream, "events"), metadata=metadata))
    for line in page.head:
        run.log(line)
    remedy = f"the page on {run.stream.name}/events names each, with its remedy; docs/audit.md explains them"
    if (error := find_audit_error([page], remedy)) is not None:
        raise error


OPERATIONS: Mapping[Callable[[JobRun, Any], None], type[StreamConfig]] = {
    accept_loss: AcceptConfig,
    accept_divergence: AcceptConfig,
    redrive_parked: ParkedRecordsConfig,
    discard_parked: ParkedRecordsConfig,
    reclaim: ReclaimConfig,
    accept_rejects: AcceptRejectsConfig,
    release_hold: ReleaseHoldConfig,
    retry_slice: RetrySliceConfig,
    pause_tier: PauseTierConfig,
    resume_tier: PauseTierConfig,
    pause: PausePartConfig,
    resume: PausePartConfig,
    recall_keys: RecallKeysConfig,
    erase: EraseConfig,
    rebuild_ledger: OperatorConfig,
    rebuild_current: OperatorConfig,
    rebuild_all: RebuildAllConfig,
    audit: AuditConfig,
}
WITH_SPARK = frozenset({erase, rebuild_current})


def build_operator_jobs(streams: "Mapping[str, Stream]") -> list[dg.JobDefinition]:
    """One job for each operation; the run's configuration names the stream.

    Args:
        streams: the declared streams, by name.
    """
    return [_build_operator_job(streams, operation, config_class) for operation, config_class in OPERATIONS.items()]


def _build_operator_job(
    streams: "Mapping[str, Stream]", operation: Callable[[JobRun, Any], None], config_class: type[StreamConfig]
) -> dg.JobDefinition:
    name, spark = operation.__name__, operation in WITH_SPARK
    about = f"{operation.__doc__} Same as `highwater {name.replace('_', '-')}`"
    about += "; a dry run unless `dry_run` is false." if issubclass(config_class, OperatorConfig) else "."

    def operate(context: dg.OpExecutionContext, config: Any) -> None:
        interrupt = context.resources.spark.interrupt if spark else do_nothing
        with bind_log_fields(stream=config.stream), translate_errors(context.retry_number, interrupt):
            stream = find_declared_stream(streams, config.stream)
            context.instance.add_run_tags(context.run_id, {STREAM_TAG: stream.name})
            run = JobRun(context, stream)
            if isinstance(config, OperatorConfig) and not config.dry_run:
                config = config.model_copy(
                    update={"by": _resolve_operator(config.by, context.run.tags.get(USER_TAG, ""))}
                )
                with recorded_action(
                    run.ledger, read_settings().operators, _build_action(name, config, context.run_id)
                ):
                    operation(run, config)
            else:
                operation(run, config)

    return build_one_op_job(name, about, config_class, operate, spark=spark)


def _resolve_operator(by: str, user: str) -> str:
    """The person who decides: the name in the configuration, or the run's tag.

    Raises:
        ConfigurationError: the two differ.
    """
    if by and user and by != user:
        raise ConfigurationError(
            "the run names two persons",
            stored=f"the tag {USER_TAG} is {user!r}",
            found=f"`by` is {by!r}",
            remedy="leave `by` out of the run's configuration where the tag names the person",
        )
    return by or user


def _build_action(action: str, config: OperatorConfig, run_id: str) -> OperatorAction:
    values = config.model_dump(exclude={"stream", "dry_run", "by", "because"})
    through, now = f"run {run_id}", datetime.now(UTC)
    return OperatorAction(
        action, config.stream, build_recorded_arguments(values), config.by, config.because, through, now
    )


def _parse_time(text: str) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            "a time cannot be read", found=text, remedy="write it as 2026-03-01 or 2026-03-01T10:00:00"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def audit_daily(streams: "Mapping[str, Stream]", job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """The schedule `audit_daily`, which is stopped until a person starts it: one run of `audit` per stream.

    The runs leave the queue after all others, so they delay no slices.
    """

    @dg.schedule(
        name="audit_daily", job=job, cron_schedule="0 6 * * *", description="Audits every stream each day at 6 UTC."
    )
    def request() -> list[dg.RunRequest]:
        return [
            dg.RunRequest(
                run_key=name,
                run_config={"stream": name},
                tags={STREAM_TAG: name, PRIORITY: AUDIT_PRIORITY},
            )
            for name in streams
        ]

    return request
