"""The artifact's manifest: what is signed, and what it says of members, verification and tuning.

A worker writes it, and the service adds up and stores what it says: every value has a bound."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..request.schema import Target, Toolchain, WireStruct

ARTIFACT_MEDIA_TYPE = "application/vnd.torchrelay.artifact"

MAX_ARTIFACT_BYTES = 1 << 30
"""One artifact file."""
MAX_UNPACKED_BYTES = 2 << 30
"""The members of one, together."""
MAX_MEMBERS = 1 << 14
Name = Annotated[str, Meta(max_length=255)]
Text = Annotated[str, Meta(max_length=1 << 14)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]


class Member(WireStruct, frozen=True):
    """One file of an artifact. `size` in bytes, before compression."""

    name: Name
    size: Annotated[int, Meta(ge=0, le=1 << 40)]
    sha256: Annotated[str, Meta(max_length=64)]


class Verification(WireStruct, frozen=True):
    """How the worker compared compiled with eager."""

    status: Literal["passed", "skipped"]
    reason: Text
    """Why it was skipped; '' when passed."""
    max_abs_error: Annotated[float, Meta(ge=0, le=sys.float_info.max)]
    """Largest |compiled - reference| over outputs and gradients."""
    seconds: Seconds


class Measurement(WireStruct, frozen=True):
    """A tuning winner (max-autotune): the problem, the choice, its time and how many were compared.

    uses: how many of the graph's operators are this problem.
    """

    problem: Text
    winner: Text
    milliseconds: Annotated[float, Meta(ge=0, lt=1e9)]
    candidates: Count
    uses: Count = 1


class Manifest(WireStruct, frozen=True):
    """What is signed. `stages` are (stage, seconds) in order: aot, inductor, search (the wait for what others search),
    autotune, verify, publish."""

    schema: int
    key: Name
    toolchain: Toolchain
    target: Target
    members: Annotated[list[Member], Meta(max_length=MAX_MEMBERS)]
    guards: Annotated[list[Text], Meta(max_length=1 << 16)]
    """Boolean expressions over request symbols that the compile assumed; the client adds them to Dynamo's."""
    stages: Annotated[list[tuple[Name, Seconds]], Meta(max_length=64)]
    verification: Verification
    tuning: Annotated[list[Measurement], Meta(max_length=1 << 16)]
    kernels: Count
    """Kernels inside: C++ libraries and Triton binaries."""
    created: Name
    """RFC 3339, UTC."""
    worker: Name
    """The worker's id, opaque."""
    kernels_built: Count = 0
    """Kernels that this compile built itself."""
    kernels_reused: Count = 0
    """Kernels that an earlier compile had built."""
    searched: Count = 0
    """Tuning problems that this compile measured."""
    recalled: Count = 0
    """Tuning problems whose winner the lock file or the team's database knew."""
    needs: Annotated[dict[Name, Name], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    """The lowest versions that its binaries need of a machine, by family (symbol_versions.py). The instruction set is
    the target's."""
    benchmarks: Count = 0
    """How often Inductor timed something in this compile, whatever for, as it counts itself. What the search of a
    problem takes is not among them."""
