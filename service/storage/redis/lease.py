"""A lease on a compile, as the scripts check it: a key, an owner and a fence."""

from __future__ import annotations

from msgspec import Struct


class Lease(Struct, frozen=True):
    """The right to compile `key`. `fence` rises with every lease given out."""

    key: str
    owner: str
    fence: str

    @property
    def token(self) -> str:
        return f"{self.owner}:{self.fence}"
