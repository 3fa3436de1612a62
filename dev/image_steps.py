"""The steps of deploy/Dockerfile without a container engine: `python -m dev.image_steps FOLDER` makes the image's tree.

Each instruction is taken from the file itself. The paths of the image lie below the folder. At the end the image's
command is started, and its health check has to succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dev.paths import REPOSITORY
from dev.processes import free_port

DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
# Changes of the system itself: packages of Debian, a user. A machine that runs these steps has what they bring.
SYSTEM = ("apt-get", "useradd")
# The folders that such a step makes, which later ones need.
FOLDERS = ("/var/lib/highwater", "/opt/dagster")
_PATHS = re.compile(r"(?<![\w./-])/(?=(?:src|opt/highwater|opt/project|opt/dagster|var/lib/highwater)\b)")
PORT = "4266"
VENV = "/opt/highwater/venv"
JARS = "/opt/highwater/jars/spark"
# What an installation of this project itself leaves among the packages.
OWN = ("highwater", "__editable__")
# Those that the image's commands start.
PROGRAMS = ("dagster",)
STEP_SECONDS = 1800
HEALTHY_SECONDS = 120
# The doctor starts a driver and tries five things on it, in half a minute; on a machine under load it took two.
CALL_SECONDS = 400


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile.

    Args:
        name: for example `RUN`.
        text: the rest of it, in one line.
    """

    name: str
    text: str

    @property
    def is_system(self) -> bool:
        """Whether it changes the system, so that it is left out here."""
        return self.name == "RUN" and any(word in self.text for word in SYSTEM)


def instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, in their order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def below(text: str, root: Path) -> str:
    """A text with the image's own paths below another root."""
    return _PATHS.sub(f"{root}/", text)


class Image:
    """The image's tree below a folder.

    Args:
        root: an empty folder, or one that does not exist.
        packages: a virtual environment with the locked packages, which are linked instead of downloaded; None to do
            what the steps say.
        jars: the jars of Spark, which are copied instead of downloaded; None to do what the steps say.
    """

    def __init__(self, root: Path, *, packages: Path | None = None, jars: Path | None = None) -> None:
        self.root = root
        self.packages = packages
        self.jars = jars
        self.folder = root
        self.environment = {"PATH": f"{root / 'bin'}{os.pathsep}/usr/bin:/bin", "HOME": str(root)}
        self.command: list[str] = []
        self.health: list[str] = []

    def build(self, steps: Sequence[Instruction]) -> None:
        """Carry out all instructions.

        Raises:
            subprocess.CalledProcessError: a step failed.
        """
        (self.root / "bin").mkdir(parents=True)
        (self.root / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3.11")
        for folder in FOLDERS:
            Path(below(folder, self.root)).mkdir(parents=True)
        if self.jars is not None:
            shutil.copytree(self.jars, Path(below(JARS, self.root)))
        for step in steps:
            print(f"{step.name} {step.text}", flush=True)
            if not step.is_system:
                self._carry_out(step)

    def _carry_out(self, step: Instruction) -> None:
        text = below(step.text, self.root)
        match step.name:
            case "RUN" if "--require-hashes" in text and self.packages is not None:
                self._link(self.packages)
            case "RUN":
                run = ["/bin/sh", "-ec", text]
                subprocess.run(run, check=True, env=self.environment, cwd=self.folder, timeout=STEP_SECONDS)
            case "COPY" if "--from=" not in text:
                *sources, target = shlex.split(text)
                self._copy(sources, target)
            case "WORKDIR":
                self.folder = Path(text)
                self.folder.mkdir(parents=True, exist_ok=True)
            case "ENV":
                self.environment |= dict(one.split("=", 1) for one in shlex.split(text))
            case "CMD":
                self.command = json.loads(text)
            case "HEALTHCHECK":
                self.health = json.loads(text.partition("CMD ")[2])
            case _:
                pass  # FROM, USER and EXPOSE change no file

    def _link(self, packages: Path) -> None:
        """Give the environment of the tree all packages of another one, but for this project's own."""
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        venv, links = Path(below(VENV, self.root)), self.root / "packages"
        links.mkdir(exist_ok=True)
        for found in (packages / "lib" / python / "site-packages").iterdir():
            link = links / found.name
            if not (found.name.startswith(OWN) or link.exists()):
                link.symlink_to(found)
        (venv / "lib" / python / "site-packages" / "linked.pth").write_text(f"{links}\n")
        for program in PROGRAMS:
            _, _, rest = (packages / "bin" / program).read_text().partition("\n")
            (venv / "bin" / program).write_text(f"#!{venv / 'bin' / 'python'}\n{rest}")
            (venv / "bin" / program).chmod(0o755)

    def call(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Carry out a program of the image, and return what it printed."""
        command = [self._program(words), *words[1:]]
        return subprocess.run(
            command,
            env={**self.environment, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
        )

    def _copy(self, sources: Sequence[str], target: str) -> None:
        for source, into in self._places(sources, target):
            into.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, into, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.suffix == ".conf":
                into.write_text(below(source.read_text(), self.root))
            else:
                shutil.copy(source, into)

    def _places(self, sources: Sequence[str], target: str) -> Iterator[tuple[Path, Path]]:
        for source in sources:
            yield REPOSITORY / source, Path(target) / Path(source).name if target.endswith("/") else Path(target)

    def ensure_healthy(self) -> None:
        """Start the image's command, and wait until its health check succeeds.

        Raises:
            TimeoutError: it does not in time.
        """
        port = str(free_port())
        command, health = ([word.replace(PORT, port) for word in words] for words in (self.command, self.health))
        variables = {**self.environment, "DAGSTER_PG_HOST": "", "DAGSTER_PG_USERNAME": "", "DAGSTER_PG_PASSWORD": ""}
        server = subprocess.Popen([self._program(command), *command[1:]], env=variables, cwd=self.folder)
        try:
            deadline = time.monotonic() + HEALTHY_SECONDS
            health_command = [self._program(health), *health[1:]]
            while subprocess.run(health_command, env=variables, cwd=self.folder, check=False).returncode:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise TimeoutError(f"{' '.join(health)} does not succeed")
                time.sleep(1)
        finally:
            server.terminate()
            server.wait()

    def _program(self, words: Sequence[str]) -> str:
        found = shutil.which(words[0], path=self.environment["PATH"])
        assert found is not None, f"{words[0]} is not in the image"
        return found


def main() -> int:
    """The program; exit status 1 where the image is not healthy."""
    parser = argparse.ArgumentParser(prog="python -m dev.image_steps", description="Make the image's tree in a folder.")
    parser.add_argument("folder", type=Path, help="does not exist yet, or is empty")
    root = parser.parse_args().folder.absolute()
    image = Image(root)
    image.build(instructions(DOCKERFILE.read_text()))
    image.ensure_healthy()
    print("healthy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
