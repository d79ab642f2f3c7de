"""Those who sign tokens: a real OpenID provider in Node, and a person at its pages; an issuer with keys of its own."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2
import jwt
import pytest
from certificates import Certificate
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from service_parts import free_port

FOLDER = Path(sys.prefix) / "openid"
"""Where the Makefile installs node-oidc-provider."""


class OpenIdProvider:
    """node-oidc-provider on loopback. groups: by login. seconds: how long an access token holds."""

    client_id = "torchrelay-cli"

    def __init__(self, groups: dict[str, list[str]], *, seconds: int = 300) -> None:
        node = shutil.which("node")
        if node is None or not (FOLDER / "node_modules" / "oidc-provider").is_dir():
            pytest.skip(f"no OpenID provider: needs node and npm, then `make {FOLDER.parent.name}/.openid`")
        self._port = free_port()
        self.issuer = f"http://127.0.0.1:{self._port}"
        settings = json.dumps({"port": self._port, "groups": groups, "seconds": seconds})
        script = Path(__file__).with_name("openid_provider.mjs")
        self.process = subprocess.Popen(
            [node, str(script), str(FOLDER), settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def approve(self, page: str, code: str, login: str, *, decline: bool = False) -> None:
        """What a person does: opens the page, types the code, confirms or declines it, signs in, and consents."""
        with httpx2.Client(follow_redirects=True, trust_env=False, timeout=30) as browser:
            answer = browser.get(page)
            while form := _Form.of(answer.text):
                typed = {"user_code": code, "login": login, "password": "any"}
                fields = {name: value or typed.get(name, "") for name, value in form.fields.items()}
                if decline and "confirm" in fields:
                    fields["abort"] = "yes"
                answer = browser.post(urljoin(str(answer.url), form.action), data=fields)
                if decline and "abort" in fields:
                    return
            assert answer.status_code == 200, answer.text

    def sign_in(self, browser: httpx2.Client, page: str, login: str) -> str:
        """What a person does at the provider, to which `page` leads; where the provider leads to in the end."""
        answer = browser.get(page)
        while True:
            form = _Form.of(answer.text)
            if answer.next_request is not None:
                if not str(answer.next_request.url).startswith(self.issuer):
                    return str(answer.next_request.url)
                answer = browser.send(answer.next_request)
            else:
                assert form is not None, answer.text
                typed = {"login": login, "password": "any"}
                fields = {name: value or typed.get(name, "") for name, value in form.fields.items()}
                answer = browser.post(urljoin(str(answer.url), form.action), data=fields)


class _Form(HTMLParser):
    """The first form of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.action = ""
        self.fields: dict[str, str] = {}

    @classmethod
    def of(cls, text: str) -> _Form | None:
        form = cls()
        form.feed(text)
        return form if form.action else None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "form" and not self.action:
            self.action = found.get("action") or ""
        if tag == "input" and (name := found.get("name")):
            self.fields[name] = found.get("value") or ""


class SigningIssuer:
    """An issuer with keys of its own: its discovery document and keys over HTTP, as a Kubernetes API server shows them.

    asked: paths, in the order of requests. wanted: a bearer token without which it shows nothing.
    """

    def __init__(self, *, wanted: str = "", certificate: Certificate | None = None) -> None:
        self.asked: list[str] = []
        self.wanted = wanted
        self.padding = ""
        self.use = "sig"
        self._keys: dict[str, Any] = {}
        self.rotate("RS256")
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked.append(self.path)
                allowed = issuer.wanted in ("", self.headers.get("Authorization", "").removeprefix("Bearer "))
                body = json.dumps(issuer.document(self.path)).encode()
                self.send_response(200 if allowed else 401)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body if allowed else b"")

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._port = free_port()
        self._certificate = certificate
        self.issuer = f"http{'s' if certificate else ''}://127.0.0.1:{self._port}"
        self._handler = Handler
        self.start()

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self._certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def document(self, path: str) -> dict[str, Any]:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", "padding": self.padding}
        listed = []
        for kid, (algorithm, key) in self._keys.items():
            made = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
            listed.append({**made, "kid": kid, "alg": algorithm, "use": self.use})
        return {"keys": listed}

    def rotate(self, algorithm: str) -> None:
        """A new key signs from now on, and the only one listed is this."""
        made = {
            "RS256": lambda: rsa.generate_private_key(65537, 2048),
            "PS256": lambda: rsa.generate_private_key(65537, 2048),
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
        }[algorithm]()
        self.algorithm, self.key, self.kid = algorithm, made, f"{algorithm}-{time.monotonic_ns()}"
        self._keys = {self.kid: (algorithm, made)}

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Those of a token that is accepted; None leaves one out."""
        now = int(time.time())
        all = {
            "iss": self.issuer,
            "aud": ["torchrelay"],
            "sub": "1234",
            "iat": now,
            "exp": now + 600,
        } | changes
        return {name: value for name, value in all.items() if value is not None}

    def token(self, *, headers: dict[str, Any] | None = None, **changes: Any) -> str:
        """headers: beside `alg`; a `kid` that is None is left out."""
        sent = {"kid": self.kid} | (headers or {})
        sent = {name: value for name, value in sent.items() if name != "kid" or value is not None}
        return jwt.encode(self.claims(**changes), self.key, self.algorithm, sent)


def sign_in_file(path: Path, *issuers: dict[str, Any]) -> str:
    """Written as TOML, whose inline tables are written like JSON but for the colons."""
    path.write_text("".join(f"[[issuers]]\n{_toml(each)}" for each in issuers))
    return str(path)


def _toml(fields: dict[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in fields.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_value(each)}' for name, each in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)
