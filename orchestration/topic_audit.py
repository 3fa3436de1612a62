"""The topics that a stream publishes to, held against the rules that their likeness to the main topic does not cover.

What belongs here: gathering the findings. What does not: the rules (`highwater.topic_rules`), or how these topics must
be set up to be published to at all (`resources.dlq_topics`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from highwater.errors import HighwaterError, TopicAbsentError
from highwater.topic_rules import Finding, judge_published
from resources.topic_facts import topic_facts

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from resources.kafka import Kafka


def judged_published(kafka: Kafka, stream: Stream) -> tuple[dict[str, list[Finding]], list[HighwaterError]]:
    """What the rules say of each of the topics that is there; and what kept one from being looked at.

    After the first that could not be, none is asked: a broker that is away is waited for once.
    """
    found: dict[str, list[Finding]] = {}
    try:
        for topic in stream.published_topics:
            with suppress(TopicAbsentError):
                found[topic] = judge_published(topic_facts(kafka, topic))
    except HighwaterError as error:
        return found, [error]
    return found, []
