"""The schema registry: schemas by their ID, GUID or subject, from a registry with Confluent's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.resources.kafka_options import redact_values
from highwater.resources.kafka_tls import read_file_versions
from highwater.schemas import Schema, SchemaReference
from highwater.settings import SCHEMA_REGISTRY_CONFIG, SCHEMA_REGISTRY_URL

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

    from highwater.settings import Plain, Settings

T = TypeVar("T")

# The client waits so long to connect, and for each part of an answer. A registry that accepts a connection and then
# is silent takes 3 tries x 4 s + pauses of up to 0.2 s and 0.4 s = 12.6 s for each request and address; one that
# refuses connections takes the pauses alone. A schema is one request, and one more for each of its references.
REQUEST_SECONDS = 4
RETRIES = 2
PAUSE_MS = 200
PATIENCE: Mapping[str, Plain] = MappingProxyType(
    {"timeout": REQUEST_SECONDS, "max.retries": RETRIES, "retries.wait.ms": PAUSE_MS}
)

# IDs are signed integers of 32 bits in the registry: larger ones come from bytes that are no framing.
LARGEST_ID = 2**31 - 1

NOT_FOUND = 404
# The registry's own codes for a subject, a version and a schema that it does not know. A 404 with another code is an
# answer of something else, such as a proxy, or of a wrong path.
UNKNOWN = frozenset({40401, 40402, 40403})
REFUSED = frozenset({401, 403})
# The types of schemas whose references are read.
_REFERENCING = frozenset({"AVRO", "PROTOBUF"})


class SchemaRegistry:
    """A schema registry. Found schemas are remembered, since a registry never changes one; unknown ones are not.

    Args:
        url: the addresses, separated by commas.
        config: further properties of the client; secrets are never shown.

    Raises:
        ConfigurationError: a property is set elsewhere.
    """

    def __init__(self, url: str, config: Mapping[str, Plain] = MappingProxyType({})) -> None:
        if "url" in config:
            raise ConfigurationError(
                f"{SCHEMA_REGISTRY_CONFIG} sets url", remedy=f"leave it out: {SCHEMA_REGISTRY_URL} sets it"
            )
        self._properties = {**PATIENCE, **config, "url": url}
        self._secrets = select_secrets(url, config)
        self._shown = ",".join(map(_without_login, url.split(",")))
        self._client: SchemaRegistryClient | None = None
        self._opening = Lock()
        self._by_id: dict[int, Schema] = {}
        self._by_guid: dict[str, Schema] = {}

    def __repr__(self) -> str:
        return f"SchemaRegistry({self._shown})"

    def fetch_schema(self, schema_id: int) -> Schema | None:
        """The schema with an ID; None if the registry does not know it.

        Raises:
            ConfigurationError: the client refuses its configuration.
            DependencyUnavailableError: the registry gave no usable answer.
        """
        if schema_id not in self._by_id:
            in_range = 0 <= schema_id <= LARGEST_ID
            answer = self._ask(lambda client: client.get_schema(schema_id)) if in_range else None
            if answer is None:
                return None
            self._by_id[schema_id] = self._resolve(answer, schema_id)
        return self._by_id[schema_id]

    def fetch_schema_by_guid(self, guid: str) -> Schema | None:
        """The schema with a GUID; None if the registry does not know it, or knows no GUIDs.

        Raises:
            ConfigurationError: the client refuses its configuration.
            DependencyUnavailableError: the registry gave no usable answer.
        """
        if guid not in self._by_guid:
            answer = self._ask(lambda client: client.get_schema_by_guid(guid), optional=True)
            if answer is None:
                return None
            self._by_guid[guid] = self._resolve(answer, None)
        return self._by_guid[guid]

    def fetch_latest_schema(self, subject: str) -> Schema | None:
        """The newest schema of a subject; None if the registry does not know the subject.

        Raises:
            ConfigurationError: the client refuses its configuration.
            DependencyUnavailableError: the registry gave no usable answer.
        """
        # Not `get_latest_version`: the client would remember its answer.
        answer = self._ask(lambda client: client.get_version(subject, "latest"))
        return None if answer is None else self._resolve(answer.schema, answer.schema_id)

    def list_subjects(self) -> list[str]:
        """The names of all subjects.

        Raises:
            ConfigurationError: the client refuses its configuration.
            DependencyUnavailableError: the registry gave no usable answer.
        """
        answer = self._ask(lambda client: client.get_subjects())
        if not isinstance(answer, list) or not all(isinstance(name, str) for name in answer):
            raise self._build_unavailable_error("the list of subjects is not a list of names")
        return sorted(answer)

    def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        with self._opening:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _resolve(self, answer: Any, schema_id: int | None) -> Schema:
        """A schema of ours from the client's, with all schemas that it needs."""
        kind = answer.schema_type
        if not isinstance(kind, str) or not isinstance(answer.schema_str, str):
            raise self._build_unavailable_error(f"a schema whose type is {kind!r} and whose text is no text")
        found: dict[str, SchemaReference] = {}
        if kind in _REFERENCING:
            self._add_references(answer.references, found, set())
        return Schema(schema_id, kind, answer.schema_str, tuple(found.values()))

    def _add_references(
        self, references: Sequence[Any] | None, found: dict[str, SchemaReference], seen: set[str]
    ) -> None:
        """Add references and what they need, which comes first; the first version of a name is taken."""
        for one in references or ():
            if one.name in seen:
                continue
            seen.add(one.name)
            answer = self._fetch_version(one.subject, one.version)
            if answer is None or not isinstance(answer.schema.schema_str, str):
                raise self._build_unavailable_error(
                    f"{one.name} (subject {one.subject}, version {one.version}) is referenced and unknown"
                )
            self._add_references(answer.schema.references, found, seen)
            found[one.name] = SchemaReference(one.name, one.subject, one.version, answer.schema.schema_str)

    def _fetch_version(self, subject: str, version: int) -> Any:
        # A deleted version is still needed by the schemas that name it.
        return self._ask(lambda client: client.get_version(subject, version, deleted=True))

    def _ask(self, question: Callable[[SchemaRegistryClient], T], *, optional: bool = False) -> T | None:
        """The client's answer; None if the registry does not know what it was asked for.

        Args:
            question: the request to the client.
            optional: a registry may lack the endpoint; that counts as unknown too.
        """
        client = self._open()
        try:
            return question(client)
        except Exception as error:  # noqa: BLE001 - an answer of any form makes the client raise anything
            fault = error
        # Outside of the `except` block: the client's error may hold a secret, so it is no cause of ours.
        if getattr(fault, "http_status_code", None) == NOT_FOUND:
            if getattr(fault, "error_code", None) in UNKNOWN:
                return None
            if optional:
                self.list_subjects()  # raises if it is no registry that answered
                return None
        raise self._build_unavailable_error(self._describe_fault(fault), getattr(fault, "http_status_code", None))

    def _open(self) -> SchemaRegistryClient:
        with self._opening:
            if self._client is None:
                self._client = self._open_client()
            return self._client

    def _open_client(self) -> SchemaRegistryClient:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        try:
            return SchemaRegistryClient(dict(self._properties))
        except (ValueError, TypeError, OSError) as error:
            found = self._redact(f"{type(error).__name__}: {error}")
        raise ConfigurationError(
            "the client of the schema registry refuses its configuration",
            found=found,
            remedy=f"correct {SCHEMA_REGISTRY_URL} or {SCHEMA_REGISTRY_CONFIG}: docs/configuration.md lists the "
            "properties",
        )

    def _describe_fault(self, fault: Exception) -> str:
        """The text of a fault, without the answer of the registry or a login server."""
        from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError

        if isinstance(fault, SchemaRegistryError):
            return f"status {fault.http_status_code}, error code {fault.error_code}"
        if isinstance(fault, OAuthTokenError):
            return "no access token was given for the login of the configuration"
        return self._redact(f"{type(fault).__name__}: {fault}")

    def _redact(self, text: str) -> str:
        return redact_values(text, {str(number): secret for number, secret in enumerate(self._secrets)})

    def _build_unavailable_error(self, found: str, status: int | None = None) -> DependencyUnavailableError:
        return DependencyUnavailableError(
            f"the schema registry at {self._shown} gave no usable answer", found=found, remedy=_describe_remedy(status)
        )


def _describe_remedy(status: int | None) -> str:
    if status in REFUSED:
        return f"correct the login in {SCHEMA_REGISTRY_CONFIG}, or give it read access; the request is repeated later"
    if status == NOT_FOUND:
        return f"correct {SCHEMA_REGISTRY_URL}: it must end where the registry's API has /subjects"
    return f"start the registry of {SCHEMA_REGISTRY_URL}, or make it reachable; the request is repeated later"


def select_secrets(url: str, config: Mapping[str, Plain]) -> frozenset[str]:
    """The values of addresses and properties that may be secrets, and the parts of logins."""
    found = {value for value in config.values() if isinstance(value, str)}
    found.update(str(config.get("basic.auth.user.info", "")).split(":", 1))
    for one in url.split(","):
        login, _, _ = urlsplit(one).netloc.rpartition("@")
        found.update({login, *login.split(":", 1), *map(unquote, login.split(":", 1))})
    return frozenset(found - {""})


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def open_registry(settings: Settings) -> SchemaRegistry | None:
    """The schema registry of the settings; None if they name none. Nothing is connected.

    Raises:
        ConfigurationError: a property is set elsewhere.
    """
    if settings.schema_registry_url is None:
        return None
    return SchemaRegistry(settings.schema_registry_url, settings.schema_registry_config)


def build_schema_finder(url: str | None, config: Mapping[str, Plain]) -> Callable[[int | str], Schema | None] | None:
    """The finder of schemas by ID or GUID.

    A process has one client for a registry, which caches schemas until its login or a file of its keys changes.

    Args:
        url: the registry's addresses; None without a registry.
        config: `HIGHWATER_SCHEMA_REGISTRY_CONFIG`.
    """
    return None if url is None else _build_finder(url, frozenset(config.items()), read_file_versions(config))


@lru_cache(maxsize=4)
def _build_finder(
    url: str, config: frozenset[tuple[str, Plain]], files: object
) -> Callable[[int | str], Schema | None]:
    del files
    registry = SchemaRegistry(url, dict(config))
    return lambda one: registry.fetch_schema(one) if isinstance(one, int) else registry.fetch_schema_by_guid(one)
