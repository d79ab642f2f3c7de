"""Stage 9: rewrite a bundle so that each Triton kernel keeps its winning configuration, with its binary inside.

Inductor measures a Triton kernel's candidates when the kernel first runs. A client that loaded all candidates would
measure them again, and could choose another one of nearly equal speed. The worker has already run the graph
(verify.py), so the artifact gets only its winners, with their binaries and measurements.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...artifact import manifest
from ...kernel_store import triton_cache
from . import kernels as triton_kernels
from .kernels import TritonKernels


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


def fix_winners(
    bundle: bytes, kernels: triton_kernels.TritonKernels
) -> tuple[bytes, list[manifest.Measurement]]:
    """`bundle` (made by this process) with winners only, and the measurements of kernels with several candidates."""
    if not kernels.live:
        return bundle, []
    kept = keep_winners(bundle, kernels)
    tuning = [
        manifest.Measurement(
            problem=name,
            winner=winner.configuration,
            milliseconds=winner.milliseconds,
            candidates=winner.candidates,
        )
        for name, winner in triton_kernels.kernel_measurements(kernels)
    ]
    return kept, tuning
