"""A process that answers as a Spark Connect server does until it is asked for a plan, and then hangs."""

from __future__ import annotations

import os
import signal
import threading
from concurrent import futures
from typing import Any

import grpc  # type: ignore[import-untyped] # its stubs are a package of their own
from pyspark.sql.connect import proto
from pyspark.sql.connect.proto import base_pb2_grpc


class FakeConnectServer(base_pb2_grpc.SparkConnectServiceServicer):
    """Takes settings, and never does the next step."""

    def Config(self, request: Any, context: object) -> Any:  # noqa: N802 - gRPC's name
        del context
        return proto.ConfigResponse(session_id=request.session_id, server_side_session_id="1")

    def AnalyzePlan(self, request: object, context: object) -> Any:  # noqa: N802 - gRPC's name
        del request, context
        _stop()
        return proto.AnalyzePlanResponse()

    def ExecutePlan(self, request: object, context: object) -> Any:  # noqa: N802 - gRPC's name
        del request, context
        _stop()
        yield proto.ExecutePlanResponse()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    # Another thread may take the signal, and this one goes on for a moment.
    threading.Event().wait()


def main() -> None:
    """Serve until killed."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    base_pb2_grpc.add_SparkConnectServiceServicer_to_server(FakeConnectServer(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)  # noqa: T201 - what its parent reads
    server.wait_for_termination()


if __name__ == "__main__":
    main()
