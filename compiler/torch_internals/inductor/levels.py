"""The levels that AOTAutograd and Inductor lower a graph through: core ATen, prims, the joint graph and its parts, and
what Inductor tells its debugger.

Nodes are marked before: a stack trace that names the node in place of a file. AOTAutograd and Inductor carry it along.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from msgspec import Struct

from ..dynamo.operators import is_left_out
from ..dynamo.tracing import python_dispatcher
from ..dynamo.types import OpOverload
from ..patching import patched
from .compile_fx import copy_graph, forward_not_compiled

MARKED_FILE = "captured"
_MARK = re.compile(rf'File "{MARKED_FILE}([0-9.]*)", line (\d+)')
MARKED_LINE = re.compile(rf"{MARKED_FILE}([0-9.]*):(\d+) in \w+, code: [^\n]*")
"""A mark in a text of PyTorch's: GraphModule.print_readable, Inductor's comments."""

Record = Callable[[str, torch.fx.GraphModule], None]
"""Is given the name of a part and its graph, which changes afterwards."""


def labels(gm: torch.fx.GraphModule, path: str = "") -> Iterator[tuple[str, torch.fx.Node]]:
    """The label of each node that a request of this graph has (compiler/api/lowered.py)."""
    position = 0
    subgraphs: list[torch.fx.GraphModule] = []
    for node in gm.graph.nodes:
        if is_left_out(node):
            continue
        yield f"{path}{position}", node
        position += 1
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(gm)
            if isinstance(value, torch.fx.GraphModule) and all(value is not other for other in subgraphs):
                yield from labels(value, f"{path}{len(subgraphs)}.")
                subgraphs.append(value)


def mark_nodes(gm: torch.fx.GraphModule) -> None:
    for label, node in labels(gm):
        path, _, position = label.rpartition(".")
        file = f"{MARKED_FILE}.{path}" if path else MARKED_FILE
        node.meta["stack_trace"] = f'  File "{file}", line {position}, in graph\n    {node.name}\n'


def label_of(node: torch.fx.Node) -> str:
    """The label in a node's mark; '' if it has none."""
    found = _MARK.findall(node.meta.get("stack_trace") or "")
    return ".".join(part for part in (found[-1][0].strip("."), found[-1][1]) if part) if found else ""


def target_of(node: torch.fx.Node) -> str:
    """`aten.add.Tensor`, `linear` or `relu`; the kind of a node that calls nothing."""
    if not node.op.startswith("call"):
        return node.op
    target = node.target
    return str(target) if isinstance(target, str | OpOverload) else str(getattr(target, "__name__", target))


def readable(gm: torch.fx.GraphModule) -> str:
    """The graph as code, with types, shapes and marks (GraphModule.print_readable)."""
    return str(gm.print_readable(print_output=False))


def unannotated(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy without annotations, as a request's graph has none."""
    copied = copy_graph(gm)
    for node in copied.graph.nodes:
        node.meta = {}
    copied.meta = {}
    return copied


def operators_of(
    gm: torch.fx.GraphModule, lacks: Callable[[OpOverload], bool]
) -> tuple[dict[str, int], dict[str, int]]:
    """How often each operator is called; and those of them that a level `lacks`."""
    called = [node.target for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
    return Counter(map(str, called)), Counter(map(str, filter(lacks, called)))


def is_not_core(target: OpOverload) -> bool:
    return torch.Tag.core not in target.tags


def is_no_prim(target: OpOverload) -> bool:
    return target.namespace != "prims"


# --- core ATen and prims -------------------------------------------------------------------------------------------


def trace_core_aten(gm: torch.fx.GraphModule, inputs: Sequence[Any], record: Record) -> tuple[list[int], int]:
    """Trace forward and backward with torch._decomp.core_aten_decompositions, inside a tracing context. Returns
    positions of inputs that the graph changes, and the number of its outputs."""
    from torch._decomp import core_aten_decompositions
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext

    def recording(name: str) -> Callable[..., Any]:
        def compiler(traced: torch.fx.GraphModule, _: Any) -> Any:
            record(name, traced)
            return forward_not_compiled

        return compiler

    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        aot_module_simplified(
            gm,
            list(inputs),
            fw_compiler=recording("forward"),
            bw_compiler=recording("backward"),
            inference_compiler=recording("forward"),
            decompositions=cast(Any, core_aten_decompositions()),
        )
    metadata = TracingContext.get().fw_metadata
    assert metadata is not None
    return list(metadata.mutated_inp_runtime_indices), len(metadata.output_info)


_STRIDED = ("slice.Tensor", "select.int", "diagonal.default", "unfold.default")
"""ATen operators that PyTorch decomposes to `as_strided`, which says less: it depends on the strides of its operand."""


def trace_prims(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Trace a part of `trace_core_aten` with torch._decomp.decomposition_table, but for _STRIDED: its entries for core
    operators are PrimTorch's references, which call prims. Names of inputs stay."""
    from torch._decomp import decomposition_table
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    decompositions: dict[Any, Any] = dict(decomposition_table)
    for name in _STRIDED:
        decompositions.pop(operator.attrgetter(name)(torch.ops.aten), None)
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = [node.meta["val"] for node in placeholders]
    mode = detect_fake_mode(inputs) or contextlib.nullcontext()
    with mode, python_dispatcher(), preserve_node_meta():
        run = torch.fx.Interpreter(gm).run
        traced = make_fx(run, decomposition_table=decompositions)(*inputs)
    for node, original in zip(traced.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        node._rename(original.name)
    traced.recompile()
    return traced


# --- Inductor ------------------------------------------------------------------------------------------------------


class InductorTexts(Struct):
    """What Inductor made of a graph: level -> part -> text. kernels: the C++ source of each kernel, by name. lines:
    the marks of the nodes that each kernel computes."""

    by_level: dict[str, dict[str, str]] = {}
    kernels: dict[str, str] = {}
    lines: dict[str, list[str]] = {}

    def add(self, level: str, part: str, text: str) -> None:
        self.by_level.setdefault(level, {})[part] = text


GENERATED = ("post_grad", "ir_before_fusion", "ir_after_fusion", "diagram", "code")
"""The levels of InductorTexts."""

_CPP_KERNEL = re.compile(
    r"^(\w+) = async_compile\.cpp_pybinding\(.*?r\'\'\'(.*?)\'\'\'\)", re.MULTILINE | re.DOTALL
)


def lower_with_inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    folder: Path | None,
    record: Record,
) -> InductorTexts:
    """Compile with Inductor: `record` gets joint graph, forward and backward as they enter it. Without a `folder` that
    Inductor may trace into, nothing is lowered, and there are no texts."""
    from torch._inductor import compile_fx, debug

    depth, part = 0, ""
    passes = compile_fx._recursive_joint_graph_passes
    texts = InductorTexts()

    def joint_graph_passes(traced: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            if depth == 1 and any(node.name.startswith("tangents") for node in traced.graph.nodes):
                record("joint", traced)
            return passes(traced, *args, **kwargs)
        finally:
            depth -= 1

    def inner(traced: torch.fx.GraphModule, examples: Any, **kwargs: Any) -> Any:
        nonlocal part
        part = "backward" if kwargs.get("is_backward") else "forward"
        record(part, traced)
        return (
            forward_not_compiled
            if folder is None
            else compile_fx.compile_fx_inner(traced, examples, **kwargs)
        )

    class Formatter(debug.DebugFormatter):
        """Keeps what the original writes to files."""

        def fx_graph(self, gm: torch.fx.GraphModule, inputs: Any) -> None: ...

        def fx_graph_transformed(self, gm: torch.fx.GraphModule, inputs: Any) -> None:
            texts.add("post_grad", part, readable(gm))

        def ir_pre_fusion(self, nodes: Any) -> None:
            texts.add("ir_before_fusion", part, _loops(nodes))

        def ir_post_fusion(self, nodes: Any) -> None:
            texts.add("ir_after_fusion", part, _loops(nodes))
            texts.add("diagram", part, _diagram(nodes))

        def output_code(self, filename: str, extension: str = "py") -> None:
            code = Path(filename).read_text()
            texts.kernels.update(_CPP_KERNEL.findall(code))
            traces = getattr(debug, "_inductor_kernel_stack_trace", {})
            lines = {kernel: _marked_lines(found) for kernel, found in traces.items()}
            for kernel, marks in lines.items():
                name = kernel.rpartition(":")[0] or kernel
                texts.lines[name] = list(dict.fromkeys([*texts.lines.get(name, []), *marks]))
            texts.add("code", part, _with_lines(code, lines))

    tracing = {} if folder is None else {**_TRACING, "trace.debug_dir": str(folder)}
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        patched(compile_fx, "_recursive_joint_graph_passes", joint_graph_passes),
        patched(debug, "DebugFormatter", Formatter),
    ):
        compile_fx.compile_fx(gm, list(inputs), inner_compile=inner, config_patches={**options, **tracing})
    return texts


_TRACING = {"trace.enabled": True, "trace.provenance_tracking_level": 1, "fx_graph_cache": False}
"""torch._inductor.config under which Inductor calls its DebugFormatter, and knows what a kernel computes."""


def _marked_lines(traces: Iterable[str]) -> list[str]:
    """Comments like those of print_readable, for all marks in stack traces."""
    found = (
        f"# File: {MARKED_FILE}{path}:{line} in graph, code: {code.strip()}"
        for trace in traces
        for path, line, code in _MARK_AND_CODE.findall(trace)
    )
    return list(dict.fromkeys(found))


_MARK_AND_CODE = re.compile(_MARK.pattern + r", in \w+\n([^\n]*)")


def _with_lines(code: str, lines: Mapping[str, list[str]]) -> str:
    """Generated Python, with a comment before each call of a kernel: which nodes it computes. lines: by kernel and
    number of the call, `NAME:NUMBER`."""
    calls: dict[str, list[list[str]]] = {}
    for kernel in sorted(lines, key=lambda kernel: int(kernel.rpartition(":")[2] or 0)):
        calls.setdefault(kernel.rpartition(":")[0], []).append(lines[kernel])
    written = []
    for line in code.splitlines():
        called = re.match(r"(\s+)(?:\w+ = )?([\w.]+?)(?:\.run)?\(", line)
        if called and calls.get(called[2]):
            written += [called[1] + comment for comment in calls[called[2]].pop(0)]
        written.append(line)
    return "\n".join(written) + "\n"


def _loops(nodes: Iterable[Any]) -> str:
    """Inductor's loops (BaseSchedulerNode.debug_str), each after the nodes that it computes."""
    return "\n\n".join("\n".join([*_computed(node), node.debug_str()]) for node in nodes) + "\n"


def _computed(node: Any) -> list[str]:
    origins = [
        origin
        for each in node.get_nodes()
        for origin in getattr(each.node, "origins", ())
        if isinstance(origin, torch.fx.Node)
    ]
    return sorted(_marked_lines(origin.meta.get("stack_trace") or "" for origin in origins))


def _diagram(nodes: Sequence[Any]) -> str:
    """The loops and what flows between them, as Graphviz reads it."""
    writer = {name: node.get_name() for node in nodes for name in node.get_buffer_names()}
    lines = ["digraph {", "  node [shape=box]"]
    for node in nodes:
        name = node.get_name()
        labels = [f"{name}: {type(node).__name__}", *_computed(node)]
        label = "\\l".join(text.replace("\\", "/").replace('"', "'") for text in labels)
        lines.append(f'  "{name}" [label="{label}\\l"]')
        read = sorted({dependency.name for dependency in node.read_writes.reads})
        lines += [f'  "{writer.get(each, each)}" -> "{name}" [label="{each}"]' for each in read]
    return "\n".join([*lines, "}", ""])
