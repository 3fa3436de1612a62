"""(p) The definitions of many streams: loading them, and the snapshot that Dagster makes of them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness import Result, Row, Target, measure_seconds

if TYPE_CHECKING:
    import dagster as dg

    from bench.world import World

STREAMS = 100
# Like `orders`, with every check and without a topic of accepted events.
DECLARATIONS = """
from dataclasses import replace
from assets.streams.orders import STREAM
STREAMS = [replace(STREAM, name=f"orders_{{n:03}}", topic=f"orders.{{n:03}}", publishes=None) for n in range({streams})]
"""


@dataclass
class Snapshot:
    """The repository snapshot that Dagster makes of the definitions of some streams.

    Args:
        streams: how many streams are declared.
        megabytes: the size of the snapshot, with the snapshots of all jobs.
        definitions: the number of jobs, sensors and schedules.
    """

    streams: int
    megabytes: float = 0.0
    measure_definitions: int = 0

    def load(self, folder: Path) -> dg.RepositoryDefinition:
        """Declare the streams in a folder, and load the definitions from there."""
        from highwater.orchestration.build import build_defs
        from highwater.stream_files import load_streams

        (folder / "many.py").write_text(DECLARATIONS.format(streams=self.streams))
        found = build_defs(streams=[*load_streams(folder).values()]).get_repository_def()
        self.definitions = len(found.get_all_jobs()) + len(found.sensor_defs) + len(found.schedule_defs)
        return found

    def serialise(self, repository: dg.RepositoryDefinition) -> None:
        """Serialise the definitions as a code server does."""
        from dagster._core.remote_representation.external_data import RepositorySnap
        from dagster._serdes import serialize_value

        self.megabytes = len(serialize_value(RepositorySnap.from_def(repository))) / 1e6

    def measure(self, rounds: int) -> Row:
        """Load and serialise in each round; the first does not count."""
        seconds: dict[str, list[float]] = {"load": [], "serialise": []}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(rounds + 1):
                found: list[dg.RepositoryDefinition] = []
                took = measure_seconds(lambda found=found: found.append(self.load(Path(folder))))  # type: ignore[misc]
                also = measure_seconds(partial(self.serialise, found[0]))
                if turn:
                    seconds["load"].append(took)
                    seconds["serialise"].append(also)
        return Row(f"{self.streams} streams", seconds)


def measure_definitions(world: World | None, rounds: int, records: int) -> Result:
    """(p) The definitions of 10 and of 100 streams, loaded and serialised again in each round."""
    del world, records
    few, many = Snapshot(STREAMS // 10), Snapshot(STREAMS)
    rows = [few.measure(rounds), many.measure(rounds)]
    return Result(
        name="p",
        title="The definitions of 100 streams",
        method=(
            "Each round builds the definitions of copies of `orders` that do not publish, and serialises the snapshots "
            "of repository and jobs, as a code server does at its start."
        ),
        rows=rows,
        targets=[
            Target("megabytes of the snapshot", many.megabytes, 12, at_least=False),
            Target("seconds to serialise it", rows[1].median("serialise"), 2, at_least=False),
            Target("jobs, sensors and schedules", many.definitions, 130, at_least=False),
        ],
    )
