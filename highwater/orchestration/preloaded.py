"""Imported by the process from which a code server's workers are forked; the import loads what runs need."""

import os

from highwater.orchestration.code_server import PRELOADED_MODULE, preload

preload(os.environ[PRELOADED_MODULE])
