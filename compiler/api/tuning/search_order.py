"""What a worker is told when it is to search kernels: for what they are made. The tasks themselves it asks for."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ...request.schema import Target, Toolchain

MOST_THREADS = 4096


class SearchJobSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """`threads`: that a CPU's kernels run in; 0 for a GPU."""

    toolchain: Toolchain
    target: Target
    threads: Annotated[int, Meta(ge=0, le=MOST_THREADS)] = 0
