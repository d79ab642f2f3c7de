"""Agreement of the processes of a job that share a name but no store: for each key, the first verdict counts."""

from __future__ import annotations

import msgspec

from ...compiler import decoding
from ...compiler.api import compiles
from ...compiler.errors import LimitExceeded
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts

MOST_KEYS = 1024
MOST_JOBS = 512
"""With MOST_KEYS errors each, as long as they may be, about 300 MB of Redis a namespace; with digests 100 MB."""
_TTL_SECONDS = 6 * 3600
"""After a job's last decision."""
_CODE_BYTES = 32
_TEXT_BYTES = 192
"""As JSON. The process that met the error has told all of it."""


class RankVerdicts:
    """The jobs of one namespace. A job's name arrives hashed."""

    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def decide(self, job: str, key: str, verdict: compiles.AgreedOutcome) -> compiles.AgreedOutcome:
        """The verdict that stands. Raises LimitExceeded for a job with too many keys."""
        if verdict.error is not None:
            error = verdict.error
            short = compiles.ErrorBody(
                _cut(error.code, _CODE_BYTES),
                _cut(error.message, _TEXT_BYTES),
                _cut(error.hint, _TEXT_BYTES),
            )
            verdict = msgspec.structs.replace(verdict, error=short)
        found = await self._scripts.agree(
            keys=[self._keys.job(job), self._keys.jobs],
            args=[
                key,
                msgspec.json.encode(verdict),
                _TTL_SECONDS * 1000,
                MOST_KEYS,
                MOST_JOBS,
                job,
                self._keys.job_prefix,
            ],
        )
        if found is None:
            raise LimitExceeded(f"this job has decided on {MOST_KEYS} keys", hint="Name each run's job anew")
        return decoding.from_json(found, type=compiles.AgreedOutcome)


def _cut(text: str, most: int) -> str:
    """Its beginning, of which JSON has at most so many bytes: a character can take six."""
    text = text[:most]
    while len(msgspec.json.encode(text)) > most + len('""'):
        text = text[:-1]
    return text
