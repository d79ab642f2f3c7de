"""Links that sign a browser in: each once, within a minute.

Redis holds a token that travels so only under a key that is in the link, and in nothing else.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys

TICKET_SECONDS = 60
_TICKET = re.compile("[A-Za-z0-9_-]{43}")


class PageTickets:
    """Every method raises RedisError."""

    def __init__(self, redis: RedisClient, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def issue(self, token: str) -> str:
        """A ticket for the token, which is ASCII."""
        ticket = secrets.token_urlsafe(32)
        await self._redis.set(self._name(ticket), _masked(token.encode(), ticket), px=TICKET_SECONDS * 1000)
        return ticket

    async def redeem(self, ticket: str) -> str:
        """The token; '' for a ticket that was used, is too old, or is none."""
        if not _TICKET.fullmatch(ticket):
            return ""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(self._name(ticket))
            pipe.delete(self._name(ticket))
            masked, _ = await pipe.execute()
        return _masked(masked or b"", ticket).decode("ascii", "replace")

    def _name(self, ticket: str) -> str:
        return self._keys.page_ticket(hashlib.sha256(b"torchrelay ticket v1\0" + ticket.encode()).hexdigest())


def _masked(text: bytes, ticket: str) -> bytes:
    """`text` combined with as many bytes that only the ticket gives; a second time gives `text` again."""
    pad = hashlib.shake_256(b"torchrelay ticket mask v1\0" + ticket.encode()).digest(len(text))
    return bytes(one ^ other for one, other in zip(text, pad, strict=True))
