"""The settings of a deployment, read from an environment that the caller hands in.

What belongs here: names, defaults and checks of the settings. What does not: opening anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from highwater.errors import ConfigurationError

HOME = "HIGHWATER_HOME"
LAKE = "HIGHWATER_LAKE"
LEDGER_URL = "HIGHWATER_LEDGER_URL"
KAFKA_BOOTSTRAP = "HIGHWATER_KAFKA_BOOTSTRAP"
KAFKA_CONFIG = "HIGHWATER_KAFKA_CONFIG"
ALERTS_URL = "HIGHWATER_ALERTS_URL"
DOCS_URL = "HIGHWATER_DOCS_URL"
LOG_FORMAT = "HIGHWATER_LOG_FORMAT"
SPARK_REMOTE = "SPARK_REMOTE"
SPARK_MASTER = "HIGHWATER_SPARK_MASTER"

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
DEFAULT_MASTER = "local[*]"
DEFAULT_LOG_FORMAT = "text"
LOG_FORMATS = (DEFAULT_LOG_FORMAT, "json")


@dataclass(frozen=True)
class Settings:
    """Everything a deployment configures; each value has an embedded default.

    `kafka_config`, `ledger_url` and `alerts_url` may hold secrets, so they are kept out of the text form.
    """

    home: Path
    lake: str
    ledger_url: str = field(repr=False)
    kafka_bootstrap: str
    kafka_config: Mapping[str, str] = field(repr=False)
    spark_remote: str | None
    spark_master: str
    alerts_url: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read the settings.

        Raises:
            ConfigurationError: `HIGHWATER_KAFKA_CONFIG` is not a JSON object of plain values.
        """
        home = Path(environment.get(HOME) or ".highwater").absolute()
        return cls(
            home=home,
            lake=_absolute(environment.get(LAKE) or str(home / "lake")),
            ledger_url=environment.get(LEDGER_URL) or f"sqlite:///{home / 'ledger.sqlite'}",
            kafka_bootstrap=environment.get(KAFKA_BOOTSTRAP) or DEFAULT_BOOTSTRAP,
            kafka_config=parse_kafka_config(environment.get(KAFKA_CONFIG) or "{}"),
            spark_remote=environment.get(SPARK_REMOTE) or None,
            spark_master=environment.get(SPARK_MASTER) or DEFAULT_MASTER,
            alerts_url=environment.get(ALERTS_URL) or None,
        )


def _absolute(lake: str) -> str:
    """The root as every process means it, whatever folder it was started in; a URI stays as it is."""
    return lake if ":" in lake.split("/", maxsplit=1)[0] else str(Path(lake).absolute())


def log_format(environment: Mapping[str, str]) -> str:
    """How log lines are written: `text` or `json`.

    Raises:
        ConfigurationError: the variable has another value.
    """
    found = environment.get(LOG_FORMAT) or DEFAULT_LOG_FORMAT
    if found not in LOG_FORMATS:
        raise ConfigurationError(
            f"{LOG_FORMAT} names no format of log lines", found=found, remedy=f"set it to {' or '.join(LOG_FORMATS)}"
        )
    return found


def docs_url(environment: Mapping[str, str]) -> str | None:
    """Where the folder `docs` is served, without a slash at its end; None where nobody said.

    Raises:
        ConfigurationError: the variable is no address that a browser opens.
    """
    found = (environment.get(DOCS_URL) or "").rstrip("/")
    if found and not found.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{DOCS_URL} is no address of a page", found=found, remedy="begin it with https://, or leave it out"
        )
    return found or None


def parse_kafka_config(text: str) -> dict[str, str]:
    """Read further librdkafka properties from a JSON object.

    Raises:
        ConfigurationError: the text is not such an object. The text itself is not repeated: it may hold secrets.
    """
    remedy = f'set {KAFKA_CONFIG} to a JSON object, for example {{"security.protocol": "SASL_SSL"}}'
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{KAFKA_CONFIG} is not JSON", remedy=remedy) from error
    if not isinstance(plain, dict) or not all(isinstance(v, str | int | bool) for v in plain.values()):
        raise ConfigurationError(f"{KAFKA_CONFIG} is not an object of plain values", remedy=remedy)
    return {str(k): _as_property(v) for k, v in plain.items()}


def _as_property(value: str | int | bool) -> str:  # noqa: FBT001 - a JSON value, not a flag
    return str(value).lower() if isinstance(value, bool) else str(value)
