"""Subgraphs that a graph calls several times (torch.ops.higher_order.invoke_subgraph), and what Inductor gets wrong in
them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..patching import patched

invoke_subgraph: Any = torch.ops.higher_order.invoke_subgraph


# --- random numbers ----------------------------------------------------------------------------------------


def draw_seeds(graph: torch.fx.Graph, count: int, device: torch.device) -> torch.fx.Node:
    """A node that draws the seeds of one call of a subgraph: int64, of shape [count]. It is the call's first operand,
    which the subgraph does not read: Inductor makes random numbers only after AOTAutograd (numbering_seeds)."""
    from torch._inductor import inductor_prims

    return graph.call_function(inductor_prims.seeds, (count, device))


@contextlib.contextmanager
def numbering_seeds(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Have calls of subgraphs draw the numbers that their nodes would draw in the graph itself. Does nothing for a
    graph without draw_seeds: a program's own input may look like seeds.

    Inductor draws all seeds of a graph at once, and each operator has the seed of its position in the graph
    (torch._inductor.fx_passes.replace_random.fuse_seed_creation_pass). So has a call: it gets the seeds from its first
    operator's to its last one's.
    """
    from torch._inductor import inductor_prims
    from torch._inductor.fx_passes import replace_random
    from torch._inductor.virtualized import V

    if not gm.graph.find_nodes(op="call_function", target=inductor_prims.seeds):
        yield
        return
    fuse: Callable[[torch.fx.Graph], int] = replace_random.fuse_seed_creation_pass

    def number(graph: torch.fx.Graph) -> int:
        drawing = [node for node in graph.nodes if node.target in (inductor_prims.seed, inductor_prims.seeds)]
        calls = [node for node in drawing if node.target is inductor_prims.seeds]
        operand = next(iter(graph.find_nodes(op="placeholder")), None)
        if calls and len(drawing) > 1:
            return _number_all(graph, drawing)
        if drawing and not calls and operand is not None and _are_seeds(operand):  # a subgraph
            _number_from(operand, drawing)
            return 1
        return fuse(graph)

    def _number_all(graph: torch.fx.Graph, drawing: list[torch.fx.Node]) -> int:
        """Draw the seeds of operators and of calls of subgraphs at once."""
        counts: list[Any] = [1 if node.target is inductor_prims.seed else node.args[0] for node in drawing]
        devices: set[Any] = {node.args[-1] for node in drawing}
        (device,) = devices
        with graph.inserting_before(drawing[0]):
            seeds = graph.call_function(inductor_prims.seeds, (sum(counts), device))
        with V.fake_mode:
            seeds.meta["val"] = torch.empty([sum(counts)], dtype=torch.int64, device=device)
        first: int = 0
        for node, count in zip(drawing, counts, strict=True):
            with graph.inserting_before(node):
                if node.target is inductor_prims.seed:
                    own = graph.call_function(inductor_prims.lookup_seed, (seeds, first))
                    own.meta.update(node.meta)
                else:
                    own = graph.call_function(torch.ops.aten.slice.Tensor, (seeds, 0, first, first + count))
                    own.meta["val"] = seeds.meta["val"][first : first + count]
            node.replace_all_uses_with(own)
            graph.erase_node(node)
            first += count
        return 1

    def _number_from(seeds: torch.fx.Node, drawing: list[torch.fx.Node]) -> None:
        """Take a subgraph's seeds from its first operand. Raises RuntimeError if it draws more or fewer."""
        if seeds.meta["val"].shape[0] != len(drawing):
            raise RuntimeError(f"a subgraph draws {len(drawing)} seeds, not {seeds.meta['val'].shape[0]}")
        for position, node in enumerate(drawing):
            with node.graph.inserting_before(node):
                own = node.graph.call_function(inductor_prims.lookup_seed, (seeds, position))
            own.meta.update(node.meta)
            node.replace_all_uses_with(own)
            node.graph.erase_node(node)

    with patched(replace_random, "fuse_seed_creation_pass", number):
        yield


def _are_seeds(operand: torch.fx.Node) -> bool:
    value = operand.meta.get("val")
    return (
        not operand.users
        and isinstance(value, torch.Tensor)
        and value.dtype is torch.int64
        and value.dim() == 1
    )


@contextlib.contextmanager
def _describing_once() -> Iterator[None]:
    """Have a subgraph traced for its schema, which says what it changes, once and not for each call with gradients
    (InvokeSubgraphHOP.gen_schema, which HigherOrderOperator.py_autograd_impl calls)."""
    from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP

    describe: Callable[..., Any] = InvokeSubgraphHOP.gen_schema
    known: weakref.WeakKeyDictionary[torch.fx.GraphModule, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(describe)
    def described(self: Any, subgraph: Any, identifier: Any, *operands: Any) -> Any:
        if not isinstance(subgraph, torch.fx.GraphModule):
            return describe(self, subgraph, identifier, *operands)
        schemas = known.setdefault(subgraph, {})
        key = identifier, tuple(map(type, operands))
        if key not in schemas:
            schemas[key] = describe(self, subgraph, identifier, *operands)
        return schemas[key]

    with patched(InvokeSubgraphHOP, "gen_schema", described):
        yield


@contextlib.contextmanager
def _updating_changes() -> Iterator[None]:
    """Have fake tensors updated where a pass changed something. From 2.13 on, an update looks at all operands of each
    call, and runs the call again where two results of its subgraph share memory, because these are not the same as
    themselves (torch._inductor.fx_utils.FakeTensorUpdater)."""
    from torch._inductor import fx_utils

    same: Callable[..., bool] | None = getattr(fx_utils, "_is_fake_tensor_same", None)
    if same is None:
        yield
        return
    update: Callable[[Any], int] = fx_utils.FakeTensorUpdater.incremental_update

    @functools.wraps(same)
    def is_same(new: Any, old: Any, *args: Any, **kwargs: Any) -> bool:
        return new is old or same(new, old, *args, **kwargs)

    def is_changed(updater: Any) -> bool:
        known = updater.processed_hashes
        hashes = set(map(updater.hash_node, updater.gm.graph.nodes))
        return hashes != known or any(map(is_changed, updater.subgraph_updaters.values()))

    @functools.wraps(update)
    def update_changes(self: Any) -> int:
        return update(self) if is_changed(self) else 0

    with (
        patched(fx_utils, "_is_fake_tensor_same", is_same),
        patched(fx_utils.FakeTensorUpdater, "incremental_update", update_changes),
    ):
        yield


# --- memory ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def keeping_memory_of_subgraphs() -> Iterator[None]:
    """Have no generated code write over what a subgraph reads or returns while somebody still needs it.

    A subgraph's results may be its inputs, or views of one memory: what its forward saves, for instance. Inductor takes
    them for separate buffers and reuses them (torch._inductor.ir.InvokeSubgraph.create). AOTAutograd does not see it
    either when it says which inputs of a backward may be written over, and a subgraph inherits that, as if its own
    inputs were numbered like those of the whole graph (torch._inductor.graph.GraphLowering). Gradients are then wrong,
    and nothing says so. Nor does a call check the sizes and strides of its operands, which the graph has checked.
    """
    from torch._inductor.codegen import wrapper
    from torch._inductor.graph import GraphLowering, SubgraphLowering
    from torch._inductor.ir import InvokeSubgraph, MultiOutput
    from torch._inductor.virtualized import V

    begin: Callable[..., None] = GraphLowering.__init__
    create: Callable[..., Any] = vars(InvokeSubgraph)["create"].__func__
    free: Callable[[Any, Any], None] = wrapper.PythonWrapperCodegen.codegen_free
    check: Callable[[Any], None] = wrapper.SubgraphPythonWrapperCodegen.codegen_input_size_asserts
    kept: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    @functools.wraps(begin)
    def begin_without_donations(self: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        begin(self, gm, *args, **kwargs)
        calls = gm.graph.find_nodes(op="call_function", target=invoke_subgraph)
        if calls or isinstance(self, SubgraphLowering):
            self.bw_donated_idxs = None

    @functools.wraps(create)
    def create_keeping(cls: Any, *args: Any) -> Any:
        results = create(cls, *args)
        names = kept.setdefault(V.graph, set())
        for result in results:
            if isinstance(result, MultiOutput):
                (call,) = result.inputs
                buffers: list[Any] = [result, *call.inputs]  # type: ignore[union-attr]
                names.update(filter(None, (buffer.maybe_get_name() for buffer in buffers)))
        V.graph.never_reuse_buffers.update(names)
        return results

    @functools.wraps(free)
    def free_without_reuse(self: Any, buffer: Any) -> None:
        name = buffer.get_name()
        if name in kept.get(V.graph, ()) and name not in V.graph.graph_inputs:
            if name not in self.freed:  # codegen_free frees nothing that is never reused
                self.freed.add(name)
                self.writeline(wrapper.FreeLine(self, buffer))
            return
        free(self, buffer)

    def check_partition(self: Any) -> None:
        if self.partition_signatures is not None:  # of CUDA graphs: the whole graph checks nothing then
            check(self)

    with (
        _describing_once(),
        _updating_changes(),
        patched(GraphLowering, "__init__", begin_without_donations),
        patched(InvokeSubgraph, "create", classmethod(create_keeping)),
        patched(wrapper.PythonWrapperCodegen, "codegen_free", free_without_reuse),
        patched(wrapper.SubgraphPythonWrapperCodegen, "codegen_input_size_asserts", check_partition),
    ):
        yield
