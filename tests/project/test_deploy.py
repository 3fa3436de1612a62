"""What deploys: image, compose file, chart and their pages agree with each other and with the settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev import paths
from dev.image_steps import Image, below, instructions
from dev.object_store import ObjectStore
from dev.paths import REPOSITORY
from dev.processes import free_port
from highwater import settings
from highwater.resources import jars
from highwater.resources.local_spark import LOCAL
from highwater.resources.object_store import LOG_STORE_JAR, build_s3a_conf
from highwater.resources.spark import STATIC_CONF

DEPLOY = REPOSITORY / "deploy"
CHART = DEPLOY / "helm" / "highwater"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PAGES = sorted((REPOSITORY / "docs" / "deployment").glob("*.md"))
# Variables of others, by what they begin with, and those of no family.
OTHERS = ("AWS_", "DAGSTER_", "SPARK_", "PYSPARK_", "POSTGRES_", "PG", "JAVA_HOME", "CODE_SERVER_HOST")
# Values and SQL that look like variables, and a variable that Spark's launcher alone reads.
NO_VARIABLES = {"SASL_SSL", "SASL_PLAINTEXT", "HADOOP_CONF_DIR"}


def variables(text: str) -> set[str]:
    """The names in a text that look like those of environment variables."""
    return set(re.findall(r"(?<![\w/.-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w-])", text)) - NO_VARIABLES


@lru_cache
def constants() -> dict[str, str]:
    """The variables that the code reads, with the constants that hold their names."""
    code = "".join(file.read_text() for file in (REPOSITORY / "highwater").rglob("*.py"))
    found = re.findall(r'^([A-Z_]+) = "((?:HIGHWATER|SPARK|DAGSTER)_[A-Z_]+)"$', code, re.MULTILINE)
    return {variable: constant for constant, variable in found}


def own_variables() -> set[str]:
    return {*constants()}


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def shared_environment() -> dict[str, str]:
    found: dict[str, str] = compose()["x-highwater"]["environment"]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_of_a_page_is_known_and_used(page: Path) -> None:
    """A page named a variable that nothing read."""
    named = variables(page.read_text())
    assert {name for name in named if name not in own_variables() and not name.startswith(OTHERS)} == set()

    files = [*(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "dev").glob("*.py")]
    tests = "".join(file.read_text() for file in files if file != Path(__file__))
    used = (DEPLOY / "compose.yaml").read_text() + tests
    by_constant = {name for name, constant in constants().items() if f".{constant}," in tests}
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
    assert {name for name in given if name not in own_variables() and not name.startswith(OTHERS)} == set()


def test_settings_of_the_compose_file_can_be_read() -> None:
    """As they are where nothing is set in .env but what must be."""
    every = {name: value for name, value in shared_environment().items() if value is not None}
    given = {name: re.sub(r"\$\{\w+(?::?[-?]([^}]*))?\}", r"\1", value) for name, value in every.items()}
    found = settings.Settings.from_environment(given)
    assert (found.spark_remote, found.lake) == ("sc://spark:15002", "s3a://highwater/lake")
    assert found.schema_registry_url == "http://registry:8080/apis/ccompat/v7"
    names = set(compose()["services"])
    assert {found.kafka_bootstrap.split(":")[0], given["DAGSTER_PG_HOST"], given["CODE_SERVER_HOST"], "spark"} <= names


def test_what_must_be_set_is_in_the_example() -> None:
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


EXECUTOR = {
    "SPARK_JAVA_OPT_0": "-Da=1",
    "SPARK_JAVA_OPT_1": "-Db=two words",
    "SPARK_EXECUTOR_MEMORY": "1024m",
    "SPARK_CLASSPATH": "/opt/highwater/jars/spark/*",
    "SPARK_CONF_DIR": "/opt/spark/conf",
    "SPARK_DRIVER_URL": "spark://driver@host:1",
    "SPARK_EXECUTOR_ID": "7",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_APPLICATION_ID": "app",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.1",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "pod",
}


def test_the_image_starts_an_executor_where_spark_asks_for_one(tmp_path: Path) -> None:
    """Spark on Kubernetes starts a pod by the argument `executor` alone, which the image did not know."""
    import pyspark

    java = tmp_path / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    java.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    said = subprocess.run(
        [DEPLOY / "entrypoint.sh", "executor"],
        env={"PATH": path, **EXECUTOR},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    of_spark = Path(pyspark.__file__).parent / "jars"
    assert said == [
        "-Da=1",
        "-Db=two words",
        "-Xms1024m",
        "-Xmx1024m",
        "-cp",
        f"/opt/spark/conf:/opt/highwater/jars/spark/*:{of_spark}/*",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        *("--driver-url", "spark://driver@host:1", "--executor-id", "7", "--cores", "2", "--app-id", "app"),
        *("--hostname", "10.0.0.1", "--resourceProfileId", "0", "--podName", "pod"),
    ]


def test_the_image_carries_out_every_other_command_as_it_is() -> None:
    """Dagster's launcher of runs gives the command as arguments."""
    words = [str(DEPLOY / "entrypoint.sh"), "sh", "-c", 'printf "%s|" "$@"; exit 3', "name", "a b", "executor"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("a b|executor|", 3)
    [entry] = [one.text for one in instructions(DOCKERFILE) if one.name == "ENTRYPOINT"]
    assert entry == '["/opt/highwater/entrypoint.sh"]'


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


def test_the_image_runs_without_root_and_says_whether_it_is_well() -> None:
    last = instructions(DOCKERFILE.partition("\nFROM ")[2].partition("\nFROM ")[2])
    names = [one.name for one in last]
    [user] = [one.text for one in last if one.name == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "Kubernetes looks at the number to learn that it is not root"
    assert not {"COPY", "RUN"} & set(names[names.index("USER") :])
    [health] = [one.text for one in last if one.name == "HEALTHCHECK"]
    assert json.loads(health.partition("CMD ")[2])[:3] == ["dagster", "api", "grpc-health-check"]


def test_the_image_installs_what_the_lock_says() -> None:
    installs = [one.text for one in instructions(DOCKERFILE) if one.name == "RUN" and "pip install" in one.text]
    assert len(installs) == 3
    assert [one for one in installs if "--require-hashes" not in one and "--no-deps --no-index" not in one] == []


def test_the_lock_of_the_image_pins_what_the_tests_ran_with() -> None:
    def pins(file: Path) -> dict[str, str]:
        return dict(re.findall(r"^([a-z0-9.\-]+)==(\S+)", file.read_text(), re.MULTILINE))

    image, tested = pins(DEPLOY / "requirements.lock"), pins(REPOSITORY / "requirements.lock")
    assert len(image) > 80
    assert {
        name: (tested[name], version) for name, version in image.items() if tested.get(name, version) != version
    } == {}
    assert not {"pytest", "ruff", "mypy"} & set(image)


def test_everything_that_the_image_copies_is_there_and_sent() -> None:
    """Docker sends only what .dockerignore lets through."""
    allowed = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [
        source
        for one in instructions(DOCKERFILE)
        if one.name == "COPY" and "--from" not in one.text
        for source in one.text.split()[:-1]
    ]
    assert len(sources) >= 8
    assert [one for one in sources if not (REPOSITORY / one).exists()] == []
    assert [
        one for one in sources if not any(fnmatch(one, pattern) or one.startswith(f"{pattern}/") for pattern in allowed)
    ] == []


def test_the_script_has_the_steps_of_the_image() -> None:
    """Each instruction that begins a line is a step, and each step but that of the system runs below the folder."""
    steps = instructions(DOCKERFILE)
    begun = re.findall(r"^([A-Z]+) ", DOCKERFILE, re.MULTILINE)
    assert [step.name for step in steps] == begun
    ran = [step for step in steps if step.name == "RUN"]
    assert [step.text[:7] for step in ran if step.is_system] == ["apt-get"]
    for step in steps:
        if not step.is_system and step.name != "FROM":
            assert not re.search(
                r"(?<![\w.])/(?:opt|src|var/lib/highwater)\b", below(step.text, Path("/tree")).replace("/tree/", "")
            )


def test_steps_are_carried_out_below_the_folder(tmp_path: Path) -> None:
    image = Image(tmp_path / "tree")
    image.build(
        instructions(
            "FROM any\n# a comment\nWORKDIR /src\nENV WORD=hello PATH=/opt/highwater/bin:/usr/bin:/bin\n"
            "COPY pyproject.toml /src/\nCOPY deploy/spark-defaults.conf /opt/highwater/conf/\n"
            'RUN test -f pyproject.toml \\\n    && echo "$WORD" > /opt/highwater/said\n'
            'RUN apt-get install nothing\nCMD ["a", "b"]\n'
        )
    )
    assert (tmp_path / "tree/opt/highwater/said").read_text() == "hello\n"
    assert (
        f"{tmp_path}/tree/opt/highwater/jars" in (tmp_path / "tree/opt/highwater/conf/spark-defaults.conf").read_text()
    )
    assert image.command == ["a", "b"]


@pytest.mark.slow
@pytest.mark.long
def test_the_image_is_healthy_without_an_engine(tmp_path: Path) -> None:
    """Downloads what the image does: four minutes."""
    image = Image(tmp_path / "tree")
    image.build(instructions(DOCKERFILE))
    image.ensure_healthy()


@pytest.mark.slow
def test_the_image_of_linked_packages_answers(tmp_path: Path) -> None:
    """Every step, but the packages and jars are those of this checkout: half a minute, without a network."""
    image = Image(tmp_path / "tree", packages=Path(sys.prefix), jars=paths.TOOLS / "jars" / "spark")
    image.build(instructions(DOCKERFILE))
    assert image.call("highwater", "--version").stdout == "highwater, version 0.1.0\n"
    where = "import highwater; print(highwater.__file__)"
    assert image.call("python", "-c", where).stdout.startswith(str(tmp_path))
    assert (tmp_path / "tree/opt/highwater/jars/spark" / LOG_STORE_JAR.name).is_file()
    assert os.access(tmp_path / "tree/opt/highwater/entrypoint.sh", os.X_OK)

    away = {"HIGHWATER_KAFKA_BOOTSTRAP": f"127.0.0.1:{free_port()}", "DAGSTER_HOME": ""}
    found = {
        one["tried"]: one["state"] for one in json.loads(image.call("highwater", "doctor", "--json", **away).stdout)
    }
    assert {name: found[name] for name in ("declarations", "ledger", "lake", "Spark", "Kafka", "Dagster")} == {
        **dict.fromkeys(("declarations", "ledger", "lake", "Spark"), "ok"),
        **dict.fromkeys(("Kafka", "Dagster"), "failed"),
    }
    image.ensure_healthy()


def test_a_step_that_fails_ends_the_script(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        Image(tmp_path / "tree").build(instructions("WORKDIR /src\nRUN false; true"))


def test_the_spark_of_the_image_has_what_cannot_be_set_later() -> None:
    lines = (DEPLOY / "spark-defaults.conf").read_text().splitlines()
    given = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    fixed = {**STATIC_CONF, **build_s3a_conf({})}
    assert {name: given.get(name) for name in fixed} == fixed
    assert given["spark.driver.extraClassPath"].startswith("/opt/highwater/jars/spark/*")
    assert given["spark.executor.extraClassPath"] == given["spark.driver.extraClassPath"]
    few = {name: int(given[name]) for name in LOCAL if name != "spark.ui.showConsoleProgress"}
    assert max(few.values()) <= 8, "a commit would wait for hundreds of tasks"


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


# The chart


def values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def test_the_chart_names_settings_that_exist() -> None:
    text = (CHART / "values.yaml").read_text()
    named = variables(text)
    assert len(named) > 12
    assert {name for name in named if name not in own_variables() and not name.startswith(OTHERS)} == set()
    assert not {*values()["settings"]} & {*values()["secrets"]}
    empty = [name for name, value in values()["settings"].items() if name.startswith("AWS_") and not value]
    assert empty == [], "deltalake does not take an empty one for none"


def test_settings_that_may_hold_secrets_are_no_plain_values() -> None:
    secret = {settings.LEDGER_URL, settings.KAFKA_CONFIG, settings.SCHEMA_REGISTRY_CONFIG, settings.ALERTS_URL}
    assert not secret & {*values()["settings"]}
    assert [name for name in values()["settings"] if re.search("PASSWORD|SECRET|KEY", name)] == []


def test_templates_ask_for_values_that_there_are() -> None:
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    asked = set(re.findall(r"\.Values\.([\w.]+)", templates))
    assert len(asked) > 10
    for path in asked:
        at: Any = values()
        for name in path.split("."):
            assert name in at, f"values.yaml has no {path}"
            at = at[name]


def helm(*arguments: str | Path) -> str:
    """What Helm prints."""
    program = shutil.which("helm")
    if program is None:
        pytest.skip("helm is not on PATH")
    made = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def render(*options: str) -> list[dict[str, Any]]:
    """What `helm template` makes of the chart."""
    helm("lint", "--strict", CHART, *options)
    said = helm("template", "shop", CHART, "--namespace", "data", *options)
    return [one for one in yaml.safe_load_all(said) if one]


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, Any]]:
    """The chart with its own values."""
    return render()


def pods_of(made: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods of a rendered chart by the names of their Deployments."""
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in made if one["kind"] == "Deployment"}


def launcher_of(made: list[dict[str, Any]]) -> dict[str, Any]:
    """The configuration of the launcher of runs."""
    [config] = [one["data"] for one in made if one["kind"] == "ConfigMap" and "dagster.yaml" in one["data"]]
    found: dict[str, Any] = yaml.safe_load(config["dagster.yaml"])["run_launcher"]["config"]
    return found


def test_every_pod_of_the_chart_is_bounded_probed_and_without_root(rendered: list[dict[str, Any]]) -> None:
    pods = pods_of(rendered)
    assert set(pods) == {"shop-code", "shop-webserver", "shop-daemon", "shop-metrics", "shop-spark"}
    for pod in pods.values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["serviceAccountName"] == "shop"
        [container] = pod["containers"]
        assert {"startupProbe", "livenessProbe"} <= set(container)
        assert "memory" in container["resources"]["limits"]
        refs = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
        assert refs == values()["secrets"]


def test_runs_of_the_chart_are_pods_with_the_same_settings(rendered: list[dict[str, Any]]) -> None:
    [config] = [one["data"] for one in rendered if one["kind"] == "ConfigMap" and "dagster.yaml" in one["data"]]
    instance = yaml.safe_load(config["dagster.yaml"])
    launcher = instance.pop("run_launcher")
    assert instance == yaml.safe_load((CHART / "files" / "dagster.yaml").read_text())
    assert launcher["class"] == "K8sRunLauncher"
    container = launcher["config"]["run_k8s_config"]["container_config"]
    assert container["resources"] == values()["runs"]["resources"]
    assert {one["name"] for one in container["env"]} >= {*values()["secrets"], "HIGHWATER_HOME"}


def test_pods_of_runs_have_no_more_rights_than_the_others(rendered: list[dict[str, Any]]) -> None:
    """They had no seccomp profile, and might gain privileges."""
    pod, container = (launcher_of(rendered)["run_k8s_config"][part] for part in ("pod_spec_config", "container_config"))
    for other in pods_of(rendered).values():
        assert pod["security_context"] == other["securityContext"]
        assert container["security_context"] == other["containers"][0]["securityContext"]
    assert pod["security_context"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["security_context"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_volumes_of_your_own_are_in_every_pod(tmp_path: Path) -> None:
    volume = {"name": "kafka-ca", "secret": {"secretName": "kafka-ca"}}
    mount = {"name": "kafka-ca", "mountPath": "/etc/highwater", "readOnly": True}
    mine = tmp_path / "values.yaml"
    mine.write_text(yaml.safe_dump({"extraVolumes": [volume], "extraVolumeMounts": [mount]}))
    made = render("--values", str(mine))
    for pod in pods_of(made).values():
        assert volume in pod["volumes"]
        assert mount in pod["containers"][0]["volumeMounts"]
    assert (launcher_of(made)["volumes"], launcher_of(made)["volume_mounts"]) == ([volume], [mount])
    assert "volumes" not in launcher_of(render())


def test_metrics_are_served_where_they_are_wanted(rendered: list[dict[str, Any]]) -> None:
    services = {one["metadata"]["name"]: one["spec"] for one in rendered if one["kind"] == "Service"}
    [container] = pods_of(rendered)["shop-metrics"]["containers"]
    assert container["command"][:2] == ["highwater", "serve-metrics"]
    assert [port["containerPort"] for port in container["ports"]] == [
        one["port"] for one in services["shop-metrics"]["ports"]
    ]
    without = render("--set", "metrics.enabled=false")
    assert [one["kind"] for one in without if one["metadata"]["name"] == "shop-metrics"] == []


def test_the_account_of_the_chart_may_make_jobs_in_its_namespace_alone(rendered: list[dict[str, Any]]) -> None:
    assert not [one["kind"] for one in rendered if one["kind"].startswith("Cluster")]
    [role] = [one for one in rendered if one["kind"] == "Role"]
    verbs = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    assert {"create", "delete"} <= verbs["jobs"]
    assert not {"create", "delete", "patch"} & verbs["pods"]
    assert "secrets" not in verbs


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    from highwater.orchestration.cli.init import make_project

    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not on PATH")
    make_project(tmp_path / "shop")
    for file in (DEPLOY / "Dockerfile", tmp_path / "shop" / "Dockerfile"):
        found = subprocess.run([hadolint, str(file)], capture_output=True, text=True, check=False)
        assert found.stdout == ""
