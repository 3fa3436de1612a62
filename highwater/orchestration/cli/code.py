"""The command `serve-code`: Dagster's code server."""

from __future__ import annotations

import os

import click

from highwater.orchestration import code_server
from highwater.settings import read_log_format

PORT = 4266


@click.command("serve-code")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(1, 65535), default=PORT, show_default=True, help="The port to listen on.")
@click.option("--module-name", "module", required=True, help="The module with the definitions, seen from this folder.")
@click.option("--location-name", "location", default="highwater", show_default=True, help="The code location's name.")
def serve_code(host: str, port: int, module: str, location: str) -> None:
    """Serve the definitions to Dagster's webserver and daemon, and start runs, until the process is ended.

    It is `dagster api grpc`, except that the process of a run has everything imported when it starts. Where another
    launcher starts runs, in pods of their own for example, Dagster's command does as well.
    """
    log_format = "json" if read_log_format(os.environ) == "json" else "colored"
    command = code_server.build_command(host=host, port=port, module=module, location=location, log_format=log_format)
    os.execv(command[0], command)  # noqa: S606 - the process becomes the server, so its signals reach it
