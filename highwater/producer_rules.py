"""Rules for a producer's settings so that no acknowledged record is lost: a table of pure functions."""

# Sources: the producer configurations of Kafka's documentation and its upgrade notes (KIP-91 for 2.1, KIP-679 for 3.0,
# KAFKA-13598 for 3.0.1 and 3.1.1), librdkafka's CONFIGURATION.md and CHANGELOG.md (1.0.0, 1.5.2).

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from highwater.topic_rules import Finding, Level

# Names of one meaning; the first is an alias of librdkafka, the second is Java's where Java has one.
ALIASES: Mapping[str, str] = {
    "request.required.acks": "acks",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.timeout.ms": "delivery.timeout.ms",
    "message.send.max.retries": "retries",
    "compression.codec": "compression.type",
}
# librdkafka takes a topic's properties with this before their names too; of its other names these alone begin so.
_OF_TOPICS, _NOT_OF_TOPICS = "topic.", ("topic.metadata.", "topic.blacklist")
IN_FLIGHT = "max.in.flight.requests.per.connection"
ENDLESS = 2**31 - 1
# Brokers keep the order of at most this many requests (KIP-185).
MAX_IN_FLIGHT = 5
# Kafka's own default (KIP-91): a rolling restart of the brokers fits in.
MIN_DELIVERY_MS = 120_000
# The broker's defaults of replica.lag.time.max.ms and transaction.max.timeout.ms.
REPLICA_LAG_MS, LONGEST_TRANSACTION_MS = 30_000, 900_000

_SWITCHED_OFF = "switched off by"

Version = tuple[int, ...]


def normalize_name(name: str) -> str:
    """The name that the rules know a property of librdkafka by: without the prefix of topics, and no alias."""
    return _resolve_alias(strip_topic_prefix(name))


def strip_topic_prefix(name: str) -> str:
    """A property of librdkafka without the prefix `topic.`, which changes nothing."""
    return name if name.startswith(_NOT_OF_TOPICS) else name.removeprefix(_OF_TOPICS)


def _resolve_alias(name: str) -> str:
    return ALIASES.get(name, name)


class Client(Enum):
    """The two clients whose names and defaults are known."""

    JAVA = "Java"
    LIBRDKAFKA = "librdkafka"


# Defaults where nothing is set, from which version on; settings that are not listed have no known default.
_DEFAULTS: Mapping[Client, Mapping[str, tuple[tuple[Version, str], ...]]] = {
    Client.JAVA: {
        "acks": (((), "1"), ((3, 0), "all")),
        "enable.idempotence": (((), "false"), ((3, 0, 1), "true"), ((3, 1, 0), "false"), ((3, 1, 1), "true")),
        IN_FLIGHT: (((), "5"),),
        "retries": (((), "0"), ((2, 1), str(ENDLESS))),
        "delivery.timeout.ms": (((), "none"), ((2, 1), "120000")),
        "request.timeout.ms": (((), "30000"),),
        "transaction.timeout.ms": (((), "60000"),),
    },
    Client.LIBRDKAFKA: {
        "acks": (((), "1"), ((1, 0), "all")),
        "enable.idempotence": (((), "false"),),
        IN_FLIGHT: (((), "1000000"),),
        "retries": (((), "2"), ((1, 5, 2), str(ENDLESS))),
        "delivery.timeout.ms": (((), "300000"),),
        "request.timeout.ms": (((), "5000"), ((1, 5, 2), "30000")),
        "transaction.timeout.ms": (((), "60000"),),
        "partitioner": (((), "consistent_random"),),
        "queuing.strategy": (((), "fifo"),),
    },
}
# Properties that a configuration does not show, and where to check them.
UNTOLD: tuple[tuple[str, str], ...] = (
    ("settings in code", "see whether the program sets properties that are not in its configuration"),
    ("delivery reports", "check that the callback or the future of every send is looked at, and what follows an error"),
    ("end of the process", "check that flush or close is waited for before it ends"),
    ("acknowledging upstream", "check that it happens after the delivery report, and not after the send"),
)


@dataclass(frozen=True)
class PropertyValue:
    """A value of a property: `text` is None where the client's version decides and is not known."""

    text: str | None
    where: str

    @property
    def number(self) -> int | None:
        """The value as a number, if it is one."""
        return int(self.text) if self.text is not None and self.text.lstrip("-").isdigit() else None


@dataclass(frozen=True)
class ProducerFacts:
    """The known settings of a producer.

    Args:
        name: for the page.
        client: which client it is.
        version: the client's version; None if it is not known.
        properties: as they are set, by their names or aliases.
        ours: whether it is Highwater's own, whose settings are all known.
        replica_lag_ms: the brokers' `replica.lag.time.max.ms`.
        longest_transaction_ms: the brokers' `transaction.max.timeout.ms`.
    """

    name: str
    client: Client
    version: Version | None
    # Among them may be a password.
    properties: Mapping[str, str] = field(repr=False)
    ours: bool = False
    replica_lag_ms: int = REPLICA_LAG_MS
    longest_transaction_ms: int = LONGEST_TRANSACTION_MS
    _named: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # To Java a name with the prefix is one that it does not know.
        plain = normalize_name if self.client is Client.LIBRDKAFKA else _resolve_alias
        named = {plain(name): value.strip() for name, value in self.properties.items()}
        object.__setattr__(self, "_named", named)

    def set(self, name: str) -> str | None:
        """The value that a property is set to; None if it is not set."""
        return self._named.get(name)

    def resolve_value(self, name: str) -> PropertyValue:
        """The value of a property, set or by default."""
        given = self.set(name)
        if given is not None:
            return PropertyValue(given, "set")
        known = _DEFAULTS[self.client].get(name, (((), "none"),))
        if self.version is None and len(known) > 1:
            values = ", ".join(
                f"{text} before" if not since else f"{text} from {'.'.join(map(str, since))}" for since, text in known
            )
            return PropertyValue(None, f"default of {self.client.value}: {values}")
        since = max(since for since, _ in known if since <= (self.version or ()))
        return PropertyValue(dict(known)[since], f"default of {self.client.value}")

    @property
    def transactional(self) -> bool:
        """Whether it writes in transactions."""
        return bool(self.set("transactional.id"))

    @property
    def idempotence(self) -> PropertyValue:
        """Whether it is idempotent: clients switch it on and off by other properties too."""
        if self.set("enable.idempotence") is not None:
            return PropertyValue(_lower(self.set("enable.idempotence")), "set")
        if self.transactional:
            return PropertyValue("true", "by transactional.id")
        found = self.resolve_value("enable.idempotence")
        against = self.against_idempotence
        if self.client is Client.JAVA and against and found.text != "false":
            return PropertyValue("false", f"{_SWITCHED_OFF} {against}")
        return found

    @property
    def against_idempotence(self) -> str | None:
        """The settings that contradict idempotence."""
        acks, retries = self.set("acks"), self.set("retries")
        if acks is not None and _lower(acks) not in {"all", "-1"}:
            return f"acks={acks}"
        if retries is not None and retries == "0":
            return "retries=0"
        flying = self.resolve_value(IN_FLIGHT).number if self.set(IN_FLIGHT) is not None else None
        return f"{IN_FLIGHT}={flying}" if flying is not None and flying > MAX_IN_FLIGHT else None


def check_producer(facts: ProducerFacts) -> list[Finding]:
    """Check a producer against every rule, in the order of docs/producers.md; unknown settings come last."""
    found = [rule(facts) for rule in RULES]
    if facts.ours:
        return found
    return found + [Finding(name, Level.UNKNOWN, "no configuration shows it", "", remedy) for name, remedy in UNTOLD]


def _lower(text: str | None) -> str:
    return (text or "").lower()


def _build_unknown_finding(rule: str, found: PropertyValue, remedy: str) -> Finding:
    return Finding(rule, Level.UNKNOWN, "not set, and the client's version is not known", found.where, remedy)


def _check_client(facts: ProducerFacts) -> Finding:
    if facts.version is None:
        remedy = "name the version with --client-version"
        return Finding("client", Level.UNKNOWN, f"{facts.client.value}, version not known", "", remedy)
    return Finding("client", Level.OK, f"{facts.client.value} {'.'.join(map(str, facts.version))}")


def _check_acks(facts: ProducerFacts) -> Finding:
    found, remedy = facts.resolve_value("acks"), "set acks=all"
    if found.text is None:
        return _build_unknown_finding("acks", found, remedy)
    if _lower(found.text) in {"all", "-1"}:
        return Finding("acks", Level.OK, "all", found.where)
    lost = "whatever the broker has not read from its socket" if found.text == "0" else "what the leader alone has"
    return Finding("acks", Level.ERROR, f"{found.text}: {lost} is acknowledged, and may be lost", found.where, remedy)


def _check_idempotence(facts: ProducerFacts) -> Finding:
    rule, found, remedy = "idempotence", facts.idempotence, "set enable.idempotence=true"
    if found.text is None:
        return _build_unknown_finding(rule, found, remedy)
    if found.text == "true":
        against = facts.against_idempotence
        if against is None:
            return Finding(rule, Level.OK, "on", found.where)
        return Finding(
            rule, Level.ERROR, f"on, with {against}: the client refuses it", found.where, f"leave out {against}"
        )
    if found.where.startswith(_SWITCHED_OFF):
        remedy = f"leave out {facts.against_idempotence}"
    return Finding(rule, Level.WARNING, "off: a retry may write a record twice", found.where, remedy)


def _check_in_flight(facts: ProducerFacts) -> Finding:
    rule, found = "requests in flight", facts.resolve_value(IN_FLIGHT)
    idempotent, number = facts.idempotence.text, found.number
    if number is None:
        return Finding(rule, Level.ERROR, f"{found.text}: no number", found.where, f"set {IN_FLIGHT}=5")
    if idempotent == "true" and facts.set(IN_FLIGHT) is None:
        return Finding(rule, Level.OK, f"at most {MAX_IN_FLIGHT}", "by idempotence")
    if number == 1 or (idempotent == "true" and number <= MAX_IN_FLIGHT):
        return Finding(rule, Level.OK, found.text or "", found.where)
    if idempotent is None:
        return _build_unknown_finding(rule, facts.idempotence, "set enable.idempotence=true")
    text = f"{number:,}: a retry may be overtaken by what was sent after it"
    return Finding(rule, Level.WARNING, text, found.where, "set enable.idempotence=true, which keeps the order of 5")


def _check_retries(facts: ProducerFacts) -> Finding:
    rule, found, remedy = (
        "retries",
        facts.resolve_value("retries"),
        "leave out retries: the delivery timeout bounds them",
    )
    if found.text is None and facts.idempotence.text != "true":
        return _build_unknown_finding(rule, found, f"set retries={ENDLESS}")
    if facts.set("retries") is None and facts.idempotence.text == "true":
        return Finding(rule, Level.OK, "until the delivery times out", "by idempotence")
    if found.number is not None and found.number >= ENDLESS:
        return Finding(rule, Level.OK, "until the delivery times out", found.where)
    remedy = remedy if found.where == "set" else f"set retries={ENDLESS}"
    if found.number == 0:
        return Finding(rule, Level.ERROR, "0: the first failed request loses its records", found.where, remedy)
    return Finding(rule, Level.WARNING, f"{found.text}: a short outage uses them up", found.where, remedy)


def _check_delivery_timeout(facts: ProducerFacts) -> Finding:
    rule, found = "delivery timeout", facts.resolve_value("delivery.timeout.ms")
    name = "delivery.timeout.ms" if facts.client is Client.JAVA else "message.timeout.ms"
    remedy = f"set {name}={MIN_DELIVERY_MS} or more"
    if found.text is None:
        return _build_unknown_finding(rule, found, remedy)
    if found.number is None:
        return Finding(rule, Level.UNKNOWN, "the retries alone bound it", found.where, "take a client from 2.1 on")
    if facts.transactional:
        return Finding(rule, Level.OK, f"{found.number:,} ms: no longer than its transaction", found.where)
    if found.number == 0:
        return Finding(
            rule, Level.WARNING, "0: a record may wait for ever, and nobody hears of it", found.where, remedy
        )
    if found.number < MIN_DELIVERY_MS:
        text = f"{found.number:,} ms: a restart of the brokers may lose records"
        return Finding(rule, Level.WARNING, text, found.where, remedy)
    return Finding(rule, Level.OK, f"{found.number:,} ms", found.where)


def _check_request(facts: ProducerFacts) -> Finding:
    rule, found, remedy = (
        "request timeout",
        facts.resolve_value("request.timeout.ms"),
        f"set request.timeout.ms={REPLICA_LAG_MS}",
    )
    if found.text is None:
        return _build_unknown_finding(rule, found, remedy)
    if found.number is None:
        return Finding(rule, Level.ERROR, f"{found.text}: no number", found.where, remedy)
    if found.number >= facts.replica_lag_ms or facts.idempotence.text == "true":
        return Finding(rule, Level.OK, f"{found.number:,} ms", found.where)
    text = f"{found.number:,} ms: brokers wait {facts.replica_lag_ms:,} ms for a replica, and a retry comes sooner"
    return Finding(rule, Level.WARNING, text, found.where, f"set request.timeout.ms={facts.replica_lag_ms}")


def _check_transactions(facts: ProducerFacts) -> Finding:
    rule, found = "transactions", facts.resolve_value("transaction.timeout.ms")
    if not facts.transactional:
        return Finding(rule, Level.OK, "none: each record is alone")
    longest = facts.longest_transaction_ms
    if found.number is None or found.number > longest:
        text = f"{found.text} ms: brokers allow {longest:,} ms"
        return Finding(rule, Level.ERROR, text, found.where, f"set transaction.timeout.ms={longest} or less")
    return Finding(rule, Level.OK, f"{facts.set('transactional.id')}, at most {found.number:,} ms each", "set")


def _check_partitioner(facts: ProducerFacts) -> Finding:
    return _check_java_partitioner(facts) if facts.client is Client.JAVA else _check_librdkafka_partitioner(facts)


def _check_java_partitioner(facts: ProducerFacts) -> Finding:
    rule, chosen = "partitioner", facts.set("partitioner.class") or ""
    if _lower(facts.set("partitioner.ignore.keys")) == "true" or chosen.endswith(
        ("RoundRobinPartitioner", "UniformStickyPartitioner")
    ):
        remedy = "leave out partitioner.class and partitioner.ignore.keys"
        return Finding(rule, Level.ERROR, "keys are ignored: no key keeps its order", "set", remedy)
    if not chosen or chosen.endswith(".DefaultPartitioner"):
        return Finding(rule, Level.OK, "murmur2", "set" if chosen else "default of Java")
    remedy = "check that it puts a key where Java's own partitioner does; highwater audit --keys shows it"
    return Finding(rule, Level.UNKNOWN, chosen, "set", remedy)


def _check_librdkafka_partitioner(facts: ProducerFacts) -> Finding:
    rule, found, remedy = "partitioner", facts.resolve_value("partitioner"), "set partitioner=murmur2_random"
    if found.text in {"murmur2", "murmur2_random"}:
        return Finding(rule, Level.OK, found.text, found.where)
    if found.text == "random":
        return Finding(rule, Level.ERROR, "random: no key keeps its order", found.where, remedy)
    text = f"{found.text}: a key goes to another partition than with Java's clients"
    return Finding(rule, Level.WARNING, text, found.where, remedy)


def _check_queuing(facts: ProducerFacts) -> Finding:
    rule = "queuing"
    if facts.client is Client.JAVA:
        return Finding(rule, Level.OK, "fifo", "Java has no other")
    found = facts.resolve_value("queuing.strategy")
    if found.text == "fifo":
        return Finding(rule, Level.OK, "fifo", found.where)
    text = f"{found.text}: a later record may come first"
    return Finding(rule, Level.ERROR, text, found.where, "set queuing.strategy=fifo")


RULES: tuple[Callable[[ProducerFacts], Finding], ...] = (
    _check_client,
    _check_acks,
    _check_idempotence,
    _check_in_flight,
    _check_retries,
    _check_delivery_timeout,
    _check_request,
    _check_transactions,
    _check_partitioner,
    _check_queuing,
)
