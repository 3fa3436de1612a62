"""Dagster's code server, whose runs are forked from a process that has imported and built everything."""

# A new Python imports Dagster, Spark's client and Highwater for three to five seconds of a core, and builds the
# definitions of all streams, 0.01 s each. Dagster's server starts one for each run and has no setting for another way
# (docs/adr/0036-fixed-cost-of-a-run.md).

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from importlib import import_module
from multiprocessing import forkserver
from types import SimpleNamespace

# Set for the process that workers are forked from: the module whose definitions it builds.
PRELOADED_MODULE = "PRELOADED_MODULE"
# What a run imports besides the definitions. A module that is missing here is imported by each worker.
RUN_MODULES = (
    "dagster._grpc.server",
    "dagster._core.instance.factory",
    "dagster._core.storage.sqlite_storage",
    "confluent_kafka.admin",
    "deltalake.fs",
    "pyarrow.dataset",
    "pyarrow.json",
    "pyspark.sql.connect.functions",
    "pyspark.sql.connect.session",
    "structlog.stdlib",
    "upath.implementations.local",
    "highwater.assets.raw",
    "highwater.assets.events",
    "highwater.assets.rejects",
    "highwater.assets.dlq",
    "highwater.assets.current",
    "highwater.assets.metrics",
    "highwater.assets.published",
    "highwater.resources.local_spark",
)
# Calls that the server answers at once: dagster.yaml lets 8 sensors, 4 schedules and 4 backfills run side by side; the
# pings of webserver and daemon and the pages of some people come beside them. gRPC's default is 6 on two cores.
THREADS = 32


def build_command(*, host: str, port: int, module: str, location: str, log_format: str) -> list[str]:
    """The command line of a server: program and arguments.

    Args:
        host: the address to listen on.
        port: the port to listen on.
        module: the module with the definitions, importable from the current folder.
        location: the name of the code location on Dagster's page.
        log_format: `json` or the default of Dagster, `colored`, for the lines of the server's own.
    """
    at = ["--host", host, "--port", str(port), "--max-workers", str(THREADS)]
    load = ["--module-name", module, "--location-name", location, "--log-format", log_format]
    # Not `-m`: each worker would import the main module again.
    return [sys.executable, "-c", f"from {__name__} import serve; serve()", *at, *load]


def serve() -> None:
    """Serve by the arguments of this process."""
    from dagster._cli import cli

    fork_workers(sys.argv[sys.argv.index("--module-name") + 1])
    cli(["api", "grpc", *sys.argv[1:]], auto_envvar_prefix="DAGSTER_CLI")


def fork_workers(module: str) -> None:
    """Let Dagster's server in this process fork the workers of its runs.

    The process that they are forked from starts at once and again when it ended. It has no thread of Python's and no
    connection; OpenBLAS and jemalloc handle forks. With a Dagster whose server cannot be changed so, each worker is a
    new Python, as Dagster starts it.
    """
    from dagster._grpc import server

    if not hasattr(server, "multiprocessing"):
        print("this version of Dagster starts a new Python for each run", file=sys.stderr)  # noqa: T201 - of a program
        return
    os.environ[PRELOADED_MODULE] = module
    multiprocessing.set_forkserver_preload(["highwater.orchestration.preloaded"])
    forkserver.ensure_running()
    # The server asks for the context "spawn" and has no setting for another one.
    forking = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))
    vars(server)["multiprocessing"] = forking


def preload(module: str) -> None:
    """Import what runs need, and build the definitions of a module.

    What fails here fails again in the run, where Dagster reports it.
    """
    try:
        for name in RUN_MODULES:
            import_module(name)
        build_definitions(module)
    except Exception:  # noqa: BLE001 - of a user's module
        traceback.print_exc()


def build_definitions(module: str) -> None:
    """Have a module's definitions built, so that no worker builds them."""
    import dagster as dg
    from dagster.components.definitions import LazyDefinitions

    served = import_module(module)
    for name, value in [*vars(served).items()]:
        built = value() if isinstance(value, LazyDefinitions) else value
        if isinstance(built, dg.Definitions):
            built.get_repository_def()
            setattr(served, name, built)
