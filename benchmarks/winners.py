"""A service's tuning winners: in: a private service; out: its entries."""

from __future__ import annotations

import json
from pathlib import Path

from torchrelay.clients.administration import Administration
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.tuning import Entry
from torchrelay.examples.private_service import PrivateService


def administration(service: PrivateService) -> Administration:
    folder = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay"
    known = json.loads((folder / "credentials.json").read_text())
    return Administration(
        ClientSettings(url=service.url, token=known["token"], cache_dir=service.root / "client")
    )


def entries(service: PrivateService) -> list[Entry]:
    with administration(service) as asked:
        return asked.tunings()
