"""A producer's configuration as a text: Java properties or JSON."""

# The format of `.properties` is that of `java.util.Properties.load`, without escapes of Unicode: no name or value that
# a rule looks at has one.

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from highwater.errors import ConfigurationError
from highwater.producer_rules import Client, ProducerFacts, Version, strip_topic_prefix

# Names that one client alone knows.
_OF_LIBRDKAFKA = frozenset(
    {"metadata.broker.list", "request.required.acks", "message.timeout.ms", "message.send.max.retries", "max.in.flight"}
    | {"queue.buffering.max.ms", "queue.buffering.max.messages", "queue.buffering.max.kbytes", "batch.num.messages"}
    | {"queuing.strategy", "partitioner", "compression.codec", "enable.gapless.guarantee", "statistics.interval.ms"}
    | {"sasl.mechanisms", "sasl.username", "sasl.password", "ssl.ca.location", "delivery.report.only.error"}
    | {"allow.auto.create.topics", "socket.timeout.ms", "sticky.partitioning.linger.ms", "debug", "log_level"}
)
_OF_JAVA = frozenset(
    {"key.serializer", "value.serializer", "partitioner.class", "partitioner.ignore.keys", "max.block.ms"}
    | {"buffer.memory", "sasl.jaas.config", "interceptor.classes", "max.request.size", "metric.reporters"}
    | {"partitioner.adaptive.partitioning.enable", "ssl.truststore.location", "ssl.truststore.password"}
)
# Kafka Connect and MirrorMaker name their producers' properties so.
_PREFIX = "producer."
# Key, then white space or `=` or `:`, then the value.
_LINE = re.compile(r"((?:[^\\\s=:]|\\.)+)\s*(?:[=:]\s*)?(.*)")


def parse_producer_facts(
    name: str, text: str, client: Client | None = None, version: Version | None = None
) -> ProducerFacts:
    """The producer settings that the text of a configuration contains.

    Args:
        name: for the page and for errors.
        text: Java properties, or a JSON object.
        client: which client it is for; by the names if None.
        version: the client's version, if it is known.

    Raises:
        ConfigurationError: it cannot be read, or the names do not show it the client.
    """
    found = _select_producer_properties(_parse_properties(name, text))
    if client is None:
        client = find_client(found)
    if client is None:
        raise ConfigurationError(
            f"{name} does not show whether it is for Java's client or for librdkafka: their defaults differ",
            found=f"properties: {len(found):,}; their names are known to both clients, or some to each alone",
            remedy="say it with --client java or --client librdkafka",
        )
    return ProducerFacts(name, client, version, found)


def find_client(properties: Mapping[str, str]) -> Client | None:
    """The client that knows these names; None if both do, or each of them one alone."""
    plain = {strip_topic_prefix(name) for name in properties}
    marks = {Client.LIBRDKAFKA: _OF_LIBRDKAFKA & plain, Client.JAVA: _OF_JAVA & properties.keys()}
    known = [client for client, names in marks.items() if names]
    return known[0] if len(known) == 1 else None


def parse_version(text: str) -> Version:
    """A version from its text.

    Raises:
        ConfigurationError: it is none.
    """
    if not re.fullmatch(r"\d+(\.\d+){0,3}", text):
        raise ConfigurationError("a client's version is no number", found=text, remedy="give it as in 3.6.1")
    return tuple(map(int, text.split(".")))


def _parse_properties(name: str, text: str) -> dict[str, str]:
    if not text.lstrip().startswith(("{", "[")):
        return _parse_java_properties(text)
    try:
        plain = json.loads(text)
    except ValueError as error:
        # The text is not repeated, since it may hold a password.
        raise ConfigurationError(
            f"{name} begins as JSON, and is none", remedy="fix it, or give Java properties"
        ) from error
    if not isinstance(plain, dict) or any(isinstance(value, dict | list) for value in plain.values()):
        raise ConfigurationError(f"{name} is JSON, and no flat object", remedy="give one object of names and values")
    return {key: _format_value(value) for key, value in plain.items()}


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_java_properties(text: str) -> dict[str, str]:
    """Java properties; a line that ends in a backslash goes on in the next one."""
    joined = re.sub(r"\\\r?\n[ \t\f]*", "", text)
    lines = [line.strip() for line in joined.splitlines()]
    pairs = [_LINE.fullmatch(line) for line in lines if line and not line.startswith(("#", "!"))]
    return {re.sub(r"\\(.)", r"\1", pair[1]): re.sub(r"\\(.)", r"\1", pair[2]) for pair in pairs if pair}


def _select_producer_properties(found: Mapping[str, str]) -> dict[str, str]:
    """The producer's part of a configuration that has others too; all of it where nothing is named so."""
    own = {name.removeprefix(_PREFIX): value for name, value in found.items() if name.startswith(_PREFIX)}
    return own or dict(found)
