"""Body of `/v1/autotunes/{library}/{key}`: what a library's own autotuner measured, for a team's other machines."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ...tuning.queries import ENTRY_LIMIT

AutotunedLibrary = Literal["triton", "helion"]
"""The libraries whose autotuners may share their winners."""


class AutotuneEntry(Struct, frozen=True):
    """key: the library's own key. data: the winner, JSON text that the clients alone read and check."""

    key: Annotated[str, Meta(max_length=256)]
    data: Annotated[str, Meta(max_length=ENTRY_LIMIT)]


BODY_LIMIT = 4 * ENTRY_LIMIT
"""Bytes of an entry as JSON."""
