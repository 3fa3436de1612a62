"""Runs one command and ends it, with everything it started, when the process that asked for it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

POLL_SECONDS = 0.5
LOWEST = 3
GRACE_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    parent, held, command = int(arguments[0]), int(arguments[1]), arguments[2:]
    # A handler, not SIG_IGN: what is ignored stays ignored in the child. The group gets the signal, so the child too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # Linux lets go of what a killed process had open from the highest descriptor down: below its sockets, so that the
    # other end reads as ended only when those are closed.
    os.dup2(held, LOWEST)
    try:
        child = subprocess.Popen(command, pass_fds=(LOWEST,))
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    waiter = threading.Thread(target=child.wait, daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(POLL_SECONDS)
        if os.getppid() != parent:
            _end_group(waiter)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_group(waiter: threading.Thread) -> None:
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while waiter.is_alive() and time.monotonic() < deadline:
        waiter.join(0.1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
