"""What was read stays true (I16): replaced history is noticed, before a row of it is read as if it followed the old."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg
import pytest

from dev.broker import EmbeddedCluster
from dev.processes import wait_until
from highwater.assets import raw
from highwater.divergence import Fingerprint, PlannedFacts, SeenRecord, compute_digest
from highwater.errors import ConfigurationError, DependencyUnavailableError, TopicAbsentError, TopicTruncatedError
from highwater.orchestration.asset_keys import build_topic_key
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.resources.divergence_detection import find_divergence
from highwater.resources.kafka import Kafka
from highwater.resources.topic_state import PartitionState, TopicState
from tests.helpers.replaced_history import planned
from tests.helpers.scene import Scene
from tests.helpers.support import Bench, Message, make_bench, make_stream, order_message, send
from tests.helpers.ticking import Ticking

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient
    from pyspark.sql import SparkSession

    from dev.broker import EmbeddedBroker


def record(offset: int, text: str, epoch: int | None) -> SeenRecord:
    return SeenRecord(offset, text, epoch)


# From here on against real brokers.


@pytest.mark.slow
def test_a_plan_keeps_the_last_record_of_each_range_and_raw_agrees_with_it(bench: Bench) -> None:
    """Python and Spark compute the same digest, of a record with a null key or value too."""
    bench.send(order_message("o1", 1), Message(b"k", None, 1), Message(None, b"v", 2))
    [slice_] = planned(bench)
    assert {p: mark.offset for p, mark in slice_.fingerprints.items()} == {0: 0, 1: 0, 2: 0}
    assert bench.ledger.get([slice_.key])[0].fingerprints == slice_.fingerprints
    assert raw.materialise(bench.work(slice_))[0].rows == 3


@pytest.mark.slow
def test_another_record_under_the_mark_is_not_read(bench: Bench) -> None:
    """As a topic that is recreated while it is read would have it: the look before the read has seen nothing."""
    bench.send(order_message("o1", 1), order_message("o1", 2))
    [slice_] = planned(bench)
    other = replace(slice_, fingerprints={0: Fingerprint(1, compute_digest(0, b"o1", b"other"))})
    with pytest.raises(TopicTruncatedError, match="another record is") as caught:
        raw.materialise(bench.work(other))
    assert "partition 0 offset 1" in str(caught.value.found)
    assert bench.rows("raw") == []


@pytest.mark.slow
def test_a_mark_is_found_behind_markers_and_aborted_records(bench: Bench) -> None:
    from confluent_kafka import Producer

    bench.send(order_message("o1", 1))
    producer = Producer({"bootstrap.servers": bench.bootstrap, "transactional.id": bench.stream.topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in range(40):
        producer.produce(bench.stream.topic, value=b"%d" % number, partition=0)
    producer.flush(30)
    producer.abort_transaction(30)
    wait_until(
        lambda: bench.kafka.read_topic_state(bench.stream.topic).partitions[0].last_stable == 42,
        30,
        "the abort's marker",
    )
    [slice_] = planned(bench)
    assert slice_.ranges[0].end == 42
    assert slice_.fingerprints[0].offset == 0


TOPIC = "orders.diverging"
LEADER, FOLLOWER, WITNESS = 0, 1, 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """Three brokers; the partition has its replicas on two of them, and the third keeps the controllers' quorum."""
    with EmbeddedCluster(tmp_path / "cluster") as started:
        yield started


def ticks_up_to_an_error(bench: Bench) -> list[Any]:
    """A partition whose new leader does not answer in time is left out of a tick."""
    ticks = []

    def noticed() -> bool:
        ticks.append(Planner(bench.ledger, bench.kafka).tick(bench.stream, datetime.now(UTC)))
        return bool(ticks[-1].errors)

    wait_until(noticed, 60, "a tick that sees the partition")
    return ticks


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(1800)
def test_replaced_history_is_noticed_before_it_is_read(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    """End 200, after the unclean election 100, then 250: same topic, same ID, other records from offset 100."""
    witness = cluster.brokers[WITNESS].bootstrap
    make_topic(cluster)
    bench = make_bench(TOPIC, cluster.bootstrap, spark, tmp_path)
    old = [order_message("o1", n + 1) for n in range(200)]
    send(cluster.bootstrap, TOPIC, old[:100])
    cluster.brokers[FOLLOWER].kill()
    wait_until(lambda: in_sync(witness) == [leader_id(cluster)], 60, "the follower leaving the in-sync replicas")
    send(cluster.bootstrap, TOPIC, old[100:150])
    [read] = planned(bench)
    raw.materialise(bench.work(read))
    send(cluster.bootstrap, TOPIC, old[150:])
    [unread] = planned(bench)
    cluster.brokers[LEADER].kill()
    cluster.brokers[FOLLOWER].start()
    wait_until(lambda: leader(witness) == cluster.brokers[FOLLOWER].node.id, 60, "the unclean election")
    new = [order_message("o2", n + 1) for n in range(150)]
    send(witness, TOPIC, new)
    wait_until(lambda: _end(bench.kafka) == 250, 60, "the new leader's offsets")

    ticks = ticks_up_to_an_error(bench)
    assert [tick.slices for tick in ticks] == [()] * len(ticks)
    error = ticks[-1].errors[0]
    assert isinstance(error, TopicTruncatedError)
    assert "planned to offset 200 in leader epoch" in str(error.stored)
    assert "ends at offset 100" in str(error.found)
    assert "highwater accept-divergence orders --partition 0" in error.remedy
    with pytest.raises(TopicTruncatedError, match="other records occupy"):
        raw.materialise(bench.work(unread))
    [again] = raw.materialise(bench.work(read))
    assert "rows unchanged" in str(again.note)

    operator = Scene(cluster.bootstrap, TOPIC, tmp_path)
    remaining = operator.run("accept-loss", "orders", "--yes", "--by", "ann")
    assert "there is nothing to accept" in remaining.output, "lost offsets are another thing than replaced ones"
    asked = ("accept-divergence", "orders", "--partition", "0")
    dry = operator.run(*asked)
    assert (dry.exit_code, "a dry run: nothing was recorded" in dry.output) == (0, True), dry.output
    assert bench.ledger.list_losses("orders", TOPIC) == []
    done = operator.run(*asked, "--yes", "--by", "ann")
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "recorded"), done.output
    [after] = planned(bench)
    assert (after.generation, after.ranges[0].start, after.ranges[0].end) == (1, 100, 250)
    raw.materialise(bench.work(unread))
    raw.materialise(bench.work(after))
    rows = sorted((row["generation"], row["offset"], row["value"]) for row in bench.rows("raw"))
    as_read = [(0, n, old[n].value) for n in range(150)]
    as_new = [(1, 100 + n, new[n].value) for n in range(150)]
    assert rows == as_read + as_new, "the old history as far as it was read, and the new one, apart"
    [loss] = bench.ledger.list_losses("orders", TOPIC)
    assert (loss.offsets.start, loss.offsets.end, loss.accepted_by) == (150, 200, "ann")


def test_forbidden_reads_fail_without_retries() -> None:
    """A leader changed, and the right to read was revoked: that was tried again for ever."""
    kafka: Any = SimpleNamespace(read=_refuse)
    state = TopicState(TOPIC, "A" * 22, {0: PartitionState(0, 20, 20, 1, 5)})
    with pytest.raises(ConfigurationError, match="may not be used"):
        find_divergence(kafka, state, {0: PlannedFacts(20, 4, Fingerprint(19, "x"))})


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ConfigurationError("topic orders may not be used by this user", remedy="allow it")


OFFLINE = "orders.offline"


@pytest.mark.slow
@pytest.mark.crash
def test_a_clean_election_is_no_divergence_and_a_partition_without_a_broker_waits_alone(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(cluster)
    send(cluster.bootstrap, TOPIC, [order_message("o1", n + 1) for n in range(20)])
    kafka = Kafka(cluster.bootstrap)
    before = kafka.read_topic_state(TOPIC)
    recorded = {0: PlannedFacts(20, before.partitions[0].leader_epoch)}
    with dg.DagsterInstance.ephemeral() as instance:
        offline = OfflinePartitions(cluster, instance, tmp_path, monkeypatch)
        cluster.brokers[LEADER].kill()
        wait_until(
            lambda: leader(cluster.brokers[WITNESS].bootstrap) == cluster.brokers[FOLLOWER].node.id, 60, "the election"
        )
        wait_until(lambda: _end(kafka) is not None, 60, "the new leader's offsets")
        now = kafka.read_topic_state(TOPIC)
        assert now.partitions[0].leader_epoch != recorded[0].epoch
        assert find_divergence(kafka, now, recorded).diverged == {}
        assert find_divergence(
            kafka, now, {0: PlannedFacts(20, before.partitions[0].leader_epoch, Fingerprint(19, "x"))}
        ).diverged
        offline.ensure_left_out()
        cluster.brokers[LEADER].start()
        offline.ensure_caught_up_with()


class OfflinePartitions:
    """A stream whose topic has its partitions on one broker each, planned as far as its first record."""

    def __init__(
        self, cluster: EmbeddedCluster, instance: dg.DagsterInstance, folder: Path, patch: pytest.MonkeyPatch
    ) -> None:
        from confluent_kafka.admin import NewTopic

        patch.setenv("HIGHWATER_HOME", str(folder))
        patch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", cluster.bootstrap)
        self.cluster, self.instance = cluster, instance
        self.ours = Ticking(make_stream(OFFLINE), instance, folder)
        placed = [[cluster.brokers[number].node.id] for number in (FOLLOWER, LEADER)]
        topic = NewTopic(OFFLINE, num_partitions=2, replica_assignment=placed)
        client = admin(cluster.bootstrap)  # one that is let go of drops the request under way
        client.create_topics([topic])[OFFLINE].result(30)
        wait_until(lambda: self.led() == [0, 1], 60, "both leaders")
        self.send(0, 1)
        self.tick_that_plans()

    def tick_that_plans(self) -> None:
        # A client that asked the broker which is gone skips a tick.
        wait_until(lambda: bool(self.ours.tick("planner").run_requests), 60, "a plan")

    def send(self, *partitions: int) -> None:
        send(self.cluster.bootstrap, OFFLINE, [order_message("o1", 1, partition) for partition in partitions])

    def led(self) -> list[int]:
        try:
            state = Kafka(self.cluster.bootstrap).read_topic_state(OFFLINE)
        except (DependencyUnavailableError, TopicAbsentError):
            return []
        return [number for number, one in state.partitions.items() if one.known]

    def planned(self) -> list[dict[int, tuple[int, int]]]:
        return [{p: (r.start, r.end) for p, r in one.ranges.items()} for one in self.ours.ledger.list_slices("orders")]

    def observed(self) -> dg.AssetObservation:
        [record] = self.instance.fetch_observations(build_topic_key(self.ours.stream), limit=1).records
        assert record.asset_observation is not None
        return record.asset_observation

    def ensure_left_out(self) -> None:
        """Tick and observation name the partition, and the other one goes on."""
        wait_until(lambda: self.led() == [0], 60, "the partition's end")
        self.send(0)
        self.tick_that_plans()
        assert self.planned() == [{0: (0, 1), 1: (0, 1)}, {0: (1, 2), 1: (1, 1)}]
        assert self.observed().metadata["left_out"].value == "1: no leader"
        assert "partition 1 of orders.offline is left out now: no leader" in self.ours.tick("planner").skip_message
        before = len(self.instance.fetch_observations(build_topic_key(self.ours.stream), limit=9).records)
        job = self.ours.defs.resolve_implicit_global_asset_job_def()
        assert job.execute_in_process(
            instance=self.instance, asset_selection=[build_topic_key(self.ours.stream)]
        ).success
        assert len(self.instance.fetch_observations(build_topic_key(self.ours.stream), limit=9).records) == before + 1
        assert self.observed().metadata["left_out"].value == "1: no leader"
        positions = [row.data for row in self.observed().metadata["positions"].records]  # type: ignore[attr-defined]
        assert [(row["planned"], row["last_stable"]) for row in positions] == [(2, 2), (1, None)]

    def ensure_caught_up_with(self) -> None:
        """Back with what it had: the next tick plans what comes then."""
        wait_until(lambda: self.led() == [0, 1], 60, "the partition's leader")
        self.send(1)
        self.tick_that_plans()
        assert self.planned()[2:] == [{0: (2, 2), 1: (1, 2)}]
        assert self.observed().metadata["left_out"].value == "none"


def _end(kafka: Kafka) -> int | None:
    try:
        return kafka.read_topic_state(TOPIC).partitions[0].last_stable
    except DependencyUnavailableError:  # for a moment the client asks the broker that is gone
        return None


def make_topic(cluster: EmbeddedCluster) -> None:
    from confluent_kafka.admin import NewTopic

    ids = [cluster.brokers[number].node.id for number in (LEADER, FOLLOWER)]
    config = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    topic = NewTopic(TOPIC, num_partitions=1, replica_assignment=[ids], config=config)
    client = admin(cluster.bootstrap)
    client.create_topics([topic])[TOPIC].result(30)
    wait_until(lambda: sorted(in_sync(cluster.bootstrap)) == sorted(ids), 30, "both replicas")
    wait_until(lambda: leader(cluster.bootstrap) == leader_id(cluster), 60, "the election")


def leader_id(cluster: EmbeddedCluster) -> int:
    broker: EmbeddedBroker = cluster.brokers[LEADER]
    return broker.node.id


def admin(bootstrap: str) -> AdminClient:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def in_sync(bootstrap: str) -> list[int]:
    partitions = admin(bootstrap).list_topics(TOPIC, timeout=60).topics[TOPIC].partitions
    return list(partitions[0].isrs) if partitions else []  # for a moment a new topic shows none


def leader(bootstrap: str) -> int:
    partitions = admin(bootstrap).list_topics(TOPIC, timeout=60).topics[TOPIC].partitions
    return int(partitions[0].leader) if partitions else -1
