"""A namespace of a private service: in: the service and a name; out: what a client needs, and the tuning winners."""

from __future__ import annotations

import json
from pathlib import Path

from torchrelay.clients.gateway.admin_client import AdminClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.api.admin import TokenRequest
from torchrelay.compiler.tuning.records import TuningEntry
from torchrelay.examples.harness.private_service import PrivateService


def administration(service: PrivateService, token: str = "") -> AdminClient:
    """With the owner's token, or another."""
    if not token:
        folder = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay"
        token = json.loads((folder / "credentials.json").read_text())["token"]
    return AdminClient(ClientSettings(url=service.url, token=token, cache_dir=service.root / "client"))


def entries(service: PrivateService, token: str = "") -> list[TuningEntry]:
    with administration(service, token) as asked:
        return asked.tunings()


class Tenant:
    """Winners and built kernels are a namespace's own: one without any is as good as a fresh service."""

    def __init__(self, service: PrivateService, namespace: str) -> None:
        self.service = service
        with administration(service) as asked:
            asked.set_quota(namespace, {})
            request = TokenRequest("bench", frozenset({"compile", "tune"}), None, namespace=namespace)
            self._token = asked.create_token(request).token
        self.environment = {
            **service.environment,
            "TORCHRELAY_TOKEN": self._token,
            "TORCHRELAY_NAMESPACE": namespace,
            "TORCHRELAY_MODE": "require",
            "TORCHRELAY_PREFETCH": "0",
        }

    def entries(self) -> list[TuningEntry]:
        return entries(self.service, self._token)
