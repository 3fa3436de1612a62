"""Run what failed in a whole run once more, by itself: `python -m tests.again RESULTS`.

Four workers with a broker and a Spark leave a machine of two cores no rest, and one that is shared stands still for
seconds. What then passes alone has told of the machine; it is named, and its first failure stays in the output above.

Not repeated is what no machine excuses: a process that crashed, and what was asserted of records, which a race loses or
doubles in one run of many (`tests.records`). Nor are more than a few failures.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.records import MARK

MOST = 3
# By what stands in a failure's text: xdist's word for a worker that is gone, the mark of what tells of records, where
# tables are held against a topic after crashes, and what the comparison with the generator's account says.
STANDING = ("crashed while running", MARK, "tests/crash_support.py", ": differences")


@dataclass(frozen=True)
class Failure:
    """One test that failed, or whose fixtures did."""

    test: str
    text: str

    @property
    def stands(self) -> bool:
        """Whether no second run may take it back."""
        return any(told in self.text for told in STANDING)


def failures(results: Path) -> list[Failure]:
    """What failed, from pytest's JUnit file.

    Raises:
        FileNotFoundError: the run did not come to its end.
    """
    found = []
    for case in ET.parse(results).iter("testcase"):
        kinds = [*case.iter("failure"), *case.iter("error")]
        if kinds:
            found.append(Failure(_node_id(case), "\n".join(f"{kind.get('message')}\n{kind.text}" for kind in kinds)))
    return found


def _node_id(case: ET.Element) -> str:
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def main(results: Path) -> int:
    """Returns the exit status: 0 only if each failure passed alone."""
    found = failures(results)
    if not found or len(found) > MOST or any(failure.stands for failure in found):
        return 1
    tests = [failure.test for failure in found]
    _say(f"{len(tests)} failed beside other tests, and run once more by themselves:", tests)
    status = subprocess.call([sys.executable, "-m", "pytest", "-m", "", *tests])
    _say(f"{len(tests)} failed beside other tests and {'passed' if status == 0 else 'failed'} alone:", tests)
    return status


def _say(what: str, tests: Sequence[str]) -> None:
    sys.stdout.write("\n  ".join([what, *tests]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
