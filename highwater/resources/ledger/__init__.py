"""The ledger: what was planned, lost and leased, in a SQL database."""

from highwater.resources.ledger.store import WAIT_SECONDS, Ledger

__all__ = ["WAIT_SECONDS", "Ledger"]
