"""The image starts, installs and carries what its pages say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dev import paths
from dev.image_steps import Image, below, instructions
from dev.paths import REPOSITORY
from dev.processes import free_port
from highwater.resources.jars import OWN_JAR
from highwater.resources.local_spark import LOCAL
from highwater.resources.object_store import build_s3a_conf
from highwater.resources.spark import STATIC_CONF
from tests.helpers.deployed_files import DEPLOY

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
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
    assert (tmp_path / "tree/opt/highwater/jars/spark" / OWN_JAR.name).is_file()
    assert os.access(tmp_path / "tree/opt/highwater/entrypoint.sh", os.X_OK)

    unavailable = {"HIGHWATER_KAFKA_BOOTSTRAP": f"127.0.0.1:{free_port()}", "DAGSTER_HOME": ""}
    found = {
        one["tried"]: one["state"]
        for one in json.loads(image.call("highwater", "doctor", "--json", **unavailable).stdout)
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


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    from highwater.orchestration.cli.init import make_project

    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not on PATH")
    make_project(tmp_path / "shop")
    for file in (DEPLOY / "Dockerfile", tmp_path / "shop" / "Dockerfile"):
        found = subprocess.run([hadolint, str(file)], capture_output=True, text=True, check=False)
        assert found.stdout == ""
