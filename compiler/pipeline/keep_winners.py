"""Stage 9: a compiled bundle and the kernels that ran in; the bundle with each kernel's winner alone out.

Inductor measures a Triton kernel's candidates when it first runs, so a client that loads all candidates would
measure them again, and near-ties would flip. The worker has run the graph (verify.py): its winners go into the
artifact with their binaries and their measurements, and losers stay behind.
"""

from __future__ import annotations

from ..artifact import manifest
from ..torch_internals.triton import kernels as triton_kernels
from ..torch_internals.triton import winners


def fix_winners(
    bundle: bytes, kernels: triton_kernels.TritonKernels
) -> tuple[bytes, list[manifest.Measurement]]:
    """Keep winners in `bundle` (made by this process); measurements of the kernels that had several candidates."""
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
