"""Routes that take and answer JSON: each is written with its structs, and the OpenAPI document has their schemas."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

import msgspec
from fastapi import APIRouter, Request, Response

from ....compiler import decoding
from ....compiler.errors import MalformedRequest
from ....compiler.request import codec
from ...admission.admit import Admission
from .errors import documented
from .page_bodies import for_browsers, page_response, wants_page

SCHEMA_REFERENCE = "#/components/schemas/{name}"
_BODY_BYTES = 4096

Route = TypeVar("Route", bound=Callable[..., Awaitable[Any]])


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
        body_type: str = "",
        body_bytes: int = _BODY_BYTES,
        status: int = 200,
        reply: str = "",
        page: Callable[[Request, Any], str] | None = None,
        live: bool = False,
        **options: Any,
    ) -> Callable[[Route], Route]:
        """Decorate a route that returns the struct of its JSON answer, or None for an empty one.

        A route's parameter `body` gets the JSON body, at most `body_bytes` long, decoded to the struct that is the
        parameter's type. body_type: the media type of a body that the route reads itself. reply: the answer's
        description; default: its struct's name. page: makes an HTML page of the struct, for browsers; live: one
        with scripts. options: of FastAPI's `add_api_route`.
        """

        def register(route: Route) -> Route:
            signature = inspect.signature(route, eval_str=True)
            struct, body = signature.return_annotation, signature.parameters.get("body")
            responses = documented(413) if body or body_type else documented()
            if struct is None:
                options["status_code"] = 204
            else:
                name = (get_args(struct) or (struct,))[0].__name__
                responses[status] = {"description": reply or name, "content": self.json_content(struct)}
            if body or body_type:
                content = self.json_content(body.annotation) if body else binary_content(body_type)
                options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}

            @functools.wraps(route)
            async def answer(request: Request, **named: Any) -> Response:
                if body:
                    named["body"] = await _decoded(request, body.annotation, body_bytes)
                elif "request" in signature.parameters:
                    named["request"] = request
                found = await route(**named)
                if struct is None:
                    return Response(status_code=204)
                headers = {"Cache-Control": "no-store"}
                if page is not None:
                    headers["Vary"] = "Accept"
                    if wants_page(request):
                        text = await asyncio.to_thread(page, request, found)  # a large one takes a while
                        return page_response(text, headers=headers, live=live)
                return Response(codec.to_json(found), status, headers, "application/json")

            if page is not None:
                for_browsers(answer)
            others = [each for name, each in signature.parameters.items() if name not in ("body", "request")]
            first = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)
            keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others]
            answer.__signature__ = signature.replace(parameters=[first, *keywords])  # type: ignore[attr-defined]
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


async def _decoded(request: Request, type: Any, limit: int) -> Any:
    """The checked struct in a JSON body. Raises LimitExceeded, MalformedRequest."""
    admission: Admission = request.app.state.gateway.admission
    body = await admission.read(request, limit)
    try:
        return decoding.from_json(body, type=type)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"not a {type.__name__}: {error}", hint="See /docs") from None
