"""Pages of Spark's user interface, and paths of its answers."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

from tests.helpers.support import PAGE_SECONDS, fetch_rest

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect


def list_answers(server: SparkConnect) -> list[str]:
    [application] = fetch_rest(server, "applications")
    base = f"applications/{application['id']}"
    return [f"{base}/environment", f"{base}/jobs", f"{base}/sql?details=true&planDescription=true&length=1000"]


def fetch_page(server: SparkConnect, path: str) -> str:
    with urllib.request.urlopen(f"{server.ui_url}/{path}/", timeout=PAGE_SECONDS) as answer:
        text: str = answer.read().decode(errors="replace")
    return text
