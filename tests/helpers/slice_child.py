"""Takes one slice through its stream's job, in a process whose environment alone says which Spark does it.

Usage: `python -m tests.helpers.slice_child TOPIC`; the slice is planned over everything that the topic holds.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime

import dagster as dg

from highwater.orchestration.build import build_defs
from highwater.resources.kafka import Kafka
from highwater.resources.ledger import Ledger
from highwater.settings import Settings
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import make_stream, read_topic


def main(topic: str) -> int:
    settings = Settings.from_environment(os.environ)
    stream = make_stream(topic)
    ends: dict[int, int] = {}
    for partition, offset in read_topic(settings.kafka_bootstrap, topic):
        ends[partition] = max(ends.get(partition, 0), offset + 1)
    topic_id = Kafka(settings.kafka_bootstrap, {}).read_topic_state(topic).topic_id
    ranges = {partition: OffsetRange(0, end) for partition, end in ends.items()}
    slice_ = Slice(stream.name, topic, topic_id, 0, 0, ranges, datetime.now(UTC))
    Ledger(settings.ledger_url).add([slice_])
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(stream.partitions_name, [slice_.key])
        job = build_defs(streams=[stream]).resolve_job_def(f"{stream.name}_slice")
        return 0 if job.execute_in_process(instance=instance, partition_key=slice_.key).success else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
