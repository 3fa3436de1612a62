"""Opening a client of confluent-kafka."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from highwater.errors import ConfigurationError
from highwater.resources.kafka_options import without_values
from highwater.settings import KAFKA_CONFIG

T = TypeVar("T")


def opened(
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
        given: those of them whose values may be secrets; all if None.
        name: of the client, for the error.
        more: what the client takes beside its properties.

    Raises:
        ConfigurationError: librdkafka does not take them. Its own error is left behind: the text may repeat a value.
    """
    from confluent_kafka import KafkaException

    try:
        return kind(dict(properties), **more)
    except KafkaException as error:
        told = error.args[0].str()
    secret = properties if given is None else given
    raise ConfigurationError(
        f"{name}: the client refuses its configuration",
        found=without_values(told, {key: value for key, value in secret.items() if isinstance(value, str)}),
        remedy=f"mend {KAFKA_CONFIG}: docs/configuration.md lists what it may hold, librdkafka's CONFIGURATION.md the "
        "values",
    )
