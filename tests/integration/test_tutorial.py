"""The tutorial works when it is pasted: each file is saved and each command is run, beside a stack of its own.

Its Spark is that of all tests: a server that has run no slice yet would take as long as all else.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from dev.dagster_services import SHORTEST_LIFE_SECONDS
from dev.paths import REPOSITORY
from dev.processes import free_port, wait_until
from highwater import settings

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect

pytestmark = pytest.mark.slow

PAGE = REPOSITORY / "docs/tutorial.md"
READY = "Ctrl-C ends everything."
START_SECONDS = 300
# A run beside other tests: start of a worker, four commits, checks.
RUN_SECONDS = 420
READ = ".venv/bin/python read.py"
SHELL = 'source .highwater/env; highwater() { .venv/bin/highwater "$@"; }; '


# A block that begins so is run after the stack was started again, save the first.
STARTED = "source .highwater/env"


class Step(NamedTuple):
    """A block of the page.

    Args:
        section: the number of its section.
        file: the file that the text is saved as; None for commands.
        text: the block.
    """

    section: int
    file: str | None
    text: str


def steps(page: str) -> Iterator[Step]:
    """The blocks of Python and of commands, in their order."""
    for number, section in re.findall(r"^## (\d+)\.[^\n]*\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        for before, language, text in re.findall(r"(.*?)^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            if language == "python":
                yield Step(int(number), re.findall(r"Save this as `([\w.]+)`", before)[-1], text)
            elif language == "sh" and not text.startswith("make up"):
                yield Step(int(number), None, text)


def copied(folder: Path) -> Path:
    """A checkout with these files, and the virtual environment and the jars of this one."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, folder / name)
    (folder / ".venv").symlink_to((REPOSITORY / ".venv").resolve())
    (folder / ".highwater").mkdir()
    for name in ("jars", "ivy"):
        (folder / ".highwater" / name).symlink_to((REPOSITORY / ".highwater" / name).resolve())
    return folder


def has_settled(process: Path) -> bool:
    """Whether a process, by its folder in /proc, lives for longer than one that cannot start."""
    started = int((process / "stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started > SHORTEST_LIFE_SECONDS + 1


class Pasted:
    """A terminal in a checkout, and `make up` in another.

    Args:
        folder: the checkout.
        spark: the Connect server of the stack.
    """

    def __init__(self, folder: Path, spark: str) -> None:
        self.folder, self.spark = folder, spark
        self.up: subprocess.Popen[bytes] | None = None
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("HIGHWATER_", "DAGSTER_", "SPARK_"))}
        self.env["PYTHONPATH"] = str(folder)

    @contextmanager
    def stack(self) -> Iterator[None]:
        """`make up` until the block ends."""
        log = self.folder / "up.log"
        command = [".venv/bin/python", "-m", "dev.up", "--no-generate", "--ui-port", str(free_port())]
        with log.open("w") as out:
            self.up = up = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.env, settings.SPARK_REMOTE: self.spark},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            try:
                wait_until(lambda: up.poll() is not None or READY in log.read_text(), START_SECONDS, "the stack")
                assert up.poll() is None, log.read_text()
                yield
            finally:
                up.send_signal(signal.SIGINT)
                up.wait(120)

    def restart_code_server(self) -> None:
        """Load the definitions, as a new start of `make up` does: its supervision starts the server again.

        It takes a server that ends soon after its start for one that cannot start.
        """
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line, here = file.read_text(), (file.parent / "cwd").readlink() == self.folder
                if "code_server import serve" in line and "guard.py" not in line and here:
                    wait_until(partial(has_settled, file.parent), 60, "the server's first seconds")
                    os.kill(int(file.parent.name), signal.SIGTERM)

    def run(self, commands: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", SHELL + commands],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_SECONDS,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def counts(self) -> dict[str, int]:
        """Rows by table, as the page's own program reads them."""
        return {name: int(rows) for name, rows in re.findall(r"^(\w+) (\d+)$", self.run(READ), re.MULTILINE)}

    def rows(self, table: str) -> int:
        """Rows of a table; 0 while it is missing. A program for each look would take a core of the stack's."""
        from deltalake import DeltaTable

        assert self.up is not None
        assert self.up.poll() is None, (self.folder / "up.log").read_text()[-3000:]
        path = str(self.folder / ".highwater/lake/parcels" / table)
        return DeltaTable(path).to_pyarrow_dataset().count_rows() if DeltaTable.is_deltatable(path) else 0

    def waiting(self) -> int:
        """How many records wait on the parked topic."""
        found = re.search(r"^(\d+) parked records? match", self.run("highwater redrive-parked parcels"), re.MULTILINE)
        return int(found[1]) if found else 0


def test_each_step_has_the_counts_that_the_page_gives(tmp_path: Path, spark_server: SparkConnect) -> None:
    terminal, blocks = Pasted(copied(tmp_path), spark_server.remote), [*steps(PAGE.read_text())]
    assert {step.section for step in blocks} == {*range(1, 9)}
    (tmp_path / "read.py").write_text(next(step.text for step in blocks if step.file == "read.py"))
    loaded = {"raw": 900, "events": 898, "rejects": 2, "current": 300}
    with terminal.stack():
        for step in blocks:
            if step.file:
                (tmp_path / step.file).write_text(step.text)
                continue
            if step.section > 1 and step.text.startswith(STARTED):
                terminal.restart_code_server()
            output = terminal.run(step.text)
            if step.section == 4:
                assert re.search(r"^event +898 .*^reject: malformed +2 ", output, re.MULTILINE | re.DOTALL)
            if step.section == 5:
                wait_until(lambda: terminal.rows("current") == 300, RUN_SECONDS, "the first slice is in all tables")
                wait_until(lambda: terminal.rows("dlq") == 2, RUN_SECONDS, "two records are sent")
                assert terminal.counts() == loaded
                wait_until(lambda: terminal.waiting() == 2, RUN_SECONDS, "two records are parked")
            if step.text.startswith(STARTED) and step.section == 7:
                wait_until(lambda: terminal.rows("events") == 899, RUN_SECONDS, "the retried record is an event")
        assert terminal.counts() == {"raw": 901, "events": 900, "rejects": 1, "current": 300}
        assert re.search("{'place': 'door', 'parcels': 300,", terminal.run(READ))
        assert re.search("^produced +900$", terminal.run("highwater audit parcels"), re.MULTILINE)
