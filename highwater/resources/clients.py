"""Opening a client of confluent-kafka."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from highwater.errors import ConfigurationError
from highwater.resources.kafka_logins import build_librdkafka_login
from highwater.resources.kafka_options import redact_values
from highwater.settings import KAFKA_CONFIG

T = TypeVar("T")

_REMEDY = f"fix {KAFKA_CONFIG}: docs/configuration.md lists what it may hold, librdkafka's CONFIGURATION.md the values"
# The wheels of confluent-kafka are built without Kerberos.
_NO_PROVIDER = "No provider for SASL mechanism GSSAPI"
_NO_KERBEROS = (
    "build confluent-kafka against a librdkafka with GSSAPI, as docs/security.md says, or set sasl.mechanisms in "
    f"{KAFKA_CONFIG} to another one; GSSAPI (Kerberos) is the default of security.protocol=SASL_…"
)


def open_client(
    kind: Callable[..., T],
    properties: Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
    name: str = "Kafka",
    **more: Any,
) -> T:
    """A client with these properties.

    Args:
        kind: Producer, Consumer or AdminClient.
        properties: in librdkafka's names.
        given: properties whose values may be secrets; all if None.
        name: the client's name, for the error.
        more: further arguments of the client.

    Raises:
        ConfigurationError: librdkafka does not take them, or their login needs a package that is not installed.
            librdkafka's own error is left behind: the text may repeat a value.
        DependencyUnavailableError: no token for the login was issued.
    """
    from confluent_kafka import KafkaException

    ready = build_librdkafka_login(properties)
    try:
        return kind(ready, **more)
    except KafkaException as error:
        message = error.args[0].str()
    secret = properties if given is None else given
    raise ConfigurationError(
        f"{name}: the client refuses its configuration",
        found=redact_values(message, {key: value for key, value in secret.items() if isinstance(value, str)}),
        remedy=_NO_KERBEROS if _NO_PROVIDER in message else _REMEDY,
    )
