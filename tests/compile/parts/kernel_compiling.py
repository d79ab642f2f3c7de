"""One process that compiles candidates for a GPU that is not there, as a search does before it runs them; JSON out.

Of Triton's driver nothing is asked but which GPU there is; compiler and ptxas are the real ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import triton
from torchrelay.clients.jobfiles import tune_file
from torchrelay.clients.jobfiles.imported_kernels import resolve_kernel
from torchrelay.compiler.search import ranking, user_kernel_benchmark
from triton.backends.compiler import GPUTarget

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "kernels"


class Driver:
    """An H100, as far as the compiler wants to know."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compiled(name: str) -> dict[str, object]:
    item = tune_file.load(FOLDER / f"{name}.yaml").kernels[0]
    kernel = resolve_kernel(item, FOLDER)
    # the last one has a block that is no power of two
    last = kernel.source.configs[-1]
    broken = msgspec.structs.replace(last, kwargs=[(parameter, 999) for parameter, _ in last.kwargs])
    source = msgspec.structs.replace(kernel.source, configs=[*kernel.source.configs, broken])
    grids = [*kernel.grids, (1, 1, 1)]
    tried = msgspec.structs.replace(kernel, source=source, grids=grids)
    order = user_kernel_benchmark.KernelBenchmarkOrder(tried, "cpu", ranking.DEFAULTS)
    sent: list[user_kernel_benchmark.BenchmarkMessage] = []
    benchmark = user_kernel_benchmark.KernelBenchmark(order, sent.append)
    benchmark.make_arguments()
    benchmark._order = msgspec.structs.replace(order, device="cuda")
    benchmark._compile()
    built = []
    for candidate in range(len(grids) - 1):
        options = benchmark._options(candidate)
        made = benchmark._kernel.warmup(grid=grids[candidate], **benchmark.arguments, **options)
        built.append((made.metadata.num_warps, made.metadata.num_stages, "cubin" in made.asm))
    try:
        benchmark.launcher(len(grids) - 1)
        error = ""
    except Exception as raised:
        error = type(raised).__name__
    return {
        "built": built,
        "wanted": [(config.num_warps, config.num_stages, True) for config in kernel.source.configs],
        "error": error,
        "failed": [each.why for each in sent if isinstance(each, user_kernel_benchmark.CandidateFails)],
    }


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    print(json.dumps({name: compiled(name) for name in sys.argv[1:]}))
