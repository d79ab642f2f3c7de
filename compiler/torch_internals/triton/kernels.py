"""Stage 9: the Triton kernels that a compile made are recorded, and a bundle keeps each with its winner, binary inside.

What an earlier compile measured is not measured again. Inductor measures a kernel's candidates when the kernel first
runs. A client that loaded all of them would measure them again, and could choose another one of nearly equal speed. The
worker has already run the graph (verify.py), so the artifact gets only its winners, with their measurements.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from ...artifact import manifest
from ...kernel_store import triton_cache
from ...kernel_store.libraries import KernelExchange
from ...kernel_store.triton_cache import TritonWinner
from ...tuning.batched_descent import BatchedDescents, DescentDeferred
from ..patching import patched
from .caches import kernel_key
from .compile_workers import build_configuration
from .extensions import recording_extensions


class TritonKernels:
    """The Triton kernels that a compile made: live autotuners by bundle key, late candidates, timings.

    modules: C extensions that Triton built or used on the way (its driver's, launchers'), by triton_module_id.
    reused: kernels whose binaries all came from earlier compiles, once the winners are kept.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Path] = {}
        self.reused = 0
        self.live: dict[str, Any] = {}
        """Bundle key -> CachingAutotuner."""
        self.sources: dict[str, str] = {}
        """Sources by bundle key."""
        self.descents: BatchedDescents | None = None
        """While coordinate descents take turns."""
        self.late: dict[int, list[Any]] = {}
        self.timings: dict[int, TritonWinner] = {}

    def undecided(self) -> bool:
        """Whether any kernel has several candidates left, or its descent before it: it has not run yet."""
        return any(
            len(kernel.launchers) > 1 or (kernel.launchers and descends(kernel, kernel.launchers[0].config))
            for kernel in self.live.values()
        )

    def descending(self) -> bool:
        """Whether any kernel's coordinate descent is still to come."""
        return any(
            kernel.launchers and descends(kernel, kernel.launchers[0].config) for kernel in self.live.values()
        )

    @contextlib.contextmanager
    def descending_together(self) -> Iterator[BatchedDescents | None]:
        """Inside the block coordinate descents take turns (batched_descent.py); None: there are none, or
        nobody who builds."""
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime.runtime_utils import triton_config_to_hashable

        compilers: Any = AsyncCompile
        if not self.descending() or not compilers.use_process_pool():
            yield None
            return
        pool = compilers.process_pool()
        caches = {name: os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}

        def build(key: str, config: Any) -> Future[Any]:
            name = self.live[key].fn.__name__
            return pool.submit(build_configuration, name, self.sources[key], config, caches)  # type: ignore[no-any-return]

        self.descents = BatchedDescents(build, triton_config_to_hashable)
        try:
            yield self.descents
        finally:
            self.descents = None


@contextlib.contextmanager
def recording_triton_kernels(exchange: KernelExchange | None = None) -> Iterator[TritonKernels]:
    """Record every statically launchable Triton kernel compiled inside the block, and candidates added after the bundle
    was made (scaled reductions, coordinate descent). What an earlier compile measured is not measured again; a descent
    ends where it ended the last time."""
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.triton_bundler import TritonBundler

    kernels = TritonKernels()
    keys: dict[int, str] = {}
    put = TritonBundler.put_static_autotuner
    precompile = CachingAutotuner._precompile_config
    benchmark = CachingAutotuner.benchmark_all_configs

    def key_of(source: str) -> str:
        key = kernel_key(source)
        kernels.sources[key] = source
        return key

    def put_static_autotuner(cls: Any, key: str, kernel: Any) -> None:
        kernels.live[key] = kernel
        keys[id(kernel)] = key
        put(key, kernel)

    def precompile_config(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> Any:  # more since torch 2.14
        result = precompile(self, cfg, *args, **kwargs)
        kernels.late.setdefault(id(self), []).append(_unloaded_copy(result))
        return result

    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = keys.get(id(self))
        problem = None if source is None else _measurement_key(source, self.launchers, args)
        known = None if problem is None else triton_cache.find_winner(exchange, problem)
        for launcher in self.launchers:
            if known is not None and str(launcher.config) == known.configuration:
                kernels.timings[id(self)] = known
                return {launcher: known.milliseconds}
        timings = benchmark(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        best = min(timings, key=timings.get)
        winner = triton_cache.TritonWinner(str(best.config), float(timings[best]), len(timings))
        kernels.timings[id(self)] = winner
        if problem is not None and math.isfinite(winner.milliseconds):
            triton_cache.offer_winner(exchange, problem, winner)
        return timings

    descend: Any = CachingAutotuner._coordinate_descent_tuning

    def coordinate_descent_tuning(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        source = keys.get(id(self))
        if source is None:
            return descend(self, launcher, *args, **kwargs)
        problem = _measurement_key(source, [launcher], args, "coordinate descent")
        known = triton_cache.find_winner(exchange, problem)
        config = None if known is None else decode_configuration(launcher.config, known.configuration)
        if config is not None:
            with patched(self.coordesc_tuner, "autotune", lambda *args, **kwargs: config):
                return descend(self, launcher, *args, **kwargs)
        if kernels.descents is None:
            winner = descend(self, launcher, *args, **kwargs)
        else:
            tune = kernels.descents.of(source, self.coordesc_tuner.autotune)
            try:
                with patched(self.coordesc_tuner, "autotune", tune):
                    winner = descend(self, launcher, *args, **kwargs)
            except DescentDeferred:
                return launcher
        timed = kernels.timings.get(id(self))
        milliseconds = timed.milliseconds if timed is not None and math.isfinite(timed.milliseconds) else 0.0
        triton_cache.offer_winner(
            exchange,
            problem,
            triton_cache.TritonWinner(encode_configuration(winner.config), milliseconds, 1),
        )
        return winner

    with (
        recording_extensions(kernels.modules),
        patched(CachingAutotuner, "_coordinate_descent_tuning", coordinate_descent_tuning),
        patched(CompiledTritonKernels, "key", staticmethod(key_of)),
        patched(TritonBundler, "put_static_autotuner", classmethod(put_static_autotuner)),
        patched(CachingAutotuner, "_precompile_config", precompile_config),
        patched(CachingAutotuner, "benchmark_all_configs", benchmark_all_configs),
    ):
        yield kernels


def _measurement_key(source: str, launchers: Sequence[Any], args: Sequence[Any], *about: str) -> bytes:
    """What a measurement of a kernel's candidates is good for."""
    import triton

    made_by = [torch.cuda.get_device_name(), str(torch.__version__), triton.__version__]
    sizes = [value for value in args if isinstance(value, int)]
    return triton_cache.winner_key(
        source, sizes, [*(str(each.config) for each in launchers), *about], made_by
    )


def _unloaded_copy(result: Any) -> Any:
    """A compile result as it was before it is loaded into the device (StaticTritonCompileResult)."""
    if not hasattr(getattr(result, "kernel", None), "cubin_raw"):
        return result
    copied = copy.copy(result)
    copied.kernel = copy.copy(result.kernel)
    return copied


def descends(kernel: Any, config: Any) -> bool:
    """Whether a CachingAutotuner would begin a coordinate descent when it runs with this configuration."""
    wanted = kernel.inductor_meta.get("coordinate_descent_tuning", False)
    return bool(wanted) and not getattr(config, "found_by_coordesc", False)


def encode_configuration(config: Any) -> str:
    """Where a coordinate descent has ended (triton.Config)."""
    return json.dumps([config.kwargs, config.num_warps, config.num_stages], sort_keys=True)


def decode_configuration(config: Any, where: str) -> Any:
    """The configuration that `_where` tells, from the one that the descent began with; None: it is none of its."""
    try:
        kwargs, warps, stages = json.loads(where)
        numbers = [*kwargs.values(), warps, stages]
    except (ValueError, TypeError, AttributeError):
        return None
    known = config.kwargs
    if kwargs.keys() != known.keys() or not all(type(number) in (int, bool) for number in numbers):
        return None
    moved = copy.deepcopy(config)
    moved.kwargs.update(kwargs)
    moved.num_warps, moved.num_stages = warps, stages
    return moved


# --- the winners in a bundle ---------------------------------------------------------------------------------


def keep_winners(bundle: bytes, kernels: TritonKernels) -> bytes:
    """Rewrite a bundle so that each kernel that ran keeps its winner alone, binary inside.

    UNPICKLES `bundle`: only the process that made it calls this (TritonBundle.static_autotuners).
    """
    entry, side_table, constant_args = pickle.loads(bundle)
    for part in (entry.compiled_fw, entry.compiled_bw):
        graph = getattr(part, "result", None)
        triton_bundle = getattr(graph, "_triton_bundle", None)
        if graph is None or triton_bundle is None:
            continue
        inside: set[str] = set()
        for static in triton_bundle.static_autotuners:
            live = kernels.live.get(static.cache_key)
            kernels.reused += all(
                triton_cache.was_reused(_binaries(result)) for result in static.kernel.compile_results
            )
            keep_winner(static.kernel, live, kernels.late.get(id(live), []))
            inside |= _embed_binaries(static.kernel)
        rest = [a for a in triton_bundle.kernel_artifacts if a.kernel_hash not in inside]
        graph._triton_bundle = dataclasses.replace(triton_bundle, kernel_artifacts=rest)
    return pickle.dumps((entry, side_table, constant_args))


def keep_winner(stored: Any, live: Any, late: Sequence[Any]) -> None:
    from torch._inductor.runtime.runtime_utils import triton_config_to_hashable

    if live is None or len(live.launchers) != 1:
        return
    winner = triton_config_to_hashable(live.launchers[0].config)
    for result in (*stored.compile_results, *late):
        if triton_config_to_hashable(result.config) == winner:
            result.config = live.launchers[0].config
            stored.compile_results = [result]
            stored.inductor_meta["dynamic_scale_rblock"] = False
            # Config.found_by_coordesc does not survive a pickle (triton.Config.__setstate__): whoever loads the
            # kernel would descend once more, with a compiler.
            stored.inductor_meta["coordinate_descent_tuning"] = False
            return


def _embed_binaries(stored: Any) -> set[str]:
    """Put each candidate's binary into the pickle itself; the Triton hashes (as paths) that are now inside."""
    inside: set[str] = set()
    for result in stored.compile_results:
        folder = _binaries(result)
        result.kernel.cubin_raw = (folder / f"{result.kernel.name}.cubin").read_bytes()
        result.kernel.cubin_path = None
        result.kernel.function = None
        inside.add(folder.name)
    return inside


def _binaries(result: Any) -> Path:
    """Where Triton's cache holds a compile result."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    folder = triton_cache_dir(result.compile_meta.get("device", 0) or 0)
    return Path(folder) / triton_hash_to_path_key(result.kernel.hash)


def fix_winners(bundle: bytes, kernels: TritonKernels) -> tuple[bytes, list[manifest.Measurement]]:
    """`bundle` (made by this process) with winners only, and the measurements of kernels with several candidates."""
    if not kernels.live:
        return bundle, []
    return keep_winners(bundle, kernels), measurements(kernels)


def measurements(kernels: TritonKernels) -> list[manifest.Measurement]:
    """The winner's, of each kernel with several candidates; none where Inductor gives all of them an infinite time, as
    it does where registers spill."""
    return [
        manifest.Measurement(
            problem=str(live.inductor_meta.get("kernel_name", "")),
            winner=winner.configuration,
            milliseconds=winner.milliseconds,
            candidates=winner.candidates,
        )
        for live in kernels.live.values()
        if (winner := kernels.timings.get(id(live))) is not None and math.isfinite(winner.milliseconds)
    ]
