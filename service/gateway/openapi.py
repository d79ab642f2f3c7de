"""The OpenAPI document: the routes in; FastAPI's document with the schemas of their msgspec structs out."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ...compiler.api import admin, compiles
from ...compiler.api.compiles import MissExplanation
from ...compiler.api.training import events
from ...compiler.api.training import jobs as training_jobs
from ...compiler.api.tuning import database
from ...compiler.api.tuning import jobs as tuning_jobs
from ...compiler.artifact.trust_document import SignedDocument
from ..base.counters import StatsReply
from .http import errors
from .routes import health, status
from .routes.admin import keys

_SCHEMAS = (
    compiles.CompileStatus,
    compiles.WorkerInfo,
    compiles.AgreedOutcome,
    compiles.ScriptUse,
    compiles.ScriptArtifacts,
    MissExplanation,
    errors.ErrorReply,
    StatsReply,
    status.InfoReply,
    status.FallbackReport,
    health.ReadyReply,
    admin.TokenRequest,
    admin.TokenReply,
    admin.TokenRecord,
    admin.NamespaceReply,
    admin.QuotaChange,
    admin.KeysReply,
    keys.RotateRequest,
    SignedDocument,
    admin.AuditReply,
    admin.CacheReply,
    admin.ArtifactReply,
    admin.CollectReply,
    admin.ImportReply,
    database.TuningsReply,
    database.TuningsRequest,
    database.TuningsImported,
    tuning_jobs.TuneRequest,
    tuning_jobs.TuneJob,
    tuning_jobs.TunesReply,
    tuning_jobs.TuneReply,
    tuning_jobs.TuneResultsReply,
    tuning_jobs.GraphStored,
    training_jobs.TrainRequest,
    training_jobs.TrainJob,
    training_jobs.TrainsReply,
    training_jobs.PackageStored,
    training_jobs.TrainFile,
    training_jobs.TrainFilesReply,
    events.NumberedEvent,
)


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the schemas of the msgspec structs that the routes answer with."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        _, found = msgspec.json.schema_components(_SCHEMAS, ref_template="#/components/schemas/{name}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(found)
        app.openapi_schema = document
    return app.openapi_schema
