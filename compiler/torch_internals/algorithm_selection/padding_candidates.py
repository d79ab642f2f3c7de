"""Whether a matrix product's operands are padded, as two candidates (pad_mm)."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ...tuning import records
from ...tuning.candidates import Candidates
from ..ambient_state import precision_settings
from ..patching import patched

PADDING_PREFIX = "pad_mm."
"""Begins the names of problems that ask whether a product's operands are padded."""


class PaddingCandidates(Candidates):
    """Whether a product's operands are padded to sizes that the device likes better, as candidates.

    `mm`, `addmm` or `bmm` of tensors, fake ones as a rule. excluded: those of mat1 and mat2 whose padding costs
    nothing in their graph. There is no reference: both are PyTorch's own product. From
    torch._inductor.fx_passes.pad_mm, which measures each anew and takes its padding if it is a tenth faster.
    """

    def __init__(self, op: str, tensors: Sequence[torch.Tensor], excluded: Collection[str]) -> None:
        *bias, mat1, mat2 = tensors
        self._op = op
        self._tensors = mat1, mat2, *bias
        self._excluded = frozenset(excluded)
        self._functions: list[Callable[[], Any]] = []
        self.device: str = mat1.device.type
        self.candidates = [f"aten {op}", f"aten padded {op}"]
        self.aten = [0]
        operands = tuple(_operand_of(tensor) for tensor in tensors)
        size = (*mat1.shape[:-1], mat2.shape[-1])
        settings = precision_settings(op, self.device, {str(tensor.dtype) for tensor in tensors})
        if excluded:
            settings["excluded"] = " ".join(sorted(excluded))
        result = records.Operand(operands[-1].dtype, size, records.contiguous(size))
        self.problem = records.Problem(PADDING_PREFIX + op, operands, result, tuple(sorted(settings.items())))

    def prepare(self, seed: int) -> None:
        """Have pad_mm make the inputs and both functions, which it hands to what measures them."""
        from torch._inductor.fx_passes import pad_mm

        functions: list[Callable[[], Any]] = []

        def measured(function: Callable[[], Any]) -> float:
            functions.append(function)
            return 1.0

        with (
            patched(pad_mm, "should_exclude_padding_time", lambda match, name: name in self._excluded),
            patched(pad_mm, "get_cached_should_pad", lambda key: None),
            patched(pad_mm, "set_cached_should_pad", lambda key, value: None),
            patched(pad_mm, "get_cached_base_mm_benchmark_time", lambda key: None),
            patched(pad_mm, "set_cached_base_mm_benchmark_time", lambda key, value: None),
            patched(pad_mm, "get_do_bench", lambda: measured),
            torch.random.fork_rng(devices=[0] if self.device == "cuda" else []),
        ):
            torch.manual_seed(seed)
            packet = getattr(torch.ops.aten, self._op)
            mat1, mat2, *bias = self._tensors
            inspect.unwrap(pad_mm._should_pad)(None, mat1, mat2, packet, *bias)
        if len(functions) != len(self.candidates):
            raise RuntimeError(f"{self.problem.text()} is not decided by measuring")
        self._functions = functions

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        body(self._functions[index])
        return torch.empty(())

    def close(self) -> None:
        self._functions = []


def _operand_of(tensor: torch.Tensor) -> records.Operand:
    return records.Operand(
        str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride())
    )


@contextlib.contextmanager
def choosing_padding(choose: Callable[[PaddingCandidates], int]) -> Iterator[None]:
    """Inside the block, `choose` says whether operands are padded where Inductor tunes and would measure that.

    Wraps torch._inductor.fx_passes.pad_mm._should_pad. Sizes that vary are left to Inductor.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import pad_mm

    remembering: Any = pad_mm._should_pad
    should_pad: Any = inspect.unwrap(remembering)

    @functools.wraps(should_pad)  # which Padding finds beneath
    def decided(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
        tensors = [mat1, mat2] if input is None else [input, mat1, mat2]
        vary = any(isinstance(n, torch.SymInt) for x in tensors for n in (*x.shape, *x.stride()))
        if vary or not (config.max_autotune or config.max_autotune_gemm):
            return bool(remembering(match, mat1, mat2, op, input))

        def known(key: str) -> bool:
            excluded = [name for name in ("mat1", "mat2") if pad_mm.should_exclude_padding_time(match, name)]
            return choose(PaddingCandidates(op.__name__, tensors, excluded)) == 1

        with patched(pad_mm, "get_cached_should_pad", known):
            return bool(should_pad(match, mat1, mat2, op, input))

    with patched(pad_mm, "_should_pad", decided):
        yield
