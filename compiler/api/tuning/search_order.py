"""The order that starts a search worker: what kernels are made for. It then requests its tasks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ...request.schema import Target, Toolchain

MOST_THREADS = 4096


class SearchJobSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """threads: for kernels on a CPU; 0 for a GPU."""

    toolchain: Toolchain
    target: Target
    threads: Annotated[int, Meta(ge=0, le=MOST_THREADS)] = 0
