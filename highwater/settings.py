"""The settings of a deployment, read from an environment that the caller hands in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from highwater.errors import ConfigurationError

HOME = "HIGHWATER_HOME"
LAKE = "HIGHWATER_LAKE"
LEDGER_URL = "HIGHWATER_LEDGER_URL"
KAFKA_BOOTSTRAP = "HIGHWATER_KAFKA_BOOTSTRAP"
KAFKA_CONFIG = "HIGHWATER_KAFKA_CONFIG"
SCHEMA_REGISTRY_URL = "HIGHWATER_SCHEMA_REGISTRY_URL"
SCHEMA_REGISTRY_CONFIG = "HIGHWATER_SCHEMA_REGISTRY_CONFIG"
ALERTS_URL = "HIGHWATER_ALERTS_URL"
DOCS_URL = "HIGHWATER_DOCS_URL"
STREAMS_FOLDER = "HIGHWATER_STREAMS"
CATALOG = "HIGHWATER_CATALOG"
LOG_FORMAT = "HIGHWATER_LOG_FORMAT"
OPERATORS = "HIGHWATER_OPERATORS"
METRICS_LISTEN = "HIGHWATER_METRICS_LISTEN"
SENSORS = "HIGHWATER_SENSORS"
SPARK_REMOTE = "SPARK_REMOTE"
SPARK_MASTER = "HIGHWATER_SPARK_MASTER"

# Each of these may hold a secret, so a file may hold its value instead: HIGHWATER_KAFKA_CONFIG_FILE names it.
SECRETS = (LEDGER_URL, KAFKA_CONFIG, SCHEMA_REGISTRY_URL, SCHEMA_REGISTRY_CONFIG, ALERTS_URL)

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
DEFAULT_MASTER = "local[*]"
DEFAULT_LOG_FORMAT = "text"
# The port of Prometheus exporters in OpenTelemetry's specification.
DEFAULT_METRICS_LISTEN = "127.0.0.1:9464"
LOG_FORMATS = (DEFAULT_LOG_FORMAT, "json")

# The values of properties.
Plain = str | int | bool

# Where streams are beside a project's workspace.yaml; the first folder that exists is used.
STREAMS_FOLDERS = ("streams", "assets/streams")
# Files that mark a project; `dg` makes the last two.
_MARKS = ("workspace.yaml", "dg.toml", "pyproject.toml")
# The project that this package is part of, if it runs from a checkout: it is the last to be found.
CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """Everything a deployment configures; each value has an embedded default.

    `kafka_config`, `ledger_url`, `spark_remote`, `alerts_url`, `schema_registry_url` and `schema_registry_config` may
    hold secrets, so they are not in the text form.
    """

    home: Path
    lake: str
    ledger_url: str = field(repr=False)
    kafka_bootstrap: str
    kafka_config: Mapping[str, str] = field(repr=False)
    spark_remote: str | None = field(repr=False)
    spark_master: str
    alerts_url: str | None = field(default=None, repr=False)
    schema_registry_url: str | None = field(default=None, repr=False)
    schema_registry_config: Mapping[str, Plain] = field(default_factory=dict, repr=False)
    catalog: str | None = None
    operators: frozenset[str] | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read the settings.

        Raises:
            ConfigurationError: `HIGHWATER_KAFKA_CONFIG` or `HIGHWATER_SCHEMA_REGISTRY_CONFIG` is not a JSON object of
                plain values, `HIGHWATER_KAFKA_BOOTSTRAP` lacks a host or a port, `HIGHWATER_SCHEMA_REGISTRY_URL` is not
                an HTTP address, `HIGHWATER_OPERATORS` has no name, or a file that holds one of the `SECRETS` cannot be
                used.
        """
        home = find_home_folder(environment)
        return cls(
            home=home,
            lake=_to_absolute(environment.get(LAKE) or str(home / "lake")),
            ledger_url=read_secret(environment, LEDGER_URL) or f"sqlite:///{home / 'ledger.sqlite'}",
            kafka_bootstrap=parse_bootstrap(environment.get(KAFKA_BOOTSTRAP) or DEFAULT_BOOTSTRAP),
            kafka_config=parse_kafka_config(read_secret(environment, KAFKA_CONFIG) or "{}"),
            spark_remote=environment.get(SPARK_REMOTE) or None,
            spark_master=environment.get(SPARK_MASTER) or DEFAULT_MASTER,
            alerts_url=read_secret(environment, ALERTS_URL) or None,
            schema_registry_url=parse_registry_url(read_secret(environment, SCHEMA_REGISTRY_URL)),
            schema_registry_config=parse_registry_config(read_secret(environment, SCHEMA_REGISTRY_CONFIG) or "{}"),
            catalog=parse_catalog(environment.get(CATALOG) or ""),
            operators=parse_operators(environment.get(OPERATORS) or ""),
        )


def find_home_folder(environment: Mapping[str, str], start: Path | None = None) -> Path:
    """The folder of local state: `HIGHWATER_HOME`, else `.highwater` in the project, found from any folder of it.

    Args:
        environment: the process's environment variables. `HIGHWATER_STREAMS` names a folder of the project; without it
            the project is the nearest one from the start upwards, as in `find_streams_folder`.
        start: where the project is looked for; the working folder if None.
    """
    here = (start or Path.cwd()).absolute()
    if given := environment.get(HOME):
        return here / given
    if streams := environment.get(STREAMS_FOLDER):
        folder = here / streams
        marked = (one for one in folder.parents if any((one / mark).is_file() for mark in _MARKS))
        project = next(marked, folder.parent)
    else:
        above = (here, *here.parents)
        bare = filter(_has_workspace, above)
        project = next(chain(list_projects(*above), bare, list_projects(CHECKOUT), [here]))
    return project / ".highwater"


def list_projects(*folders: Path) -> Iterator[Path]:
    """The folders that have a `workspace.yaml` and streams."""
    for folder in folders:
        if _has_workspace(folder) and any((folder / one).is_dir() for one in STREAMS_FOLDERS):
            yield folder


def _has_workspace(folder: Path) -> bool:
    return (folder / "workspace.yaml").is_file()


def read_secret(environment: Mapping[str, str], name: str) -> str:
    """The value of one of the `SECRETS`; empty where it is not set.

    Args:
        environment: holds the variable, or `<name>_FILE` with the path of a file that holds the value. The file is read
            each time, so a file that is replaced needs no restart.
        name: the variable.

    Raises:
        ConfigurationError: both are set, or the file cannot be read or is empty. No content is repeated.
    """
    other = f"{name}_FILE"
    given, place = environment.get(name) or "", environment.get(other)
    if not place:
        return given
    if given:
        raise ConfigurationError(f"{name} and {other} are both set", remedy="unset one of them")
    try:
        text = Path(place).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
    else:
        if value := text.removesuffix("\n").removesuffix("\r"):
            return value
        why = "it is empty"
    raise ConfigurationError(
        f"the file of {other} cannot be used",
        found=f"{place}: {why}",
        remedy=f"name a file that this user may read and that holds the value of {name}",
    )


def _to_absolute(lake: str) -> str:
    """The root as an absolute path, so that it is the same for all processes; a URI stays as it is."""
    return lake if ":" in lake.split("/", maxsplit=1)[0] else str(Path(lake).absolute())


# Host and port, and the protocol that both clients allow before them; an address of IPv6 is in brackets.
_BROKER = re.compile(r"(?:[A-Z_]+://)?(?:\[[0-9A-Fa-f:.%]+\]|[\w.-]+):(\d{1,5})")


def parse_bootstrap(text: str) -> str:
    """Read the brokers' addresses, separated by commas.

    librdkafka would add a port that is missing, and Spark's client would refuse the address.

    Raises:
        ConfigurationError: one of them has no host or no port.
    """
    for one in text.split(","):
        address = _BROKER.fullmatch(one.strip())
        if address is None or not 0 < int(address[1]) < 65536:
            raise ConfigurationError(
                f"{KAFKA_BOOTSTRAP} has an address without host and port",
                found=one,
                remedy="write host:port of each broker, separated by commas, as kafka-1:9093,kafka-2:9093",
            )
    return text


def parse_catalog(text: str) -> str | None:
    """Read the schema of Spark's catalog, `schema` or `catalog.schema`; None without one.

    Raises:
        ConfigurationError: it is no such name.
    """
    if text and not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?", text):
        raise ConfigurationError(
            f"{CATALOG} names no schema of a catalog",
            found=text,
            remedy="write schema or catalog.schema, of letters, digits and _",
        )
    return text or None


def read_log_format(environment: Mapping[str, str]) -> str:
    """The form of log lines: `text` or `json`.

    Raises:
        ConfigurationError: the variable has another value.
    """
    found = environment.get(LOG_FORMAT) or DEFAULT_LOG_FORMAT
    if found not in LOG_FORMATS:
        raise ConfigurationError(
            f"{LOG_FORMAT} names no format of log lines", found=found, remedy=f"set it to {' or '.join(LOG_FORMATS)}"
        )
    return found


def parse_metrics_listen(text: str) -> tuple[str, int]:
    """The address at which `highwater serve-metrics` listens: host and port; an address of IPv6 is in brackets.

    Raises:
        ConfigurationError: the text is no host and port.
    """
    host, _, port = (text or DEFAULT_METRICS_LISTEN).rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(
            f"{METRICS_LISTEN} is no address to listen on",
            found=text,
            remedy=f"write host and port, as {DEFAULT_METRICS_LISTEN} or 0.0.0.0:9464",
        )
    return host.strip("[]"), int(port)


def find_docs_url(environment: Mapping[str, str]) -> str | None:
    """The address of the folder `docs`, without a slash at its end; None where nobody said.

    Raises:
        ConfigurationError: the variable is no address that a browser opens.
    """
    found = (environment.get(DOCS_URL) or "").rstrip("/")
    if found and not found.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{DOCS_URL} is no address of a page", found=found, remedy="begin it with https://, or leave it out"
        )
    return found or None


def parse_operators(text: str) -> frozenset[str] | None:
    """Read the names of the operators, separated by commas; None for an empty text, which lets everybody decide.

    Raises:
        ConfigurationError: the text has commas and no name.
    """
    if not text.strip():
        return None
    names = frozenset(name.strip() for name in text.split(",")) - {""}
    if not names:
        raise ConfigurationError(
            f"{OPERATORS} has no name", found=text, remedy="list names, separated by commas, or leave it out"
        )
    return names


def parse_kafka_config(text: str) -> dict[str, str]:
    """Read further librdkafka properties from a JSON object.

    Raises:
        ConfigurationError: the text is not such an object. The text itself is not repeated: it may hold secrets.
    """
    plain = _parse_plain_object(KAFKA_CONFIG, text, example='{"security.protocol": "SASL_SSL"}')
    return {name: _format_property(value) for name, value in plain.items()}


def parse_registry_url(text: str) -> str | None:
    """Read the addresses of the schema registry, separated by commas; None without any.

    Raises:
        ConfigurationError: one is not an HTTP address. The text itself is not repeated: it may hold a password.
    """
    urls = [url.strip() for url in text.split(",") if url.strip()]
    if not all(url.startswith(("http://", "https://")) for url in urls):
        raise ConfigurationError(
            f"{SCHEMA_REGISTRY_URL} is not an HTTP address", remedy="begin each address with http:// or https://"
        )
    if not all(map(_is_whole, urls)):
        raise ConfigurationError(
            f"{SCHEMA_REGISTRY_URL} is not an HTTP address",
            remedy="write /, #, ? and @ in a user's name or password as %2F, %23, %3F and %40",
        )
    return ",".join(urls) or None


def _is_whole(url: str) -> bool:
    """Whether an address has its login, if any, before its host: else part of a password would count as the path."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return bool(parts.hostname) and "@" not in url.partition(parts.netloc)[2]


def parse_registry_config(text: str) -> dict[str, Plain]:
    """Read further properties of the schema registry's client from a JSON object; numbers stay numbers.

    Raises:
        ConfigurationError: the text is not such an object. The text itself is not repeated: it may hold secrets.
    """
    return _parse_plain_object(
        SCHEMA_REGISTRY_CONFIG, text, example='{"ssl.ca.location": "/etc/ssl/certs/registry-ca.pem"}'
    )


def _parse_plain_object(name: str, text: str, *, example: str) -> dict[str, Plain]:
    try:
        plain = json.loads(text)
    except ValueError:
        problem = f"{name} is not JSON"  # the error of the JSON parser holds the whole text, so it is not the cause
    else:
        if isinstance(plain, dict) and all(isinstance(value, Plain) for value in plain.values()):
            return plain
        problem = f"{name} is not an object of plain values"
    raise ConfigurationError(problem, remedy=f"set {name} to a JSON object, for example {example}")


def _format_property(value: Plain) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
