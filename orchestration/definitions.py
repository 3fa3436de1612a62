"""What Dagster loads: see `workspace.yaml`."""

import os

import dagster as dg

from orchestration import log_lines
from orchestration.build import build_defs


@dg.definitions
def defs() -> dg.Definitions:
    """Everything, built when Dagster asks for it."""
    log_lines.install(os.environ)
    return build_defs(environment=os.environ)
