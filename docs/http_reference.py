"""The HTTP part of the site's reference: each operation of the gateway with a request and its answers, as Markdown.

Made from the OpenAPI document that a gateway serves. Bodies of requests are written here, with the structs that routes
take; an answer is made of its schema.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from torchrelay.compiler.api.admin import QuotaChange, TokenRequest
from torchrelay.compiler.api.compiles import ScriptUse
from torchrelay.compiler.api.runs import RunRecord
from torchrelay.compiler.api.training.jobs import TrainRequest, TrainSpec
from torchrelay.compiler.api.tuning.database import AutotuneEntry, TuningsRequest
from torchrelay.compiler.api.tuning.jobs import OperatorTuneItem, TuneRequest
from torchrelay.compiler.tuning import records
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.gateway.app import create_app
from torchrelay.service.gateway.routes.admin.keys import RotateRequest
from torchrelay.service.gateway.routes.status import FallbackReport

KEY = "6c0f2a91d3b4" + "0" * 52
_MATRIX = records.Operand("float32", (512, 512), (512, 1))
_PROBLEM = records.Problem("mm", (_MATRIX, _MATRIX), _MATRIX)
_PLACE = records.DeviceEnvironment("NVIDIA H200", "9.0", "580.65.06", "2.13.0+cu130", "3.7.0", "13.0")
_WINNER = records.Timing("triton_mm BLOCK_M=64 num_warps=4", 0.0113, 0.0112, 0.0115, 80)
BODIES: dict[str, msgspec.Struct] = {
    "POST /v1/report": FallbackReport("compile_failed"),
    "POST /v1/keys": RotateRequest(overlap_seconds=86400),
    "POST /v1/tokens": TokenRequest("ci", frozenset({"read", "compile"}), expires_seconds=90 * 86400),
    "PATCH /v1/namespaces/{name}": QuotaChange(compiles=8, compile_seconds=3600.0, bytes=20 << 30),
    "POST /v1/prefetch": ScriptUse([KEY], [KEY]),
    "POST /v1/runs": RunRecord(program="train.py", pid=4711, ended=1796000000.0, hits=12, torch="2.13.0"),
    "POST /v1/trains": TrainRequest(spec=TrainSpec(name="gpt", function="my_package.train:main", workers=2)),
    "POST /v1/tunes": TuneRequest(
        name="products", device="cpu", threads=4, items=[OperatorTuneItem(line=0, problem=_PROBLEM)]
    ),
    "POST /v1/tunings": TuningsRequest(
        [records.TuningEntry(problem=_PROBLEM, place=_PLACE, winner=_WINNER, candidates=19)]
    ),
    "PUT /v1/autotunes/{library}/{key}": AutotuneEntry("matmul/1024", '{"BLOCK_M": 64}'),
}
"""A request's JSON body, by operation."""


def document() -> dict[str, Any]:
    """The OpenAPI document of a gateway with default settings, which starts nothing."""
    return create_app(ServiceSettings()).openapi()


def operations() -> str:
    """Every operation, by tag. Before them, what answers that are errors mean."""
    described = document()
    schemas = described["components"]["schemas"]
    by_tag: dict[str, list[str]] = {}
    statuses: dict[str, str] = {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(
                _operation(method.upper(), path, operation, schemas)
            )
            found = operation["responses"].items()
            statuses |= {status: each["description"] for status, each in found if _is_error(each)}
    lines = ["| status | meaning |", "|---|---|"]
    lines += [f"| {status} | {meaning} |" for status, meaning in sorted(statuses.items())]
    for tag, parts in by_tag.items():
        lines += ["", f"## {tag.capitalize()}", *parts]
    return "\n".join(lines)


def _is_error(response: dict[str, Any]) -> bool:
    schema = response.get("content", {}).get("application/json", {}).get("schema", {})
    return str(schema.get("$ref", "")).endswith("/ErrorReply")


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    lines = ["", f"### {method} {path}", "", f"{operation['summary']}.", "", operation.get("description", "")]
    if "security" not in operation:
        lines += ["", "It needs no token."]
    if parameters := operation.get("parameters"):
        lines += ["", "| parameter | in | default | meaning |", "|---|---|---|---|"]
        for each in parameters:
            schema = each["schema"]
            default = "required" if each.get("required") else f"`{json.dumps(schema.get('default'))}`"
            choices = " or ".join(f"`{choice}`" for choice in schema.get("enum", ()))
            meaning = each.get("description", "") or choices
            lines.append(f"| `{each['name']}` | {each['in']} | {default} | {meaning} |")
    lines += ["", "```console", _curl(method, path, operation), "```"]
    errors = []
    for status, response in sorted(operation["responses"].items()):
        if _is_error(response):
            errors.append(f"`{status}`")
            continue
        content = response.get("content", {})
        types = ", ".join(f"`{each}`" for each in content if each != "application/json")
        lines += ["", f"`{status}`: {response['description']}{' (' + types + ')' if types else ''}"]
        if "application/json" in content:
            body = example(content["application/json"]["schema"], schemas)
            lines += ["", "```json", json.dumps(body, indent=1), "```"]
    if errors:
        lines += ["", f"Errors: {', '.join(errors)}"]
    return "\n".join(lines)


def _curl(method: str, path: str, operation: dict[str, Any]) -> str:
    body = BODIES.get(f"{method} {path}")
    for each in operation.get("parameters", ()):
        if each["in"] == "path":
            path = path.replace(f"{{{each['name']}}}", f"${each['name'].upper()}")
    parts = ["curl" if method == "GET" else f"curl -X {method}", f'"$TORCHRELAY_URL{path}"']
    if "security" in operation:
        parts.append('-H "Authorization: Bearer $TORCHRELAY_TOKEN"')
    for media_type in operation.get("requestBody", {}).get("content", ()):
        parts.append(f"-H 'Content-Type: {media_type}'")
        if media_type == "application/json":
            parts.append(f"-d '{msgspec.json.format(msgspec.json.encode(body), indent=1).decode()}'")
        else:
            parts.append("--data-binary @FILE")
    return " \\\n  ".join(parts)


def example(schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> Any:
    """A value that `schema` allows: of an object all fields at the top, further down those that it must have."""
    if "$ref" in schema:
        return example(schemas[schema["$ref"].rpartition("/")[2]], schemas, depth)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("anyOf"):
        return example(choices[0], schemas, depth)
    match schema.get("type"):
        case "object":
            required = schema.get("required", ())
            fields = schema.get("properties", {})
            return {
                name: example(each, schemas, depth + 1)
                for name, each in fields.items()
                if name in required or depth == 0
            }
        case "array":
            items = schema.get("prefixItems") or [schema["items"]] if schema.get("items") != {} else []
            return [example(each, schemas, depth + 1) for each in items]
        case "string":
            return KEY if "{64}" in schema.get("pattern", "") else schema.get("default", "...")
        case "integer" | "number":
            return schema.get("default", schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1))
        case "boolean":
            return schema.get("default", False)
    return None
