"""A stream whose unresolved records hold their slices, one such record, and its release."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from highwater.declaration import OnReject
from highwater.declaration_parts import ON_REJECT
from highwater.envelope import Origin
from highwater.holds import HoldingRecords, Release
from tests.helpers.support import make_stream

HOLDING = {**ON_REJECT, "unresolved": OnReject.HOLD}
STREAM = make_stream("orders", on_reject=HOLDING)
FOUND = HoldingRecords(3, Origin("orders", 0, 2, 41), "unresolved", "customer_id is not in reference/customers")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(minutes=7)
PARK = Release(park=True, by="ann", because="unknown customer", at=LATER)
