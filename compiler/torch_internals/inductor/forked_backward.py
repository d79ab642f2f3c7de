"""Lower the backward in a forked copy of this process while this process lowers the forward."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...process.forked_copy import ForkedCopy
from ..patching import patched
from .dry_run import forward_not_compiled


class ForkableSearch(Protocol):
    """What chooses while a graph is lowered, where half of that is done in a copy of this process."""

    def answer_fork(self, question: bytes) -> bytes:
        """What `ask` gives in the copy; in a thread of this process. Raises nothing."""

    def enter_fork(self, ask: Callable[[bytes], bytes]) -> None:
        """This is the copy now; it can tell nobody anything but through `ask`, and ends by Scouted."""

    def fork_result(self) -> Any:
        """In the copy: what it has found out, as pickle has it."""

    def adopt_fork_result(self, result: Any) -> None:
        """In this process: what the copy took was taken."""


MAX_FORKED_BYTES = 2 << 30
"""Bytes up to which a job copies itself: whoever watches its memory counts what the two share twice."""


class BackwardInFork:
    """torch._inductor.compile_fx.compile_fx_inner, with the backward lowered while the forward is.

    A copy of this process is told that the forward is done; AOTAutograd then hands it the backward, which it lowers
    (fx_codegen_and_compile) without building anything. This process takes that as Inductor takes a graph from its own
    cache (CompiledFxGraph.after_deserialization), if it comes to the very same backward: the strides of what the
    forward saves, which only its lowering decides, were a guess. Otherwise it lowers the backward itself.
    """

    def __init__(self, lower: Callable[..., Any], ahead: ForkableSearch) -> None:
        self._lower = lower
        self._ahead = ahead
        self._copy: ForkedCopy | None = None

    def __enter__(self) -> BackwardInFork:
        return self

    def __exit__(self, *error: object) -> None:
        if self._copy is not None:
            self._copy.close()

    @property
    def inside_copy(self) -> bool:
        return self._copy is not None and self._copy.inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import resource  # not on Windows, where no job runs

        from torch._inductor import compile_fx

        if kwargs.get("is_backward"):
            with patched(compile_fx, "fx_codegen_and_compile", self._codegen(compile_fx)):
                return self._lower(*args, **kwargs)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if not kwargs.get("is_inference") and held <= MAX_FORKED_BYTES:
            with contextlib.suppress(OSError):
                self._copy = ForkedCopy(self._ahead.answer_fork)
            if self._copy is not None and self._copy.inside:
                self._ahead.enter_fork(self._copy.ask)
                torch.set_num_threads(1)  # a pool of threads does not survive a fork
                if (box := kwargs.get("cudagraphs")) is not None:
                    box.value = False  # as lowering a forward for a CPU leaves it
                return forward_not_compiled
        return self._lower(*args, **kwargs)

    def _codegen(self, compile_fx: Any) -> Callable[..., Any]:
        original = compile_fx.fx_codegen_and_compile

        @functools.wraps(original)
        def fx_codegen_and_compile(gm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._copy is None:
                return original(gm, inputs, *args, **kwargs)
            task = _lowering_inputs(gm, inputs, args, kwargs)
            if self._copy.inside:
                with without_cpp_builds():
                    lowered = original(gm, inputs, *args, **kwargs)
                lowered.prepare_for_serialization()
                self._copy.finish(pickle.dumps((task, lowered, self._ahead.fork_result())))
            data = self._copy.result()
            self._copy = None
            done, lowered, found = pickle.loads(data) if data else ((), None, None)
            if lowered is None or done != task:
                return original(gm, inputs, *args, **kwargs)
            self._ahead.adopt_fork_result(found)
            lowered.after_deserialization(compile_fx.CompiledFxGraphConstantsWithGm(gm))
            return lowered

        return fx_codegen_and_compile


def _lowering_inputs(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], args: Any, kwargs: Mapping[str, Any]
) -> list[str]:
    """All that a lowering is given, as text."""
    given = [
        f"{x.dtype} {x.device} {tuple(x.shape)} {x.stride()} {x.storage_offset()}"
        if isinstance(x, torch.Tensor)
        else repr(x)
        for x in inputs
    ]
    settings = {name: getattr(value, "value", value) for name, value in kwargs.items()}
    return [str(gm.graph), *given, repr(args), repr(sorted(settings.items()))]


@contextlib.contextmanager
def without_cpp_builds() -> Iterator[None]:
    """Inside the block, generated code loads without its C++ kernels (AsyncCompile.cpp_pybinding)."""
    from torch._inductor.async_compile import AsyncCompile

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        return forward_not_compiled

    with patched(AsyncCompile, "cpp_pybinding", cpp_pybinding):
        yield
