"""Alerts: one for each condition and one recovery, through restarts, hanging receivers and looks that fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.processes import LOOPBACK, free_port
from highwater.alerting import DEPLOYMENT, Alert, Condition, mark_reported, update_alerts, update_watch
from highwater.declaration import Alerts, Foreign, Lookup
from highwater.envelope import Origin
from highwater.errors import LAKE, ConfigurationError, DependencyUnavailableError
from highwater.orchestration.build import build_defs
from highwater.orchestration.reporting import alert_conditions, alert_inputs, alerts, topic_conditions
from highwater.reclaims import Reclaim
from highwater.resources.kafka import Kafka
from highwater.resources.ledger import Ledger
from highwater.resources.webhook import post
from highwater.topic_rules import Setting
from tests.helpers.scene import Scene
from tests.helpers.support import make_stream
from tests.helpers.written_tables import MAIN, PARKED, STREAM, Written

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from tests.conftest import TopicFactory

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def measure(over: bool, value: str = "7") -> Condition:
    return Condition("orders", "parked records", value, "5", over, "look")


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_alerts_and_recoveries_alternate_and_none_is_reported_twice(ticks: list[tuple[bool, bool]]) -> None:
    """Each tick measures the condition, and its receiver may be unavailable."""
    open_: dict[tuple[str, str], Alert] = {}
    heard: list[str] = []
    for over, receives in ticks:
        open_ = update_alerts(open_, [measure(over)], NOW)
        for alert in [alert for alert in open_.values() if alert.is_unreported]:
            if receives:
                heard.append(alert.to_plain()["kind"])
                open_ = mark_reported(open_, alert)
    assert heard == [("alert", "recovery")[n % 2] for n in range(len(heard))]
    if ticks and ticks[-1][1]:
        assert (heard[-1:] == ["alert"]) == ticks[-1][0], "the receiver knows the state"


def test_a_thousand_ticks_over_a_threshold_are_one_alert_and_one_recovery() -> None:
    """What is in the ledger between two ticks is all that they know of each other."""
    open_: dict[tuple[str, str], Alert] = {}
    heard: list[str] = []
    for tick in range(1_002):
        open_ = update_alerts(open_, [measure(over=tick < 1_000, value=str(tick))], NOW + timedelta(minutes=tick))
        for alert in [alert for alert in open_.values() if alert.is_unreported]:
            heard.append(f"{alert.to_plain()['kind']} {alert.since:%H:%M}")
            open_ = mark_reported(open_, alert)
    assert heard == ["alert 00:00", "recovery 00:00"]


def test_unmeasured_alerts_stay_unchanged() -> None:
    open_ = update_alerts({}, [measure(over=True)], NOW)
    assert update_alerts(open_, [], NOW + timedelta(hours=1)) == open_
    later = update_alerts(open_, [measure(over=True, value="9")], NOW + timedelta(hours=1))
    [alert] = later.values()
    assert (alert.since, alert.value) == (NOW, "9")


def test_an_alert_that_lasts_has_the_remedy_of_now() -> None:
    """It named the first slice that was exhausted, for as long as any was, and the threshold of before."""
    known = {
        name: replace(alert, reported=True) for name, alert in update_alerts({}, [measure(over=True)], NOW).items()
    }
    now = replace(measure(over=True), threshold="6", remedy="look at the other")
    [alert] = update_alerts(known, [now], NOW + timedelta(hours=1)).values()
    assert (alert.since, alert.reported, alert.threshold, alert.remedy) == (NOW, True, "6", "look at the other")


HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.mark.parametrize(
    ("seen", "gone", "restarted"),
    [
        ({"mine": NOW - HOUR / 2, "other": NOW - DAY}, {"other"}, {"mine", "other"}),
        ({"mine": NOW - HOUR / 2, "other": NOW - DAY + HOUR}, set(), {"mine"}),
        ({"mine": NOW - HOUR / 2}, set(), {"mine", "other"}),
        ({"mine": NOW - HOUR / 60, "other": NOW - HOUR}, set(), set()),
        ({"mine": NOW - HOUR, "other": NOW - DAY}, set(), {"mine", "other"}),
        ({}, set(), {"mine", "other"}),
    ],
    ids=[
        "nobody watches it",
        "somebody did today",
        "a ledger of before",
        "a tick ago",
        "no tick ran for a while",
        "a new ledger",
    ],
)
def test_gone_is_what_nobody_watched_over_while_others_ticked(
    seen: dict[str, datetime], gone: set[str], restarted: set[str]
) -> None:
    found = update_watch(["mine", "other"], ["mine"], seen, NOW)
    assert (set(found.gone), set(found.added)) == (gone, restarted)


def test_the_alerts_of_what_nothing_declares_any_more_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alerts of a removed stream, and of a reference table unavailable when its stream went, never ended."""
    ledger, unused = Ledger(f"sqlite:///{tmp_path / 'l.sqlite'}"), cast("Any", None)
    heard: list[dict[str, Any]] = []
    table = Lookup("customer_id", "reference/old", "id")
    ledger.breakers.change(table.dependency, lambda row: replace(row, state="open", since=NOW, why="away"))
    mine, other = replace(STREAM, lookup=None), replace(STREAM, name="other", lookup=table)
    monkeypatch.setattr(alerts, "CONDITIONS", (lambda asked: replace(measure(over=True), stream=asked.stream.name),))

    def tick(number: int, *streams: Stream) -> list[tuple[str, str, str]]:
        monkeypatch.setattr(alerts, "datetime", SimpleNamespace(now=lambda _: NOW + number * 0.9 * HOUR))
        heard.clear()
        alerts.tick(ledger, unused, unused, streams, lambda alert: heard.append(alert.to_plain()))
        return sorted((one["kind"], one["stream"], one["what"]) for one in heard)

    of_table = (DEPLOYMENT, f"circuit breaker of {table.dependency}")
    names = [("other", "parked records"), of_table]
    assert tick(0, mine, other) == sorted(("alert", *one) for one in [("orders", "parked records"), *names])
    for number in range(1, 7):  # two code locations on one ledger: each declares what the other does not
        assert tick(number, mine if number % 2 else other) == []
    ended = {number: found for number in range(7, 40) if (found := tick(number, mine))}
    assert ended == {6 + 27: sorted(("recovery", *one) for one in names)}, "a day after the last tick of the other"
    assert [one.stream for one in ledger.alerts.read_open().values()] == ["orders"]


def test_streams_without_time_or_change_keep_their_alerts(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick that measured 100 streams took longer than Dagster lets it."""
    streams = [replace(STREAM, name=name) for name in ("a", "b", "c", "d")]
    at, seen = [0.0], list[str]()

    def measured(asked: alert_inputs.StreamInputs) -> Condition:
        seen.append(asked.stream.name)
        at[0] += alerts.MEASURE_SECONDS * 0.7
        return replace(measure(over=asked.stream.name == "b"), stream=asked.stream.name)

    monkeypatch.setattr(alerts, "CONDITIONS", (measured,))
    monkeypatch.setattr(alerts, "time", SimpleNamespace(monotonic=lambda: at[0]))
    unused: Any = None
    begin, found = "", []
    for resting in ((), (), {"b"}):
        seen.clear()
        outputs = alerts.tick(ledger, unused, unused, streams, lambda _: None, begin=begin, resting=resting)
        found.append(
            (
                "".join(seen),
                outputs.begin,
                "".join(outputs.calm),
                "".join(outputs.alerting),
                [one.stream for one in ledger.alerts.read_open().values()],
            )
        )
        begin = outputs.begin
    assert found == [("ab", "c", "a", "b", ["b"]), ("cd", "a", "cd", "", ["b"]), ("ac", "d", "ac", "", ["b"])]


def test_an_alert_that_cannot_be_measured_has_the_remedy_of_its_error(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named the tick, and the tick named the problem alone."""

    def refused(_: alert_inputs.StreamInputs) -> Condition:
        raise ConfigurationError("the topic may not be read", found="DENIED", remedy="allow READ on it")

    def broken(_: alert_inputs.StreamInputs) -> Condition:
        raise ZeroDivisionError

    monkeypatch.setattr(alerts, "CONDITIONS", (refused, broken, refused))
    unused: Any = None
    lines = alerts.tick(ledger, unused, unused, [STREAM], lambda _: None).lines
    [alert] = ledger.alerts.read_open().values()
    assert (alert.what, alert.value) == (
        "not measured",
        "the topic may not be read; found: DENIED; broken: ZeroDivisionError",
    )
    assert alert.remedy.startswith("allow READ on it; report this as a defect")
    assert "orders: not measured: the topic may not be read; found: DENIED; remedy: allow READ on it" in lines


def test_the_status_of_any_stream_has_the_alerts_of_the_deployment(tmp_path: Path) -> None:
    """That the ticks of a sensor failed was in no command, and the runbook sent people to `status`."""
    scene = Scene(f"{LOOPBACK}:{free_port()}", "orders", tmp_path)
    failing = Condition(DEPLOYMENT, "sensor planner", "its last 3 ticks failed", "3", over=True, remedy="see them")
    passed = Alert(DEPLOYMENT, "stream files", "all were read", "none", "no action needed", NOW, ended=NOW)
    scene.ledger.alerts.record({**update_alerts({}, [failing, measure(over=True)], NOW), ("", ""): passed})
    lines = scene.run("status", "orders").output.splitlines()
    shown = "the deployment: alert since 2026-03-01 00:00 UTC: sensor planner: its last 3 ticks failed; see them"
    assert (lines[0], sum(shown in line for line in lines)) == (shown, 1)
    assert sum("alert since" in line for line in lines) == 2
    [plain] = json.loads(scene.run("status", "orders", "--json").stdout)
    assert [one["stream"] for one in plain["alerts"]] == ["orders", DEPLOYMENT]


@pytest.fixture
def ticking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Ticks with one measure that a test sets; each opens the ledger afresh, as another daemon does."""

    def tick(over: bool | None, report: alerts.Report) -> list[str]:
        def measured(*_: object) -> Condition | None:
            if over is None:
                raise DependencyUnavailableError("the lake is unavailable", remedy="wait")
            return measure(over)

        monkeypatch.setattr(alerts, "CONDITIONS", (measured,))
        unused: Any = None
        return alerts.tick(Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), unused, unused, [STREAM], report).lines

    return tick


@pytest.mark.slow
def test_many_ticks_give_one_alert_and_one_recovery(ticking: Callable[..., list[str]]) -> None:
    heard: list[Alert] = []
    for _ in range(100):
        ticking(True, heard.append)
        ticking(None, heard.append)
    assert [(alert.to_plain()["kind"], alert.value) for alert in heard] == [("alert", "7")]
    ticking(False, heard.append)
    ticking(False, heard.append)
    assert [alert.to_plain()["kind"] for alert in heard] == ["alert", "recovery"]


def test_a_receiver_that_fails_is_reported_later(ticking: Callable[..., list[str]]) -> None:
    def fails(_: Alert) -> None:
        raise DependencyUnavailableError("the receiver of alerts did not answer", remedy="wait")

    heard: list[Alert] = []
    assert "did not answer" in " ".join(ticking(True, fails))
    ticking(True, heard.append)
    ticking(False, fails)
    ticking(False, heard.append)
    assert [alert.to_plain()["kind"] for alert in heard] == ["alert", "recovery"]


class Receiver(BaseHTTPRequestHandler):
    """Keeps what it was sent; answers by the server's `status`, or not at all while it is 0.

    What the server's `refuses` is in, it refuses with that status.
    """

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if server.status == 0:
            time.sleep(1)
            return
        server.heard.append((self.headers["Content-Type"], json.loads(body)))
        status = next((code for word, code in server.refuses.items() if word.encode() in body), server.status)
        self.send_response(status)
        self.send_header("Location", server.location)
        self.end_headers()

    def do_GET(self) -> None:
        """Where a redirected POST would arrive, without its body."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def receiver() -> Iterator[Any]:
    server: Any = HTTPServer((LOOPBACK, 0), Receiver)
    server.heard, server.status, server.refuses, server.location = [], 200, {}, "/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_receiver_gets_json_and_its_address_is_never_repeated(receiver: Any) -> None:
    url = f"http://{LOOPBACK}:{receiver.server_port}/?token=planted-secret"
    post(url, {"kind": "alert"})
    assert receiver.heard == [("application/json", {"kind": "alert"})]
    messages = []
    for status, seconds in ((500, 5.0), (302, 5.0), (0, 0.2)):
        receiver.status = status
        with pytest.raises(DependencyUnavailableError) as caught:
            post(url, {}, seconds)
        messages.append(str(caught.value) + repr(caught.value.__cause__))
    with pytest.raises(DependencyUnavailableError) as caught:
        post(f"http://{LOOPBACK}:{free_port()}/planted-secret", {})
    with pytest.raises(ConfigurationError) as strange:
        post("file:///planted-secret", {})
    with pytest.raises(ConfigurationError, match="no HTTP address") as odd:
        post(f"http://{LOOPBACK}/planted secret", {})
    messages.append(str(odd.value) + repr(odd.value.__cause__))
    assert not any("planted" in text for text in [*messages, str(caught.value), str(strange.value)])


def test_a_receiver_that_moved_for_good_is_a_permanent_error(receiver: Any) -> None:
    """It was tried for ever as one that does not answer, and nobody learned the new address."""
    url = f"http://{LOOPBACK}:{receiver.server_port}/planted-secret"
    here = f"http://{LOOPBACK}:{receiver.server_port}"
    targets = {"https://u:planted@new.example:8443/planted?x": "https://new.example:8443", "/planted": here}
    for location, shown in targets.items():
        receiver.location = location
        for receiver.status, error in (
            (301, ConfigurationError),
            (308, ConfigurationError),
            (302, DependencyUnavailableError),
            (303, DependencyUnavailableError),
            (307, DependencyUnavailableError),
        ):
            with pytest.raises(error) as caught:
                post(url, {})
            assert caught.value.found == f"status {receiver.status}, redirect to {shown}"
            assert "planted" not in str(caught.value)
            assert ("set HIGHWATER_ALERTS_URL to the new address" in caught.value.remedy) == (
                error is ConfigurationError
            )
    receiver.status, receiver.location = 301, "http://[broken"
    with pytest.raises(ConfigurationError, match="redirect to no address"):
        post(url, {})


def test_an_alert_that_the_receiver_refuses_keeps_back_no_other(
    receiver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is reported first, and nothing after one that was always refused was ever reported."""
    found = [replace(measure(over=True), what=what) for what in ("first", "second", "third")]
    measuring = [lambda _, one=one: one for one in found]
    unused: Any = None

    def tick() -> tuple[list[str], list[str]]:
        receiver.heard.clear()
        ledger = Ledger(f"sqlite:///{tmp_path / 'l.sqlite'}")
        url = f"http://{LOOPBACK}:{receiver.server_port}/"
        lines = alerts.tick(ledger, unused, unused, [STREAM], lambda alert: post(url, alert.to_plain())).lines
        return [body["what"] for _, body in receiver.heard], [line for line in lines if not line.startswith("sent:")]

    receiver.refuses = {"first": 413}
    for new, asked in ((2, ["first", "second"]), (3, ["first", "third"])):
        monkeypatch.setattr(alerts, "CONDITIONS", measuring[:new])
        heard, [line] = tick()
        assert heard == asked
        assert line.startswith("not sent: orders first: the receiver of alerts refused this one")
        assert "413" in line
    for busy in (408, 425, 429, 503):
        receiver.refuses = {"first": busy}
        monkeypatch.setattr(alerts, "CONDITIONS", [*measuring, lambda _: replace(found[0], what="fourth")])
        assert tick()[0] == ["first"], "who cannot take it now is not asked for the others"
    receiver.refuses = {}
    assert tick()[0] == ["first", "fourth"]


def test_conditions_of_the_lake_are_measured(tmp_path: Path) -> None:
    written = Written(tmp_path)
    kinds = {"rejects_malformed": 1, "rejects_schema": 0, "rejects_invalid": 5, "rule_amount_positive": 5}
    written.prove(MAIN, {"raw": 10, "events": 4, "rejects": 6, "dlq": 6, "current": 5}, raw=10, **kinds)
    written.add("events", MAIN, range(4))
    written.add("rejects", MAIN, range(4, 10), next_topic=PARKED)
    written.ledger.add([MAIN])
    written.write()
    unavailable = Kafka(f"{LOOPBACK}:{free_port()}")
    stream = replace(STREAM, alerts=Alerts(reject_ratio=0.6, parked=5))
    asked = alert_inputs.StreamInputs(written.ledger, unavailable, written.lake, stream)
    ratio, parked = alert_conditions._measure_reject_ratio(asked), alert_conditions._measure_parked_records(asked)
    assert ratio is not None
    assert parked is not None
    assert (ratio.over, ratio.value) == (False, "60% of 10 records of the newest 1 slices")
    assert "(rejects/invalid 5, rejects/invalid/amount_positive 5, rejects/malformed 1)" in ratio.remedy
    assert (parked.over, parked.value) == (True, "6 wait for a person")
    beyond = alert_conditions._measure_reject_ratio(
        replace(asked, stream=replace(STREAM, alerts=Alerts(reject_ratio=0.59)))
    )
    assert beyond is not None
    assert beyond.over


def test_unavailable_dependencies_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that fails is neither an alert nor its end."""
    monkeypatch.setattr(topic_conditions, "fetch_topic_settings", lambda *_: {"retention.ms": Setting("60000", "x")})
    monkeypatch.setattr(
        alerts, "CONDITIONS", (topic_conditions.measure_retention_left, alert_conditions._measure_retry_age)
    )
    ledger, unavailable = Ledger(f"sqlite:///{tmp_path / 'l.sqlite'}"), Kafka(f"{LOOPBACK}:{free_port()}")
    lake: Any = None
    lines: list[str] = []
    assert list(alerts._measure_stream(ledger, unavailable, lake, STREAM, lines, [])) == []
    assert [line.startswith("orders: not measured: ") for line in lines] == [True, True]


@pytest.mark.parametrize(
    ("settings", "over"),
    [
        ({"retention.ms": Setting("-1", "x")}, False),
        ({"retention.ms": Setting(str(2**63 - 1), "x")}, False),
        ({}, None),
        (None, None),
    ],
    ids=["for ever", "the longest there is", "unknown", "may not be read"],
)
def test_a_topic_that_keeps_all_ends_the_alert_of_its_retention(
    settings: dict[str, Setting] | None, over: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who raised retention.ms to unlimited, as the alert says, never got the recovery."""
    monkeypatch.setattr(topic_conditions, "fetch_topic_settings", lambda *_: settings)
    unused: Any = None
    found = topic_conditions.measure_retention_left(alert_inputs.StreamInputs(unused, unused, unused, STREAM))
    assert (found and found.over) == over
    if found is not None:
        known = {("orders", found.what): Alert("orders", found.what, "1 h", "2 h", "raise it", NOW, reported=True)}
        assert [one.to_plain()["kind"] for one in update_alerts(known, [found], NOW).values()] == ["recovery"]


def test_the_alerts_of_tiers_and_of_sending_end_when_the_declaration_has_neither(tmp_path: Path) -> None:
    """Nothing measured them any more, and they stayed open for ever."""
    unused: Any = None
    bare = replace(STREAM, tiers=(), foreign=(), publishes=None)
    asked = alert_inputs.StreamInputs(Ledger(f"sqlite:///{tmp_path / 'l.sqlite'}"), unused, unused, bare)
    for measuring in (alert_conditions._measure_retry_age, alert_conditions._measure_publication_age):
        found = measuring(asked)
        assert found is not None
        assert not found.over


def test_a_lake_whose_folder_is_gone_is_not_measured(tmp_path: Path) -> None:
    """It was taken for an empty one: alerts recovered, and slices reprocessed long ago seemed to wait."""
    written = Written(tmp_path)
    written.prove(MAIN, {"raw": 10, "events": 4, "rejects": 6, "dlq": 6, "current": 5}, raw=10)
    for n, table in enumerate(("events", "rejects")):
        written.add(table, MAIN, range(4 + 6 * n), next_topic=PARKED)
    written.ledger.add([MAIN])
    written.ledger.allocate_attempts([MAIN.key])
    written.ledger.reclaims.add("orders", [Reclaim(Origin("orders", 0, 0, 2), MAIN.key, 1, "fixed", "ann", NOW)])
    written.write()
    unavailable = Kafka(f"{LOOPBACK}:{free_port()}")
    of_lake = [measuring for measuring, names in alert_conditions.DEPENDENCIES.items() if LAKE in names]
    heard: list[Alert] = []

    def tick() -> list[str]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(alerts, "CONDITIONS", of_lake)
            lines: list[str] = []
            found = [*alerts._measure_stream(written.ledger, unavailable, written.lake, STREAM, lines, [])]
        heard.extend(update_alerts({}, found, NOW).values())
        return lines

    tick()
    there = len(heard)
    (tmp_path / "lake").rename(tmp_path / "moved")
    gone = tick()
    assert there > 0
    assert len(heard) == there
    assert len(gone) == len(of_lake)
    assert all("orders: not measured: the lake's folder" in one or "is not asked" in one for one in gone)


@pytest.mark.slow
def test_the_sensor_reports_what_kafka_shows(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry that nobody plans, and a backlog that retention is about to take."""
    from tests.conftest import create_topic
    from tests.helpers.support import Message, send

    scene = Scene(bootstrap, topic(**{"retention.ms": "20000", "message.timestamp.type": "LogAppendTime"}), tmp_path)
    limits = Alerts(retries_late=timedelta(seconds=1), retention_left=timedelta(seconds=30))
    absent = (Foreign(f"{scene.topic}.absent", timedelta(seconds=1)),)
    stream = replace(make_stream(scene.topic), tiers=(timedelta(seconds=1),), foreign=absent, alerts=limits)
    create_topic(bootstrap, stream.tier_topics[0], 1, {"message.timestamp.type": "LogAppendTime"})
    scene.tick()  # with rejects on its tier and no plan it would have lost its ledger
    send(bootstrap, stream.tier_topics[0], [Message(b"k", b"v")])
    scene.write(3)
    settings = {
        "HIGHWATER_HOME": str(tmp_path),
        "HIGHWATER_KAFKA_BOOTSTRAP": bootstrap,
        "HIGHWATER_ALERTS_URL": f"http://{LOOPBACK}:{receiver.server_port}/",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    time.sleep(11)
    defs = build_defs(streams=[stream])
    sensor = defs.get_repository_def().get_sensor_def("alerts")

    def tick() -> str:
        with dg.build_sensor_context(resources=defs.resources, instance=dg.DagsterInstance.ephemeral()) as context:
            return str(sensor.evaluate_tick(context).skip_message)

    assert "sent: alert orders age of retries" in tick()
    assert {body["what"] for _, body in receiver.heard} == {"age of retries", "retention before unread records"}
    assert "2 alerts are open" in tick()
    shown = scene.run("status", "orders").output
    assert "alert since" in shown
    assert f"the oldest retry, on {stream.tier_topics[0]}, is" in shown
    assert len(receiver.heard) == 2
