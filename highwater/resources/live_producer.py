"""The configuration of our producers as the client took it, for the audit."""

# With `debug=conf` librdkafka logs, when a client is made, each property that is not at its default. No broker is
# needed for it, and nothing is sent: a name is fenced by `init_transactions` alone, which is not called.

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping

from highwater.declaration import Stream
from highwater.producer_rules import Client, ProducerFacts
from highwater.resources.clients import open_client
from highwater.resources.kafka import Kafka
from highwater.resources.transactions import build_publishing_properties

LOG_SECONDS = 5.0
_STEP_SECONDS = 0.05
# The last of librdkafka's sections; properties of topics are in it.
_LAST_SECTION = "Default topic configuration"
_PROPERTY = re.compile(r"^CONF .*\]:   (\S+) = (.*)$")


def list_own_producers(kafka: Kafka, stream: Stream) -> list[ProducerFacts]:
    """The producers that a stream's runs open.

    Raises:
        ConfigurationError: the client refuses the configuration.
    """
    properties = build_publishing_properties(kafka, f"highwater.pub.audit.{stream.name}")
    return [read_producer_facts(f"publication of rejects of {stream.name}", properties)]


def read_producer_facts(name: str, properties: Mapping[str, str]) -> ProducerFacts:
    """A producer with these properties as librdkafka has it.

    Raises:
        ConfigurationError: the client refuses them.
    """
    from confluent_kafka import Producer, libversion

    lines = _LogLines()
    # None of the process's loggers: what goes there is for people.
    log = logging.Logger("highwater.live_producer", logging.DEBUG)  # noqa: LOG001
    log.addHandler(lines)
    debug = ",".join(filter(None, (properties.get("debug"), "conf")))
    client = open_client(Producer, {**properties, "debug": debug}, name=name, logger=log)
    deadline = time.monotonic() + LOG_SECONDS
    # The lines come together, from the queue that is polled; the round after the last section brings its rest.
    while not lines.complete and time.monotonic() < deadline:
        client.poll(_STEP_SECONDS)
    client.poll(_STEP_SECONDS)
    version = tuple(map(int, libversion()[0].split("-")[0].split(".")))
    return ProducerFacts(name, Client.LIBRDKAFKA, version, lines.properties, ours=True)


class _LogLines(logging.Handler):
    """The lines of the log that name a property."""

    def __init__(self) -> None:
        super().__init__()
        self.properties: dict[str, str] = {}
        self.complete = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.complete |= _LAST_SECTION in text
        if found := _PROPERTY.match(text):
            self.properties[found[1]] = found[2]
