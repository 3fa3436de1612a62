"""The topic as Dagster shows it: an external asset that is observed, with its lag."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import dagster as dg

from highwater.orchestration.asset_keys import build_topic_key, build_topic_spec
from highwater.orchestration.failures import translate_errors
from highwater.orchestration.metadata import MAX_SHOWN, Metadata
from highwater.resources.deleted_topics import read_state

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState

NOTHING: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True)
class PlanningPosition:
    """The position of planning in one Kafka partition; None where Kafka did not say.

    Args:
        partition: the Kafka partition.
        planned: the end of the planned offsets.
        log_start: the earliest offset that the broker still holds.
        last_stable: the last stable offset: planning never goes past it (I3).
        high_watermark: the offset after the last record, be it of an open transaction.
    """

    partition: int
    planned: int | None
    log_start: int | None
    last_stable: int | None
    high_watermark: int | None = None

    @property
    def lag(self) -> int | None:
        """Offsets up to the high watermark that are not planned, those after an open transaction among them."""
        if self.last_stable is None:
            return None
        end = max(self.last_stable, self.high_watermark or 0)
        return max(end - (self.planned if self.planned is not None else self.log_start or 0), 0)

    @property
    def held_back(self) -> int | None:
        """Offsets of the lag that an open transaction keeps from being planned (I3)."""
        return None if self.last_stable is None else max((self.high_watermark or 0) - self.last_stable, 0)


def build_positions(state: "TopicState", planned: Mapping[int, int]) -> list[PlanningPosition]:
    """The positions of all partitions of a topic."""
    return [
        PlanningPosition(number, planned.get(number), found.log_start, found.last_stable, found.high_watermark)
        for number, found in sorted(state.partitions.items())
    ]


def build_topic_metadata(found: list[PlanningPosition], left_out: Mapping[int, str] = NOTHING) -> Metadata:
    """The metadata of an observation: the lag as a number, which plots, and the positions as a table.

    Args:
        found: the positions.
        left_out: partitions in which planning did not go on, with the reason.
    """
    names = ("partition", "planned", "log_start", "last_stable", "high_watermark", "lag", "held_back")
    # Only partitions with the most lag: a thousand would be 140 KB per observation, and Dagster keeps them all.
    shown = sorted(sorted(found, key=lambda one: -(one.lag or 0))[:MAX_SHOWN], key=lambda one: one.partition)
    records = [dg.TableRecord({name: getattr(position, name) for name in names}) for position in shown]
    schema = dg.TableSchema([dg.TableColumn(name, "int") for name in names])
    lags = [position.lag for position in found if position.lag is not None]
    return {
        "lag": dg.MetadataValue.int(sum(lags)),
        "held_back": dg.MetadataValue.int(sum(position.held_back or 0 for position in found)),
        "largest_lag": dg.MetadataValue.int(max(lags, default=0)),
        "partitions": dg.MetadataValue.int(len(found)),
        "left_out": dg.MetadataValue.text("; ".join(f"{p}: {why}" for p, why in left_out.items()) or "none"),
        "positions": dg.MetadataValue.table(records, schema),
    }


def observe_positions(kafka: "Kafka", ledger: "Ledger", stream: "Stream") -> list[PlanningPosition]:
    """Compare the topic's offsets now with what is planned.

    Raises:
        TopicVanishedError, TopicAbsentError: the topic is not there any more, or never was.
        DependencyUnavailableError: "Kafka" or the ledger does not answer.
    """
    return build_positions(
        read_state(ledger, kafka, stream, stream.topic), ledger.topics.read_planned_ends(stream.name, stream.topic)
    )


def build_topic_asset(stream: "Stream") -> dg.AssetsDefinition:
    """The external asset of the stream's topic; a person observes it by a click, the planner's sensor as it ticks."""

    @dg.multi_observable_source_asset(  # type: ignore[untyped-decorator]  # Dagster gives it no types
        specs=[build_topic_spec(stream)],
        name=f"{stream.name}_topic",
        required_resource_keys={"kafka", "ledger"},
    )
    def observe(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
        with translate_errors(context.op_execution_context.retry_number, lambda: None):
            found = observe_positions(context.resources.kafka.open(), context.resources.ledger.open(), stream)
        silent = {position.partition: "no leader" for position in found if position.last_stable is None}
        yield dg.ObserveResult(asset_key=build_topic_key(stream), metadata=build_topic_metadata(found, silent))

    asset: dg.AssetsDefinition = observe
    return asset
