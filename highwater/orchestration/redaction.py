"""The secrets in this process's settings, and texts and errors without them (I13)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from highwater.resources.kafka_logins import escape_jaas_value

if TYPE_CHECKING:
    from highwater.settings import Settings

HIDDEN = "(hidden)"
# Shorter values would blot out words of ordinary sentences, and are no secrets.
SHORTEST = 4
# The parameters of a Connect server's address that are no secrets.
_HARMLESS = frozenset({"use_ssl", "user_id", "user_agent", "session_id"})
_SECRET = re.compile(r"password|secret|token|jaas|credential|\.pem$|oauthbearer\.config", re.IGNORECASE)


class HiddenError(Exception):
    """Replaces an error whose text, or whose cause's text, held a secret."""


# The secrets of all settings that this process has read. One that was replaced in its file is a secret still, and the
# clients that have it go on for a while.
_REMEMBERED: set[str] = set()


def remember_secrets(settings: Settings) -> None:
    """Let `list_remembered_secrets` have the values of these settings too."""
    _REMEMBERED.update(select_secret_values(settings))


def list_remembered_secrets() -> frozenset[str]:
    """The secrets that this process had so far; they need no setting to be readable now."""
    return frozenset(_REMEMBERED)


def select_secret_values(settings: Settings) -> frozenset[str]:
    """The values that must not be stored: secret properties, passwords in addresses, tokens, the alerts' address."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    found = {value for name, value in settings.kafka_config.items() if _SECRET.search(name)}
    found.add(settings.alerts_url or "")
    found |= _select_registry_secrets(settings) | _select_connect_secrets(settings)
    try:
        url = make_url(settings.ledger_url)
    except (ArgumentError, ValueError):
        found.add(settings.ledger_url)
    else:
        found |= {str(url.password or ""), *[str(v) for k, v in url.query.items() if _SECRET.search(k)]}
    # Java's client has them within quotes.
    found |= set(map(escape_jaas_value, found))
    return frozenset(value for value in found if len(value) >= SHORTEST)


def _select_registry_secrets(settings: Settings) -> set[str]:
    """The secrets of the schema registry: passwords in its addresses and its configuration."""
    config = settings.schema_registry_config
    # A proxy's address may hold a login; the places of files are none.
    found = {str(value) for name, value in config.items() if _SECRET.search(name) or name in {"proxy", "url"}}
    login = str(config.get("basic.auth.user.info", ""))
    found |= {login, login.partition(":")[2]}
    for address in (settings.schema_registry_url or "").split(","):
        password = urlsplit(address).password or ""
        found |= {password, unquote(password)}
    return found


def _select_connect_secrets(settings: Settings) -> set[str]:
    """The parameters of the Spark Connect server's address that may be secrets, such as its token, or headers."""
    parameters = [one.partition("=") for one in (settings.spark_remote or "").split(";")[1:]]
    values = {value for name, _, value in parameters if name not in _HARMLESS}
    return values | set(map(unquote, values))


def redact_secrets(text: str, secrets: Collection[str]) -> str:
    """The text without the secrets, the longest first: one may be part of another."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def redact_error(error: Exception, secrets: Collection[str]) -> Exception:
    """The error itself if neither it nor its cause names a secret, else one that describes them without secrets."""
    texts = [f"{type(part).__name__}: {part}" for part in _list_error_chain(error)]
    if not any(secret in text for text in texts for secret in secrets):
        return error
    return HiddenError(redact_secrets("; caused by ".join(texts), secrets))


def _list_error_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
