"""The log store for local files: an entry of Delta's log is written once, whatever other processes write."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from dev.processes import wait_until
from dev.spark_local import environment, local_conf, write_conf_dir
from highwater.resources.object_store import FILE_LOG_STORE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A JVM with the classes of Spark and ours, without a session."""
    from pyspark.java_gateway import launch_gateway

    home = tmp_path_factory.mktemp("log-store")
    folder = write_conf_dir(home, "local", local_conf(home, driver_memory_mb=512))
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment(folder).items():
            patched.setenv(name, value)
        gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
    yield gateway.jvm
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "orders" / "current" / "_delta_log"
    folder.mkdir(parents=True)
    return folder


class Store:
    """The store in the JVM."""

    def __init__(self, jvm: Any, log: Path, name: str = FILE_LOG_STORE) -> None:
        self._jvm = jvm
        self._log = log
        self._conf = jvm.org.apache.hadoop.conf.Configuration()
        self._store = getattr(getattr(jvm, name.rpartition(".")[0]), name.rpartition(".")[2])(self._conf)

    def write(self, name: str, lines: Path, *, overwrite: bool = False) -> None:
        """Write an entry of the lines of a file, or of a pipe as somebody writes to it."""
        content = self._jvm.java.nio.file.Files.lines(self._jvm.java.io.File(str(lines)).toPath())
        path = self._jvm.org.apache.hadoop.fs.Path(f"file:{self._log}/{name}")
        self._store.write(path, content.iterator(), overwrite, self._conf)

    def read(self, name: str) -> list[str]:
        path = self._jvm.org.apache.hadoop.fs.Path(f"file:{self._log}/{name}")
        lines = self._store.read(path, self._conf)
        return [lines.next() for _ in iter(lines.hasNext, False)]


def lines_of(folder: Path, text: str) -> Path:
    file = folder / "lines"
    file.write_text(text)
    return file


def test_an_entry_is_there_whole_or_not_at_all(jvm: Any, log: Path, tmp_path: Path) -> None:
    store = Store(jvm, log)
    store.write("0.json", lines_of(tmp_path, '{"größe": 1}\n{"b": 2}\n'))
    assert (log / "0.json").read_text() == '{"größe": 1}\n{"b": 2}\n'
    assert store.read("0.json") == ['{"größe": 1}', '{"b": 2}']
    assert [file.name for file in log.iterdir()] == ["0.json"], "nothing else is left"


def test_an_entry_that_is_there_stays(jvm: Any, log: Path, tmp_path: Path) -> None:
    (log / "0.json").write_text("first")
    with pytest.raises(Py4JJavaError, match=r"java\.nio\.file\.FileAlreadyExistsException"):
        Store(jvm, log).write("0.json", lines_of(tmp_path, "second\n"))
    assert (log / "0.json").read_text() == "first"
    assert [file.name for file in log.iterdir()] == ["0.json"]


def test_an_entry_that_another_process_writes_at_the_same_moment_stays(jvm: Any, log: Path, tmp_path: Path) -> None:
    """Between the look at the folder and the end of our own write: the pipe holds the store there."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as beside:
        late: Future[None] = beside.submit(Store(jvm, log).write, "0.json", pipe)
        # Open to both sides, so that it waits for no reader.
        with os.fdopen(os.open(pipe, os.O_RDWR), "wb", buffering=0) as opened:
            opened.write(b"second\n")
            wait_until(lambda: any(log.iterdir()), 60, "the file that the store writes first")
            (log / "0.json").write_text("first")
        with pytest.raises(Py4JJavaError, match=r"java\.nio\.file\.FileAlreadyExistsException"):
            late.result()
    assert (log / "0.json").read_text() == "first"
    assert [file.name for file in log.iterdir()] == ["0.json"]


def test_a_hint_is_replaced(jvm: Any, log: Path, tmp_path: Path) -> None:
    store = Store(jvm, log)
    for text in ("first\n", "second\n"):
        store.write("_last_checkpoint", lines_of(tmp_path, text), overwrite=True)
    assert (log / "_last_checkpoint").read_text() == "second\n"


def test_a_hint_that_another_process_replaced_is_read(jvm: Any, log: Path, tmp_path: Path) -> None:
    """Hadoop keeps checksums beside its files, and refuses a file that delta-rs wrote in the place of one."""
    store = Store(jvm, log)
    store.write("_last_checkpoint", lines_of(tmp_path, "first\n"), overwrite=True)
    assert [file.name for file in log.iterdir()] == ["_last_checkpoint"]
    by_hadoop = Store(jvm, log, "io.delta.storage.LocalLogStore")
    by_hadoop.write("_last_checkpoint", lines_of(tmp_path, "second\n"), overwrite=True)
    (log / "_last_checkpoint").write_text("third\n")
    with pytest.raises(Py4JJavaError, match="ChecksumException"):
        by_hadoop.read("_last_checkpoint")
    assert store.read("_last_checkpoint") == ["third"]
    store.write("_last_checkpoint", lines_of(tmp_path, "fourth\n"), overwrite=True)
    assert by_hadoop.read("_last_checkpoint") == ["fourth"]


def test_an_entry_that_is_not_there_is_absent(jvm: Any, log: Path) -> None:
    with pytest.raises(Py4JJavaError, match=r"java\.io\.FileNotFoundException"):
        Store(jvm, log).read("0.json")


def test_a_log_without_a_folder_is_absent(jvm: Any, log: Path, tmp_path: Path) -> None:
    log.rmdir()
    with pytest.raises(Py4JJavaError, match=r"java\.io\.FileNotFoundException"):
        Store(jvm, log).write("0.json", lines_of(tmp_path, "first\n"))


def test_of_two_writers_at_once_each_entry_has_one(jvm: Any, log: Path, tmp_path: Path) -> None:
    """With Delta's own store for local files both took 50 of 400."""
    lines, stores = lines_of(tmp_path, "x\n" * 100), [Store(jvm, log) for _ in range(2)]
    together = threading.Barrier(len(stores))

    def write(store: Store) -> list[int]:
        taken = []
        for number in range(400):
            together.wait(60)
            with suppress(Py4JJavaError):
                store.write(f"{number}.json", lines)
                taken.append(number)
        return taken

    with ThreadPoolExecutor(len(stores)) as beside:
        first, second = beside.map(write, stores)
    assert sorted([*first, *second]) == [*range(400)]
    assert len([*log.iterdir()]) == 400
