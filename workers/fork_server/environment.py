"""The environment of a fork server and its children: an allow-list of the worker's own, paths made private.

Settings of Inductor and Triton in a worker's environment would change what it builds but not the key, and
a compile has no use for tokens and Redis addresses. So only listed names pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_PASSED = frozenset(
    {
        *(
            "PATH",
            "LANG",
            "LC_ALL",
            "LC_CTYPE",
            "TZ",
            "LD_LIBRARY_PATH",
            "LIBRARY_PATH",
            "CPATH",
            "CC",
            "CXX",
        ),
        *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TRITON_PTXAS_PATH"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "VIRTUAL_ENV"),
    }
)


def slot_mark(worker: str) -> str:
    """The environment entry by which a slot finds its processes after their fork server has died."""
    return f"TORCHRELAY_SLOT={worker}"


def own_gpu(current: Mapping[str, str], index: int) -> dict[str, str]:
    """The variable that makes only the GPU at `index` of the visible ones visible."""
    visible = [name for name in current.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": visible[index] if index < len(visible) else str(index)}


def server_environment(
    current: Mapping[str, str], python_path: str, worker: str, gpu: int | None = None
) -> dict[str, str]:
    """What a fork server is started with. `python_path`: where it finds the package; `gpu`: its own one."""
    mark, _, value = slot_mark(worker).partition("=")
    return {
        **{name: value for name, value in current.items() if name in _PASSED},
        **(own_gpu(current, gpu) if gpu is not None else {}),
        mark: value,
        "PYTHONPATH": python_path,
        "PYTHONHASHSEED": "0",
        # asks the driver instead of initialising CUDA, which a process that forks must not have done
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # no pool of compile processes at import; the pipeline decides in the child
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # a large graph has more index expressions than sympy's cache of a thousand, and each would be computed again
        "SYMPY_CACHE_SIZE": "100000",
        # threads that spin at each barrier of a graph's verification take the processors of others: on a busy machine
        # it took eight times as long
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def job_environment(server: Mapping[str, str], work: Path) -> dict[str, str]:
    """What one job sees: the server's, with home, temporary files and every cache below `work`."""
    return {
        **server,
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "XDG_CACHE_HOME": str(work / "home" / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        "TRITON_HOME": str(work / "home"),
        "CUDA_CACHE_PATH": str(work / "cuda"),
    }
