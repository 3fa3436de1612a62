"""Orders: from placed to paid, refunded or canceled; versions without gaps for each order."""

from datetime import timedelta

from highwater.declaration import Accepted, Answers, Field, Limits, Lookup, Metrics, Stream, Transitions

STREAM = Stream(
    name="orders",
    topic="orders",
    description="The states of every order, in the order in which they happened.",
    fields=(
        Field("order_id", "string"),
        Field("version", "integer", at_least=1),
        Field("status", "string", one_of=("placed", "paid", "refunded", "canceled")),
        Field("customer_id", "string"),
        Field("amount", "decimal(12,2)", at_least=0),
        Field("event_time", "timestamp"),
    ),
    key=("order_id",),
    version="version",
    first_version=1,
    event_time="event_time",
    record_key="strict",
    transitions=Transitions(
        field="status",
        first="placed",
        allowed={"placed": ("paid", "canceled"), "paid": ("refunded",)},
    ),
    lookup=Lookup(field="customer_id", table="reference/customers", column="customer_id"),
    limits=Limits(max_offsets=200_000, min_offsets=1_000, max_wait=timedelta(seconds=20)),
    tiers=(timedelta(seconds=10), timedelta(minutes=5), timedelta(hours=1)),
    metrics=Metrics(status="status", amount="amount", mean_of=("paid",)),
    publishes=Accepted(topic="orders.accepted"),
    answers=Answers(
        does_order_matter="Yes, for each order: the highest version is the order's state, whenever it arrives.",
        what_about_duplicates="The same version with the same content counts once; other content is a conflict.",
        what_on_failure="Malformed and invalid records are parked for a person; unknown customers are retried.",
    ),
)
