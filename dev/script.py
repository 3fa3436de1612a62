"""The script of a generated stream: which records, in which order, decided by the seed alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random

from dev.faults import BURST, NONE, Source, Story, poison, sound
from dev.intended import Intended
from highwater.errors import ConfigurationError

# A number of keys are alive at once: neighbours in a partition are of different keys, and a life spreads over slices.
ALIVE = 200
# Faults that a life of one record cannot have.
OF_SEVERAL = frozenset({"out_of_order"})


@dataclass(frozen=True)
class Script:
    """The records to write to one topic.

    Args:
        source: the stream.
        seed: decides everything, together with `run`.
        run: which run of this seed; ids of different runs differ.
        records: records to be written, up to a life more; without end if None.
        rates: of each fault the share of keys that have it; the source's own where one is not named.
    """

    source: Source
    seed: int
    run: int = 0
    records: int | None = None
    rates: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(self.rates.keys() - self.source.faults.keys())
        if unknown:
            raise ConfigurationError(
                f"{self.source.name} has no fault {', '.join(unknown)}",
                found=", ".join(f"{name}={self.rates[name]:g}" for name in unknown),
                remedy=f"choose among {', '.join(sorted(self.source.faults))}",
            )
        if sum(self.all_rates.values()) > 1 or any(rate < 0 for rate in self.all_rates.values()):
            raise ConfigurationError(
                "the rates of the faults are shares of all keys: none below 0, their sum at most 1",
                found=f"a sum of {sum(self.all_rates.values()):g}",
                remedy="name smaller rates",
            )

    @property
    def all_rates(self) -> dict[str, float]:
        """The rate of every fault that occurs."""
        rates = {**dict.fromkeys(self.source.faults, 0.0), **self.source.rates, **self.rates}
        return {name: rate for name, rate in sorted(rates.items()) if rate}

    @property
    def prefix(self) -> str:
        """The prefix of this run's ids."""
        return f"{self.seed}-{self.run}"

    def life(self, number: int) -> list[Intended]:
        """The records of the n-th key, in the order in which they are written."""
        rng = Random(f"{self.source.name} {self.prefix} {number}")  # noqa: S311 - a seed is to decide
        fault = self._fault(rng, number)
        story = self._story(rng, number)
        while fault in OF_SEVERAL and len(story.states) == 1:
            story = self._story(rng, number)
        return sound(rng, story) if fault == NONE else self.source.faults[fault](rng, story)

    def _story(self, rng: Random, number: int) -> Story:
        return self.source.story(rng, self.prefix, number, self.source.partitions)

    def _fault(self, rng: Random, number: int) -> str:
        """The first keys have one fault each, so that a short run has them all; then the rates decide."""
        rates = self.all_rates
        if number < len(rates):
            return list(rates)[number]
        names = [*rates, NONE]
        return rng.choices(names, [*rates.values(), 1 - sum(rates.values())])[0]

    def lives(self) -> Iterator[list[Intended]]:
        """The lives, until they hold enough records."""
        written = 0
        for number in count():
            if self.records is not None and written >= self.records:
                return
            life = self.life(number)
            written += len(life)
            yield life

    def poison(self, records: int) -> Iterator[Sequence[Intended]]:
        """A number of records that nobody can read, one by one: each of a key of its own, which no life has."""
        for number in range(records):
            rng = Random(f"{self.source.name} {self.prefix} {BURST} {number}")  # noqa: S311 - a seed is to decide
            yield [poison(rng, self.source.story(rng, f"{self.prefix}-{BURST}", number, self.source.partitions))]

    def batches(self) -> Iterator[Sequence[Intended]]:
        """The records in the order of writing: one by one, and those of a transaction together."""
        rng = Random(f"{self.source.name} {self.prefix} order")  # noqa: S311 - a seed is to decide
        lives = self.lives()
        alive = list(islice(lives, ALIVE))
        while alive:
            at = rng.randrange(len(alive))
            taken = len(alive[at]) if alive[at][0].transaction else 1
            yield alive[at][:taken]
            alive[at] = alive[at][taken:]
            if not alive[at]:
                alive[at] = next(lives, [])
            if not alive[at]:
                alive[at] = alive[-1]
                alive.pop()
