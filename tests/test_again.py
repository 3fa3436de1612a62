"""What is run once more after a failure, and what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import MOST, Failure, failures, main

pytestmark = pytest.mark.slow

# Fails, or has a fixture that does, the first time that it runs in a folder.
ONCE = """
from pathlib import Path
import pytest

def first(name):
    mark = Path(__file__).with_name(name)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

@pytest.fixture
def broken():
    assert not first("setup")

def test_fixture(broken):
    pass

def test_once():
    assert not first("call")
"""
# What tells of records beside what does not.
RECORDS = """
import pytest
from tests.records import of_records
from tests.support import make_stream
from highwater.errors import DependencyAwayError, UnbalancedError

@of_records()
def see_each_once(found):
    assert found == [1]

def test_helper():
    see_each_once([1, 1])

@pytest.mark.records
def test_marked():
    assert [1, 2] == [2, 1]

@pytest.mark.records
def test_fence():
    with pytest.raises(LookupError):
        pass

@pytest.mark.records
def test_balance():
    raise UnbalancedError("rejects", stored=1, found=2, remedy="none")

@pytest.mark.records
def test_waited():
    raise DependencyAwayError("the broker is away")

@pytest.mark.records
def test_long():
    pytest.fail("Timeout (>1200.0s)")

def test_other():
    assert False
"""
CRASHES = "import os\ndef test_crash():\n    os._exit(3)\n"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pytest's results go, in a folder that has tests of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "inner").mkdir()
    return tmp_path / "results.xml"


def ran(results: Path, text: str, *options: str) -> None:
    """Run tests as `make test` does."""
    (results.parent / "inner" / "test_it.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
        *options,
        "inner",
    ]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1


def told(results: Path, *failed: str) -> None:
    """Write results by hand."""
    cases = "".join(
        f'<testcase classname="inner.test_it" name="{name}"><failure message="assert 0">x</failure></testcase>'
        for name in failed
    )
    results.write_text(f'<testsuites><testsuite>{cases}<testcase classname="a" name="b"/></testsuite></testsuites>')


def test_what_passes_alone_is_named_and_forgiven(results: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran(results, ONCE)
    tests = ["inner/test_it.py::test_fixture", "inner/test_it.py::test_once"]
    assert [failure.test for failure in failures(results)] == tests
    assert main(results) == 0
    assert "2 failed beside other tests and passed alone:\n  " + "\n  ".join(tests) in capfd.readouterr().out


def test_what_fails_again_fails(results: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (results.parent / "inner" / "test_it.py").write_text(
        "def test_good():\n    pass\ndef test_bad():\n    assert False\n"
    )
    told(results, "test_good", "test_bad")
    assert main(results) == 1
    assert "2 failed beside other tests and failed alone:" in capfd.readouterr().out


def test_a_crash_is_not_run_again(results: Path) -> None:
    ran(results, CRASHES, "-n", "1")
    assert [failure.stands for failure in failures(results)] == [True]
    assert main(results) == 1


def test_what_tells_of_records_is_not_run_again(results: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An offset that was planned twice, or a record that was doubled, by a race, would pass alone."""
    root = Path(__file__).parents[1]
    (results.parent / "inner" / "conftest.py").write_text("from tests.conftest import pytest_pyfunc_call\n")
    (results.parent / "pytest.ini").write_text(f"[pytest]\npythonpath = {root}\nmarkers = records\n")
    ran(results, RECORDS, "-n", "1")
    standing = {failure.test.rpartition("::")[2] for failure in failures(results) if failure.stands}
    assert standing == {"test_helper", "test_marked", "test_fence", "test_balance"}
    assert len(failures(results)) == len(standing) + 3
    ran(results, RECORDS, "-k", "test_helper")
    assert main(results) == 1
    assert not capfd.readouterr().out


def test_tables_that_differ_from_their_topic_are_not_run_again() -> None:
    assert Failure("a", "tests/crash_support.py:218: AssertionError").stands
    assert Failure("a", "AssertionError: orders: differences").stands
    assert not Failure("a", "tests/test_crashes.py:98: AssertionError").stands


@pytest.mark.parametrize("failed", [MOST + 1, 0])
def test_many_failures_and_a_bad_end_without_any_are_bad(
    results: Path, failed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    told(results, *(f"test_{n}" for n in range(failed)))
    assert main(results) == 1
    assert not capfd.readouterr().out
