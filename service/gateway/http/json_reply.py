"""What JSON routes share: an answer's bytes, and how OpenAPI names bodies that are msgspec structs."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from ....compiler.request import codec


def json_answer(body: object, status: int = 200) -> Response:
    return Response(
        codec.to_json(body), status, media_type="application/json", headers={"Cache-Control": "no-store"}
    )


def json_reply(name: str, *, many: bool = False, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that answers with the schema `name`."""
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{name}"}
    if many:
        schema = {"type": "array", "items": schema}
    return {status: {"description": name, "content": {"application/json": {"schema": schema}}}}


def json_request(name: str) -> dict[str, Any]:
    """`openapi_extra=` of a route whose body is the schema `name`."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}
