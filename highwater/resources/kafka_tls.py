"""The client's certificate and key for Spark's Java client, and when a file of a configuration was replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.errors import ConfigurationError

_PHRASE = "ssl.key.password"
_CERTIFICATE, _KEY = ("ssl.certificate.location", "ssl.certificate.pem"), ("ssl.key.location", "ssl.key.pem")
# The properties that `build_java_keys` translates together.
KEYS = frozenset({*_CERTIFICATE, *_KEY, _PHRASE})
_CERTIFICATE_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY_HEADER = re.compile(r"-----BEGIN ([A-Z0-9 ]*PRIVATE KEY)-----")


def build_java_keys(config: Mapping[str, str]) -> dict[str, str]:
    """The properties of Java's client for the certificate and key of a configuration in PEM.

    Java's client takes one file, with the key in PKCS#8 and without a password. Such a file is named. Otherwise the
    contents are handed over, and the key is converted: librdkafka reads more formats.

    Raises:
        ConfigurationError: one of the two is missing or cannot be read. No content is repeated.
    """
    if not {*_CERTIFICATE, *_KEY} & config.keys():
        # The key in a PKCS#12 store may have a password of its own.
        return {_PHRASE: config[_PHRASE]} if _PHRASE in config else {}
    name, key = _read_pem(config, _KEY)
    certificates = _extract_certificates(*_read_pem(config, _CERTIFICATE))
    place, found = config.get("ssl.key.location"), {"ssl.keystore.type": "PEM"}
    if place is not None and place == config.get("ssl.certificate.location") and _is_plain_pkcs8(key):
        return {**found, "ssl.keystore.location": place}
    key = key if _is_plain_pkcs8(key) else _convert_key(name, key, config.get(_PHRASE))
    return {**found, "ssl.keystore.certificate.chain": certificates, "ssl.keystore.key": key}


def _read_pem(config: Mapping[str, str], names: tuple[str, str]) -> tuple[str, str]:
    """The property and the text in PEM, from a file or from the configuration itself."""
    location, pem = names
    if pem in config:
        return pem, config[pem]
    if location in config:
        return location, _read_file(location, config[location])
    raise ConfigurationError(
        f"neither {location} nor {pem} is set", remedy="name both a certificate and its private key, or neither"
    )


def _read_file(name: str, place: str) -> str:
    try:
        return Path(place).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
    raise ConfigurationError(
        f"the file of {name} cannot be read",
        found=f"{place}: {why}",
        remedy="name a file in PEM that this user may read; it is read each time a client is made",
    )


def _extract_certificates(name: str, text: str) -> str:
    """The certificates alone: a private key in the same file must not go with them."""
    found = _CERTIFICATE_BLOCK.findall(text)
    if not found:
        raise ConfigurationError(
            f"{name} holds no certificate", found="no line with BEGIN CERTIFICATE", remedy="use a certificate in PEM"
        )
    return "\n".join(found)


def _is_plain_pkcs8(text: str) -> bool:
    return "-----BEGIN PRIVATE KEY-----" in text


def _convert_key(name: str, text: str, password: str | None) -> str:
    """A private key of another format in PEM (PKCS#1, SEC 1, or with a password) as PKCS#8 without a password.

    Java's client refuses PKCS#1. Java 17 opens no key that OpenSSL 3 encrypted (PBES2), whatever the password is.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    # librdkafka needs no password for a key without one, and takes it.
    secret = password.encode() if password is not None and "ENCRYPTED" in text else None
    try:
        key = serialization.load_pem_private_key(_extract_key(text), secret)
        return key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        found = _KEY_HEADER.search(text)
    raise ConfigurationError(
        f"the private key of {name} cannot be read",
        found=f"BEGIN {found[1]}, {_PHRASE} is {'not set' if password is None else 'set'}"
        if found
        else "no line with BEGIN PRIVATE KEY",
        remedy=f"set the right {_PHRASE}, or convert the key to PKCS#8 by openssl pkcs8 -topk8 -nocrypt -in "
        "key.pem -out key.pkcs8.pem and use the new file",
    )


def _extract_key(text: str) -> bytes:
    """The block of the key: certificates may precede it."""
    found = _KEY_HEADER.search(text)
    return text[found.start() if found else 0 :].encode()


def read_file_versions(config: Mapping[str, Any]) -> tuple[tuple[str, int, int, int] | None, ...]:
    """The versions of the files that the configuration names: clients read them once, when they are made."""
    places = [str(value) for name, value in sorted(config.items()) if name.endswith((".location", ".keytab"))]
    return tuple(map(_read_file_version, places))


def _read_file_version(place: str) -> tuple[str, int, int, int] | None:
    try:
        found = Path(place).stat()
    except OSError:
        return None
    return place, found.st_mtime_ns, found.st_size, found.st_ino
