"""A graph at its levels, from FX as captured to machine code: what a request that names levels is answered with.

It is data to read. The worker knows no file and no line of the program. It names the captured node that something comes
from, by a label, and the client knows the lines of its nodes (clients/artifacts/lowered.py). A label is the node's
position in the request's graph, after the positions of the subgraphs around it: `7`, `0.3`.

captured: FX, as it was sent. joint: forward and backward together, as AOTAutograd traces them; forward, backward: the
parts, with Inductor's decompositions. core_aten, prims: both parts with PyTorch's decompositions to the core ATen
operators, and from there to PrimTorch's. post_grad: after Inductor's own passes. ir_before_fusion, ir_after_fusion:
Inductor's loops. diagram: the fused loops, in Graphviz' language. code: the generated Python with C++ or Triton.
assembly: x86 of the C++ kernels. ptx, sass: of the Triton kernels.
"""

from __future__ import annotations

from msgspec import Struct

from ..request.schema import Constant, Graph, Level

MEMBER = "lowered.msgpack"
"""The member of an artifact that has a Lowering, as MessagePack: JSON has no infinity, and masks are made of it."""


class LoweredPart(Struct, frozen=True, kw_only=True):
    """One text of a level."""

    name: str
    """joint, forward or backward; or a kernel's file."""
    text: str
    graph: Graph | None = None
    """The FX graph on the wire, for levels that are one; `text` then has the same nodes."""
    constants: list[Constant] = []
    names: list[str] = []
    """The name of each of the graph's nodes in `text`."""
    sources: list[str] = []
    """The label of the captured node that each node comes from; '' for none."""
    operators: dict[str, int] = {}
    """How often each operator is called."""
    left: dict[str, int] = {}
    """Those of `operators` that the level's set does not have: PyTorch has no decomposition of them, or none for these
    arguments."""
    note: str = ""
    """Why there is no graph."""


class LoweredLevel(Struct, frozen=True):
    """`missing`: why there is no part."""

    name: Level
    parts: list[LoweredPart]
    missing: str = ""


class Calls(Struct, frozen=True):
    """How the graphs of core_aten and prims are called, as AOTAutograd has it. The forward takes the inputs of the
    captured graph. It returns the new values of `mutated` inputs (their positions), `outputs` results, and what the
    backward needs; the backward takes these and the gradients of the results."""

    mutated: list[int] = []
    outputs: int = 0


class Lowering(Struct, frozen=True):
    levels: list[LoweredLevel]
    calls: Calls = Calls()
    lines: dict[str, str] = {}
    """`FILE:LINE: CODE` of labels. The client adds them."""
