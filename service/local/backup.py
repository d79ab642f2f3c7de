"""`torchrelay backup` and `torchrelay restore`, for an installation whose Redis is reached by --redis, or for that of
`torchrelay up`, which `backup` finds running, and for which `restore` runs a redis-server meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from obstore.exceptions import BaseError as StoreError
from obstore.store import ObjectStore
from redis.exceptions import RedisError

from ...compiler.errors import SettingsError, Unavailable
from ..base.settings import ServiceSettings
from ..parts.backup import Backups
from ..storage.blobs import open_store
from ..storage.redis.connections import connect
from ..storage.redis.keys import Keys
from . import state_folder
from .listening import say
from .redis_server import RedisServer

_HINT = "Correct what it names, then run the command again"


def make(settings: ServiceSettings, target: str, *, with_keys: bool, with_store: bool) -> None:
    """Raises SettingsError, NotFound, Unavailable."""
    keys_folder = _keys_folder(settings) if with_keys else None
    if "redis_url" not in settings.model_fields_set:
        runtime = settings.state_dir / "runtime"
        if not runtime.exists():
            raise SettingsError(
                f"no `torchrelay up` runs on {settings.state_dir}", hint="Give --state or --redis"
            )
        url = f"unix://{runtime.read_text().strip()}/redis.sock?db=0"
        settings = settings.model_copy(update={"redis_url": url})

    async def run() -> None:
        async with _opened(settings, target) as backups:
            name, manifest = await backups.make(signing_keys=keys_folder, whole_store=with_store)
            say(f"backup {name}: {manifest.keys} keys of Redis")
            if keys_folder is None:
                say("without the signing keys: save them apart, or clients must run `torchrelay login` again")
            if not with_store:
                say("without what the blob store holds")

    asyncio.run(run())


def restore(settings: ServiceSettings, source: str, *, name: str) -> None:
    """Raises SettingsError, NotFound, MalformedRequest, Unavailable."""
    keys_folder = None if settings.signer_url else settings.keys_location

    async def run() -> None:
        async with _redis_of(settings) as there, _opened(there, source) as backups:
            restored, manifest = await backups.restore(name, signing_keys=keys_folder)
            say(f"restored {restored}: {manifest.keys} keys of Redis")
        say("next: start the service, then `torchrelay cache reindex`")

    asyncio.run(run())


def _keys_folder(settings: ServiceSettings) -> Path:
    if settings.signer_url or settings.pkcs11_module is not None:
        raise SettingsError(
            "the signing keys are not here", hint="Save the signer's folder of keys, or the device"
        )
    if not settings.keys_location.is_dir():
        raise SettingsError(
            f"there are no keys in {settings.keys_location}", hint="Set TORCHRELAY_SERVICE_KEYS_DIR"
        )
    return settings.keys_location


@asynccontextmanager
async def _redis_of(settings: ServiceSettings) -> AsyncIterator[ServiceSettings]:
    """Settings with a Redis: the one that they name, or that of the state folder, run meanwhile."""
    if "redis_url" in settings.model_fields_set:
        yield settings
        return
    folder = settings.state_dir
    async with state_folder.exclusive(folder) as lock:
        with state_folder.runtime_directory(folder) as runtime:
            redis = RedisServer(folder / "redis", runtime / "redis.sock", folder / "redis.log", lock)
            try:
                await redis.start()
                yield settings.model_copy(update={"redis_url": redis.url})
            finally:
                await redis.stop()


@asynccontextmanager
async def _opened(settings: ServiceSettings, place: str) -> AsyncIterator[Backups]:
    os.umask(0o077)  # a backup holds digests of tokens, and what users compiled
    redis = connect(settings)
    try:
        url = place if "://" in place else Path(place).absolute().as_uri()
        yield Backups(
            redis,
            Keys(settings.redis_prefix),
            _store(settings, settings.blob_location),
            _store(settings, url),
        )
    except (RedisError, StoreError, OSError) as error:
        raise Unavailable(
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", hint=_HINT
        ) from error
    finally:
        with suppress(RedisError):
            await redis.aclose()


def _store(settings: ServiceSettings, url: str) -> ObjectStore:
    try:
        return open_store(
            url, timeout_seconds=settings.blob_timeout_seconds, allow_http=settings.blob_allow_http
        )
    except (ValueError, StoreError) as error:
        raise SettingsError(
            f"{url} is no store: {error}", hint="Give a folder, s3://, gs:// or az://"
        ) from None
