"""Routes that answer with JSON: each is written with its structs, and the OpenAPI document has their schemas."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

import msgspec
from fastapi import APIRouter, Response

from ....compiler.request import codec
from .errors import documented

SCHEMA_REFERENCE = "#/components/schemas/{name}"

Route = TypeVar("Route", bound=Callable[..., Awaitable[Any]])


def json_answer(body: object, status: int = 200) -> Response:
    return Response(
        codec.to_json(body), status, media_type="application/json", headers={"Cache-Control": "no-store"}
    )


def binary_content(media_type: str) -> dict[str, Any]:
    """`content` of a body of bytes, for the OpenAPI document."""
    return {media_type: {"schema": {"type": "string", "format": "binary"}}}


class JsonRouter(APIRouter):
    """The routes of one resource. `structs`: what their JSON bodies are, for the OpenAPI document."""

    def __init__(self, tag: str) -> None:
        super().__init__(tags=[tag], default_response_class=Response)
        self.structs: list[Any] = []

    def json_content(self, struct: Any) -> dict[str, Any]:
        """`content` of a JSON body, for the OpenAPI document, which then has the schema of `struct`."""
        self.structs.append(struct)
        (schema,), _ = msgspec.json.schema_components((struct,), ref_template=SCHEMA_REFERENCE)
        return {"application/json": {"schema": schema}}

    def json(
        self,
        method: str,
        path: str,
        summary: str,
        *,
        body: type | str | None = None,
        status: int = 200,
        reply: str = "",
        **options: Any,
    ) -> Callable[[Route], Route]:
        """Decorate a route that returns the struct of its JSON answer, or None for an empty one.

        `body`: the struct of the request's JSON body, or the media type of its bytes. `reply`: the answer's
        description; default: its struct's name. `options`: of FastAPI's `add_api_route`.
        """

        def register(route: Route) -> Route:
            signature = inspect.signature(route, eval_str=True)
            struct = signature.return_annotation
            responses = documented() if body is None else documented(413)
            if struct is None:
                options["status_code"] = 204
            else:
                name = (get_args(struct) or (struct,))[0].__name__
                responses[status] = {"description": reply or name, "content": self.json_content(struct)}
            if body is not None:
                content = binary_content(body) if isinstance(body, str) else self.json_content(body)
                options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}

            @functools.wraps(route)
            async def answer(*arguments: Any, **named: Any) -> Response:
                found = await route(*arguments, **named)
                return Response(status_code=204) if struct is None else json_answer(found, status)

            answer.__signature__ = signature  # type: ignore[attr-defined]
            self.add_api_route(
                path,
                answer,
                methods=[method],
                summary=summary,
                responses=responses,
                response_model=None,
                **options,
            )
            return route

        return register
