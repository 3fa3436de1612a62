"""A stream whose unresolved records hold their slices, and one such record."""

from __future__ import annotations

from highwater.declaration import OnReject
from highwater.declaration_parts import ON_REJECT
from highwater.envelope import Origin
from highwater.holds import HoldingRecords
from tests.helpers.support import make_stream

HOLDING = {**ON_REJECT, "unresolved": OnReject.HOLD}
STREAM = make_stream("orders", on_reject=HOLDING)
FOUND = HoldingRecords(3, Origin("orders", 0, 2, 41), "unresolved", "customer_id is not in reference/customers")
