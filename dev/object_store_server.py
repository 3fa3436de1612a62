"""moto's S3 behind a door that holds, spoils and counts requests: `python -m dev.object_store_server PORT`."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

from dev.processes import LOOPBACK

# Below it a test gives its orders; no bucket has such a name.
ORDERS = "/_door/"
# Ends the wait of a request that a test forgot: longer than any test waits.
HELD_SECONDS = 300.0
_CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code><Message>another request is under way</Message></Error>"


@dataclass
class HeldRequest:
    """One PUT that is to be held: the first whose path holds `part`."""

    part: str
    key: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    status: str = ""


class Door:
    """The WSGI application."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        # moto looks for the object and then writes it; S3 does both in one step.
        self._one_put = threading.Lock()
        self._ignores_conditions = False
        self._lost_answers: Counter[str] = Counter()
        self._conflicts: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()
        self._holds: list[HeldRequest] = []
        self._requests: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        key = str(environ["PATH_INFO"])
        if key.startswith(ORDERS):
            length = int(environ.get("CONTENT_LENGTH") or 0)
            answer = self._obey(key.removeprefix(ORDERS), json.loads(environ["wsgi.input"].read(length) or b"{}"))
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(answer).encode()]
        self._requests.append(f"{environ['REQUEST_METHOD']} {key}?{environ.get('QUERY_STRING', '')}")
        if environ["REQUEST_METHOD"] != "PUT":
            return self._moto(environ, start_response)  # type: ignore[no-any-return]
        held = next((one for one in self._holds if not one.key and one.part in key), None)
        if held is not None:
            held.key = key
            held.released.wait(HELD_SECONDS)
        status, headers, body = self._put(key, environ)
        if held is not None:
            held.status = status
        start_response(status, headers)
        return body

    def _obey(self, order: str, given: Mapping[str, Any]) -> Any:
        if order == "requests":
            return self._requests
        if order == "hold":
            self._holds.append(HeldRequest(given["part"]))
            return len(self._holds) - 1
        if order == "held":
            one = self._holds[given["number"]]
            return {"key": one.key, "status": one.status}
        if order == "release":
            one = self._holds[given["number"]]
            one.key = one.key or "nothing came"
            one.released.set()
        elif order == "ignore_conditions":
            self._ignores_conditions = given["on"]
        elif order == "lose_answers":
            self._lost_answers[given["part"]] += given["times"]
        elif order == "conflict":
            self._conflicts[given["part"]] += given["times"]
        return dict(self._writes)

    def _put(self, key: str, environ: dict[str, Any]) -> tuple[str, Any, list[bytes]]:
        if self._ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if _taken(self._conflicts, key):
            return "409 Conflict", [("Content-Type", "application/xml")], [_CONFLICT]
        answers: list[tuple[Any, ...]] = []

        def answered(*given: Any) -> None:
            answers.append(given)

        with self._one_put if "HTTP_IF_NONE_MATCH" in environ else nullcontext():
            body = [*self._moto(environ, answered)]
        status, headers = answers[-1][:2]
        if not status.startswith("200"):
            return status, headers, body
        self._writes[key] += 1
        if _taken(self._lost_answers, key):
            return "500 Internal Server Error", [("Content-Length", "0")], []
        return status, headers, body


def _taken(times: Counter[str], key: str) -> bool:
    """Whether something is to happen to a key; then it is to happen once less."""
    part = next((part for part, left in times.items() if left and part in key), None)
    if part is not None:
        times[part] -= 1
    return part is not None


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def main(port: int) -> None:
    """The process."""
    run_simple(LOOPBACK, port, Door(), threaded=True, request_handler=_Quiet)


if __name__ == "__main__":
    main(int(sys.argv[1]))
