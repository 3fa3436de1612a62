"""Dagster's program with a code server that forks the workers of its runs instead of starting a new Python for each.

A new Python imports Dagster, Spark's client and Highwater for three to five seconds of a core, and a demonstration or a
soak has dozens of runs. `make up` and deployments run Dagster's own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from types import SimpleNamespace

from dagster._cli import cli
from dagster._grpc import server

# Imported once, by a process without threads that does nothing else. What is missing here is imported by each worker.
PRELOAD = (
    "dagster._grpc.server",
    "pyspark.sql.connect.session",
    "pyspark.sql.connect.functions",
    "deltalake",
    "confluent_kafka",
    "pyarrow.dataset",
    "highwater.assets.raw",
    "highwater.assets.events",
    "highwater.assets.rejects",
    "highwater.assets.dlq",
    "highwater.assets.current",
    "highwater.assets.metrics",
    "highwater.assets.published",
)


def served_module(arguments: list[str]) -> str:
    """The module with the definitions that a command line of `dagster api grpc` serves."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--module-name", required=True)
    known, _ = parser.parse_known_args(arguments)
    return str(known.module_name)


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload([served_module(sys.argv[1:]), *PRELOAD])
    # The server asks for the context "spawn" and has no setting for another one.
    forking = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))
    vars(server)["multiprocessing"] = forking
    sys.exit(cli(auto_envvar_prefix="DAGSTER_CLI"))
