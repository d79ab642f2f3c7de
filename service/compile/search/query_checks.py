"""Checks of a query from a worker process: it must decode, and its device environment must fit its target."""

from __future__ import annotations

import msgspec

from ....compiler import decoding
from ....compiler.errors import LimitExceeded, MalformedRequest
from ....compiler.request import schema
from ....compiler.request.cpu_isa import capability
from ....compiler.tuning import queries
from ....compiler.tuning.records import DeviceEnvironment


def is_measurable(place: DeviceEnvironment, versions: schema.Toolchain, target: schema.Target) -> bool:
    """Whether kernels for `target` could be measured there. The gateway cannot tell CPU models apart."""
    if (place.torch, place.triton, place.cuda) != (versions.torch, versions.triton, versions.cuda):
        return False
    if target.kind == "cuda":
        return (place.device, place.capability) == (target.name, target.capability)
    return place.capability == capability(target.cpu) and place.threads > 0  # a GPU's have none


def decode_query(question: bytes) -> queries.TuningQuery:
    """The query in these bytes. Raises LimitExceeded, MalformedRequest."""
    if len(question) > queries.QUESTION_LIMIT:
        raise LimitExceeded(f"a question of {len(question)} bytes, limit {queries.QUESTION_LIMIT}")
    try:
        query: queries.TuningQuery = decoding.from_msgpack(question, type=queries.TuningQuery)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"the question cannot be decoded: {error}") from None
    return query
