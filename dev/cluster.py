"""Three brokers that form one cluster, until Ctrl-C: `python -m dev.cluster`, or `make cluster`."""

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
    options = _parser().parse_args(arguments)
    home = options.home.absolute()
    if home.exists() and not (home / "kafka-1").exists() and any(home.iterdir()):
        print(f"error: {home} holds something else than a former cluster; name another --home", file=sys.stderr)
        return 1
    shutil.rmtree(home, ignore_errors=True)
    try:
        with signals_raise_interrupt(), EmbeddedCluster(home, options.brokers, controller_apart=True) as cluster:
            _report(cluster, again=options.again)
            _watch(cluster, again=options.again)
    except HighwaterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("every broker was ended")
    return 0


def _report(cluster: EmbeddedCluster, *, again: bool) -> None:
    print(f"HIGHWATER_KAFKA_BOOTSTRAP={cluster.bootstrap}")
    for broker in cluster.brokers:
        print(f"broker {broker.node.id}: process group {broker.pid}, log {broker.log}")
    after = "it is started again on its data" if again else "it stays down"
    print(f"kill one with: kill -KILL -<process group>; {after}. Ctrl-C ends all.", flush=True)


def _watch(cluster: EmbeddedCluster, *, again: bool) -> None:
    """Report brokers that somebody killed, and start them again, as a supervisor of services would."""
    gone: set[int] = set()
    while True:
        time.sleep(LOOK_SECONDS)
        for broker in cluster.brokers:
            if broker.alive or broker.node.id in gone:
                continue
            print(f"broker {broker.node.id} is gone" + ("; it starts again" if again else ""), flush=True)
            if again:
                broker.start()
                print(f"broker {broker.node.id}: process group {broker.pid}", flush=True)
            else:
                gone.add(broker.node.id)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dev.cluster", description=__doc__)
    home = paths.home(os.environ) / "cluster"
    parser.add_argument("--home", type=Path, default=home, help="emptied first; default: %(default)s")
    parser.add_argument("--brokers", type=int, choices=(1, 3, 5), default=3, help="default: %(default)s")
    parser.add_argument(
        "--no-restart",
        dest="again",
        action="store_false",
        help="leave what is killed down: two of three, say, so that writes are refused",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
