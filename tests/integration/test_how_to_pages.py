"""The commands of the how-to pages do what the pages say, pasted line by line into a shell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from dev.dagster_services import prepare_home
from highwater.orchestration.cli.main import main
from tests.helpers.pages import find_shell_blocks
from tests.helpers.support import order_message

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect
    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow

# Programs that no page installs, or that would start a deployment of their own.
ELSEWHERE = ("aws ", "createdb ", "dagster-", ".venv/bin/", "kafka-consumer-groups", "make ")
PAGES = (
    *("access", "audit", "commands", "dlq", "maintenance", "operations", "recovery"),
    *("deployment/README", "deployment/backup", "deployment/postgresql"),
)
# The shell hands a command's arguments and environment over, and waits for its exit status.
SHELL = r"""
highwater() {
  { printf '%s\x1f' "$@"; printf '\x1e'; env | grep -E '^(DAGSTER|HIGHWATER|SPARK)_' | tr '\n' '\037'; echo; } >&3
  read -r status <&4
  return "$status"
}
"""
LONGEST_SECONDS = 120


class Terminal:
    """A shell in which `highwater` runs in this process."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self.ran: list[str] = []
        self.output = ""

    def paste(self, commands: str, stdin: str) -> None:
        """Run lines of commands until one fails."""
        calls, asked = os.pipe()
        answers, answer = os.pipe()
        environment = {**os.environ, **self._environment}
        descriptors = f"exec 3>&{asked} 4<&{answers}\n"
        shell = subprocess.Popen(
            ["bash", "-euc", descriptors + SHELL + commands],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.PIPE,
            pass_fds=(asked, answers),
            text=True,
        )
        os.close(asked)
        os.close(answers)
        assert shell.stdin is not None
        shell.stdin.write(stdin)
        shell.stdin.close()
        with os.fdopen(calls) as lines, os.fdopen(answer, "w") as statuses:
            for line in lines:
                print(self._call(*line.rstrip("\n").split("\x1e")), file=statuses, flush=True)
        assert shell.wait(LONGEST_SECONDS) == 0, f"{self.ran[-1:]}\n{self.output}\n{commands}"

    def _call(self, arguments: str, environment: str) -> int:
        given = dict(one.split("=", 1) for one in environment.split("\x1f") if one)
        command = arguments.split("\x1f")[:-1]
        self.ran.append(" ".join(command))
        with chdir(self._folder):
            done = CliRunner().invoke(main, command, env=given)
        self.output = f"{done.output}\n{done.exception or ''}"
        return done.exit_code


def commands_of(page: str, replaced: dict[str, str]) -> Iterator[str]:
    """The lines of commands on a page that this machine can run."""
    for block in find_shell_blocks(f"docs/{page}.md"):
        for line in block.replace("\\\n", " ").splitlines():
            if not line.strip().startswith(ELSEWHERE):
                yield reduce(lambda text, pair: text.replace(*pair), replaced.items(), line.strip())


@pytest.fixture
def deployed(bench: Bench) -> Bench:
    """A stream with two slices in all tables."""
    bench.send(*[order_message(f"o{n}", 1) for n in range(4)])
    for ordinal in range(2):
        bench.materialise(bench.plan(ordinal, p0=(2 * ordinal, 2 * ordinal + 2)))
    return bench


def test_each_page_works_when_it_is_pasted(deployed: Bench, spark_server: SparkConnect, tmp_path: Path) -> None:
    streams, topic, empty = tmp_path / "streams", deployed.stream.topic, f"sqlite:///{tmp_path / 'empty.sqlite'}"
    streams.mkdir()
    declaration = f"from tests.helpers.support import make_stream\nSTREAM = make_stream({topic!r})\n"
    (streams / "orders.py").write_text(declaration)
    (tmp_path / "app.properties").write_text(
        "acks=all\nkey.serializer=org.apache.kafka.common.serialization.StringSerializer\n"
    )
    (tmp_path / "sender.json").write_text(
        '{"acks": "all", "enable.idempotence": true, "partitioner": "murmur2_random"}'
    )
    prepare_home(tmp_path / "dagster", ours=True)
    environment = {
        "HIGHWATER_HOME": str(tmp_path),
        "HIGHWATER_STREAMS": str(streams),
        "HIGHWATER_KAFKA_BOOTSTRAP": deployed.bootstrap,
        "SPARK_REMOTE": spark_server.remote,
        "DAGSTER_HOME": str(tmp_path / "dagster"),
        "USER": "ann",
    }
    replaced = {
        "locate orders 3 81244": f"locate {topic} 0 1",
        "orders.dlq": f"{topic}.dlq",
        "orders@0000100": f"{topic}@0000000",
        "orders@0000199": f"{topic}@0000001",
        "postgresql+psycopg2://highwater_owner:…@postgres:5432/drill": f"sqlite:///{tmp_path / 'drill.sqlite'}",
        "postgresql+psycopg2://highwater_owner:…@db:5432/highwater": f"sqlite:///{tmp_path / 'ledger.sqlite'}",
        "postgresql+psycopg2://highwater:…@db:5432/highwater": f"sqlite:///{tmp_path / 'ledger.sqlite'}",
        # "point HIGHWATER_LEDGER_URL at an empty database", and "without ledger and lake"
        "highwater rebuild-ledger": f"HIGHWATER_LEDGER_URL={empty} highwater rebuild-ledger",
        "highwater rebuild-all": f"HIGHWATER_HOME={tmp_path / 'new'} highwater rebuild-all",
    }
    for page in PAGES:
        terminal = Terminal(tmp_path, environment)
        terminal.paste("\n".join(commands_of(page, replaced)), stdin="o3\n")
        assert terminal.ran, page
    assert deployed.failing() == {}
    assert set(deployed.current()) == {"o0", "o1", "o2"}, "the key that the page erases is erased"
    assert len(deployed.rows("raw")) == len(deployed.rows("events")) == 3
