"""The Helm chart agrees with the settings, and its pods are bounded and without root."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from highwater import settings
from tests.helpers.deployed_files import CHART, OTHERS, find_variables, list_own_variables


def values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def test_the_chart_names_settings_that_exist() -> None:
    text = (CHART / "values.yaml").read_text()
    named = find_variables(text)
    assert len(named) > 12
    assert {name for name in named if name not in list_own_variables() and not name.startswith(OTHERS)} == set()
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
