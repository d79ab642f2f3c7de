"""The request for a program's one graph, and the graph that a worker makes of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrelay.compiler.graph import decode
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import schema

Callee = Callable[..., Any]


def request_of(program: Callee, *inputs: Any) -> schema.GraphRequest:
    found: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Callee:
        found.append(capture(gm, examples, mode="default", options={}).request)
        return gm.forward

    torch.compile(program, backend=backend)(*inputs)
    (request,) = found
    return request


def eager_of(request: schema.GraphRequest) -> torch.fx.GraphModule:
    return decode.decode_graph(request.graph, request.constants, device_index={"cuda": 0}, symbols={})
