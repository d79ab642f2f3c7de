"""The API as it describes itself, called with values that fit and values that do not: never a 5xx."""

from __future__ import annotations

import schemathesis
from described_api import described_api
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from service_parts import TOKEN, Running


def test_no_call_that_the_description_can_make_breaks_the_service(gateway: Running) -> None:
    schema = described_api(gateway.url)
    tried: dict[str, int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        raw = operation.definition.raw
        # What takes nothing cannot be given anything wrong.
        takes = "requestBody" in raw or bool(raw.get("parameters"))
        for mode in [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * takes:
            tried[operation.label] = tried.get(operation.label, 0) + _call(operation, mode)
    assert len(tried) >= 11
    assert sum(tried.values()) > 400
    with gateway.http() as http:
        assert http.get("/v1/stats").status_code == 200


def _call(operation: schemathesis.APIOperation, mode: GenerationMode) -> int:
    """How many calls were answered, with a token and with a wrong one."""
    calls = 0

    @settings(
        max_examples=20,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def stands(case: schemathesis.Case) -> None:
        nonlocal calls
        for token in (TOKEN, "wrong"):
            answer = case.call(headers={"Authorization": f"Bearer {token}"}, timeout=20)
            # Redis is there and the workers are too, so that not even 503 is an answer.
            assert answer.status_code < 500, (operation.label, answer.status_code, answer.text)
            # What is no HTTP at all is refused by the server below the service, in its own words.
            if answer.status_code >= 400 and answer.text != "Invalid HTTP request received.":
                assert set(answer.json()["error"]) == {"code", "message", "hint"}
            calls += 1

    stands()
    return calls
