"""Patches that make lowering faster and change no generated code."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch

from ..patching import patched


@contextlib.contextmanager
def faster_lowering() -> Iterator[None]:
    """Spare what Inductor works out again and again for a large graph, and what only its logs would show;
    docs/patches.md lists what. A key for a cache that is always empty may be a nonce. A progress bar's thread would
    keep a fork server from forking. Saving in a cache what is serialized afterwards anyway is left out for another
    reason too: 2.11 pickles it under a fake mode, and a constant on a GPU then ends the process (SIGSEGV)."""
    from torch._dynamo.repro import after_aot
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import graph, scheduler  # noqa: F401 - graph first: the modules of codegen import each other
    from torch._inductor.codegen import common, cpp, cpp_template_kernel
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.virtualized import V
    from torch.fx import interpreter

    fill = DtypePropagationOpsHandler.__init__
    sizes: tuple[int, ...] = ()

    @functools.wraps(fill)
    def fill_once(self: Any) -> None:
        nonlocal sizes
        tables = torch._inductor.utils.op_dtype_propagation_rules, common.pointwise_overrides_data
        if sizes != (now := (len(tables[0]), len(tables[1]))):
            fill(self)
            sizes = now

    uses = scheduler.get_scheduler_node_symbol_uses

    def symbol_uses(node: Any) -> Any:
        return (
            uses(node) if V.graph.sizevars.shape_env.var_to_range else torch.utils._ordered_set.OrderedSet()
        )

    template = functools.cache(common.KernelTemplate._template_from_string)
    parse_anew: Callable[[Any], Any] = cpp_template_kernel.parse_expr_with_index_symbols
    parse_text = functools.cache(parse_anew)

    def parse(index: Any) -> Any:
        if isinstance(index, (list, tuple)):
            return [parse(each) for each in index]
        return parse_anew(index) if isinstance(index, sympy.Expr) else parse_text(str(index))

    stride = vars(cpp)["stride_at_vec_range"]  # defined there until 2.12, in sizevars from 2.13 on

    @functools.cache
    def stride_at_vec_range(index: Any, var: Any, vec_length: int | None = None) -> Any:
        found = linear_stride(index, var)
        return stride(index, var, vec_length) if found is None else found

    no_bar = torch.fx.config.disable_progress
    with (
        patched(DtypePropagationOpsHandler, "__init__", fill_once),
        patched(scheduler, "get_scheduler_node_symbol_uses", symbol_uses),
        patched(cpp, "stride_at_vec_range", stride_at_vec_range),
        patched(common.KernelTemplate, "_template_from_string", staticmethod(template)),
        patched(cpp_template_kernel, "parse_expr_with_index_symbols", parse),
        patched(torch.fx.GraphModule, "print_readable", lambda self, *args, **kwargs: ""),
        patched(after_aot, "save_graph_repro", lambda *args, **kwargs: None),
        patched(autograd_cache, "autograd_cache_key", lambda *args, **kwargs: (secrets.token_hex(16), [])),
        patched(autograd_cache.AOTAutogradCache, "save", lambda key, entry, remote: entry.pre_save()),
        patched(interpreter, "tqdm", _NoProgressBar) if no_bar else contextlib.nullcontext(),
    ):
        yield


def linear_stride(index: sympy.Expr, var: sympy.Symbol) -> sympy.Integer | None:
    """How far a sum of integers times symbols moves with `var`; None of any other expression."""
    stride = 0
    for term in sympy.Add.make_args(index):
        factor, symbol = term.as_coeff_Mul()
        if not (factor.is_Integer and (symbol.is_Symbol or symbol is sympy.S.One)):
            return None
        stride += int(factor) if symbol == var else 0
    return sympy.Integer(stride)


class _NoProgressBar:
    def __init__(self, **kwargs: Any) -> None: ...

    def update(self, count: int) -> None: ...

    def close(self) -> None: ...
