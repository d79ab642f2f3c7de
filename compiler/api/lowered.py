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
    targets: list[str] = []
    """What each node calls; the kind of a node that calls nothing."""
    inputs: list[list[int]] = []
    """The positions of the nodes whose values each takes."""
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


class NodeSources(Struct, frozen=True):
    """Where in the program the nodes of a captured graph come from, for pages, where its author shares that. nodes: for
    each label the positions of its line in `lines` and of its module's path in `modules`, -1 for none."""

    lines: list[str]
    modules: list[str]
    nodes: dict[str, tuple[int, int]]


class DrawnNode(Struct, frozen=True, omit_defaults=True):
    """One node of a graph as a page draws it. target: the operator; the kind of what calls none. type: of its value, as
    FX writes it. inputs: positions of nodes before it. module: the path of the module that called it, of an input that
    of its first use, after `backward.` in the second half of a joint graph. line: of the program."""

    name: str
    target: str
    type: str = ""
    inputs: list[int] = []
    module: str = ""
    line: str = ""


class DrawnGraph(Struct, frozen=True):
    """Answer of `GET /artifacts/{key}/graph`. note: what the picture lacks, and how to have it. drawable: the levels
    and parts of this artifact that have a graph."""

    key: str
    level: Level
    part: str
    nodes: list[DrawnNode]
    note: str
    drawable: list[tuple[Level, str]]


class Lowering(Struct, frozen=True):
    levels: list[LoweredLevel]
    calls: Calls = Calls()
    lines: dict[str, str] = {}
    """`FILE:LINE: CODE` of labels. The client adds them."""
