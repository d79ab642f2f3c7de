"""What capture.py makes of a Dynamo graph. A start without tracing has one too, and captures nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec import Struct

from ..request import schema

if TYPE_CHECKING:
    from .dtensors import DTensorEdges


class CapturedGraph(Struct, frozen=True):
    """A request, and what the client needs to load its answer and to call it with the original graph's inputs."""

    request: schema.GraphRequest
    symints: dict[str, Any]
    """Canonical symbol name -> the client's own torch.SymInt."""
    device_index: int | None
    """The GPU it runs on."""
    cudagraphs: bool
    floats: dict[int, str] = {}
    """Input position -> Dynamo's name of the symbolic float it stands for."""
    gm: torch.fx.GraphModule | None = None
    """The graph that is sent, with its example `inputs`."""
    inputs: Sequence[Any] = ()
    hoisted: dict[str, torch.Tensor] = {}
    """The tensors that the original graph has as attributes, by the name of the placeholder that stands for each, in
    the order of placeholders. They come after the original inputs."""
    edges: DTensorEdges | None = None

    @property
    def groups(self) -> dict[str, str]:
        return {} if self.edges is None else self.edges.groups

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original graph's inputs, which returns the original graph's outputs."""
        if self.edges is not None:
            compiled = self.edges.bind(compiled)
        if not self.hoisted:
            return compiled
        tensors = tuple(self.hoisted.values())

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            return compiled(*args, *tensors)

        return call

    def without_inputs(self) -> CapturedGraph:
        """The same without the example inputs, which `bind` does not need."""
        return msgspec.structs.replace(self, gm=None, inputs=())
