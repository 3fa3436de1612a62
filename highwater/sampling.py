"""The records of a sample: as many of each partition, from its beginning and its end, and repeats of their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from highwater.second_reader import KafkaRecord
from highwater.slices import OffsetRange

Part = Literal["beginning", "end"]

# A sample of a topic with many keys has each key once, so it shows neither which field goes with the key nor which one
# rises. 20 records are read for each sampled one to find their keys again: 20,000 for 1,000, in half a second.
READ_FOR_REPEATS = 20
MAX_BYTES_FOR_REPEATS = 64 * 2**20
# One repeat for four records is evidence enough; a busy key alone is none.
RECORDS_PER_REPEAT = 4
REPEATS_PER_KEY = 3


def compute_shares(sizes: Mapping[int, int], count: int) -> dict[int, int]:
    """The number of records that each partition gives, so that the smallest shares are as large as possible.

    Args:
        sizes: the offsets of each partition.
        count: the records wanted in all.
    """
    found = dict.fromkeys(sizes, 0)
    left = count
    open_ = sorted((size, partition) for partition, size in sizes.items() if size)
    while open_ and left:
        size, partition = open_.pop(0)
        each = -(-left // (len(open_) + 1))  # rounded up, so that no record is left over
        found[partition] = min(size, each)
        left -= found[partition]
    return found


def split_share(share: int) -> dict[Part, int]:
    """The numbers of records of a share from the beginning and from the end."""
    return {"beginning": share - share // 2, "end": share // 2}


def build_window(log: OffsetRange, width: int, part: Part) -> OffsetRange:
    """The offsets at one end of a partition's log."""
    if part == "beginning":
        return OffsetRange(log.start, min(log.end, log.start + width))
    return OffsetRange(max(log.start, log.end - width), log.end)


def needs_repeats(records: Sequence[KafkaRecord]) -> bool:
    """Whether each record has a key, and few keys occur twice."""
    keys = {record.key for record in records}
    return None not in keys and len(records) - len(keys) < _compute_repeat_limit(records)


def select_repeats(sampled: Sequence[KafkaRecord], others: Iterable[KafkaRecord]) -> list[KafkaRecord]:
    """The records that have the key of a sampled one, until there are enough.

    Args:
        sampled: the sample.
        others: further records, in the order of their offsets; the sampled ones among them are left out.
    """
    places = {(record.partition, record.offset) for record in sampled}
    left = Counter(dict.fromkeys((record.key for record in sampled), REPEATS_PER_KEY))
    found: list[KafkaRecord] = []
    size = 0
    for record in others:
        size += len(record.value or b"")
        if len(found) >= _compute_repeat_limit(sampled) or size > MAX_BYTES_FOR_REPEATS:
            break
        if left[record.key] and (record.partition, record.offset) not in places:
            left[record.key] -= 1
            found.append(record)
    return found


def _compute_repeat_limit(sampled: Sequence[KafkaRecord]) -> int:
    return -(-len(sampled) // RECORDS_PER_REPEAT)  # rounded up
