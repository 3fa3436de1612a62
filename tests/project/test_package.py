"""The package as pip installs it, without a checkout: the wheel, `highwater init`, `highwater jars`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dev.image_steps import instructions
from dev.paths import REPOSITORY
from highwater.errors import ConfigurationError
from highwater.orchestration.cli.init import TEMPLATES, make_project
from highwater.orchestration.cli.main import main
from highwater.resources import jars
from highwater.resources.jars import OWN_JAR
from highwater.resources.local_spark import LOCAL, build_jars_conf, set_java
from highwater.settings import Settings
from highwater.stream_files import find_streams_folder, load_streams

CALLS = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of a copy of the sources: a build leaves files beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("highwater", "assets", "orchestration", "resources", "dev"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", source)
    build = (*CALLS, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source))
    subprocess.run(build, check=True, timeout=300)
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel alone."""
    site = tmp_path_factory.mktemp("site")
    install = (*CALLS, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    subprocess.run(install, check=True, timeout=300)
    return site


@pytest.mark.slow
def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"highwater"}


@pytest.mark.slow
def test_the_wheel_has_what_is_no_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = [path.relative_to(REPOSITORY).as_posix() for path in (*TEMPLATES.rglob("*.template"), jars.LOCK)]
    assert len(data) > 10
    assert set(data) <= names


@pytest.mark.slow
def test_dagster_is_reported_where_the_component_is(wheel: Path) -> None:
    """`dg list components` goes by this entry point."""
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    points = ConfigParser()
    points.read_string(archive.read(name).decode())
    assert dict(points["dagster_dg_cli.registry_modules"]) == {"highwater": "highwater.orchestration.components"}

    from dagster.components.core.package_entry import discover_package_objects

    found = discover_package_objects([*points["dagster_dg_cli.registry_modules"].values()])
    assert [key.name for key in found] == ["StreamComponent"]


@pytest.mark.slow
def test_a_project_works_with_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HIGHWATER_", "DAGSTER_", "SPARK_"))}
    variables = {**inherited, "PYTHONPATH": str(installed), "HIGHWATER_HOME": str(tmp_path / "home")}

    def call(folder: Path, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    highwater = ("-m", "highwater.orchestration.cli.main")
    assert str(installed) in call(tmp_path, "-c", "import highwater; print(highwater.__file__)")
    call(tmp_path, *highwater, "init", "my-project")
    project = tmp_path / "my-project"
    said = call(project, "-m", "dagster", "definitions", "validate", "-w", "workspace.yaml")
    assert "Validation successful for code location my-project" in said
    assert "Usage" in call(project, *highwater, "infer", "--help")
    assert call(project, *highwater, "slices", "example", "--json").strip() == "[]"


def test_a_project_has_its_example_and_no_placeholder(tmp_path: Path) -> None:
    project = tmp_path / "my-project"
    made = make_project(project)
    assert {file.relative_to(project).as_posix() for file in made} == {
        ".dockerignore",
        ".gitignore",
        "Dockerfile",
        "README.md",
        "compose.yaml",
        "dagster.yaml",
        "definitions.py",
        "pyproject.toml",
        "streams/example.py",
        "workspace.grpc.yaml",
        "workspace.yaml",
    }
    assert not [file for file in made if re.search(r"@[A-Z]+@", file.read_text())]
    assert find_streams_folder({}, project) == project / "streams"
    assert [*load_streams(project / "streams")] == ["example"]
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == "my-project"
    assert len((project / "README.md").read_text().splitlines()) <= 12


def test_nothing_installs_the_package_by_its_name() -> None:
    """PyPI's `highwater` is another project: pages and templates installed that one."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *TEMPLATES.rglob("*.template")]
    code = [*(REPOSITORY / "highwater").rglob("*.py")]
    by_name = re.compile(r"pip (?:install|wheel)[^`]*[ '\"](?<![/.-])highwater(?![\w./-])|highwater\s*[=~<>]=")
    found = {
        f"{file.relative_to(REPOSITORY)}: {line}"
        for file in (*pages, *code)
        for line in file.read_text().splitlines()
        if by_name.search(line) and "adr" not in file.parts
    }
    assert found == set()


def test_a_project_installs_a_wheel_with_what_s3_needs(tmp_path: Path) -> None:
    """Its image had neither boto3 nor the log store, so its runs refused a lake on S3."""
    make_project(tmp_path / "shop")
    steps = {one.text: one.name for one in instructions((tmp_path / "shop" / "Dockerfile").read_text())}
    [copied] = [text for text, name in steps.items() if name == "COPY" and "wheels" in text]
    [install] = [text for text in steps if "pip install" in text]
    assert copied == "wheels /wheels"
    assert '"$(echo /wheels/highwater-*.whl)[s3]"' in install
    said = (tmp_path / "shop" / "README.md").read_text()
    assert "folder `wheels`" in said
    assert said.index("DAGSTER_HOME") < said.index("highwater doctor")


def test_the_compose_file_of_a_project_can_have_a_lake_on_s3(tmp_path: Path) -> None:
    make_project(tmp_path / "shop")
    given = yaml.safe_load((tmp_path / "shop" / "compose.yaml").read_text())["x-highwater"]["environment"]
    assert {"HIGHWATER_LAKE", "HIGHWATER_SENSORS", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID"} <= set(given)


def test_the_instance_of_a_project_is_the_shipped_one() -> None:
    assert (TEMPLATES / "dagster.yaml.template").read_text() == (REPOSITORY / "dagster.yaml").read_text()


def test_the_compose_file_of_a_project_runs_what_its_workspace_names(tmp_path: Path) -> None:
    make_project(tmp_path / "shop")
    services = yaml.safe_load((tmp_path / "shop" / "compose.yaml").read_text())["services"]
    workspace = yaml.safe_load((tmp_path / "shop" / "workspace.grpc.yaml").read_text())
    [server] = (one["grpc_server"] for one in workspace["load_from"])
    assert services["daemon"]["environment"][server["host"]["env"]] in services
    assert f'"--port", "{server["port"]}", "--module-name"' in (tmp_path / "shop" / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("name", "said"), [("full", "is not empty"), ("full/file", "is not empty"), ("My Project", "cannot be a project's")]
)
def test_init_refuses_what_it_would_spoil(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ConfigurationError, match=said):
        make_project(tmp_path / name)
    assert [file.name for file in tmp_path.rglob("*")] == ["full", "file"]


def test_init_takes_an_empty_folder_and_says_what_comes_next(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    said = CliRunner().invoke(main, ["init", str(tmp_path / "shop")])
    assert said.exit_code == 0
    assert said.output.splitlines()[-1] == f"{tmp_path / 'shop' / 'README.md'} has the next steps"


def settings(home: Path, master: str = "local[2]") -> Settings:
    return Settings.from_environment({"HIGHWATER_HOME": str(home), "HIGHWATER_SPARK_MASTER": master})


def test_a_local_master_without_jars_is_refused_with_the_command(tmp_path: Path) -> None:
    """Spark failed with the name of a class that it did not find."""
    with pytest.raises(ConfigurationError, match=r"lacks the jars.*run highwater jars"):
        build_jars_conf(settings(tmp_path), {})


def test_a_local_master_takes_the_jars_that_were_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(modules: object, work: Path, cache: Path, *, transitive: bool) -> dict[jars.Module, Path]:
        (work / "new").mkdir()
        (work / "new" / "a-1.jar").write_bytes(b"")
        return {jars.Module("org.example", "a", "1"): work / "new" / "a-1.jar"}

    monkeypatch.setattr(jars, "resolve", resolve)
    monkeypatch.setattr(
        jars,
        "read_lock",
        lambda text: {"spark": {jars.Module("org.example", "a", "1"): jars.compute_sha256(Path(os.devnull))}},
    )
    monkeypatch.setenv("HIGHWATER_HOME", str(tmp_path))
    done = CliRunner().invoke(main, ["jars"], catch_exceptions=False)
    assert done.exit_code == 0
    assert (tmp_path / "jars" / "spark" / "a-1.jar").is_file()
    expected = f"{OWN_JAR}{os.pathsep}{tmp_path}/jars/spark/*"
    assert build_jars_conf(settings(tmp_path), {}) == {
        **LOCAL,
        "spark.driver.extraClassPath": expected,
        "spark.executor.extraClassPath": expected,
    }


def test_the_jars_of_a_server_have_the_log_store_of_this_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image of a project got its jars this way, and could not commit to S3."""
    place = jars.build_jars_path("spark", tmp_path)
    place.mkdir(parents=True)
    (place / OWN_JAR.name).write_bytes(b"of another release")
    monkeypatch.setattr(jars, "ensure_jars", jars.build_jars_path)
    done = CliRunner().invoke(main, ["jars", "--to", str(tmp_path)], catch_exceptions=False)
    assert done.output == f"the jars are in {place}\n"
    assert {file.name: file.read_bytes() for file in place.iterdir()} == {OWN_JAR.name: OWN_JAR.read_bytes()}


@pytest.mark.parametrize(
    ("master", "environment"),
    [
        ("spark://master:7077", {}),
        ("local[2]", {"SPARK_CONF_DIR": "/etc/spark"}),
        ("local[2]", {"SPARK_HOME": "/opt/spark"}),
    ],
)
def test_a_spark_that_somebody_configured_is_left_alone(
    tmp_path: Path, master: str, environment: dict[str, str]
) -> None:
    assert build_jars_conf(settings(tmp_path, master), environment) == {}


def test_the_java_of_a_session_is_where_its_launcher_looks(tmp_path: Path) -> None:
    environment = {"PATH": ""}
    set_java(environment, tmp_path)
    assert (Path(environment["JAVA_HOME"]) / "bin" / "java").is_file()
    given = {"JAVA_HOME": "/opt/java"}
    set_java(given, tmp_path)
    assert given == {"JAVA_HOME": "/opt/java"}
