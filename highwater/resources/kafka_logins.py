"""Logins to Kafka in the words of both clients, librdkafka and Spark's Java client."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from highwater.errors import KAFKA, ConfigurationError, DependencyUnavailableError
from highwater.settings import KAFKA_CONFIG

MECHANISMS = ("sasl.mechanisms", "sasl.mechanism")
# The mechanism of both clients where none is named.
DEFAULT_MECHANISM = "GSSAPI"
OAUTH, MSK_IAM = "OAUTHBEARER", "AWS_MSK_IAM"
PASSWORD_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
        "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
        "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
    }
)
_OAUTH_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
# In the package of kafka-clients 3.9, which Spark 4.0 ships, and of 4.x; that of `secured` is an older name of it.
_OAUTH_HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
# Java waits for a token endpoint for ever where nothing is set. Two requests and a pause end within half a minute.
_LOGIN_MS = "10000"
# Class of the package aws-msk-iam-auth, which is installed beside Spark's Kafka connector.
_MSK_MODULE = "software.amazon.msk.auth.iam.IAMLoginModule"
_MSK_HANDLER = "software.amazon.msk.auth.iam.IAMClientCallbackHandler"
_KERBEROS_MODULE = "com.sun.security.auth.module.Krb5LoginModule"

# librdkafka has two names for each of the first two.
_OIDC: Mapping[str, str] = MappingProxyType(
    {
        "sasl.oauthbearer.client.id": "clientId",
        "sasl.oauthbearer.client.credentials.client.id": "clientId",
        "sasl.oauthbearer.client.secret": "clientSecret",
        "sasl.oauthbearer.client.credentials.client.secret": "clientSecret",
        "sasl.oauthbearer.scope": "scope",
    }
)
_METHOD, _GRANT = "sasl.oauthbearer.method", "sasl.oauthbearer.grant.type"
_ENDPOINT, _EXTENSIONS = "sasl.oauthbearer.token.endpoint.url", "sasl.oauthbearer.extensions"
_USER = ("sasl.username", "sasl.password")
_KEYTAB, _PRINCIPAL, _SERVICE = "sasl.kerberos.keytab", "sasl.kerberos.principal", "sasl.kerberos.service.name"
# For the token endpoint, which is another server than the broker.
_HTTPS = ("https.ca.location", "https.ca.pem")

# The properties that `build_java_login` translates together, since one needs another.
LOGINS = frozenset({*_USER, *_OIDC, _METHOD, _GRANT, _ENDPOINT, _EXTENSIONS, *_HTTPS, _KEYTAB, _PRINCIPAL})

# The broker's address names the region: b-1.demo.a1b2c3.c2.kafka.eu-west-1.amazonaws.com:9098.
_REGION = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com")


def build_java_login(config: Mapping[str, str]) -> dict[str, str]:
    """The properties of Java's client for the login of a configuration; none where it has no login.

    Raises:
        ConfigurationError: Java's client has no such login, or something is missing. No value is repeated.
    """
    named = find_mechanism(config)
    if named == MSK_IAM:
        return {"sasl.client.callback.handler.class": _MSK_HANDLER, "sasl.jaas.config": f"{_MSK_MODULE} required;"}
    if named == OAUTH:
        return _build_oidc_login(config)
    if any(name in config for name in (*_OIDC, _METHOD, _ENDPOINT)):
        raise ConfigurationError(
            f"a login by OIDC does not go with the SASL mechanism {named or DEFAULT_MECHANISM}",
            remedy=f"set sasl.mechanisms to {OAUTH}, or leave the properties sasl.oauthbearer.… out of {KAFKA_CONFIG}",
        )
    if any(name in config for name in _USER):
        return _build_password_login(config, named)
    return _build_kerberos_login(config) if named == DEFAULT_MECHANISM else {}


def find_mechanism(config: Mapping[str, Any]) -> str | None:
    """The SASL mechanism that a configuration names; None where it names none and needs none."""
    found = next((str(config[name]) for name in MECHANISMS if name in config), None)
    if found is None and str(config.get("security.protocol", "")).upper().startswith("SASL"):
        return DEFAULT_MECHANISM
    return found


def _build_password_login(config: Mapping[str, str], named: str | None) -> dict[str, str]:
    if named is None or named not in PASSWORD_MODULES:
        raise ConfigurationError(
            f"a user and a password do not go with the SASL mechanism {named or 'none'}",
            remedy=f"set sasl.mechanisms to one of {', '.join(PASSWORD_MODULES)}",
        )
    options = {"username": config.get("sasl.username", ""), "password": config.get("sasl.password", "")}
    return {"sasl.jaas.config": _build_jaas_config(PASSWORD_MODULES[named], options)}


def _build_oidc_login(config: Mapping[str, str]) -> dict[str, str]:
    grant = config.get(_GRANT, "client_credentials")
    if config.get(_METHOD, "").lower() != "oidc" or grant != "client_credentials":
        raise ConfigurationError(
            f"the SASL mechanism {OAUTH} needs a login that both Kafka clients have, and {KAFKA_CONFIG} names another",
            found=f"{_METHOD}={config.get(_METHOD, 'default')}, {_GRANT}={grant}",
            remedy=f"set {_METHOD} to oidc, with client ID, client secret and {_ENDPOINT}; for Amazon MSK set "
            f"sasl.mechanisms to {MSK_IAM}",
        )
    options = {java: config[name] for name, java in _OIDC.items() if name in config}
    missing = [_ENDPOINT] if not config.get(_ENDPOINT) else []
    missing += [name for name, java in _OIDC.items() if java != "scope" and java not in options]
    if missing:
        raise ConfigurationError(
            "the login by OIDC lacks a property", found=f"no {missing[0]}", remedy=f"add it to {KAFKA_CONFIG}"
        )
    options |= {f"extension_{name}": value for name, value in _parse_extensions(config.get(_EXTENSIONS, ""))}
    return {
        "sasl.login.callback.handler.class": _OAUTH_HANDLER,
        "sasl.login.connect.timeout.ms": _LOGIN_MS,
        "sasl.login.read.timeout.ms": _LOGIN_MS,
        _ENDPOINT: config[_ENDPOINT],
        "sasl.jaas.config": _build_jaas_config(_OAUTH_MODULE, options | _build_https_trust(config)),
    }


def _parse_extensions(text: str) -> list[tuple[str, str]]:
    """SASL extensions: `logicalCluster=lkc-1,identityPoolId=pool-1`."""
    pairs = [one.partition("=") for one in text.split(",") if one]
    if not all(name and equals for name, equals, _ in pairs):
        raise ConfigurationError(
            f"{_EXTENSIONS} is no list of names and values", remedy="write it as name=value,name=value"
        )
    return [(name, value) for name, _, value in pairs]


def _build_https_trust(config: Mapping[str, str]) -> dict[str, str]:
    """Java takes the authority of the token endpoint's certificate from the login's own options."""
    place, pem = (config.get(name) for name in _HTTPS)
    if place is not None:
        return {"ssl.truststore.type": "PEM", "ssl.truststore.location": ensure_one_file("https.ca.location", place)}
    return {} if pem is None else {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": pem}


def ensure_one_file(name: str, value: str) -> str:
    """The value of a property that names certificates, where Java can read it.

    Raises:
        ConfigurationError: it is a folder or `probe`, which librdkafka alone takes.
    """
    if value == "probe" or Path(value).is_dir():
        raise ConfigurationError(
            f"{name} names no file, and Spark's Kafka client takes nothing else",
            remedy="put the certificates into one file in PEM, and name that",
        )
    return value


def _build_kerberos_login(config: Mapping[str, str]) -> dict[str, str]:
    """A login by keytab; without one it is left to the configuration of the JVM (`java.security.auth.login.config`)."""
    found = {} if _SERVICE in config else {_SERVICE: "kafka"}  # librdkafka's default; Java has none
    if _KEYTAB in config:
        # librdkafka's own default of the principal.
        options = {"keyTab": config[_KEYTAB], "principal": config.get(_PRINCIPAL, "kafkaclient")}
        found["sasl.jaas.config"] = _build_jaas_config(_KERBEROS_MODULE, options, "useKeyTab=true storeKey=true ")
    return found


def _build_jaas_config(module: str, options: Mapping[str, str], flags: str = "") -> str:
    written = " ".join(f"{name}={_quote(value)}" for name, value in options.items())
    return f"{module} required {flags}{written};"


def _quote(text: str) -> str:
    return '"' + escape_jaas_value(text) + '"'


def escape_jaas_value(text: str) -> str:
    """A value as it is written between the quotes of a JAAS configuration."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "\\r").replace("\n", "\\n")


def build_librdkafka_login(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of a client of librdkafka, with what it needs beyond them for its login.

    Raises:
        ConfigurationError: a package is missing for the mechanism, or the region of its tokens is unknown.
        DependencyUnavailableError: no token was issued.
    """
    named = find_mechanism(properties)
    if named == MSK_IAM:
        others = {name: value for name, value in properties.items() if name not in MECHANISMS}
        return {
            **others,
            "sasl.mechanisms": OAUTH,
            "oauth_cb": _build_token_callback(str(properties["bootstrap.servers"])),
        }
    return dict(properties)


def _build_token_callback(bootstrap: str) -> Callable[[str], tuple[str, float]]:
    """Gives a token and its end, in seconds since 1970, by the default credentials of AWS."""
    region = _find_region(bootstrap)
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
    except ImportError:
        provider = None
    else:
        provider = MSKAuthTokenProvider
    if provider is None:
        raise ConfigurationError(
            f"the SASL mechanism {MSK_IAM} needs the package aws-msk-iam-sasl-signer-python, which is not installed",
            remedy="install it: pip install aws-msk-iam-sasl-signer-python",
        )

    def generate() -> tuple[str, float]:
        text, ends_ms = provider.generate_auth_token(region)
        return text, ends_ms / 1000

    first = [_fetch_first_token(generate)]

    def provide_token(_: str) -> tuple[str, float]:
        return first.pop() if first else generate()

    return provide_token


def _fetch_first_token(generate: Callable[[], tuple[str, float]]) -> tuple[str, float]:
    """Asked for before the client is made, which would wait for 10 s and hide the reason."""
    try:
        return generate()
    except Exception as error:  # noqa: BLE001 - AWS's libraries raise errors of many families
        found = f"{type(error).__name__}: {error}"
    raise DependencyUnavailableError(
        f"AWS gave no token for the SASL mechanism {MSK_IAM}",
        found=found,
        remedy="give this process AWS credentials that AWS's default search finds, as docs/security.md says; it is "
        "tried again",
        of=KAFKA,
    )


def _find_region(bootstrap: str) -> str:
    found = _REGION.search(bootstrap)
    region = found[1] if found else os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        raise ConfigurationError(
            f"the SASL mechanism {MSK_IAM} needs the cluster's region, and the brokers' addresses do not name it",
            found=bootstrap,
            remedy="set AWS_REGION",
        )
    return region
