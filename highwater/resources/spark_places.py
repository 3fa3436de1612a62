"""The addresses of a Spark, and whether its Connect server, its master or its API server accepts connections."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from highwater import settings as names
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.resources.local_spark import build_jars_conf, find_run_java
from highwater.settings import Settings

CONNECT_SECONDS = 3.0
CONNECT_PORT = 15002
HADOOP_CONF = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
_LOCAL_OR_YARN = re.compile(r"yarn(-client|-cluster)?|local(-cluster)?(\[[^\]]+\])?")
_KUBERNETES_PORTS = {"https": 443, "http": 80}

HostPort = tuple[str, int]


def parse_address(remote: str) -> str:
    """Host and port of a Spark Connect server, without the parameters, which may hold a token."""
    return remote.removeprefix("sc://").split("/")[0].split(";")[0]


def reach(settings: Settings, environment: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """Connect to the places of the configured Spark; a session of this process also needs Java and jars.

    Returns:
        The places that answer, and those that do not.

    Raises:
        ConfigurationError: Java, jars or Hadoop's configuration are missing, or the address cannot be read.
        DependencyUnavailableError: no place answers.
    """
    if settings.spark_remote is not None:
        host, port = connect_place(settings.spark_remote)
        _ensure_one_answers("Spark Connect server", [(host, port)], f"start it, or fix {names.SPARK_REMOTE}")
        return f"a server answers at {host}:{port}", []
    kind, places = parse_master_places(settings.spark_master)
    java = find_run_java(environment, settings.home)
    build_jars_conf(settings, environment)
    master, driver = settings.spark_master, f"the driver runs on Java {java.version} ({java.origin})"
    if master.startswith("yarn"):
        return f"{driver}, Hadoop's configuration is in {find_hadoop_folder(environment)}", []
    if not places:
        return f"{driver}, on {master}", []
    unavailable = _ensure_one_answers(kind, places, f"start it, or fix {names.SPARK_MASTER}")
    answering = next(_format_place(one) for one in places if _format_place(one) not in unavailable)
    return f"{driver}, a {kind} answers at {answering}", unavailable


def connect_place(remote: str) -> HostPort:
    """Host and port of a Spark Connect server.

    Raises:
        ConfigurationError: it does not begin with `sc://`, or its port is no number.
    """
    if not remote.startswith("sc://"):
        # The rest may hold a token.
        raise ConfigurationError(
            f"{names.SPARK_REMOTE} is no address of a Spark Connect server",
            remedy="begin it with sc://, as sc://spark-connect:15002",
        )
    address = parse_address(remote)
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return address.strip("[]"), CONNECT_PORT
    return _build_place(names.SPARK_REMOTE, host, port)


def parse_master_places(master: str) -> tuple[str, list[HostPort]]:
    """The name of the service that a master's URL names, and its hosts and ports; none for a local master and YARN.

    Raises:
        ConfigurationError: the URL of a standalone master or of Kubernetes has no host or port, or it names no master.
    """
    if master.startswith("spark://"):
        addresses = [one.rpartition(":") for one in master.removeprefix("spark://").split(",")]
        return "Spark master", [_build_place(names.SPARK_MASTER, host, port) for host, _, port in addresses]
    if master.startswith("k8s://"):
        address = master.removeprefix("k8s://")
        try:
            url = urlsplit(address if "://" in address else f"https://{address}")
            port = url.port or _KUBERNETES_PORTS.get(url.scheme, 0)
        except ValueError:
            url, port = urlsplit(""), 0
        return "Kubernetes API server", [_build_place(names.SPARK_MASTER, url.hostname or "", str(port))]
    if not _LOCAL_OR_YARN.fullmatch(master):
        raise ConfigurationError(
            f"{names.SPARK_MASTER} names no master that Spark knows",
            found=master,
            remedy="write local[*], spark://HOST:7077, yarn or k8s://https://HOST:443",
        )
    return "", []


def _build_place(variable: str, host: str, port: str) -> HostPort:
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"{variable} has an address without host and port",
            found=f"{host}:{port}",
            remedy=f"write {variable} as docs/configuration.md does, with a host and a port for each server",
        )
    return host.strip("[]"), int(port)


def find_hadoop_folder(environment: Mapping[str, str]) -> str:
    """The folder with YARN's addresses, which Spark takes from one of two variables.

    Raises:
        ConfigurationError: neither variable names a folder that is there.
    """
    given = {name: environment[name] for name in HADOOP_CONF if environment.get(name)}
    for folder in given.values():
        if Path(folder).is_dir():
            return folder
    raise ConfigurationError(
        f"{names.SPARK_MASTER} is yarn, and Hadoop's configuration is missing",
        found=", ".join(f"no folder {folder} of {name}" for name, folder in given.items())
        or f"{' and '.join(HADOOP_CONF)} are not set",
        remedy=f"set {HADOOP_CONF[0]} to the folder with yarn-site.xml and core-site.xml",
    )


def _ensure_one_answers(kind: str, places: Sequence[HostPort], remedy: str) -> list[str]:
    """The places that do not answer, if at least one does."""
    silent = {place: problem for place in places if (problem := _connect(place))}
    if len(silent) == len(places):
        raise DependencyUnavailableError(
            f"no {kind} answers at {', '.join(map(_format_place, places))}",
            found=", ".join(dict.fromkeys(silent.values())),
            remedy=remedy,
        )
    return [_format_place(place) for place in silent]


def _connect(place: HostPort) -> str:
    """The reason why a connection fails; empty if it succeeds."""
    try:
        with socket.create_connection(place, CONNECT_SECONDS):
            return ""
    except (OSError, ValueError) as error:
        return type(error).__name__


def _format_place(place: HostPort) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
