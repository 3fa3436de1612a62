"""An S3 server behind a proxy that can hold or spoil requests and lose answers."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dev.paths import REPOSITORY
from dev.processes import LOOPBACK, Child, accepts, free_port, wait_until
from dev.server import Server

START_SECONDS = 60.0
ANSWER_SECONDS = 30.0
HELD_SECONDS = 120.0
KEY, SECRET = "key-of-the-object-store", "secret-of-the-object-store"
REGION = "eu-central-1"


class ObjectStore(Server):
    """moto's S3, all in memory, in a process of its own: some calls of deltalake keep a whole Python waiting.

    Args:
        home: its log file lies below.
    """

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        super().__init__(home / "logs" / "object-store.log", [self.port], START_SECONDS)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its clients, and nothing of the machine's own account."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def client(self) -> Any:
        """A client of boto's, for what tests look at."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
        )

    def make_bucket(self, name: str) -> str:
        """Create a bucket; returns it as Spark and deltalake name it."""
        self.client().create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        return f"s3a://{name}"

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys of a bucket's objects, in order."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", ())]

    def writes(self, part: str) -> dict[str, int]:
        """The number of successful PUTs of each key that holds `part`; a key begins with its bucket."""
        found: dict[str, int] = self._ask("writes")
        return {key: count for key, count in found.items() if part in key}

    def requests(self) -> list[str]:
        """All requests so far, as method, path and query."""
        found: list[str] = self._ask("requests")
        return found

    def lose_answers(self, part: str, times: int = 1) -> None:
        """Carry out the next PUTs of a path that holds `part`, and answer them by an error."""
        self._ask("lose_answers", part=part, times=times)

    def conflict(self, part: str, times: int = 1) -> None:
        """Answer the next PUTs of a path that holds `part` as S3 does while another request for it is under way."""
        self._ask("conflict", part=part, times=times)

    @contextmanager
    def ignoring_conditions(self) -> Iterator[None]:
        """Take every PUT, as a store does that does not know the condition."""
        self._ask("ignore_conditions", on=True)
        try:
            yield
        finally:
            self._ask("ignore_conditions", on=False)

    @contextmanager
    def holding(self, part: str) -> Iterator[HeldRequest]:
        """Hold the next PUT of a path that holds `part`; it is let in at the end of the block."""
        held = HeldRequest(self, part, self._ask("hold", part=part))
        try:
            yield held
        finally:
            held.release()

    def _ask(self, order: str, **given: object) -> Any:
        request = urllib.request.Request(f"{self.url}/_door/{order}", json.dumps(given).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)

    def _make_child(self) -> Child:
        command: list[str | Path] = [sys.executable, "-m", "dev.object_store_server", str(self.port)]
        return Child("object-store", command, logs=self.log.parent, cwd=REPOSITORY)

    def _answers(self) -> bool:
        return accepts(self.port)


class HeldRequest:
    """One PUT that waits at the server's door.

    Args:
        store: the server.
        part: of the path.
        number: the server's.
    """

    def __init__(self, store: ObjectStore, part: str, number: int) -> None:
        self._store = store
        self._part = part
        self._number = number

    def _now(self) -> dict[str, str]:
        found: dict[str, str] = self._store._ask("held", number=self._number)  # noqa: SLF001 - one module
        return found

    def wait_arrived(self) -> None:
        """Wait until the request is at the door.

        Raises:
            ChildFailedError: none came.
        """
        wait_until(lambda: bool(self._now()["key"]), HELD_SECONDS, f"a PUT of {self._part}")

    def release(self) -> None:
        """Let it in."""
        self._store._ask("release", number=self._number)  # noqa: SLF001 - one module

    def wait_answered(self) -> str:
        """Wait until the store has carried it out or refused it; returns the status line.

        Raises:
            ChildFailedError: it did neither.
        """
        wait_until(lambda: bool(self._now()["status"]), HELD_SECONDS, f"the answer to the PUT of {self._part}")
        return self._now()["status"]
