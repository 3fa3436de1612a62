"""Dagster's instance as DAGSTER_HOME names it, and what keeps it from being opened or asked, in our words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError

if TYPE_CHECKING:
    import dagster as dg

T = TypeVar("T")
Opened = Callable[[], AbstractContextManager["dg.DagsterInstance | None"]]

_COPY = "set it to the whole path of a folder with a copy of the project's dagster.yaml"


def ensure_home(home: str) -> None:
    """Ensure that DAGSTER_HOME is one that Dagster takes.

    Raises:
        ConfigurationError: it is not an absolute path, or there is no such folder.
    """
    folder = Path(home).expanduser()
    if not folder.is_absolute():
        raise ConfigurationError("DAGSTER_HOME is not an absolute path", found=home, remedy=_COPY)
    if not folder.is_dir():
        raise ConfigurationError("DAGSTER_HOME names no folder that is there", found=home, remedy=_COPY)


@contextmanager
def translate_errors(problem: str, kinds: type[Exception] = Exception) -> Iterator[None]:
    """Translate errors of Dagster, since each kind of storage raises its own.

    Only the error's name is shown: texts may hold a password (I13).

    Args:
        problem: the problem to report.
        kinds: the errors to translate.

    Raises:
        ConfigurationError: the configuration cannot be used.
        DependencyUnavailableError: everything else.
    """
    try:
        yield
    except HighwaterError:
        raise
    except kinds as error:
        kind = ConfigurationError if isinstance(error, _import_config_errors()) else DependencyUnavailableError
        raise kind(
            problem,
            found=type(error).__name__,
            remedy="fix the storage block of its dagster.yaml, start the database, or make the folder writable",
        ) from None


def _import_config_errors() -> tuple[type[Exception], ...]:
    import dagster as dg
    import yaml
    from dagster._check import CheckError
    from sqlalchemy.exc import ArgumentError

    return yaml.YAMLError, dg.DagsterInvalidConfigError, CheckError, ImportError, ArgumentError


@contextmanager
def dagster_instance() -> Iterator[dg.DagsterInstance | None]:
    """Dagster's instance, or None where DAGSTER_HOME does not say where it is.

    Raises:
        ConfigurationError, DependencyUnavailableError: it cannot be opened, or its storage does not answer what it is
            asked.
    """
    home = os.environ.get("DAGSTER_HOME")
    if not home:
        yield None
        return
    ensure_home(home)
    import dagster as dg
    from sqlalchemy.exc import SQLAlchemyError

    with translate_errors(f"Dagster's instance, as {home} configures it, cannot be opened"):
        opened = dg.DagsterInstance.get()
    # Beside the instance much else is asked for: only errors of its storage are said so.
    with (
        opened as instance,
        translate_errors(f"Dagster's storage, as {home} configures it, does not answer", SQLAlchemyError),
    ):
        yield instance


def ask_instance(opened: Opened, question: Callable[[dg.DagsterInstance], T]) -> tuple[T | None, HighwaterError | None]:
    """The answer of the instance, and the reason why it could not be asked; neither where there is none to ask."""
    try:
        with translate_errors("Dagster could not be asked"), opened() as instance:
            return None if instance is None else question(instance), None
    except HighwaterError as error:
        return None, error
