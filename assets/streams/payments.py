"""Payments: amounts booked on an account's payment; the newest booking time wins."""

from datetime import timedelta

from highwater.declaration import Answers, Field, Limits, Stream

STREAM = Stream(
    name="payments",
    topic="payments",
    description="Bookings of payments; each booking replaces the one before it.",
    fields=(
        Field("account_id", "string"),
        Field("payment_id", "string"),
        Field("booked_at", "timestamp"),
        Field("amount", "decimal(12,2)"),
        Field("currency", "string"),
    ),
    key=("account_id", "payment_id"),
    version="booked_at",
    event_time="booked_at",
    record_key="strict",
    limits=Limits(max_offsets=100_000, min_offsets=1_000, max_wait=timedelta(seconds=20)),
    answers=Answers(
        does_order_matter="Only within one payment: the booking with the latest time is the one that counts.",
        what_about_duplicates="The same booking twice counts once.",
        what_on_failure="Every failure is permanent here: nothing is looked up, so waiting fixes nothing.",
    ),
)
