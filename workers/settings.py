"""The settings of a slot and of the pool; the gateway fills them in from its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ..compiler import decoding
from ..compiler.kernel_store import libraries
from ..compiler.request import codec

ENGINE = "torchrelay.workers.fork_server.compile_engine"

IsolationSetting = Literal["auto", "required", "off"]
"""auto: the strongest that the machine offers. required: a worker that can confine neither files nor network does not
start."""
Form = Literal["namespaces", "landlock", "seccomp", "none"]
FORMS: tuple[Form, ...] = ("namespaces", "landlock", "seccomp", "none")
"""Each job has one of them (sandbox/isolation.py)."""


class JobLimits(Struct, frozen=True, kw_only=True):
    """Bounds on one job, all of its processes together unless said otherwise.

    Memory is watched four times a second and the job is killed past the limit; pages that a job shares with a copy of
    itself count for both. Kernel limits do not fit:
    RLIMIT_AS and RLIMIT_DATA count address space, of which CUDA and torch reserve far more than they use, and
    hold for each process alone. A jump between two checks can overshoot; the child's out-of-memory score is
    the worst possible, so that the kernel picks it before anything else on the machine. RLIMIT_NPROC counts
    everything its user runs, so processes are counted here as well.
    """

    memory_bytes: int = 16 << 30
    processes: int = 512
    file_bytes: int = 8 << 30
    """Largest single file (RLIMIT_FSIZE)."""
    disk_bytes: int = 16 << 30
    """All files of its folder, where its /tmp and /dev/shm are too; an empty one counts for 4 KiB. Watched as memory
    is."""
    open_files: int = 16384
    """The limit of each process (RLIMIT_NOFILE)."""
    request: codec.Limits = codec.Limits()


EqualLayers = Literal["off", "cpu", "all"]
"""For which targets equal layers are lowered once (compiler/pipeline/equal_layers.py)."""


class EarlyServer(Struct, frozen=True):
    """A fork server that was started before its slot's actor, on the same machine (fork_server/prestart.py)."""

    pid: int
    socket: str
    """Where the actor adopts it."""


class SlotSettings(Struct, frozen=True, kw_only=True):
    """One slot: a fork server and the one job that it runs at a time; the same for searches."""

    worker: str
    kind: Literal["cpu", "cuda"]
    gpu: int = 0
    """Which of the GPUs that its node sees is its own."""
    python: str | None = None
    """The Python of another environment, with another torch, that runs its jobs; None: the actor's own."""
    engine: str = ENGINE
    """Module with preload(), describe(kind), compile_graph(...) and search(...)."""
    limits: JobLimits = JobLimits()
    jobs_root: str | None = None
    """Where job directories are made; None: the machine's temporary directory."""
    kernels_dir: str | None = None
    """Where built C++ libraries are stored for later jobs (compiler/kernel_store/libraries.py); None: nowhere."""
    kernels_bytes: int = libraries.DEFAULT_LIMIT
    equal_layers: EqualLayers = "cpu"
    shared_dir: str | None = None
    """Where the server stores what its own code makes for all jobs (precompiled headers); None: below the
    machine's temporary directory, in a folder that all slots of this user share."""
    early_server: EarlyServer | None = None
    """Its server for compiles; None, or if it has ended: the actor starts one."""
    search_idle_seconds: float = 300.0
    """The searches' fork server ends after so long without a searcher."""
    warm_searches: bool = True
    """On a GPU: the searches' fork server starts with the slot, and stays. One of a GPU's slots needs that."""
    isolation: IsolationSetting = "auto"
    forms: tuple[Form, ...] = FORMS
    """The forms of isolation that may be tried; a test takes some away."""
    protocol: int = 1
    """The number of the dispatcher's release (protocols.WORKERS)."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        """To a worker node, which may be of the release before: by names, of which it ignores those that are new."""
        return partial(decoding.from_msgpack, type=SlotSettings), (msgspec.msgpack.encode(self),)


class SlotOrder(Struct, frozen=True):
    """All that a fork server is told, however it was started (fork_server/server.py)."""

    settings: SlotSettings
    jobs_dir: str
    shared: str | None
    """The folder of SlotSettings.shared_dir, once it is known to be this user's alone; None: there is none."""


class PoolSettings(Struct, frozen=True, kw_only=True):
    """The pool of slots on a Ray cluster. The service's settings of the same names say more of each."""

    ray_address: str | None = None
    """host:port of a running cluster; None starts one on loopback that ends with this process."""
    ray_token: str | None = None
    """The cluster's token; None makes one for an embedded cluster."""
    temp_dir: str | None = None
    """The embedded cluster's directory, short (it holds sockets); None makes one and removes it again."""
    early_server: EarlyServer | None = None
    """For the embedded cluster's first CPU slot."""
    cpu_slots: int = 1
    """CPU slots of the embedded cluster. Nodes of a running cluster offer theirs (ray_resources.node_resources)."""
    gpu_slots: int = 1
    """GPU slots of the embedded cluster, on all its GPUs together; each GPU has at least one."""
    gpu_slots_per_gpu: int = 8
    """At most, on any node; 0 leaves GPUs alone."""
    toolchains: tuple[str, ...] = ()
    memory_limit_bytes: int = JobLimits().memory_bytes
    request_limits: codec.Limits = codec.Limits()
    kernels_dir: str | None = None
    kernels_bytes: int = libraries.DEFAULT_LIMIT
    equal_layers: EqualLayers = "cpu"
    isolation: IsolationSetting = "auto"
    object_store_bytes: int = 256 << 20
    autoscale_idle_seconds: float = 0.0
    autoscale_cpu_slots: int = 0
    autoscale_gpus: int = 0
    engine: str = ENGINE
