"""Sends alerts to `HIGHWATER_ALERTS_URL` by HTTP POST."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from http.client import HTTPException, InvalidURL
from urllib.parse import urljoin, urlsplit

from highwater.errors import ConfigurationError, DependencyUnavailableError

SECONDS = 5.0
# Refusals that are not of what was sent: it came too early, too late, or among too many.
_LATER = frozenset({408, 425, 429})
# 302, 303 and 307 may end, as a maintenance page does.
_MOVED = frozenset({301, 308})


@cache
def _build_opener() -> urllib.request.OpenerDirector:
    """An opener that follows no redirect: the POST would arrive as a GET without its body, and count as delivered."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def post(url: str, plain: Mapping[str, object], seconds: float = SECONDS) -> None:
    """Send plain values as JSON. The URL may hold a token and is never repeated (I13).

    Raises:
        ConfigurationError: the URL is none of HTTP, the receiver has moved (301, 308), or it refuses this alert (4xx)
            and may take another.
        DependencyUnavailableError: nobody took it in time.
    """
    remedy = "check that the receiver of HIGHWATER_ALERTS_URL runs; the next tick tries it again"
    if not url.startswith(("http://", "https://")):
        raise _build_address_error()
    request = urllib.request.Request(url, json.dumps(plain).encode(), {"Content-Type": "application/json"})
    try:
        with _build_opener().open(request, timeout=seconds):
            return
    except urllib.error.HTTPError as error:
        if error.code in _MOVED:
            raise _build_moved_error(error.code, _format_target(url, error)) from None
        if 400 <= error.code < 500 and error.code not in _LATER:
            raise _build_refused_error(error.code) from None
        raise DependencyUnavailableError(
            "the receiver of alerts refused", found=f"status {error.code}{_format_target(url, error)}", remedy=remedy
        ) from None
    except (InvalidURL, UnicodeError):
        raise _build_address_error() from None
    except (OSError, ValueError, HTTPException) as error:
        raise DependencyUnavailableError(
            "the receiver of alerts did not answer", found=type(error).__name__, remedy=remedy
        ) from None


def _format_target(url: str, error: urllib.error.HTTPError) -> str:
    """The server that a redirect leads to; its path may repeat the token of the URL (I13). Empty without a redirect."""
    location = error.headers.get("Location") if 300 <= error.code < 400 else None
    if location is None:
        return ""
    try:
        target = urlsplit(urljoin(url, location))
        return f", redirect to {target.scheme}://{target.netloc.rpartition('@')[2]}"
    except ValueError:
        return ", redirect to no address"


def _build_address_error() -> ConfigurationError:
    return ConfigurationError(
        "HIGHWATER_ALERTS_URL is no HTTP address",
        remedy="set it to a URL that begins with http:// or https://; "
        "the value is not shown, since it may hold a token",
    )


def _build_moved_error(status: int, target: str) -> ConfigurationError:
    return ConfigurationError(
        "the receiver of alerts has moved for good",
        found=f"status {status}{target}",
        remedy="set HIGHWATER_ALERTS_URL to the new address, which this command shows whole: "
        "curl -s -o /dev/null -w '%{redirect_url}' -d '{}' \"$HIGHWATER_ALERTS_URL\"",
    )


def _build_refused_error(status: int) -> ConfigurationError:
    return ConfigurationError(
        "the receiver of alerts refused this one",
        found=f"status {status}",
        remedy="see what the receiver of HIGHWATER_ALERTS_URL takes, and from whom; the next tick tries it again",
    )
