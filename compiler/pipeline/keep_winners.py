"""Stage 9: removes from a compiled bundle the Triton kernels' candidates that lost.

Inductor measures a Triton kernel's candidates when the kernel first runs. A client that loaded all candidates would
measure them again, and could choose another one of nearly equal speed. The worker has already run the graph
(verify.py), so the artifact gets only its winners, with their binaries and measurements.
"""

from __future__ import annotations

from ..artifact import manifest
from ..torch_internals.triton import kernels as triton_kernels
from ..torch_internals.triton import winners


def fix_winners(
    bundle: bytes, kernels: triton_kernels.TritonKernels
) -> tuple[bytes, list[manifest.Measurement]]:
    """`bundle` (made by this process) with winners only, and the measurements of kernels with several candidates."""
    if not kernels.live:
        return bundle, []
    kept = winners.keep_winners(bundle, kernels)
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
