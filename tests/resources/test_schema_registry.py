"""Schemas read from a real registry, and what a registry that fails looks like."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from dev.processes import LOOPBACK, free_port
from dev.registry import EmbeddedRegistry
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.formats import Avro
from highwater.orchestration.cli.main import main
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.resources.schema_registry import SchemaRegistry, open_registry
from highwater.schemas import Schema, SchemaReference, parse_framing
from highwater.settings import Settings
from highwater.stream_files import load_streams
from tests.helpers.identities import Authority

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

PASSWORD = "not-to-be-shown"
# Nothing is retried: for tests in which that only takes time.
AT_ONCE = {"max.retries": 0}

MONEY = '{"type":"record","name":"Money","namespace":"shop","fields":[{"name":"amount","type":"long"}]}'
ORDER = '{"type":"record","name":"Order","namespace":"shop","fields":[{"name":"total","type":"shop.Money"}]}'
CART = '{"type":"record","name":"Cart","namespace":"shop","fields":[{"name":"order","type":"shop.Order"}]}'
MONEY_PROTO = 'syntax = "proto3";\npackage shop;\n\nmessage Money {\n  int64 amount = 1;\n}\n'
ORDER_PROTO = (
    'syntax = "proto3";\npackage shop;\n\nimport "shop/money.proto";\n\nmessage Order {\n  shop.Money total = 1;\n}\n'
)
JSON_SCHEMA = '{"$schema":"http://json-schema.org/draft-07/schema#","type":"object"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRegistry]:
    with EmbeddedRegistry(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: EmbeddedRegistry) -> SchemaRegistryClient:
    """A client of the tests' own: it registers what the code under test reads."""
    from confluent_kafka.schema_registry import SchemaRegistryClient

    return SchemaRegistryClient({"url": server.url})


@pytest.fixture
def registry(server: EmbeddedRegistry) -> SchemaRegistry:
    return SchemaRegistry(server.url)


def register(
    client: SchemaRegistryClient, subject: str, kind: str, text: str, *references: tuple[str, str, int]
) -> int:
    from confluent_kafka.schema_registry import Schema as Registered
    from confluent_kafka.schema_registry import SchemaReference

    return client.register_schema(subject, Registered(text, kind, [SchemaReference(*one) for one in references]))


@pytest.mark.slow
def test_an_avro_schema_comes_with_what_it_references_the_needed_first(
    client: SchemaRegistryClient, registry: SchemaRegistry
) -> None:
    register(client, "avro-money", "AVRO", MONEY)
    register(client, "avro-order", "AVRO", ORDER, ("shop.Money", "avro-money", 1))
    found = register(
        client, "avro-cart", "AVRO", CART, ("shop.Order", "avro-order", 1), ("shop.Money", "avro-money", 1)
    )

    assert registry.fetch_schema(found) == Schema(
        found,
        "AVRO",
        CART,
        (SchemaReference("shop.Money", "avro-money", 1, MONEY), SchemaReference("shop.Order", "avro-order", 1, ORDER)),
    )


@pytest.mark.slow
def test_a_protobuf_schema_comes_with_its_imports_and_compiles(
    client: SchemaRegistryClient, registry: SchemaRegistry, tmp_path: Path
) -> None:
    from grpc_tools import protoc

    register(client, "shop/money.proto", "PROTOBUF", MONEY_PROTO)
    found = register(client, "proto-order", "PROTOBUF", ORDER_PROTO, ("shop/money.proto", "shop/money.proto", 1))

    schema = registry.fetch_schema(found)

    assert schema is not None
    assert (schema.kind, [one.name for one in schema.references]) == ("PROTOBUF", ["shop/money.proto"])
    for name, text in [("order.proto", schema.text), *((one.name, one.text) for one in schema.references)]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    arguments = ["protoc", f"-I{tmp_path}", f"--descriptor_set_out={tmp_path / 'set'}", "order.proto"]
    assert protoc.main(arguments) == 0


@pytest.mark.slow
def test_a_json_schema_is_read(client: SchemaRegistryClient, registry: SchemaRegistry) -> None:
    found = register(client, "json", "JSON", JSON_SCHEMA)

    assert registry.fetch_schema(found) == Schema(found, "JSON", JSON_SCHEMA)


@pytest.mark.slow
def test_values_of_confluents_serializer_name_the_schema(
    client: SchemaRegistryClient, registry: SchemaRegistry
) -> None:
    from confluent_kafka.schema_registry.avro import AvroSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    serialize = AvroSerializer(client, MONEY)
    value = serialize({"amount": 3}, SerializationContext("written", MessageField.VALUE))

    framed = parse_framing(value, [])

    assert framed is not None
    assert framed.schema_id is not None
    found = registry.fetch_schema(framed.schema_id)
    assert found is not None
    assert json.loads(found.text)["name"] == "Money"
    assert framed.payload == b"\x06", "3 as a zig-zag varint"


@pytest.mark.slow
def test_the_newest_schema_of_a_subject_is_read_each_time(
    client: SchemaRegistryClient, registry: SchemaRegistry
) -> None:
    first = register(client, "growing", "AVRO", '"string"')
    assert registry.fetch_latest_schema("growing") == Schema(first, "AVRO", '"string"')
    client.set_compatibility("growing", "NONE")
    second = register(client, "growing", "AVRO", '"long"')
    assert registry.fetch_latest_schema("growing") == Schema(second, "AVRO", '"long"')
    assert "growing" in registry.list_subjects()


@pytest.mark.slow
def test_a_declaration_is_inferred_from_a_subject(
    client: SchemaRegistryClient, server: EmbeddedRegistry, tmp_path: Path
) -> None:
    register(client, "bills-value", "AVRO", MONEY)
    environment = {"HIGHWATER_HOME": str(tmp_path), "HIGHWATER_SCHEMA_REGISTRY_URL": server.url}
    environment["HIGHWATER_KAFKA_BOOTSTRAP"] = f"{LOOPBACK}:1"

    def infer(subject: str, *more: str) -> Result:
        arguments = ["--declarations", str(tmp_path), "infer", "bills", "--subject", subject, *more]
        return CliRunner().invoke(main, arguments, env=environment)

    found = infer("bills-value")
    assert found.exit_code == 0, found.output
    stream = load_streams(tmp_path)["bills"]
    assert ([(one.name, one.type) for one in stream.fields], stream.value) == ([("amount", "long")], Avro())
    other = infer("nobody-registered-this", "--force")
    assert other.exit_code == EXIT_PERMANENT
    assert "bills-value" in other.stderr, "the subjects that there are"


UNKNOWN = [
    *(("fetch_schema", schema_id) for schema_id in (0, 999_999, 2**31 - 1, 2**31, 2**32 - 1)),
    ("fetch_latest_schema", "nobody-registered-this"),
    # This registry gives no schema a GUID.
    ("fetch_schema_by_guid", "5b9a4b3c-0000-4000-8000-000000000000"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "asked"), UNKNOWN)
def test_a_schema_that_the_registry_does_not_know_is_none(
    registry: SchemaRegistry, method: str, asked: int | str
) -> None:
    assert getattr(registry, method)(asked) is None


@pytest.mark.slow
def test_an_unknown_schema_is_asked_for_again(client: SchemaRegistryClient, registry: SchemaRegistry) -> None:
    """A producer may register a schema just after a reader asked for it."""
    coming = register(client, "before", "AVRO", '{"type":"fixed","name":"Before","size":1}') + 1
    assert registry.fetch_schema(coming) is None
    assert register(client, "after", "AVRO", '{"type":"fixed","name":"After","size":1}') == coming
    assert registry.fetch_schema(coming) is not None


@pytest.mark.slow
def test_a_stopped_registry_is_unavailable_and_known_schemas_stay(tmp_path: Path) -> None:
    from confluent_kafka.schema_registry import SchemaRegistryClient

    with EmbeddedRegistry(tmp_path) as server:
        known = register(SchemaRegistryClient({"url": server.url}), "known", "AVRO", MONEY)
        registry = SchemaRegistry(server.url, AT_ONCE)
        before = registry.fetch_schema(known)
    assert not server.alive

    assert registry.fetch_schema(known) == before == Schema(known, "AVRO", MONEY)
    with pytest.raises(DependencyUnavailableError, match=r"HIGHWATER_SCHEMA_REGISTRY_URL") as caught:
        registry.fetch_schema(known + 1)
    assert "refused" in str(caught.value)


Answer = Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]


@contextmanager
def answering(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server that gives one answer to everything; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer((LOOPBACK, free_port()), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http{'' if tls is None else 's'}://{LOOPBACK}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def texts(error: BaseException | None) -> str:
    """All that a log would show of an error and of what caused it."""
    found = ""
    while error is not None:
        found += f"{error!r} {error}\n"
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_login_is_reported_without_the_password(status: int) -> None:
    """The server repeats the login in its answer, as some proxies do."""

    def refuse(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        login = base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode()
        return status, json.dumps({"error_code": status, "message": f"unknown login {login}"}).encode()

    with answering(refuse) as url:
        registry = SchemaRegistry(url, {"basic.auth.user.info": f"reader:{PASSWORD}"})
        with pytest.raises(DependencyUnavailableError, match="HIGHWATER_SCHEMA_REGISTRY_CONFIG") as caught:
            registry.fetch_schema(1)

    assert f"status {status}" in str(caught.value)
    assert PASSWORD not in texts(caught.value) + repr(registry)


BEARER = {
    "bearer.auth.credentials.source": "STATIC_TOKEN",
    "bearer.auth.token": "a-token",
    "bearer.auth.logical.cluster": "a-cluster",
    "bearer.auth.identity.pool.id": "a-pool",
}


@pytest.mark.parametrize(
    ("config", "login"),
    [
        ({"basic.auth.user.info": f"reader:{PASSWORD}"}, b"Basic " + base64.b64encode(f"reader:{PASSWORD}".encode())),
        (BEARER, b"Bearer a-token"),
    ],
)
def test_a_login_opens_the_registry(config: dict[str, str], login: bytes) -> None:
    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        if request.headers["Authorization"] != login.decode():
            return 401, b'{"error_code": 401, "message": "who are you?"}'
        return 200, json.dumps({"schema": MONEY}).encode()

    with answering(answer) as url:
        assert SchemaRegistry(url, {**config, **AT_ONCE}).fetch_schema(1) == Schema(1, "AVRO", MONEY)
        with pytest.raises(DependencyUnavailableError):
            SchemaRegistry(url, AT_ONCE).fetch_schema(1)


def test_a_registry_behind_tls_is_known_by_its_authority(tmp_path: Path) -> None:
    authority, other = Authority("registry"), Authority("another")
    identity = authority.issue("server")
    files = {"ca": authority.pem, "other": other.pem, "key": identity.pkcs8, "certificate": identity.certificate}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with answering(lambda _: (200, json.dumps({"schema": MONEY}).encode()), tls) as url:
        trusting: dict[str, str | int] = {"ssl.ca.location": str(tmp_path / "ca"), **AT_ONCE}
        assert SchemaRegistry(url, trusting).fetch_schema(1) == Schema(1, "AVRO", MONEY)
        strange: list[dict[str, str]] = [{"ssl.ca.location": str(tmp_path / "other")}, {}]
        for config in strange:
            with pytest.raises(DependencyUnavailableError, match=r"(?i)certificate"):
                SchemaRegistry(url, {**config, **AT_ONCE}).fetch_schema(1)


def test_a_password_in_the_address_is_not_reported() -> None:
    with answering(lambda _: (401, b"{}")) as url:
        registry = SchemaRegistry(url.replace("//", f"//reader:{PASSWORD}@"), AT_ONCE)
        with pytest.raises(DependencyUnavailableError) as caught:
            registry.list_subjects()

    assert url in str(caught.value)
    assert PASSWORD not in texts(caught.value) + repr(registry)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b'{"error_code": 50001, "message": "store"}'),
        (503, b"<html>"),
        (302, b""),
        (404, b"<html>not here</html>"),
        (404, b'{"error_code": 404, "message": "HTTP 404 Not Found"}'),
        (200, b"<html>login</html>"),
        (200, b"[]"),
        (200, b"{}"),
        (200, b""),
        (200, b'{"schema": 1}'),
        (200, b'{"schema": 1, "schemaType": "XML"}'),
        (200, b'{"schema": "{}", "schemaType": 1}'),
    ],
)
def test_an_answer_that_no_registry_gives_is_not_taken_for_an_unknown_schema(status: int, body: bytes) -> None:
    """A record that names an unknown schema is rejected; a proxy's page must never lead to that (I15)."""
    with answering(lambda _: (status, body)) as url:
        registry = SchemaRegistry(url, AT_ONCE)
        with pytest.raises(DependencyUnavailableError):
            registry.fetch_schema(1)
        with pytest.raises(DependencyUnavailableError):
            registry.fetch_schema_by_guid("5b9a4b3c-0000-4000-8000-000000000000")


def test_a_schema_of_an_unknown_type_is_a_schema() -> None:
    """It was taken for an unusable answer, so one record that named such a schema failed its slice for ever."""
    known = json.dumps({"schema": "<x/>", "schemaType": "XML", "references": [{"name": "a", "subject": "a"}]})
    with answering(lambda _: (200, known.encode())) as url:
        registry = SchemaRegistry(url, AT_ONCE)
        assert registry.fetch_schema(1) == Schema(1, "XML", "<x/>")
        assert registry.fetch_schema_by_guid("5b9a4b3c-0000-4000-8000-000000000000") == Schema(None, "XML", "<x/>")


def test_a_missing_reference_is_not_taken_for_an_unknown_schema() -> None:
    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        if request.path.startswith("/schemas/ids/1"):
            referenced = [{"name": "shop.Money", "subject": "money", "version": 3}]
            return 200, json.dumps({"schema": ORDER, "references": referenced}).encode()
        return 404, b'{"error_code": 40402, "message": "Version not found."}'

    with (
        answering(answer) as url,
        pytest.raises(DependencyUnavailableError, match=r"shop\.Money .subject money, version 3"),
    ):
        SchemaRegistry(url, AT_ONCE).fetch_schema(1)


def test_a_schema_is_read_by_its_guid_once() -> None:
    asked = []

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        asked.append(request.path)
        return 200, json.dumps({"schema": MONEY}).encode()

    guid = "5b9a4b3c-0000-4000-8000-000000000000"
    with answering(answer) as url:
        registry = SchemaRegistry(url, AT_ONCE)
        assert registry.fetch_schema_by_guid(guid) == registry.fetch_schema_by_guid(guid) == Schema(None, "AVRO", MONEY)
    assert asked == [f"/schemas/guids/{guid}"]


def test_a_silent_registry_is_unavailable_within_the_time_out() -> None:
    released = threading.Event()

    def answer(_: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        released.wait(60)
        return 200, b"[]"

    with answering(answer) as url:
        began = time.monotonic()
        with pytest.raises(DependencyUnavailableError, match="ReadTimeout"):
            SchemaRegistry(url, {"timeout": 1, **AT_ONCE}).list_subjects()
        took = time.monotonic() - began
        released.set()
    assert took < 30, "the server answers after 60 s"


def test_an_address_in_the_properties_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="HIGHWATER_SCHEMA_REGISTRY_URL"):
        SchemaRegistry("http://here", {"url": "http://there"})


@pytest.mark.parametrize(
    "config",
    [
        {"basic.auth.user.info": PASSWORD},
        {"no.such.property": PASSWORD},
        {"ssl.ca.location": f"/no/such/{PASSWORD}"},
        {"timeout": 1, "bearer.auth.credentials.source": PASSWORD},
    ],
)
def test_properties_that_the_client_refuses_are_reported_without_their_values(config: dict[str, str | int]) -> None:
    with pytest.raises(ConfigurationError, match="HIGHWATER_SCHEMA_REGISTRY_CONFIG") as caught:
        SchemaRegistry("http://here", config).list_subjects()
    assert PASSWORD not in texts(caught.value)


def test_settings_without_a_registry_open_none() -> None:
    assert open_registry(Settings.from_environment({})) is None


def test_settings_open_a_registry_and_connect_to_nothing() -> None:
    settings = Settings.from_environment(
        {
            "HIGHWATER_SCHEMA_REGISTRY_URL": f"https://reader:{PASSWORD}@192.0.2.1/api, http://192.0.2.2:8081",
            "HIGHWATER_SCHEMA_REGISTRY_CONFIG": json.dumps({"timeout": 1, "ssl.key.password": PASSWORD}),
        }
    )
    assert settings.schema_registry_config == {"timeout": 1, "ssl.key.password": PASSWORD}
    assert repr(open_registry(settings)) == "SchemaRegistry(https://192.0.2.1/api,http://192.0.2.2:8081)"
    assert PASSWORD not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HIGHWATER_SCHEMA_REGISTRY_URL", f"reader:{PASSWORD}@registry"),
        ("HIGHWATER_SCHEMA_REGISTRY_CONFIG", f'{{"ssl.key.password": "{PASSWORD}"'),
        ("HIGHWATER_SCHEMA_REGISTRY_CONFIG", f'{{"ssl.key.password": ["{PASSWORD}"]}}'),
        ("HIGHWATER_SCHEMA_REGISTRY_CONFIG", f'["{PASSWORD}"]'),
    ],
)
def test_settings_that_cannot_be_are_refused_without_their_text(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        Settings.from_environment({name: value})
    assert PASSWORD not in texts(caught.value)
    assert caught.value.__context__ is None, "the parser's error holds the whole text"
