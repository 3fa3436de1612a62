"""What a deployment configures, read from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.errors import ConfigurationError
from highwater.settings import CHECKOUT, SECRETS, Settings, find_home_folder, read_secret
from highwater.stream_files import find_streams_folder


@pytest.mark.parametrize(
    ("named", "root"),
    [
        ("lake", f"{Path('lake').absolute()}"),
        ("/mnt/lake", "/mnt/lake"),
        ("s3://bucket/lake", "s3://bucket/lake"),
        ("file:/mnt/lake", "file:/mnt/lake"),
    ],
)
def test_a_lake_lies_at_one_place_for_every_process(named: str, root: str) -> None:
    """Spark takes a table by its path only where that is absolute."""
    assert Settings.from_environment({"HIGHWATER_LAKE": named}).lake == root


@pytest.mark.parametrize("below", ["", "streams", "src/deep"])
def test_the_home_is_the_projects_from_any_folder_of_it(below: str, tmp_path: Path) -> None:
    """A command in a folder below the project began another, empty ledger."""
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "streams").mkdir()
    (tmp_path / "workspace.yaml").write_text("")
    # A folder on the way, with a workspace of another kind, and without streams.
    (tmp_path / "src" / "workspace.yaml").write_text("")
    assert find_home_folder({}, tmp_path / below) == tmp_path / ".highwater"
    assert find_streams_folder({}, tmp_path / below) == tmp_path / "streams"


def test_the_home_follows_the_streams_that_are_named(tmp_path: Path) -> None:
    code = tmp_path / "project" / "src" / "shop"
    (code / "defs").mkdir(parents=True)
    named = {"HIGHWATER_STREAMS": str(code / "defs")}
    assert find_home_folder(named, tmp_path) == code / ".highwater", "beside the streams"
    (tmp_path / "project" / "pyproject.toml").write_text("")
    assert find_home_folder(named, tmp_path) == tmp_path / "project" / ".highwater", "in the project of dg"
    assert find_home_folder({**named, "HIGHWATER_HOME": "given"}, tmp_path) == tmp_path / "given"


def test_the_home_is_beside_a_workspace_whose_streams_are_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "workspace.yaml").write_text("")
    assert find_home_folder({}, tmp_path / "src") == tmp_path / ".highwater"


def test_the_home_is_below_the_working_folder_where_no_project_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_home_folder({}, tmp_path) == CHECKOUT / ".highwater", "whose streams are found from there"
    monkeypatch.setattr("highwater.settings.CHECKOUT", tmp_path / "site-packages")
    assert find_home_folder({}, tmp_path) == tmp_path / ".highwater"


@pytest.mark.parametrize("url", ["http://user:pa/ss@host:8081", "https://user:pa#ss@host", "http://[bad", "http://h:x"])
def test_an_address_of_a_registry_whose_password_would_show_is_refused(url: str) -> None:
    """The part after `/` or `#` counted as the path, and was shown with the address."""
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environment({"HIGHWATER_SCHEMA_REGISTRY_URL": url})
    assert "ss@" not in str(caught.value)


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_may_hold_what_is_secret(name: str, end: str, tmp_path: Path) -> None:
    """Its line's end, which every editor writes, is no part of the value."""
    file = tmp_path / "secret"
    file.write_bytes(f"a value{end}".encode())
    assert read_secret({f"{name}_FILE": str(file)}, name) == "a value"
    file.write_text("another")
    assert read_secret({f"{name}_FILE": str(file), name: ""}, name) == "another", "it is read each time"


def test_the_settings_are_those_of_the_files(tmp_path: Path) -> None:
    values = {
        "HIGHWATER_LEDGER_URL": "postgresql+psycopg2://me:planted@db/highwater",
        "HIGHWATER_KAFKA_CONFIG": '{"sasl.password": "planted"}',
        "HIGHWATER_SCHEMA_REGISTRY_URL": "https://me:planted@registry",
        "HIGHWATER_SCHEMA_REGISTRY_CONFIG": '{"timeout": 1}',
        "HIGHWATER_ALERTS_URL": "https://alerts/planted",
    }
    assert {*values} == {*SECRETS}
    for name, value in values.items():
        (tmp_path / name).write_text(f"{value}\n")
    named = {f"{name}_FILE": str(tmp_path / name) for name in values}
    assert Settings.from_environment(named) == Settings.from_environment(values)


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "No such file"), (b"", "it is empty"), (b"\n", "it is empty"), (b"\xff\xfeplanted", "UTF-8")],
)
def test_a_file_of_a_secret_that_cannot_be_used_is_an_error(content: bytes | None, found: str, tmp_path: Path) -> None:
    """Not a default: the ledger's would be another, empty ledger."""
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="HIGHWATER_LEDGER_URL_FILE") as caught:
        Settings.from_environment({"HIGHWATER_LEDGER_URL_FILE": str(file)})
    assert found in str(caught.value)
    assert "planted" not in str(caught.value)


def test_a_secret_is_given_once(tmp_path: Path) -> None:
    both = {"HIGHWATER_ALERTS_URL": "https://planted", "HIGHWATER_ALERTS_URL_FILE": str(tmp_path / "secret")}
    with pytest.raises(ConfigurationError, match="HIGHWATER_ALERTS_URL and HIGHWATER_ALERTS_URL_FILE are both set"):
        Settings.from_environment(both)


@pytest.mark.parametrize("given", ["kafka", "kafka:9092,", "http://kafka:9092", "kafka:99999", " ", "::1:9092"])
def test_brokers_without_host_or_port_are_refused(given: str) -> None:
    """librdkafka added the port, so that everything but Spark's reads worked; of the others it said `timed out`."""
    with pytest.raises(ConfigurationError, match="HIGHWATER_KAFKA_BOOTSTRAP has an address without host and port"):
        Settings.from_environment({"HIGHWATER_KAFKA_BOOTSTRAP": given})


@pytest.mark.parametrize("given", ["kafka-1:9093, kafka_2.example:9093", "[::1]:9092", "SASL_SSL://kafka:9093"])
def test_brokers_are_named_as_both_clients_take_them(given: str) -> None:
    assert Settings.from_environment({"HIGHWATER_KAFKA_BOOTSTRAP": given}).kafka_bootstrap == given
