"""The definitions that Dagster loads; `workspace.yaml` names this module."""

import os
from pathlib import Path

import dagster as dg

from highwater.orchestration import log_lines
from highwater.orchestration.build import build_defs
from highwater.stream_files import find_streams_folder, read_streams
from resources import project_resources

STREAMS = Path(__file__).resolve().parent.parent / "assets" / "streams"


@dg.definitions
def defs() -> dg.Definitions:
    """All definitions, built when Dagster asks for them."""
    log_lines.install(os.environ)
    return build_defs(
        streams=read_streams(find_streams_folder(default=STREAMS)),
        resources=project_resources(),
        environment=os.environ,
    )
