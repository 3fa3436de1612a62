from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev.processes import (
    LOOPBACK,
    PORTS,
    Child,
    ChildFailedError,
    _claims,
    accepts,
    free_port,
    signals_raise_interrupt,
    wait_until,
)

SERVER = """
import socket, sys, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(sys.argv[1]))); s.listen(); print("listening", flush=True)
time.sleep(600)
"""


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Children of a test; ended after it."""
    made: list[Child] = []
    yield made
    for child in made:
        child.kill()


def test_a_free_port_is_on_loopback_and_below_the_range_of_outgoing_connections() -> None:
    port = free_port()
    assert port in PORTS
    with socket.socket() as probe:
        probe.bind((LOOPBACK, port))


def test_the_preferred_port_is_taken_only_when_free() -> None:
    free = free_port()
    assert free_port(prefer=free) == free
    assert free_port(prefer=0) > 0
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        assert free_port(prefer=taken.getsockname()[1]) != taken.getsockname()[1]


def test_a_preferred_port_is_not_given_to_two_processes_before_one_listens() -> None:
    """Two stacks that began at once both chose the usual port, and one asked the other's webserver for its runs."""
    port = free_port()
    _claims.pop(port).close()
    choose = f"from dev.processes import free_port; print(free_port(prefer={port}), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", choose], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert int(first.stdout.readline()) == port
        assert free_port(prefer=port) != port
        first.communicate(b"\n")
    assert free_port(prefer=port) == port
    assert free_port(prefer=port) == port


def test_a_child_is_healthy_when_the_check_says_so_and_gone_after_stop(tmp_path: Path, children: list[Child]) -> None:
    port = free_port()
    child = Child("server", python(SERVER, port), logs=tmp_path)
    children.append(child)
    child.start()
    child.wait_healthy(lambda: accepts(port), 30)
    assert child.log.read_text() == "listening\n"
    child.stop()
    assert not child.alive
    assert not accepts(port)


def test_a_killed_child_no_longer_listens_when_kill_returns(tmp_path: Path, children: list[Child]) -> None:
    """The guard was gone before the JVM: its port still accepted, and a server started again was taken for ready."""
    port = free_port()
    child = Child("server", python(SERVER, port), logs=tmp_path)
    children.append(child)
    for _ in range(3):
        child.start()
        child.wait_healthy(lambda: accepts(port), 30)
        child.kill()
        assert not accepts(port)


def test_a_child_that_ends_early_is_reported_with_the_end_of_its_log(tmp_path: Path, children: list[Child]) -> None:
    child = Child("broken", python("print('the reason', flush=True); raise SystemExit(7)"), logs=tmp_path)
    children.append(child)
    child.start()
    with pytest.raises(ChildFailedError) as caught:
        child.wait_healthy(lambda: False, 30)
    assert caught.value.problem == "broken ended with exit status 7"
    assert "the reason" in str(caught.value.found)
    assert str(tmp_path / "broken.log") in caught.value.remedy


def test_a_child_that_is_never_healthy_is_killed_at_the_deadline(tmp_path: Path, children: list[Child]) -> None:
    child = Child("deaf", python("import time; time.sleep(600)"), logs=tmp_path)
    children.append(child)
    child.start()
    with pytest.raises(ChildFailedError, match="deaf was not ready within 1 s"):
        child.wait_healthy(lambda: False, 0.6)
    assert not child.alive


def test_a_program_that_is_not_there_is_reported(tmp_path: Path, children: list[Child]) -> None:
    child = Child("absent", [tmp_path / "no-such-program"], logs=tmp_path)
    children.append(child)
    child.start()
    with pytest.raises(ChildFailedError, match="cannot start"):
        child.wait_healthy(lambda: False, 30)


def test_the_tail_of_a_second_start_has_nothing_of_the_first(tmp_path: Path, children: list[Child]) -> None:
    child = Child("counter", python("import os; print(os.getpid())"), logs=tmp_path)
    children.append(child)
    child.start()
    child.wait(30)
    first = child.tail()
    child.start()
    child.wait(30)
    assert first
    assert first not in child.tail()
    assert first in child.log.read_text()


def test_kill_ends_grandchildren_too(tmp_path: Path, children: list[Child]) -> None:
    pid_file = tmp_path / "pid"
    code = """
    import subprocess, sys, time
    heir = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[1] + ".part", "w").write(str(heir.pid))
    import os; os.rename(sys.argv[1] + ".part", sys.argv[1])
    time.sleep(600)
    """
    child = Child("parent", python(code, pid_file), logs=tmp_path)
    children.append(child)
    child.start()
    wait_until(pid_file.exists, 30, "the grandchild")
    heir = int(pid_file.read_text())
    assert runs(heir)
    child.kill()
    wait_until(lambda: not runs(heir), 10, "the grandchild's end")


@pytest.mark.crash
def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """SIGKILL lets no `finally` run, so the guard beside each child has to notice that the parent is gone."""
    port = free_port()
    code = f"""
    import sys, time
    from pathlib import Path
    from dev.processes import Child
    Child("server", [sys.executable, "-c", {SERVER!r}, "{port}"], logs=Path(sys.argv[1])).start()
    time.sleep(600)
    """
    parent = subprocess.Popen(python(code, tmp_path))
    try:
        wait_until(lambda: accepts(port), 30, "the server's start")
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not accepts(port), 15, "the server's end")


def test_a_child_outlives_the_thread_that_started_it(tmp_path: Path, children: list[Child]) -> None:
    """PR_SET_PDEATHSIG, the usual way, fires at the end of the starting thread: a pool's children were killed."""
    import threading

    port = free_port()
    child = Child("server", python(SERVER, port), logs=tmp_path)
    children.append(child)
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    child.wait_healthy(lambda: accepts(port), 30)
    time.sleep(0.7)  # longer than the guard's poll: what is shown is that nothing happens in it
    assert child.alive


def test_sigterm_ends_a_block_as_ctrl_c_does() -> None:
    with signals_raise_interrupt(), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
