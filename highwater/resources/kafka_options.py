"""Properties of Kafka clients: what may not be set, and what a librdkafka property is called in Java."""

# Sources: librdkafka's CONFIGURATION.md and the Kafka documentation's pages of consumer and security configuration.

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from highwater.errors import ConfigurationError
from highwater.producer_rules import strip_topic_prefix
from highwater.resources.kafka_logins import LOGINS, build_java_login, ensure_one_file
from highwater.resources.kafka_tls import KEYS, build_java_keys
from highwater.resources.producer_properties import find_weakness, list_ruled_properties
from highwater.settings import KAFKA_CONFIG

# Required values for readers, and the effect of another value.
_READERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "enable.auto.commit": ("false", "offsets are committed with the output, never by a client"),
        "enable.auto.offset.store": ("false", "offsets are committed with the output, never by a client"),
        "auto.offset.reset": ("error", "a reader that jumps loses what it jumped over"),
        "isolation.level": ("read_committed", "records of aborted transactions must not be read"),
    }
)
# Properties that the pipeline sets itself, so no value is allowed.
_NAMED: Mapping[str, str] = MappingProxyType(
    {
        "group.id": "consumers are assigned; the group that mirrors progress is named by the stream",
        "transactional.id": "it is bound to the slice, so that an old producer is fenced",
        "bootstrap.servers": "HIGHWATER_KAFKA_BOOTSTRAP says it",
        "metadata.broker.list": "HIGHWATER_KAFKA_BOOTSTRAP says it",
    }
)
# The producers of runs are transactional, so how long a delivery may take is bounded otherwise; others see to it.
_TIMEOUTS = frozenset({"delivery.timeout.ms", "message.timeout.ms"})
# Properties that could weaken what the pipeline promises: only a value that keeps it is taken.
GUARDED = frozenset({*_READERS, *_NAMED, *list_ruled_properties()}) - _TIMEOUTS

# Properties of the same meaning in both clients; `_to_java_value` knows where values differ. ssl.cipher.suites is none
# of them: its names are OpenSSL's here and Java's own there, and here it does not concern TLS 1.3.
_SAME = frozenset(
    {
        "client.dns.lookup",
        "client.id",
        "client.rack",
        "connections.max.idle.ms",
        "fetch.max.bytes",
        "fetch.min.bytes",
        "max.partition.fetch.bytes",
        "metadata.max.age.ms",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "sasl.kerberos.service.name",
        "sasl.mechanism",
        "sasl.oauthbearer.sub.claim.name",
        "security.protocol",
        "ssl.endpoint.identification.algorithm",
        "ssl.keystore.location",
        "ssl.keystore.password",
    }
)
_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "fetch.message.max.bytes": "max.partition.fetch.bytes",
        "fetch.wait.max.ms": "fetch.max.wait.ms",
        "sasl.mechanisms": "sasl.mechanism",
        "socket.receive.buffer.bytes": "receive.buffer.bytes",
        "socket.send.buffer.bytes": "send.buffer.bytes",
        "ssl.ca.location": "ssl.truststore.location",
        "ssl.ca.pem": "ssl.truststore.certificates",
    }
)
# Where 0 here is -1 there: never close idle connections, and the system's own size of a buffer.
_ZERO_IS_OFF = frozenset({"connections.max.idle.ms", "socket.receive.buffer.bytes", "socket.send.buffer.bytes"})
# Properties that say how librdkafka works inside; the Java client has its own ways and needs no equal.
_OURS_ALONE = frozenset(
    {"debug", "log_level", "statistics.interval.ms", "queue.buffering.max.messages", "queue.buffering.max.kbytes"}
    | {"linger.ms", "queue.buffering.max.ms", "batch.size", "batch.num.messages", "compression.type"}
    | {"compression.codec", "socket.keepalive.enable", "socket.timeout.ms", "broker.address.family"}
    | {"delivery.timeout.ms", "message.timeout.ms", "transaction.timeout.ms"}
    | {"receive.message.max.bytes", "sasl.kerberos.kinit.cmd", "sasl.kerberos.min.time.before.relogin"}
)
# A property of ours and what it says of the store that it names; Java's default is JKS.
_STORE_TYPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ssl.ca.location": ("ssl.truststore.type", "PEM"),
        "ssl.ca.pem": ("ssl.truststore.type", "PEM"),
        "ssl.keystore.location": ("ssl.keystore.type", "PKCS12"),
    }
)


def refuse_weakening(config: Mapping[str, str]) -> None:
    """Ensure that no property weakens a guarantee.

    Raises:
        ConfigurationError: one does; the message gives property, value and reason.
    """
    for name, value in sorted(config.items()):
        reason = _find_weakness(name, value)
        if reason is not None:
            raise ConfigurationError(
                f"the property {name} must not be {value}: {reason}",
                found=f"{name}={value}",
                remedy=f"leave it out of {KAFKA_CONFIG}",
            )


def _find_weakness(name: str, value: str) -> str | None:
    name = strip_topic_prefix(name)
    if name in _NAMED:
        return _NAMED[name]
    if name in _READERS:
        sound, reason = _READERS[name]
        return None if value.strip().lower() == sound else reason
    return find_weakness(name, value, transactional=True)


def redact_values(text: str, config: Mapping[str, str]) -> str:
    """A client's message without the values of the configuration: any of them may be a secret (I13)."""
    for value in sorted(config.values(), key=len, reverse=True):
        if len(value) > 3:  # shorter ones are numbers and flags, and would take letters out of words
            text = text.replace(value, "***")
    return text


def build_spark_options(bootstrap: str, config: Mapping[str, str]) -> dict[str, str]:
    """The options of Spark's Kafka source for the same cluster.

    Raises:
        ConfigurationError: a property, or its value, has no equal in the Java client, or a file of a key cannot be
            used. The value is not repeated: it may be a secret.
    """
    java = {"bootstrap.servers": bootstrap, "allow.auto.create.topics": "false"}
    for given, value in config.items():
        name = strip_topic_prefix(given)
        # A guarded value is one that Spark's reader has anyway, or a producer's.
        if name not in LOGINS | KEYS | _OURS_ALONE | GUARDED:
            java[_to_java_name(name)] = _to_java_value(name, value)
            java.update([_STORE_TYPES[name]] if name in _STORE_TYPES else [])
    java |= build_java_keys(config) | build_java_login(config)
    return {f"kafka.{name}": value for name, value in java.items()}


def _to_java_name(name: str) -> str:
    if name in _SAME:
        return name
    if name in _RENAMED:
        return _RENAMED[name]
    raise ConfigurationError(
        f"the property {name} cannot be translated for Spark's Kafka client",
        remedy=f"leave it out of {KAFKA_CONFIG}, or use one that docs/configuration.md lists",
    )


def _to_java_value(name: str, value: str) -> str:
    if name == "security.protocol":
        return value.upper()  # librdkafka takes small letters too
    if name == "client.dns.lookup":
        return value.lower()  # and large ones here
    if name == "ssl.endpoint.identification.algorithm" and value.lower() == "none":
        return ""
    if name in _ZERO_IS_OFF and value == "0":
        return "-1"
    return ensure_one_file(name, value) if name == "ssl.ca.location" else value
