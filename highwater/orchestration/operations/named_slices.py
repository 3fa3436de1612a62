"""Slices by the keys that a person names; slices of other streams are refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError

if TYPE_CHECKING:
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice


def load_slices(ledger: Ledger, streams: Collection[str], keys: Sequence[str]) -> list[Slice]:
    """The slices of these keys, in their order.

    Args:
        ledger: the plans.
        streams: the names of those that the slices may be of.
        keys: the slices.

    Raises:
        UnknownSliceError: one of them was never planned.
        ConfigurationError: one of them is of another stream.
    """
    slices = ledger.get(keys)
    for slice_ in slices:
        if slice_.stream not in streams:
            raise ConfigurationError(
                f"{slice_.key} is no slice of {', '.join(streams)}",
                found=f"stream {slice_.stream}",
                remedy=f"name slices of {', '.join(streams)}",
            )
    return slices
