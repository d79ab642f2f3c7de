"""The artifact's manifest: what is signed, and what it says of members, verification and tuning."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..request.schema import Target, Toolchain, WireStruct

ARTIFACT_MEDIA_TYPE = "application/vnd.torchrelay.artifact"


class Member(WireStruct, frozen=True):
    """One file of an artifact. `size` in bytes, before compression."""

    name: str
    size: int
    sha256: str


class Verification(WireStruct, frozen=True):
    """How the worker compared compiled with eager."""

    status: Literal["passed", "skipped"]
    reason: str
    """Why it was skipped; '' when passed."""
    max_abs_error: float
    """Largest |compiled - reference| over outputs and gradients."""
    seconds: float


class Measurement(WireStruct, frozen=True):
    """A tuning winner (max-autotune): the problem, the choice, its time and how many were compared.

    uses: how many of the graph's operators are this problem.
    """

    problem: str
    winner: str
    milliseconds: float
    candidates: int
    uses: int = 1


class Manifest(WireStruct, frozen=True):
    """What is signed. `stages` are (stage, seconds) in order: aot, inductor, search (the wait for what others search),
    autotune, verify, publish."""

    schema: int
    key: str
    toolchain: Toolchain
    target: Target
    members: list[Member]
    guards: list[str]
    """Boolean expressions over request symbols that the compile assumed; the client adds them to Dynamo's."""
    stages: list[tuple[str, float]]
    verification: Verification
    tuning: list[Measurement]
    kernels: int
    """Kernels inside: C++ libraries and Triton binaries."""
    created: str
    """RFC 3339, UTC."""
    worker: str
    """The worker's id, opaque."""
    kernels_built: int = 0
    """Kernels that this compile built itself."""
    kernels_reused: int = 0
    """Kernels that an earlier compile had built."""
    searched: int = 0
    """Tuning problems that this compile measured."""
    recalled: int = 0
    """Tuning problems whose winner the lock file or the team's database knew."""
    needs: dict[str, str] = msgspec.field(default_factory=dict)
    """The lowest versions that its binaries need of a machine, by family (symbol_versions.py). The instruction set is
    the target's."""
    benchmarks: int = 0
    """How often Inductor timed something in this compile, whatever for, as it counts itself. What the search of a
    problem takes is not among them."""
