"""Sends alerts to `HIGHWATER_ALERTS_URL` by HTTP POST."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException

from highwater.errors import ConfigurationError, DependencyUnavailableError

SECONDS = 5.0
# Refusals that are not of what was sent: it came too early, too late, or among too many.
_LATER = frozenset({408, 425, 429})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its body, and count as delivered."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def post(url: str, plain: Mapping[str, object], seconds: float = SECONDS) -> None:
    """Send plain values as JSON. The URL may hold a token and is never repeated (I13).

    Raises:
        ConfigurationError: the URL is none of HTTP, or the receiver refuses this one (4xx); it may take another.
        DependencyUnavailableError: nobody took it in time.
    """
    remedy = "check that the receiver of HIGHWATER_ALERTS_URL runs; the next tick tries it again"
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(
            "HIGHWATER_ALERTS_URL is no HTTP address",
            remedy="set it to a URL that begins with http:// or https://; "
            "the value is not shown, since it may hold a token",
        )
    request = urllib.request.Request(url, json.dumps(plain).encode(), {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=seconds):
            return
    except urllib.error.HTTPError as error:
        if 400 <= error.code < 500 and error.code not in _LATER:
            raise _build_refused_error(error.code) from None
        raise DependencyUnavailableError(
            "the receiver of alerts refused", found=f"status {error.code}", remedy=remedy
        ) from None
    except (OSError, ValueError, HTTPException) as error:
        raise DependencyUnavailableError(
            "the receiver of alerts did not answer", found=type(error).__name__, remedy=remedy
        ) from None


def _build_refused_error(status: int) -> ConfigurationError:
    return ConfigurationError(
        "the receiver of alerts refused this one",
        found=f"status {status}",
        remedy="see what the receiver of HIGHWATER_ALERTS_URL takes, and from whom; the next tick tries it again",
    )
