"""Before stage 1: a Dynamo graph gets plain tensors as its only inputs, and is then captured as a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct

from ...compiler.graph.annotations import refuse_annotations
from .configuration import Mode
from .dtensor_edges import LocalGraph, to_local_tensors
from .held_tensors import HoistedGraph, hoist_tensors
from .locked_tunings import LockedTunings
from .request import CapturedGraph, capture


class PreparedGraph(Struct, frozen=True):
    """A captured graph of plain tensors, and what binds its compiled form to the original inputs."""

    captured: CapturedGraph
    hoisted: HoistedGraph
    local: LocalGraph

    @property
    def is_plain(self) -> bool:
        """Whether the request alone says how the artifact is called: `bind` changes nothing."""
        captured = self.captured
        return not (
            self.hoisted.attributes
            or self.local.meshes
            or self.local.parts
            or self.local.outputs
            or captured.floats
            or captured.groups
        )

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original graph's inputs, which returns the original graph's outputs."""
        return self.hoisted.bind(self.local.bind(compiled))

    def without_inputs(self) -> PreparedGraph:
        """The same without the example inputs, which `bind` does not need."""
        hoisted = msgspec.structs.replace(self.hoisted, inputs=[])
        return PreparedGraph(self.captured, hoisted, msgspec.structs.replace(self.local, inputs=[]))


def prepare(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: Mode,
    options: Mapping[str, Any],
    lock: LockedTunings | None = None,
) -> PreparedGraph:
    """Capture `gm` and leave it unchanged. Raises as `capture` does."""
    hoisted = hoist_tensors(gm, example_inputs)
    local = to_local_tensors(hoisted.gm, hoisted.inputs)
    if local.gm is not gm:  # a copy has what its nodes name; capture() looks at it alone
        refuse_annotations(gm)
    captured = capture(
        local.gm,
        local.inputs,
        mode=mode,
        options=options,
        lock=lock,
        meshes=local.meshes,
        groups=local.groups,
    )
    return PreparedGraph(captured, hoisted, local)
