"""The properties of a producer that loses nothing in silence, in librdkafka's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from highwater.errors import ConfigurationError
from highwater.producer_rules import ALIASES, normalize_name

# An outage of brokers ends within a day, or a person decides; until then records wait in memory and in order.
DELIVERY_TIMEOUT_MS = 24 * 60 * 60 * 1000
# Below two minutes (Kafka's own default, KIP-91) a rolling restart of the brokers may already lose records.
MIN_DELIVERY_TIMEOUT_MS = 120_000
# The broker's transaction.max.timeout.ms is 15 minutes by default; it refuses more.
TRANSACTION_TIMEOUT_MS = 60_000
MAX_IN_FLIGHT = 5
# librdkafka's 5 make many small batches, which three replicas write each: records of a hundred bytes took a third
# longer than with 20, the longest wait of a record.
LINGER_MS = 20


def build_producer_properties(
    bootstrap: str, config: Mapping[str, str] | None = None, *, transactional_id: str | None = None
) -> dict[str, str]:
    """The properties of a reliable producer, in librdkafka's names.

    Args:
        bootstrap: brokers as `host:port`, comma separated.
        config: further properties, secrets included; a value here wins over a default that may be changed.
        transactional_id: makes the producer transactional. Its records may then wait no longer than the transaction
            lasts, since librdkafka refuses a delivery timeout above `transaction.timeout.ms`.

    Raises:
        ConfigurationError: a property would weaken the producer; property, value and reason are in the text.
    """
    config = {name: str(value) for name, value in (config or {}).items()}
    given = {normalize_name(name): value for name, value in config.items()}
    if transactional_id is not None:
        given["transactional.id"] = transactional_id
    for name, value in config.items():
        _ensure_not_weakened(name, value, transactional="transactional.id" in given)
    found = {**_build_defaults(given), **given, "bootstrap.servers": bootstrap}
    if "transactional.id" in found:
        for name in ("delivery.timeout.ms", "transaction.timeout.ms"):
            if not _is_in_range(found[name], 1, 2**31 - 1):
                raise ConfigurationError(
                    f"the producer's property {name} is no time",
                    found=found[name],
                    remedy="give a whole number of milliseconds, 1 or more",
                )
        found["delivery.timeout.ms"] = str(min(int(found["delivery.timeout.ms"]), int(found["transaction.timeout.ms"])))
    return found


def _build_defaults(given: Mapping[str, str]) -> dict[str, str]:
    found = {
        "acks": "all",
        "enable.idempotence": "true",
        "max.in.flight.requests.per.connection": str(MAX_IN_FLIGHT),
        "delivery.timeout.ms": str(DELIVERY_TIMEOUT_MS),
        # librdkafka's own default is another one than that of Kafka's Java clients: keys would part ways.
        "partitioner": "murmur2_random",
        "allow.auto.create.topics": "false",
        "linger.ms": str(LINGER_MS),
    }
    if "transactional.id" in given:
        found["transaction.timeout.ms"] = str(TRANSACTION_TIMEOUT_MS)
    return found


def _ensure_not_weakened(name: str, value: str, *, transactional: bool) -> None:
    reason = find_weakness(name, value, transactional=transactional)
    if reason is not None:
        raise ConfigurationError(
            f"the producer's property {name} must not be {value}: {reason}",
            remedy=f"take {name} out of the configuration",
        )


Sound = Callable[[str], bool]
# For each property the values that do not weaken, and what another one would do.
_RULES: Mapping[str, tuple[Sound, str]] = MappingProxyType(
    {
        "acks": (
            lambda value: value in {"all", "-1"},
            "a record would count as delivered before every in-sync replica has it",
        ),
        "enable.idempotence": (
            lambda value: value == "true",
            "a retry could write a record twice, or out of order",
        ),
        "max.in.flight.requests.per.connection": (
            lambda value: _is_in_range(value, 1, MAX_IN_FLIGHT),
            f"brokers keep the order of at most {MAX_IN_FLIGHT} requests in flight (KIP-185)",
        ),
        "queuing.strategy": (
            lambda value: value == "fifo",
            "a retry could overtake what was sent before it",
        ),
        "partitioner": (
            lambda value: value == "murmur2_random",
            "a key would go to another partition than Java's clients and this project's tools choose",
        ),
        "retries": (
            lambda value: _is_in_range(value, 2**31 - 1, 2**31 - 1),
            "attempts are bounded by delivery.timeout.ms alone (KIP-91), or a short outage uses them up",
        ),
        "delivery.timeout.ms": (
            lambda value: _is_in_range(value, MIN_DELIVERY_TIMEOUT_MS, 2**31 - 1),
            f"below {MIN_DELIVERY_TIMEOUT_MS} ms a restart of brokers may lose records (0 would never end)",
        ),
        "allow.auto.create.topics": (
            lambda value: value == "false",
            "a misspelled topic would be created, and its records would be where nobody reads them",
        ),
        "enable.gapless.guarantee": (
            lambda value: value == "false",
            "it ends the whole producer at the first failure and leaves records under way unknown, for every key",
        ),
        "delivery.report.only.error": (
            lambda value: value == "false",
            "delivered records could not be counted",
        ),
    }
)


def list_ruled_properties() -> frozenset[str]:
    """The properties whose value may weaken a producer, under all of their names."""
    return frozenset({*_RULES, *[older for older, name in ALIASES.items() if name in _RULES]})


def find_weakness(name: str, value: str, *, transactional: bool) -> str | None:
    """The reason why a property would weaken a producer; None if it does not.

    Args:
        name: the property, under any of its names, with the prefix `topic.` or without.
        value: its value.
        transactional: whether the producer is; then the transaction bounds the time of a delivery.
    """
    name = normalize_name(name)
    if name not in _RULES or (name == "delivery.timeout.ms" and transactional):
        return None
    sound, reason = _RULES[name]
    return None if sound(value.strip().lower()) else reason


def _is_in_range(text: str, least: int, most: int) -> bool:
    return text.lstrip("-").isdigit() and least <= int(text) <= most
