"""Symbolic sizes and numbers: read them from a graph's shape environment, and make new ones (SymNode, ShapeEnv)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    PendingUnbackedSymbolNotFound,
    ShapeEnv,
    compute_unbacked_bindings,
)
from torch.utils._pytree import key_get, keystr
from torch.utils._sympy.numbers import int_oo


def sym_expr(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """The expression that a symbolic value is (SymNode.expr)."""
    expression: sympy.Expr = value.node.expr
    return expression


def sym_symbol(value: Any) -> sympy.Symbol | None:
    """The symbol that a symbolic integer was made for (SymNode._expr), before replacements; else None."""
    symbol = value.node._expr if isinstance(value, torch.SymInt) else None
    return symbol if isinstance(symbol, sympy.Symbol) else None


def sym_env(value: torch.SymInt) -> ShapeEnv:
    """The shape environment a symbolic integer belongs to (SymNode.shape_env)."""
    env: ShapeEnv = value.node.shape_env
    return env


def symfloat_hint(value: torch.SymFloat) -> float:
    """The example value of a symbolic float (SymNode.hint)."""
    return float(value.node.hint)


def has_hint_override(env: ShapeEnv) -> bool:
    """Whether mark_dynamic(..., hint_override=...) says for which size to optimize (ShapeEnv.var_to_hint_override)."""
    return bool(env.var_to_hint_override)


def new_shape_env() -> ShapeEnv:
    """torch.fx.experimental.symbolic_shapes.ShapeEnv without duck shaping: the client did it already."""
    return ShapeEnv(duck_shape=False)


def new_symint(env: ShapeEnv, name: str, hint: int | None, lower: int, upper: int | None) -> torch.SymInt:
    """A symbolic integer of `env` with that range: a backed one with that hint (ShapeEnv.create_symbol,
    create_symintnode), or without one the size of an input that is unbacked (create_unbacked_symint)."""
    from torch._dynamo.source import LocalSource
    from torch.utils._sympy.value_ranges import ValueRanges

    if hint is None:
        with env.ignore_fresh_unbacked_symbols():
            size = env.create_unbacked_symint()
        made = sym_expr(size)
        if lower >= 0:
            env.size_like.add(made)
        env.constrain_symbol_range(made, lower, int_oo if upper is None else upper)
        env.unbacked_inputs.add(made)
        return size
    source = LocalSource(name)
    symbol = env.create_symbol(
        hint,
        source,
        dynamic_dim=DimDynamic.DYNAMIC,
        positive=True if lower > 0 else None,
        do_not_specialize_zero_one=True,
    )
    if isinstance(symbol, sympy.Symbol):
        env.var_to_range[symbol] = ValueRanges(lower, int_oo if upper is None else upper)
    node = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(node, torch.SymInt)
    return node


def new_symfloat(env: ShapeEnv, name: str, hint: float) -> torch.SymFloat:
    """A backed symbolic float (ShapeEnv.create_unspecified_symbol, create_symfloatnode)."""
    from torch._dynamo.source import LocalSource

    source = LocalSource(name)
    symbol = env.create_unspecified_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    node = env.create_symfloatnode(symbol, hint=hint, source=source)
    assert isinstance(node, torch.SymFloat)
    return node


def is_backed(value: torch.SymFloat) -> bool:
    """Whether a symbolic float has an example value (SymNode.hint): it does not depend on data."""
    return value.node.hint is not None


def symfloat_name(value: Any) -> str | None:
    """The symbol a symbolic float is, by name; None for an expression, and for what is none."""
    symbol = value.node._expr if isinstance(value, torch.SymFloat) else None
    return symbol.name if isinstance(symbol, sympy.Symbol) else None


def symint_of(env: ShapeEnv, symbol: sympy.Symbol) -> torch.SymInt:
    """The symbolic integer that stands for a symbol `env` already has (ShapeEnv.create_symintnode)."""
    node = env.create_symintnode(symbol, hint=symbol_hint(env, symbol))
    assert isinstance(node, torch.SymInt)
    return node


def symbol_hint(env: ShapeEnv, symbol: sympy.Symbol) -> int | None:
    """The example value of a backed symbol, None for an unbacked one (ShapeEnv.backed_var_to_val, var_to_val)."""
    table = getattr(env, "backed_var_to_val", None)
    if table is None:
        table = env.var_to_val
    value = table.get(symbol)
    return None if value is None else int(value)


def symbol_range(env: ShapeEnv, symbol: sympy.Symbol) -> tuple[int, int | None]:
    """(lower, upper) of a symbol; upper None means unbounded (ShapeEnv.var_to_range)."""
    bounds = env.var_to_range[symbol]
    limit = 1 << 62
    lower = int(bounds.lower) if bounds.lower.is_finite and abs(bounds.lower) < limit else -limit
    upper = int(bounds.upper) if bounds.upper.is_finite and bounds.upper < limit else None
    return lower, upper


def guard_expressions(env: ShapeEnv) -> list[sympy.Expr]:
    """What a shape environment has assumed so far, in order (ShapeEnv.guards)."""
    return [guard.expr for guard in env.guards]


class UnbackedFacts(NamedTuple):
    """What a shape environment knows of a symbol that depends on data. path: where it is in its node's value."""

    path: str
    lower: int
    upper: int | None
    size_like: bool


def unbacked_facts(node: torch.fx.Node) -> Iterator[UnbackedFacts]:
    """What is known of each integer that a node of Dynamo's graph is the first to have: meta["unbacked_bindings"]."""
    for symbol, path in node.meta.get("unbacked_bindings", {}).items():
        value = key_get(node.meta["example_value"], path)
        if isinstance(value, torch.SymInt):
            env = sym_env(value)
            lower, upper = symbol_range(env, env.unbacked_renamings.get(symbol, symbol))
            yield UnbackedFacts(keystr(path), lower, upper, symbol in env.size_like)


def bind_unbacked(env: ShapeEnv, node: torch.fx.Node, value: Any, known: Iterable[UnbackedFacts]) -> None:
    """Note at a node which symbols in its value are new and depend on data, as Dynamo does, and let `env` know what is
    known of them. A second trace of the graph calls its own symbols by these names, so that it knows the same
    (compute_unbacked_bindings, PropagateUnbackedSymInts)."""
    try:
        bindings = compute_unbacked_bindings(env, value)
    except (
        PendingUnbackedSymbolNotFound
    ):  # it is inside a graph that the node calls, and no second trace looks there
        return
    if not bindings:
        return
    node.meta["unbacked_bindings"] = bindings
    symbols = {keystr(path): symbol for symbol, path in bindings.items()}
    for facts in known:
        if (symbol := symbols.get(facts.path)) is not None:
            env.constrain_symbol_range(symbol, facts.lower, int_oo if facts.upper is None else facts.upper)
            if facts.size_like:
                env.size_like.add(symbol)


def shape_env_of(mode: FakeTensorMode) -> ShapeEnv | None:
    """A mode's shape environment (FakeTensorMode.shape_env); None where all sizes are numbers."""
    return mode.shape_env
