"""What PyTorch and CUDA say of this process' devices, in ways that public functions do not."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from .patching import patched


@contextlib.contextmanager
def without_fake_gpus() -> Iterator[None]:
    """Inside the block, FakeTensorMode leaves a CUDA build on a machine without a GPU as it is. Its guard says that
    there are eight devices; autograd's engine starts a thread for each at its first backward, and no child that is
    forked after that can run a backward (Engine::initialize_device_threads_pool)."""
    with patched(torch._C, "_ensureCUDADeviceGuardSet", lambda: None):
        yield


def delay_current_stream(seconds: float) -> None:
    """Have the current stream wait for about so long before what comes next (torch.cuda._sleep, in clock cycles)."""
    sleep: Any = torch.cuda._sleep
    sleep(int(seconds * 1.5e9))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU has no room, for the allocator or for CUDA itself."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "CUDA error: out of memory" in str(error)
    )


_NO_ERROR, _NO_DEVICE = 0, 100
"""Results of cuInit."""


def cuda_can_start() -> bool:
    """Whether CUDA can be initialised in this process, a fork, as in one that was started: not if it was before.
    Initialises the driver, and takes no memory of a GPU. True where there is no CUDA."""
    if torch.version.cuda is None:
        return True
    if torch.cuda._is_in_bad_fork():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return driver.cuInit(0) in (_NO_ERROR, _NO_DEVICE)
