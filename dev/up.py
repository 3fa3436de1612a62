"""`make up`: the stack until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dev import jars, paths
from dev.dagster_services import UI_PORT
from dev.processes import signals_raise_interrupt
from dev.stack import Stack
from highwater import settings
from highwater.errors import ConfigurationError, HighwaterError
from highwater.orchestration.cli.doctor import NAMES
from highwater.orchestration.cli.terminal import print_table
from highwater.orchestration.deployment import Deployment
from highwater.orchestration.reporting.doctor import examine
from highwater.settings import Settings

WATCH_SECONDS = 1.0

# Records a second: enough to see tables grow, little enough to leave the machine to Spark.
RATES = {"orders": 20, "payments": 5}
# When customers that came late become known: long enough to see their orders wait.
LATE_SECONDS = 120
# Of payments, with --burst: enough for a slice that is cut at once, and that the breaker refuses.
BURST = {"payments": 1_000}


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        prog="python -m dev.up",
        description="Run broker, Spark, Dagster's UI and daemon, and a generator of orders, until Ctrl-C.",
        epilog=f"A broker that {settings.KAFKA_BOOTSTRAP} names, or a Spark that {settings.SPARK_REMOTE} or "
        f"{settings.SPARK_MASTER} names, is used instead of an embedded one.",
    )
    made.add_argument(
        "--ui-port", type=int, default=UI_PORT, help="port of Dagster's UI, if it is free; 0 for any (%(default)s)"
    )
    choice = made.add_mutually_exclusive_group()
    choice.add_argument("--generate", action="store_true", help="write orders to a configured broker too")
    choice.add_argument("--no-generate", action="store_true", help="write orders to no broker")
    made.add_argument(
        "--registry",
        action="store_true",
        help="run a schema registry too; it is fetched first if it is missing, 142 MB",
    )
    made.add_argument(
        "--burst", action="store_true", help="begin with payments that nobody can read: they open the stream's breaker"
    )
    return made


def generates(arguments: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether the generator runs: by itself on an embedded broker only, since a configured one is somebody's."""
    if arguments.no_generate:
        return False
    return bool(arguments.generate or not environment.get(settings.KAFKA_BOOTSTRAP))


def writers(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Callable[[Stack], None] | None:
    """The command that starts the generators when the broker answers; None where none runs.

    Raises:
        ConfigurationError: a burst is asked for, and no generator runs that could write it.
    """
    if generates(arguments, environment):
        return partial(start_generators, burst=BURST if arguments.burst else {})
    if arguments.burst:
        raise ConfigurationError(
            "--burst asks for records, and no generator runs", remedy="add --generate, or remove --no-generate"
        )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """The program; exit status 0 after Ctrl-C, 1 when a part failed."""
    arguments = parser().parse_args(argv)
    try:
        with signals_raise_interrupt():
            _run(arguments)
    except KeyboardInterrupt:
        print("\nended.", flush=True)
        return 0
    except HighwaterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    home = paths.home(os.environ)
    if arguments.registry:
        jars.ensure("registry")
    stack = Stack(
        home, ui_port=arguments.ui_port, registry=arguments.registry, on_broker=writers(arguments, os.environ)
    )
    print_table(NAMES, examined(stack))
    print(f"Starting; logs are in {home / 'logs'} ...", flush=True)
    with stack:
        print(welcome(stack), flush=True)
        while True:
            for line in stack.supervise():
                print(line, flush=True)
            time.sleep(WATCH_SECONDS)


def examined(stack: Stack) -> list[list[str]]:
    """The doctor's findings before anything is started; a failure is reported and keeps nothing from starting."""
    found = Settings.from_environment(stack.env)
    return [one.row for one in examine(Deployment(found), found, stack.env, not_started(stack))]


def not_started(stack: Stack) -> set[str]:
    """The services that the stack starts later: asking a port where nobody listens takes seconds, and shows nothing."""
    embedded = {"Kafka": stack.broker, "Spark": stack.spark, "schema registry": stack.registry}
    return {"Dagster", *(name for name, part in embedded.items() if part is not None)}


def start_generators(stack: Stack, burst: Mapping[str, int]) -> None:
    """Let orders and payments be written, faults among them, until the stack ends; of some streams a burst first."""
    for stream, rate in RATES.items():
        command = [sys.executable, "-m", "dev.generator", "--stream", stream, "--until-interrupted"]
        command += ["--bootstrap", stack.bootstrap, "--home", str(stack.home), "--rate", str(rate)]
        # Each start writes keys of its own: the same seed would write the versions of the last start again.
        command += ["--seed", str(int(time.time())), "--late-customers-after", str(LATE_SECONDS)]
        command += ["--burst", str(burst.get(stream, 0))]
        stack.run(f"generator-{stream}", command)


def welcome(stack: Stack) -> str:
    """The addresses and facts of a running stack, for a person."""
    lines = [
        f"Dagster   {stack.webserver_url}",
        f"Kafka     {stack.bootstrap}" + ("" if stack.broker else "  (configured)"),
        f"Spark     {stack.env.get(settings.SPARK_REMOTE) or stack.env.get(settings.SPARK_MASTER)}"
        + (f"  page {stack.spark.ui_url}" if stack.spark else "  (configured)"),
        *([f"Registry  {stack.registry.url}"] if stack.registry else []),
        *(f"log       {log}" for log in stack.logs()),
        f"In another terminal: source {stack.home / 'env'}; .venv/bin/highwater status",
        "Ctrl-C ends everything.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
