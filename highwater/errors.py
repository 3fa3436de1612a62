"""The errors of Highwater: permanent ones need a person, temporary ones another try."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# The dependencies that have a breaker, beside the reference tables.
KAFKA = "kafka"
LAKE = "lake"


class HighwaterError(Exception):
    """A fault with a remedy.

    Args:
        problem: the fault, with the object's name.
        stored: the value that Highwater had recorded, where there is one.
        found: the value that was found instead.
        remedy: the operator's next action, a command if possible.
    """

    def __init__(
        self,
        problem: str,
        *,
        remedy: str,
        stored: object = None,
        found: object = None,
    ) -> None:
        self.problem = problem
        self.stored = stored
        self.found = found
        self.remedy = remedy
        super().__init__(problem, stored, found, remedy)

    def __str__(self) -> str:
        parts = [self.problem]
        if self.stored is not None:
            parts.append(f"stored: {self.stored}")
        if self.found is not None:
            parts.append(f"found: {self.found}")
        parts.append(f"remedy: {self.remedy}")
        return "; ".join(parts)


class PermanentError(HighwaterError):
    """Waiting does not help: a person has to change something first."""


class TemporaryError(HighwaterError):
    """A later attempt may succeed: a dependency is unavailable, or another writer was first."""


class ConfigurationError(PermanentError):
    """A setting or an argument that cannot be used."""


class DeclarationError(PermanentError):
    """A stream's declaration that contradicts itself or cannot be read."""


class UnknownSliceError(PermanentError):
    """A slice key that is not one, names another stream, or was never planned."""


class TopicAbsentError(PermanentError):
    """The topic does not exist on this cluster."""


class TopicVanishedError(TopicAbsentError):
    """A topic that was planned, or that records were published to, is not there any more (I11)."""


class TopicRecreatedError(PermanentError):
    """The topic carries another ID than the one that was planned (I11)."""


class OffsetsExpiredError(PermanentError):
    """Offsets that were never read, or are to be read again, lie before the log start offset (I10, I11)."""


class PartitionsRemovedError(PermanentError):
    """The topic has fewer partitions than the plan (I11)."""


class TopicTruncatedError(PermanentError):
    """A partition ends before the planned end: acknowledged history was cut off (I11, I16)."""


class InconsistentRecordError(PermanentError):
    """A generation or a loss that no topic can have, such as one that begins below offset 0; it was not recorded."""


class LedgerDiffersError(PermanentError):
    """The ledger differs from its schema, or from the commits of the tables in the lake."""


class LedgerRefusedError(PermanentError):
    """The ledger's database refuses a statement or one of its values, such as a text longer than its column."""


class UnbalancedError(PermanentError):
    """Raw, events and rejects of a slice do not add up: rows were changed by somebody else (I5)."""


class IncompleteReadError(PermanentError):
    """A read returned fewer rows than the table's log or its commits count; nothing was concluded from it (I15)."""


class BlockedError(PermanentError):
    """A check that the stream lets block failed; nothing downstream of the checked table is committed."""


class RejectsOverLimitError(PermanentError):
    """Too many records of a slice would be rejected, so the whole slice is left undecided."""


class RetractionError(PermanentError):
    """An event that was sent to the topic of accepted events would be retracted, and nobody allows that."""


class TopicDriftError(PermanentError):
    """A topic that is published to is not set up as the stream's declaration and its main topic ask for."""


class RecordTooLargeError(PermanentError):
    """A record is larger than its topic, or the producer, takes; nothing of its transaction is visible.

    Args:
        problem: the fault.
        stored: not used.
        found: the sizes.
        remedy: the commands that raise the limits.
        refused: the records that broker or client refused, where they are known.
    """

    def __init__(
        self, problem: str, *, remedy: str, stored: object = None, found: object = None, refused: Sequence[object] = ()
    ) -> None:
        super().__init__(problem, remedy=remedy, stored=stored, found=found)
        self.refused = refused


class RecordRefusedError(PermanentError):
    """A record that the client refuses to send, for example because it is too large; it was not sent."""


class KeyStoppedError(PermanentError):
    """An earlier record of the same key failed for good, and the order of a key is kept; this record was not sent."""


class ForeignMemberError(PermanentError):
    """Somebody consumes in the group that mirrors a stream's progress (I12)."""


class DependencyUnavailableError(TemporaryError):
    """Kafka, the lake, the ledger or Spark could not be reached; nothing was decided (I15).

    Args:
        problem: the fault.
        stored: the value that Highwater had recorded, where there is one.
        found: the value that was found instead.
        remedy: the operator's next action.
        of: the absent dependency, if it has a breaker: `KAFKA`, `LAKE`, or a reference table.
    """

    def __init__(
        self, problem: str, *, remedy: str, stored: object = None, found: object = None, of: str | None = None
    ) -> None:
        super().__init__(problem, remedy=remedy, stored=stored, found=found)
        self.of = of


class OutOfTimeError(DependencyUnavailableError):
    """The time of a sensor's tick was over before Kafka was asked everything; no breaker counts it."""


class NothingFetchedError(DependencyUnavailableError):
    """Kafka gave Spark no record in time, although its offsets are there."""


class SupersededAttemptError(TemporaryError):
    """Another attempt at the same slice committed first; this one wrote nothing (I4)."""


class BreakerOpenError(TemporaryError):
    """A circuit breaker is open: nothing was tried."""


class SliceHeldError(TemporaryError):
    """Records of a slice hold it: nothing of it was committed downstream of raw, nor is what comes after it."""


class OutOfTurnError(TemporaryError):
    """A slice of a stream whose slices follow each other, while one before it is still to come; nothing was tried."""


class LeaseHeldError(TemporaryError):
    """Somebody else holds the lease, or took it after its holder did not renew it in time."""


class UndeliveredError(TemporaryError):
    """Records whose delivery was refused, timed out, or was not known yet when the producer was closed."""
