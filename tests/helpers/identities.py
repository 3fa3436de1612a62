"""A broker with a listener for each way to log in, and what its clients need: certificates, and a token server."""

from __future__ import annotations

import json
import os
import ssl
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import Thread
from typing import Any, Self
from urllib.parse import parse_qs

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from joserfc import jwt
from joserfc.jwk import RSAKey

from dev import class_archives
from dev.broker import EmbeddedBroker
from dev.java import find_java
from dev.processes import LOOPBACK, free_port

USER = "highwater"
# Signs that a header, a JAAS configuration or a form could take for their own.
PASSWORD = 'of "the" plain\\user'
CLIENT_ID, CLIENT_SECRET = "highwater", 'oidc+secret/with:"signs"\\and%20more'
SCOPE, AUDIENCE = "kafka tables", "kafka"
STRONG_ENOUGH = 2048


class Authority:
    """A certificate authority."""

    def __init__(self, name: str) -> None:
        self._key = rsa.generate_private_key(65537, STRONG_ENOUGH)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._signed(self._name, self._key, authority=True)

    @property
    def pem(self) -> str:
        """Its certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def issue(self, name: str) -> Identity:
        """A key and its certificate, for a server on the loopback address or a client."""
        key = rsa.generate_private_key(65537, STRONG_ENOUGH)
        named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(named, key, authority=False)
        return Identity(key, certificate.public_bytes(serialization.Encoding.PEM).decode())

    def _signed(self, name: x509.Name, key: rsa.RSAPrivateKey, *, authority: bool) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(LOOPBACK))]), critical=False)
            .sign(self._key, hashes.SHA256())
        )


@dataclass(frozen=True)
class Identity:
    """A private key and its certificate in PEM."""

    key: rsa.RSAPrivateKey
    certificate: str

    @property
    def pkcs8(self) -> str:
        return self.written(pkcs8=True)

    def written(self, *, pkcs8: bool, password: str | None = None) -> str:
        """The key in PKCS#8 or PKCS#1, behind a password as OpenSSL 3 encrypts it."""
        kinds = serialization.PrivateFormat
        how = kinds.PKCS8 if pkcs8 else kinds.TraditionalOpenSSL
        chosen: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            chosen = serialization.BestAvailableEncryption(password.encode())
        return self.key.private_bytes(serialization.Encoding.PEM, how, chosen).decode()


@dataclass
class TokenServer:
    """A login server for OIDC client credentials, over TLS."""

    authority: Authority
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(STRONG_ENOUGH, {"kid": "1", "use": "sig"}))
    seconds: int = 300
    asked: list[tuple[int, str, str]] = field(default_factory=list)
    """Status, client's name and scope of each request."""
    url: str = ""

    def token(self) -> str:
        """A token that the broker takes."""
        now = int(time.time())
        claims = {"sub": USER, "iss": "tests", "aud": AUDIENCE, "iat": now, "exp": now + self.seconds, "scope": SCOPE}
        return jwt.encode({"alg": "RS256", "kid": "1"}, claims, self.key)

    def public_keys(self) -> str:
        """What the broker verifies tokens by."""
        return json.dumps({"keys": [self.key.as_dict(private=False)]})

    @contextmanager
    def serving(self, home: Path) -> Iterator[TokenServer]:
        handler = type("Handler", (_TokenHandler,), {"tokens": self})
        server = ThreadingHTTPServer((LOOPBACK, 0), handler)
        mine, files = self.authority.issue("tokens"), home / "tokens.pem"
        files.write_text(mine.pkcs8 + mine.certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        self.url = f"https://{LOOPBACK}:{server.server_port}/token"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _TokenHandler(BaseHTTPRequestHandler):
    tokens: TokenServer

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        name, _, given = b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode().partition(":")
        known = (name, given) == (CLIENT_ID, CLIENT_SECRET) and form["grant_type"] == ["client_credentials"]
        status = 200 if known else 401
        self.tokens.asked.append((status, name, form.get("scope", [""])[0]))
        answer: dict[str, Any] = {"error": "invalid_client"}
        if known:
            answer = {"access_token": self.tokens.token(), "token_type": "Bearer", "expires_in": self.tokens.seconds}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are in `asked`."""


class Listening:
    """A broker with a plain listener, one for all SASL mechanisms over TLS, and one that wants a certificate.

    Args:
        home: of the broker, and of the files of its clients.
        authority: signs the broker's certificate, and those of clients that it lets in.
        tokens: a login server for OIDC.
    """

    def __init__(self, home: Path, authority: Authority, tokens: TokenServer) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.authority, self.tokens = authority, tokens
        self.ca, mine, keys = home / "ca.pem", authority.issue("broker"), home / "tokens.json"
        self.ca.write_text(authority.pem)
        store = home / "broker.pem"
        store.write_text(mine.pkcs8 + mine.certificate)
        keys.write_text(tokens.public_keys())
        self.sasl, self.mutual = (f"{LOOPBACK}:{free_port()}" for _ in range(2))
        # Kafka reads keys of tokens only from where it is allowed to.
        allowed = [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.{what}={keys.as_uri()}" for what in ("urls", "files")]
        allowed[1] = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.files={keys}"
        java = find_java(os.environ)
        self.broker = EmbeddedBroker(home, java_options=[*class_archives.options("broker", java), *allowed])
        known = self.broker.properties
        for listeners in ("listeners", "advertised.listeners"):
            known[listeners] += f",SECURED://{self.sasl},MUTUAL://{self.mutual}"
        known["listener.security.protocol.map"] = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL,MUTUAL:SSL"
        for one in ("listener.name.secured", "listener.name.mutual"):
            known[f"{one}.ssl.keystore.type"] = "PEM"
            known[f"{one}.ssl.keystore.location"] = str(store)
        known["listener.name.mutual.ssl.client.auth"] = "required"
        known["listener.name.mutual.ssl.truststore.type"] = "PEM"
        known["listener.name.mutual.ssl.truststore.location"] = str(self.ca)
        known |= _mechanisms("listener.name.secured", keys)

    def __enter__(self) -> Self:
        self.broker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.broker.stop()

    def password(self, mechanism: str, password: str = PASSWORD) -> dict[str, str]:
        """The configuration of a client with a user and a password."""
        user = {"sasl.mechanisms": mechanism, "sasl.username": USER, "sasl.password": password}
        return {"security.protocol": "SASL_SSL", "ssl.ca.location": str(self.ca), **user}

    def oidc(self, secret: str = CLIENT_SECRET) -> dict[str, str]:
        """The configuration of a client with a login by OIDC."""
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.ca),
            "sasl.mechanisms": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": CLIENT_ID,
            "sasl.oauthbearer.client.secret": secret,
            "sasl.oauthbearer.scope": SCOPE,
            "sasl.oauthbearer.token.endpoint.url": self.tokens.url,
            "https.ca.location": str(self.ca),
        }

    def certificate(self, **files: object) -> dict[str, str]:
        """The configuration of a client with a certificate: `certificate(key_location=path, certificate_pem=text)`."""
        named = {f"ssl.{name.replace('_', '.')}": str(value) for name, value in files.items()}
        return {"security.protocol": "SSL", "ssl.ca.location": str(self.ca), **named}

    def set_scram(self, password: str) -> None:
        """Give the user this password for both SCRAM mechanisms."""
        from confluent_kafka.admin import (
            AdminClient,
            ScramCredentialInfo,
            ScramMechanism,
            UserScramCredentialUpsertion,
        )

        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        # A request changes one mechanism of a user only.
        for kind in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            change = UserScramCredentialUpsertion(USER, ScramCredentialInfo(kind, 4096), password.encode())
            admin.alter_user_scram_credentials([change])[USER].result(60)


def _mechanisms(listener: str, keys: Path) -> Mapping[str, str]:
    """What lets a listener take all mechanisms."""
    kafka = "org.apache.kafka.common.security"
    plain = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
    # A properties file takes one level of backslashes away.
    login = f'{kafka}.plain.PlainLoginModule required user_{USER}="{plain}";'.replace("\\", "\\\\")
    scram = f"{kafka}.scram.ScramLoginModule required;"
    return {
        f"{listener}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        f"{listener}.plain.sasl.jaas.config": login,
        f"{listener}.scram-sha-256.sasl.jaas.config": scram,
        f"{listener}.scram-sha-512.sasl.jaas.config": scram,
        f"{listener}.oauthbearer.sasl.jaas.config": f"{kafka}.oauthbearer.OAuthBearerLoginModule required;",
        f"{listener}.oauthbearer.sasl.server.callback.handler.class": f"{kafka}.oauthbearer."
        "OAuthBearerValidatorCallbackHandler",
        "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "sasl.oauthbearer.expected.issuer": "tests",
    }
