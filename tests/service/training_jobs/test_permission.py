"""Who may start training jobs: only where the settings allow them, and no administrator by being one."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec
from service_parts import Running, StartGateway, client_of
from training_parts import request


def _issued(http: httpx2.Client, *roles: str, **fields: Any) -> str:
    answer = http.post("/v1/tokens", json={"name": "ada", "roles": list(roles), **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


def test_training_is_off_unless_the_settings_turn_it_on(start_gateway: StartGateway) -> None:
    with start_gateway(training=None).http() as http:
        answer = http.post("/v1/trains", json=msgspec.to_builtins(request("")))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        assert "TORCHRELAY_SERVICE_TRAINING" in answer.json()["error"]["hint"]


def test_an_administrator_of_a_namespace_may_neither_train_nor_let_others(
    gateway: Running, http: httpx2.Client
) -> None:
    with client_of(gateway.url, _issued(http, "admin", namespace="red")) as ada:
        assert ada.post("/v1/trains", json=msgspec.to_builtins(request(""))).status_code == 403
        asked = {"name": "x", "roles": ["train"]}
        assert ada.post("/v1/tokens", json=asked).json()["error"]["code"] == "forbidden"
    with client_of(gateway.url, _issued(http, "admin", "train", namespace="red")) as bob:
        assert bob.post("/v1/tokens", json=asked).status_code == 201
