"""Which of a team's pinned winners a request carries: if it tunes, those that may apply where it will run. No torch.

The client puts them in, the gateway holds a request to it: what cannot change the artifact does not change the key.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..tuning import records
from . import cpu_isa as targets
from . import schema


def pin(
    request: schema.GraphRequest, entries: Iterable[records.TuningEntry], *, strict: bool
) -> schema.GraphRequest:
    """`request` with the entries of a lock that may apply to it; unchanged if it does not tune, or if the lock is loose
    and none may. `entries`: one for a problem and place."""
    if not tunes(request):
        return request
    fitting = [entry for entry in entries if fits(entry.place, request)]
    if not fitting and not strict:
        return request
    lock = schema.TuningLock(strict, sorted(fitting, key=records.entry_sort_key))
    return msgspec.structs.replace(request, tuning_lock=lock)


def tunes(request: schema.GraphRequest) -> bool:
    """Whether Inductor chooses among kernels by measuring: by mode or option."""
    options = dict(request.options)
    by_mode = request.mode.startswith("max-autotune")
    return bool(options.get("max_autotune", by_mode) or options.get("max_autotune_gemm", False))


def fits(environment: records.DeviceEnvironment, request: schema.GraphRequest) -> bool:
    """Whether what was measured in `environment` may apply to `request`, as far as a client can tell: the driver, and a
    CPU's model, are those of a worker, which compares them."""
    toolchain, target = request.toolchain, request.target
    if (environment.torch, environment.triton, environment.cuda) != (
        toolchain.torch,
        toolchain.triton,
        toolchain.cuda,
    ):
        return False
    if target.kind == "cpu":
        return (environment.capability, environment.threads) == (
            targets.capability(target.cpu),
            request.ambient.threads,
        )
    return (environment.device, environment.capability) == (target.name, target.capability)
