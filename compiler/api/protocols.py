"""Which releases work together: what passes between two parts is a protocol with a number.

A message without a number is of the first. Each side states its number, and the newer one judges, since it alone knows
what has changed: it goes on, or says which part is to be upgraded (docs/decisions/0038).
"""

from __future__ import annotations

from msgspec import Struct

from ..errors import ProtocolMismatch

PROTOCOL_HEADER = "Torchrelay-Protocol"
"""On every request of a client and every answer of a gateway: the sender's number."""


class Protocol(Struct, frozen=True):
    """number: what this release speaks. oldest: the lowest number that it still works with, at most `number` - 1 once
    there are two, so that neighbouring releases work side by side."""

    number: int = 1
    oldest: int = 1

    def check(self, theirs: int, *, own: str, other: str) -> None:
        """Raises ProtocolMismatch if `other` is too old for `own`, which is of this release."""
        if theirs < self.oldest:
            raise ProtocolMismatch(
                f"{other} speaks protocol {theirs}, {own} {self.oldest} to {self.number}",
                hint=f"Upgrade {other}",
            )


CLIENTS = Protocol()
"""Between clients and gateways."""
WORKERS = Protocol()
"""Between dispatchers and worker nodes."""
REDIS = Protocol()
"""What gateways and dispatchers store in Redis for each other."""


def number_in(header: str | None) -> int:
    """The number in a PROTOCOL_HEADER. Raises ValueError."""
    if header is None:
        return 1
    if not (header.isascii() and header.isdecimal() and len(header) <= 6):
        raise ValueError(f"{PROTOCOL_HEADER}: {header[:20]!r} is not a number")
    return int(header)
