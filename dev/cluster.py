"""Three brokers that form one cluster, until Ctrl-C: `python -m dev.cluster`, or `make cluster`.

What belongs here: the command. What does not: the brokers (`dev.broker`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dev import paths
from dev.broker import EmbeddedCluster
from dev.processes import signals_raise_interrupt
from highwater.errors import HighwaterError

LOOK_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: exit status 0 after Ctrl-C, 1 when the cluster did not start."""
    asked = _parser().parse_args(arguments)
    home = asked.home.absolute()
    if home.exists() and not (home / "kafka-1").exists() and any(home.iterdir()):
        print(f"error: {home} holds something else than a former cluster; name another --home", file=sys.stderr)
        return 1
    shutil.rmtree(home, ignore_errors=True)
    try:
        with signals_raise_interrupt(), EmbeddedCluster(home, asked.brokers) as cluster:
            _tell(cluster)
            _watch(cluster)
    except HighwaterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("every broker was ended")
    return 0


def _tell(cluster: EmbeddedCluster) -> None:
    print(f"HIGHWATER_KAFKA_BOOTSTRAP={cluster.bootstrap}")
    for broker in cluster.brokers:
        print(f"broker {broker.node.id}: process group {broker.pid}, log {broker.log}")
    print("kill one with: kill -KILL -<process group>; it is started again on its data. Ctrl-C ends all.", flush=True)


def _watch(cluster: EmbeddedCluster) -> None:
    """Start brokers again that somebody killed, as a supervisor of services would."""
    while True:
        time.sleep(LOOK_SECONDS)
        for broker in cluster.brokers:
            if not broker.alive:
                print(f"broker {broker.node.id} is gone; it starts again", flush=True)
                broker.start()
                print(f"broker {broker.node.id}: process group {broker.pid}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dev.cluster", description=__doc__)
    home = paths.home(os.environ) / "cluster"
    parser.add_argument("--home", type=Path, default=home, help="emptied first; default: %(default)s")
    parser.add_argument("--brokers", type=int, choices=(1, 3, 5), default=3, help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
