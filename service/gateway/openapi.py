"""The OpenAPI document: FastAPI's, with the schemas of the msgspec structs that routes take and answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .http.errors import ErrorReply
from .http.json_routes import SCHEMA_REFERENCE, JsonRouter


def openapi_document(app: FastAPI, routers: Iterable[JsonRouter]) -> dict[str, Any]:
    """The document of `app`, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        structs = [ErrorReply, *(struct for router in routers for struct in router.structs)]
        _, schemas = msgspec.json.schema_components(structs, ref_template=SCHEMA_REFERENCE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(sorted(schemas.items()))
        app.openapi_schema = document
    return app.openapi_schema
