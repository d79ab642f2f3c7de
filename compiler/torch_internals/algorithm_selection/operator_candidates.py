"""An operator's candidates in Inductor's algorithm selection: build, run, describe them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ...tuning import records
from ...tuning.candidates import CandidateBuilds, Candidates
from ...tuning.tile_config import slowest_first
from ..ambient_state import precision_settings
from ..cpp import candidate_context
from ..inductor.config import changed_options
from ..patching import patched, replace


class OperatorCandidates(Candidates):
    """An operator that Inductor has several implementations for, and these candidates.

    Made from what torch._inductor.select_algorithm.AlgorithmSelectorCache.__call__ is given. device: `cpu` or `cuda`.
    candidates: the text of each, in Inductor's order; the same in every process, no two alike. aten: those that are
    PyTorch's own kernels.
    """

    def __init__(self, cache: Any, bound: Mapping[str, Any], problem: records.Problem | None = None) -> None:
        from torch._inductor.select_algorithm import ExternKernelCaller
        from torch._inductor.virtualized import V

        self._cache = cache
        self._bound = bound
        self.choices = list(bound["choices"])
        self._graph = V.graph
        self._arguments: Any = None
        self._places: dict[int, Any] = {}
        """The same arguments in other memory."""
        self.device: str = bound["layout"].device.type
        self.candidates = _distinct([candidate_text(choice) for choice in self.choices])
        self.aten = [i for i, choice in enumerate(self.choices) if isinstance(choice, ExternKernelCaller)]
        self.problem = self._problem() if problem is None else problem

    def _problem(self) -> records.Problem:
        from torch._inductor import ir

        name, nodes = self._bound["name"], list(self._bound["input_nodes"])
        keys = [self._cache.key_of(node) for node in nodes]
        result = self._cache.key_of(ir.Buffer(name="result", layout=self._bound["layout"]))
        settings = {option: str(value) for option, value in changed_options(SEARCH_SPACE_OPTIONS).items()}
        settings |= precision_settings(name, self.device, {key[1] for key in keys})
        if self.aten:
            own = self.choices[self.aten[0]]
            settings |= {f"arg.{k}": repr(v) for k, v in own.kwargs.items()}
            for i, (node, key) in enumerate(zip(own.input_nodes, keys, strict=False)):
                if (given := self._cache.key_of(node)) != key:  # a bias that only the templates take expanded
                    settings[f"given.{i}"] = _operand(given).text()
        if dynamic := [f"{i}.{dim}" for i, node in enumerate(nodes) for dim in _symbolic_dimensions(node)]:
            settings["dynamic"] = " ".join(dynamic)
        if any(key[-1] for key in keys):
            settings["offsets"] = " ".join(str(key[-1]) for key in keys)
        if fixed := [str(i) for i, node in enumerate(nodes) if node.get_name() in self._graph.constants]:
            settings["constants"] = " ".join(fixed)
        if name not in DESCRIBED_BY_OPERANDS or not self.aten or self._bound.get("input_gen_fns"):
            sources = sorted(
                str(getattr(bmreq, "module_cache_key", "") or getattr(bmreq, "hash_key", ""))
                for bmreq in map(_benchmark_request, self.choices)
            )
            settings["sources"] = hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]
        return records.Problem(
            name, tuple(map(_operand, keys)), _operand(result), tuple(sorted(settings.items()))
        )

    def thin(self, most: int) -> None:
        """Keep PyTorch's own kernels and as many others, the same ones each time."""
        drawn = sorted(
            (i for i in range(len(self.choices)) if i not in self.aten),
            key=lambda i: hashlib.sha256(self.candidates[i].encode()).digest(),
        )
        kept = sorted({*self.aten, *drawn[:most]})
        self.choices = [self.choices[i] for i in kept]
        self.candidates = [self.candidates[i] for i in kept]
        self.aten = [position for position, i in enumerate(kept) if i in self.aten]

    def begin_building(self) -> CandidateBuilds:
        """Have the candidates compiled, as many at once as Inductor may."""
        from torch._inductor import config

        if self.device == "cuda":
            return self._building_templates()
        pool = ThreadPoolExecutor(config.compile_threads or 1)
        built = {
            i: pool.submit(candidate_context().run, choice.precompile)
            for i, choice in enumerate(self.choices)
            if hasattr(choice, "precompile")
        }
        pool.shutdown(wait=False)
        return CandidateBuilds(
            list(built.values()),
            lambda: {i: str(e) for i, done in built.items() if (e := done.exception()) is not None},
        )

    def _building_templates(self) -> CandidateBuilds:
        """Triton's candidates in Inductor's processes, as AsyncCompile.triton has them; the candidates then run what
        comes from there. Inductor itself loads and compiles each again when it is measured, which costs seconds where
        the device lacks the shared memory for it."""
        from torch._guards import CompileContext
        from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.select_algorithm import TritonTemplateCaller
        from torch._inductor.virtualized import V

        compilers: Any = AsyncCompile()
        parallel = compilers.use_process_pool()
        begun: dict[int, tuple[str, Any]] = {}
        rest: list[int] = []
        with V.set_graph_handler(self._graph):
            for i in slowest_first(self.candidates):
                choice = self.choices[i]
                if parallel and isinstance(choice, TritonTemplateCaller):
                    source = Path(choice.bmreq.module_path).read_text()
                    begun[i] = source, compilers.triton(choice.bmreq.kernel_name, source).future
                elif hasattr(choice, "precompile"):
                    rest.append(i)
        compile_id = CompileContext.current_compile_id()

        def finish(i: int) -> None:
            if i not in begun:
                with V.set_graph_handler(self._graph):
                    self.choices[i].precompile()
                return
            source, future = begun[i]
            request = self.choices[i].bmreq
            try:
                kernel, _ = future.result()
            finally:
                CompiledTritonKernels.remove_future(source)
            module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
            if not kernel.launchers:
                kernel.set_compile_info(compile_id, False)
                kernel.restore_after_unpickle(old_values=None)
                kernel.precompile(
                    warm_cache_only=False, reload_kernel=lambda: getattr(module, request.kernel_name)
                )
            replace(module, request.kernel_name, kernel)

        def wait() -> dict[int, str]:
            failed: dict[int, str] = {}
            for i in (*begun, *rest):
                try:
                    finish(i)
                except Exception as error:
                    failed[i] = str(error) or type(error).__name__
            return failed

        return CandidateBuilds([future for _, future in begun.values()], wait)

    def prepare(self, seed: int) -> None:
        """Make the example inputs: random, or as the operator wants them (`input_gen_fns`). 8-bit integers take all
        values; Inductor would have zeros, whose product is right in any order."""
        from torch._dynamo.utils import counters
        from torch._inductor.virtualized import V

        counters["inductor"]["select_algorithm_autotune"] += 1
        devices = [0] if self.device == "cuda" else []
        with torch.random.fork_rng(devices=devices), V.set_graph_handler(self._graph):
            torch.manual_seed(seed)
            self._arguments = self._cache.get_inputs(
                self.choices,
                self._bound["input_nodes"],
                self._bound["layout"],
                self._bound.get("input_gen_fns"),
            )
            for tensor in self._arguments.triton.input_tensors:
                if tensor.dtype in (torch.int8, torch.uint8):
                    limits = torch.iinfo(tensor.dtype)
                    tensor.copy_(
                        torch.randint(limits.min, limits.max + 1, tensor.shape, device=tensor.device)
                    )
        self._places = {0: self._arguments}

    def move(self, copy: int) -> bool:
        """See Candidates.move: copies of torch._inductor.select_algorithm.AutotuneArgs."""
        if copy not in self._places:
            self._places[copy] = _copied_arguments(self._places[0])
        self._arguments = self._places[copy]
        return True

    def reference(self) -> torch.Tensor | None:
        """The result of the inputs in float64; None where it cannot be computed."""
        if not self.aten:
            return None
        inputs = list(self._arguments.extern.input_tensors)
        try:
            known = float64_product(self.problem.op, inputs)
            if known is not None:
                return known
            wide = [x.double() if x.is_floating_point() else x for x in inputs]
            result = self.choices[self.aten[0]].to_callable()(*wide)
        except Exception:  # no such kernel for float64, or none that takes it
            return None
        return result if isinstance(result, torch.Tensor) and result.dtype == torch.float64 else None

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        """Have a candidate get ready on the inputs and call body(once), where once() runs it; what it computed last.

        Replaces what times a candidate (torch._inductor.runtime.benchmarking.benchmarker) in its `benchmark`.
        """
        from torch._inductor.runtime.benchmarking import benchmarker
        from torch._inductor.virtualized import V

        choice = self.choices[index]
        inputs, out = self._arguments.get_benchmark_tensors(self._cache._is_extern(choice)).unpack()
        # what is not written must show, and another candidate's result must not stand in for it
        out.fill_(math.nan if out.is_floating_point() and out.element_size() > 1 else 0)
        returned: Any = None

        def benchmark(
            function: Any, args: Any = None, kwargs: Any = None, *rest: Any, **settings: Any
        ) -> float:
            def once() -> None:
                nonlocal returned
                returned = function(*(args or ()), **(kwargs or {}))

            body(once)
            return 0.0

        def device_benchmark(function: Any, *rest: Any, **settings: Any) -> float:
            return benchmark(function)

        with (
            patched(benchmarker, "benchmark", benchmark),
            patched(benchmarker, "benchmark_cpu", device_benchmark),
            patched(benchmarker, "benchmark_gpu", device_benchmark),
            V.set_graph_handler(self._graph),
        ):
            choice.benchmark(*inputs, out=out)
        if isinstance(returned, list | tuple) and returned:
            returned = returned[0]
        return returned if isinstance(returned, torch.Tensor) else out

    def close(self) -> None:
        """Let go of inputs and of what was loaded to run candidates (BenchmarkRequest.cleanup_run_fn)."""
        self._arguments, self._places = None, {}
        for choice in self.choices:
            clean: Any = getattr(_benchmark_request(choice), "cleanup_run_fn", None)
            if clean is not None:
                clean()


def _copied_arguments(arguments: Any) -> Any:
    """AutotuneArgs in other memory; tensors that share theirs share it again."""
    memory: dict[int, Any] = {}
    new_storage: Any = torch.UntypedStorage

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (copied := memory.get(storage.data_ptr())) is None:
            copied = new_storage(storage.nbytes(), device=storage.device)
            memory[storage.data_ptr()] = copied.copy_(storage)
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())

    def copies(tensors: Any) -> Any:
        return type(tensors)([copy(tensor) for tensor in tensors.input_tensors], copy(tensors.output_tensor))

    return type(arguments)(triton=copies(arguments.triton), extern=copies(arguments.extern))


SEARCH_SPACE_OPTIONS = frozenset(
    {
        "max_autotune_conv_backends",
        "max_autotune_flex_search_space",
        "max_autotune_gemm_backends",
        "max_autotune_gemm_search_space",
    }
)
"""Options that say which candidates there are."""


DESCRIBED_BY_OPERANDS = frozenset(
    {"addmm", "baddbmm", "bmm", "convolution", "int_mm", "mm", "mm_plus_mm", "scaled_mm"}
)
"""Operators that operands and the arguments of PyTorch's own kernel say all about."""


def _benchmark_request(choice: Any) -> Any:
    """ChoiceCaller.bmreq, if it has one; a subgraph's refuses to tell unless it is measured elsewhere."""
    try:
        return choice.bmreq
    except (AttributeError, AssertionError):
        return None


def _operand(key: Sequence[Any]) -> records.Operand:
    """What AlgorithmSelectorCache.key_of tells: device, dtype, sizes, strides, offset."""
    lengths = [int(length) for length in key[2:-1]]
    half = len(lengths) // 2
    return records.Operand(key[1].removeprefix("torch."), tuple(lengths[:half]), tuple(lengths[half:]))


def _symbolic_dimensions(node: Any) -> list[int]:
    return [i for i, size in enumerate(node.get_size()) if getattr(size, "free_symbols", None)]


def candidate_text(choice: Any) -> str:
    """`aten mm`; `cpp_bmm`; `triton_mm ACC_TYPE='tl.float32', BLOCK_K=32, ...`. Without the number of its making."""
    from torch._inductor.select_algorithm import ExternKernelCaller

    if isinstance(choice, ExternKernelCaller):
        return f"aten {choice.name}"
    text = f"{re.sub(r'_[0-9]+$', '', choice.name)} {choice.description}".strip()
    return text if len(text) <= 4000 else f"{text[:3900]} {hashlib.sha256(text.encode()).hexdigest()}"


def _distinct(texts: Sequence[str]) -> list[str]:
    """The second of two that are alike is `text #2`."""
    seen: dict[str, int] = {}
    numbered = []
    for text in texts:
        seen[text] = seen.get(text, 0) + 1
        numbered.append(text if seen[text] == 1 else f"{text} #{seen[text]}")
    return numbered


Tensor = torch.Tensor


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Exact: sums of products of 8-bit integers are far below 2^53."""
    return a @ b


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *bias: Tensor) -> Tensor | None:
    """One scale for a tensor, or one for each row of `a` and each column of `b`; not one for each block."""
    rows, columns = a.shape[0], b.shape[1]
    if scale_a.shape not in _scales(rows, 1) or scale_b.shape not in _scales(1, columns):
        return None
    product = (a * scale_a) @ (b * scale_b)
    return product + bias[0] if bias else product


def _scales(rows: int, columns: int) -> list[tuple[int, ...]]:
    return [(), (1,), (1, 1), (rows, columns)]


def _grouped_mm(a: Tensor, b: Tensor, *offsets: Tensor) -> Tensor | None:
    """torch.nn.functional.grouped_mm: of two tensors of 2 or 3 dimensions, of which one may be cut by offsets."""
    if not offsets:
        return a @ b if a.dim() == b.dim() == 3 else None
    ends = [int(end) for end in offsets[0].tolist()]
    groups = list(zip([0, *ends], ends, strict=False))
    if a.dim() == 2 and b.dim() == 3:
        result = a.new_zeros(a.shape[0], b.shape[2])
        for group, (begin, end) in enumerate(groups):
            result[begin:end] = a[begin:end] @ b[group]
        return result
    if a.dim() == 3 and b.dim() == 2:
        result = a.new_zeros(a.shape[1], b.shape[1])
        for group, (begin, end) in enumerate(groups):
            result[:, begin:end] = a[group] @ b[:, begin:end]
        return result
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, begin:end] @ b[begin:end] for begin, end in groups])
    return None


def _scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *offsets: Tensor
) -> Tensor | None:
    """One scale for each row of `a`, and for each column of each matrix of `b`."""
    if (a.dim(), b.dim()) != (2, 3) or scale_a.shape != a.shape[:1] or scale_b.shape != b.shape[::2]:
        return None
    return _grouped_mm(a * scale_a[:, None], b * scale_b[:, None, :], *offsets)


_PRODUCTS: dict[str, Callable[..., Tensor | None]] = {
    "int_mm": _int_mm,
    "scaled_mm": _scaled_mm,
    "grouped_mm": _grouped_mm,
    "scaled_grouped_mm": _scaled_grouped_mm,
}


def float64_product(op: str, inputs: Sequence[Tensor]) -> Tensor | None:
    """A product of the operands of `op`, as PyTorch's own kernel takes them, in float64. None: it is not known how."""
    function = _PRODUCTS.get(op)
    wide = [x.double() if x.is_floating_point() or x.dtype.itemsize == 1 else x for x in inputs]
    return None if function is None else function(*wide)
