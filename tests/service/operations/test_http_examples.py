"""The reference of HTTP operations (docs/http_reference.py): a gateway takes each body that it shows."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx2
import msgspec
import pytest
import torchrelay
from jsonschema import Draft202012Validator

sys.path.insert(0, str(Path(torchrelay.__file__).parent / "docs"))

import http_reference

PLACES = {"name": "team-a", "library": "triton", "key": http_reference.KEY}


@pytest.mark.parametrize("operation", http_reference.BODIES)
def test_a_gateway_takes_the_example(operation: str, http: httpx2.Client) -> None:
    method, path = operation.split()
    body = msgspec.json.encode(http_reference.BODIES[operation])
    answer = http.request(method, path.format(**PLACES), content=body)
    if operation == "POST /v1/trains":  # all but that: this gateway's pool has no nodes
        assert "no node runs jobs" in answer.text
    else:
        assert answer.status_code in (200, 201, 202, 204), answer.text


def test_each_operation_with_a_json_body_has_an_example_and_each_answer_fits_its_schema() -> None:
    document = http_reference.document()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                assert f"{method.upper()} {path}" in http_reference.BODIES
            for response in operation["responses"].values():
                if schema := response.get("content", {}).get("application/json", {}).get("schema"):
                    value = http_reference.example(schema, document["components"]["schemas"])
                    Draft202012Validator({**schema, "components": document["components"]}).validate(value)
