"""The endpoints `/metrics` and `/health` over HTTP, each measured at most once in some seconds for all who ask."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

    from highwater.orchestration.reporting.health import Health
    from highwater.orchestration.reporting.prometheus_metrics import MetricSamples

T = TypeVar("T")
# Prometheus waits 10 s for a scrape by default.
PATIENCE_SECONDS = 8.0
HEALTH_SECONDS = 5.0
_LOG = logging.getLogger(__name__)


class CachedValue(Generic[T]):
    """A value that is computed on request, at most once in some seconds and by one thread at a time.

    Args:
        compute: computes the value.
        seconds: how long a value serves all who ask.
        patience: how many seconds a caller waits for a computation before it gets the value of before.
    """

    def __init__(self, compute: Callable[[], T], seconds: float, patience: float = PATIENCE_SECONDS) -> None:
        self._compute = compute
        self._seconds = seconds
        self._patience = patience
        self._changed = threading.Condition()
        self._value: T | None = None
        self._until = 0.0
        self._computing = False

    def get(self) -> T | None:
        """The value; older than usual while a computation takes long or fails, and None before the first one ends."""
        with self._changed:
            if time.monotonic() >= self._until:
                if not self._computing:
                    self._computing = True
                    threading.Thread(target=self._refresh, daemon=True).start()
                self._changed.wait_for(lambda: not self._computing, self._patience)
            return self._value

    def _refresh(self) -> None:
        value = None
        try:
            value = self._compute()
        except Exception as error:  # noqa: BLE001 - the value of before serves on, and its time shows its age
            _LOG.error("could not be measured: %s", type(error).__name__)
        with self._changed:
            if value is not None:
                self._value = value
            self._until = time.monotonic() + self._seconds
            self._computing = False
            self._changed.notify_all()


def build_application(metrics: CachedValue[MetricSamples], health: CachedValue[Health]) -> WSGIApplication:
    """The WSGI application of both endpoints.

    Args:
        metrics: the numbers.
        health: the conditions of health.
    """
    from prometheus_client import CollectorRegistry, make_wsgi_app

    def serve(environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            found = metrics.get()
            if found is None:
                return _respond_with_text(start, "503 Service Unavailable", "the first measuring is not over\n")
            registry = CollectorRegistry()
            registry.register(found)
            scrape: Iterable[bytes] = make_wsgi_app(registry)(environ, start)
            return scrape
        if path == "/health":
            return _respond_with_health(start, health.get())
        return _respond_with_text(start, "404 Not Found", "there are /metrics and /health\n")

    return serve


def _respond_with_health(start: StartResponse, found: Health | None) -> Iterable[bytes]:
    plain: Mapping[str, Any] = {"status": "unknown", "checks": {}} if found is None else found.to_plain()
    status = "200 OK" if found is not None and found.ok else "503 Service Unavailable"
    body = json.dumps(plain, indent=2) + "\n"
    return _respond_with_text(start, status, body, "application/json")


def _respond_with_text(
    start: StartResponse, status: str, body: str, kind: str = "text/plain; charset=utf-8"
) -> Iterable[bytes]:
    data = body.encode()
    start(status, [("Content-Type", kind), ("Content-Length", str(len(data)))])
    return [data]


class _QuietHandler(WSGIRequestHandler):
    """Logs no requests; a client that sends nothing is let go after some seconds."""

    timeout = 30

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def open_server(host: str, port: int, serve: WSGIApplication) -> WSGIServer:
    """A server that is bound and not serving yet; a thread for each request.

    Args:
        host: the address to listen on.
        port: the port; 0 takes a free one.
        serve: the application.

    Raises:
        OSError: the address cannot be bound.
    """
    from prometheus_client.exposition import ThreadingWSGIServer

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return make_server(host, port, serve, Server, handler_class=_QuietHandler)
