"""What a back end tells Dynamo besides code: errors for the user, to trace again, the default back end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch


def symbols_to_specialize(error: BaseException) -> frozenset[str] | None:
    """Names of the symbolic floats that cannot stay symbolic, if that is what `error` says; else None.

    torch._dynamo.exc.TensorifyScalarRestartAnalysis and torch._dynamo.symbolic_convert.TensorifyState.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    if not isinstance(error, TensorifyScalarRestartAnalysis):
        return None
    return frozenset(TensorifyState.force_specializations)


def is_specialized(name: str) -> bool:
    """Whether Dynamo has been asked for this symbolic float as a constant, by `restart_analysis` or by Inductor."""
    from torch._dynamo.symbolic_convert import TensorifyState

    return TensorifyState.should_specialize(name)


def restart_analysis(specialized: Collection[str]) -> BaseException | None:
    """The exception that makes Dynamo trace its frame again, with these symbolic floats as constants; None if it has
    been asked for all of them before: it would come to the same graph, again and again."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    if all(map(is_specialized, specialized)):
        return None
    for name in specialized:
        TensorifyState.specialize(name)
    return TensorifyScalarRestartAnalysis()


def graph_break_at_data() -> BaseException | None:
    """The exception by which Inductor has Dynamo break the graph that is being compiled, where code asks for a value
    of a tensor (torch._subclasses.fake_tensor.DataDependentOutputException, OutputGraph.call_user_compiler). None where
    graphs may hold such values (fullgraph=True, torch._dynamo.config.capture_scalar_outputs): Inductor then fails."""
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import DataDependentOutputException

    context = TracingContext.try_get()
    env = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    if env is None or env.allow_scalar_outputs or env.allow_dynamic_output_shape_ops:
        return None
    return DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def breaks_graph_at_data(error: BaseException) -> bool:
    """Whether `graph_break_at_data` made it."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return isinstance(error, DataDependentOutputException)


def asks_for_data(error: BaseException) -> bool:
    """Whether tracing failed because code asks for a value of a tensor, or for a size that only a run knows
    (torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode and the errors of fake tensors)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    return isinstance(error, kinds)


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Have torch.compile know the back end by its name. Otherwise the first call that names it imports all of PyTorch's
    own back ends, before it asks installed packages for others."""
    import torch._dynamo

    with contextlib.suppress(AssertionError):  # it is known
        torch._dynamo.register_backend(backend, name=name)


def set_default_backend(name: str | None) -> None:
    """torch.compiler.set_default_backend. Before torch 2.13 there is none, and nothing to set."""
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend(name)


def default_backend() -> Any:
    """The back end of a torch.compile that names none: a name or a function."""
    return (
        torch.compiler.get_default_backend() if hasattr(torch.compiler, "get_default_backend") else "inductor"
    )


def uncompiled(module: Any) -> Any:
    """The module that torch.compile wrapped (torch._dynamo.eval_frame.OptimizedModule._orig_mod); else `module`."""
    return getattr(module, "_orig_mod", module)


def is_dynamos_own(error: BaseException) -> bool:
    """Whether a back end's error is one that Dynamo handles: it traces the frame again, breaks the graph, leaves the
    frame alone, or gives it to the user as it is (OutputGraph._call_user_compiler)."""
    from torch._dynamo import exc

    kinds: tuple[type[BaseException], ...] = (exc.RestartAnalysis, exc.SkipFrame, exc.UserError, IndexError)
    return isinstance(error, kinds + tuple(getattr(exc, "exceptions_allowed_to_be_fallback", ())))


def is_user_error(error: BaseException) -> bool:
    """Whether `user_error` made it."""
    from torch._dynamo.exc import ShortenTraceback

    return isinstance(error, ShortenTraceback)


def user_error(error: Exception) -> Exception:
    """The same error, made so that Dynamo hands it to the user as it is (torch._dynamo.exc.ShortenTraceback).

    The result is an instance of the error's own class, so `except` clauses see the typed error.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    both = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__})
    result: Exception = both.__new__(both)  # type: ignore[call-overload]
    result.args = error.args
    result.__dict__.update(error.__dict__)
    result.first_useful_frame = None  # type: ignore[attr-defined]
    return result
