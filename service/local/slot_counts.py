"""How many compiles a machine runs at once if nobody says so: what its cores and its memory allow."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_MAX_CPU_SLOTS = 8
_GIB = 1 << 30
_CPU_SLOT_BYTES = 4 * _GIB
_GPU_SLOT_BYTES = 8 * _GIB
"""Memory of one compile, its compilers too: a GPU's has a process for each core that compiles Triton kernels."""
_GPU_MEMORY_BYTES = 2 * _GIB
"""Memory on the GPU for a compile: a CUDA context takes half a GiB, and one graph at a time is verified."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def default_cpu_slots() -> int:
    """Half the cores, because a compile is serial for a good part and uses every core for the rest."""
    return max(1, min(_MAX_CPU_SLOTS, _cores() // 2, memory_bytes() // _CPU_SLOT_BYTES))


def default_gpu_slots() -> int:
    """For all GPUs together. They have at least one each, and at most gpu_slots_per_gpu (ServiceSettings)."""
    slots = min(_cores() // 2, memory_bytes() // _GPU_SLOT_BYTES)
    if gpu_memory := gpu_memory_bytes():
        slots = min(slots, gpu_memory // _GPU_MEMORY_BYTES)
    return max(1, slots)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def memory_bytes(limits: tuple[str, ...] = _CGROUP_LIMITS) -> int:
    """The machine's memory, or the limit of this process's control group."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in limits:
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such limit, or `max`
            continue
    return min(found)


def gpu_memory_bytes(command: str = "nvidia-smi") -> int:
    """The memory of all GPUs together; 0 if it is unknown."""
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return sum(int(line) << 20 for line in answer.splitlines())
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
