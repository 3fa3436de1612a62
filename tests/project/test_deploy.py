"""The pages of a deployment and the compose file agree with each other and with the settings."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev import paths
from dev.object_store import ObjectStore
from dev.paths import REPOSITORY
from highwater import settings
from highwater.resources import jars
from tests.helpers import deployed_files
from tests.helpers.deployed_files import CHART, DEPLOY, OTHERS, find_variables, list_constants, list_own_variables

PAGES = sorted((REPOSITORY / "docs" / "deployment").glob("*.md"))


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def shared_environment() -> dict[str, str]:
    found: dict[str, str] = compose()["x-highwater"]["environment"]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_of_a_page_is_known_and_used(page: Path) -> None:
    """A page named a variable that nothing read."""
    named = find_variables(page.read_text())
    assert {name for name in named if name not in list_own_variables() and not name.startswith(OTHERS)} == set()

    files = [*(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "dev").glob("*.py")]
    tests = "".join(file.read_text() for file in files if file not in {Path(__file__), Path(deployed_files.__file__)})
    used = (DEPLOY / "compose.yaml").read_text() + tests
    by_constant = {name for name, constant in list_constants().items() if f".{constant}," in tests}
    assert {name for name in named - by_constant if name not in used} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_this_repository_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"(?<![\w./-])(?:deploy|highwater|dev|tests)/[\w./-]*\.\w+", page.read_text()))
    # The reader makes deploy/.env.
    assert {name for name in named if not (REPOSITORY / name).exists()} <= {"deploy/.env"}


def test_the_pages_name_the_jars_of_the_lock() -> None:
    locked = {str(module) for modules in jars.read_lock(jars.LOCK.read_text()).values() for module in modules}
    named = {name for page in PAGES for name in re.findall(r"`([a-z.]+:hadoop-[a-z-]+:[\d.]+)`", page.read_text())}
    assert named
    assert named <= locked


def test_the_compose_file_sets_every_setting() -> None:
    every = {value for name, value in vars(settings).items() if name.isupper() and str(value).startswith("HIGHWATER_")}
    assert len(every) > 10
    assert every <= set(shared_environment())


def test_the_compose_file_sets_nothing_that_is_unknown() -> None:
    given = set(shared_environment())
    assert {name for name in given if name not in list_own_variables() and not name.startswith(OTHERS)} == set()


def test_settings_of_the_compose_file_can_be_read() -> None:
    """As they are where nothing is set in .env but what must be."""
    every = {name: value for name, value in shared_environment().items() if value is not None}
    given = {name: re.sub(r"\$\{\w+(?::?[-?]([^}]*))?\}", r"\1", value) for name, value in every.items()}
    found = settings.Settings.from_environment(given)
    assert (found.spark_remote, found.lake) == ("sc://spark:15002", "s3a://highwater/lake")
    assert found.schema_registry_url == "http://registry:8080/apis/ccompat/v7"
    names = set(compose()["services"])
    assert {found.kafka_bootstrap.split(":")[0], given["DAGSTER_PG_HOST"], given["CODE_SERVER_HOST"], "spark"} <= names


def test_required_settings_are_in_the_example() -> None:
    needed = set(re.findall(r"\$\{(\w+):\?\}", (DEPLOY / "compose.yaml").read_text()))
    example = set(re.findall(r"^(\w+)=", (DEPLOY / "example.env").read_text(), re.MULTILINE))
    assert needed <= example
    assert example - needed <= set(shared_environment())


def test_a_role_needs_no_keys_of_aws() -> None:
    """Compose refused to start without keys, and a role got keys that it must not have."""
    assert {name: shared_environment()[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")} == {
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
    }


@pytest.mark.slow
def test_the_bucket_of_the_compose_file_is_made_on_its_own_store(tmp_path: Path) -> None:
    """It was made in the account of a deployment on Amazon's store."""
    [python, option, code] = compose()["services"]["bucket"]["command"]
    assert "http://s3:5000/highwater" in code
    with ObjectStore(tmp_path) as store:
        words = [sys.executable, option, code.replace("http://s3:5000", store.url)]
        for _ in range(2):
            subprocess.run(words, check=True, env={"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, timeout=60)
        assert [one["Name"] for one in store.client().list_buckets()["Buckets"]] == ["highwater"]
    assert python == "python"


def test_the_store_of_the_compose_file_is_the_one_of_the_tests() -> None:
    from importlib.metadata import version

    assert compose()["services"]["s3"]["image"] == f"motoserver/moto:{version('moto')}"


def test_servers_of_spark_are_started_by_the_command_that_knows_the_lake() -> None:
    """They were started without the settings of S3, which the command derives from AWS's variables."""
    assert compose()["services"]["spark"]["command"][:2] == ["highwater", "serve-spark"]
    assert "- highwater\n            - serve-spark" in (CHART / "templates" / "spark.yaml").read_text()


def test_every_service_is_watched_and_bounded() -> None:
    services = compose()["services"]
    lasting = {name: one for name, one in services.items() if name != "bucket"}
    assert [name for name, one in lasting.items() if "mem_limit" not in one] == []
    # The code server has the health check of the image.
    assert [name for name, one in lasting.items() if "healthcheck" not in one] == ["code", "registry"]
    assert {port.rpartition(":")[0] for one in services.values() for port in one.get("ports", [])} == {"127.0.0.1:3000"}


def test_a_service_waits_for_services_with_a_health_check() -> None:
    services = compose()["services"]
    for one in services.values():
        for name, how in one.get("depends_on", {}).items():
            checked = "healthcheck" in services[name] or name == "code"
            assert checked, f"nothing says when {name} is {how['condition']}"


# Each with any name after it.
OPEN_ENDED = (
    "spark.executorEnv.",
    "spark.sql.catalog.",
    "spark.yarn.appMasterEnv.",
    "spark.kubernetes.executor.secretKeyRef.",
    "spark.hadoop.",
    "spark.delta.logStore.",
)


OF_THE_CHART = {"spark.enabled", "spark.remote"}
WITH_PROPERTIES = [
    *PAGES,
    REPOSITORY / "docs" / "configuration.md",
    DEPLOY / "spark-defaults.conf",
    CHART / "values.yaml",
]


def test_every_property_of_a_page_is_one_of_spark_or_delta() -> None:
    """By the constants of the classes of Spark 4.0 and of Delta; a page had a name of another mode."""
    import pyspark

    found = {
        name.rstrip(".")
        for file in WITH_PROPERTIES
        for name in re.findall(r"(?<![\w./-])spark\.[A-Za-z][\w.-]*\w", file.read_text())
        if not name.startswith(OPEN_ENDED)
    }
    places = [Path(pyspark.__file__).parent / "jars", paths.TOOLS / "jars" / "spark"]
    wanted = (
        "spark-core_",
        "spark-common-utils",
        "spark-sql",
        "spark-catalyst",
        "spark-connect_",
        "spark-yarn",
        "delta-",
    )
    archives = [
        one for place in places for one in place.glob("*.jar") if one.name.startswith((*wanted, "spark-kubernetes"))
    ]
    known = b"".join(
        archive.read(name)
        for archive in map(zipfile.ZipFile, archives)
        for name in archive.namelist()
        if name.endswith(".class") and re.search("config|Conf|internal|Utils|Constants|package", name)
    )
    assert len(found) > 20
    constants_of = {
        name: [b"\x01" + len(one).to_bytes(2) + one for one in spelled(name)] for name in found - OF_THE_CHART
    }
    assert {name for name, forms in constants_of.items() if not any(form in known for form in forms)} == set()


def spelled(name: str) -> list[bytes]:
    """How constants hold the name: Delta's are without the prefix, and the last word of an account is its own."""
    short = name.removeprefix("spark.databricks.delta.").removesuffix(".serviceAccountName")
    return [name.encode(), short.encode()]


def test_the_instance_in_containers_is_the_shipped_one_on_postgresql() -> None:
    inside = yaml.safe_load((CHART / "files" / "dagster.yaml").read_text())
    shipped = (REPOSITORY / "dagster.yaml").read_text()
    # The block that the shipped file has as a comment.
    commented = re.search(r"^# storage:\n(?:#   .*\n)+", shipped, re.MULTILINE)
    assert commented is not None
    storage = yaml.safe_load(re.sub("^# ", "", commented[0], flags=re.MULTILINE))
    assert inside == {**yaml.safe_load(shipped), **storage}
