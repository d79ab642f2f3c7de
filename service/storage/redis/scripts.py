"""The Lua scripts of storage/redis/lua/ as callables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from redis.asyncio import Redis

SCRIPTS = {
    "lease": (
        "acquire",
        "renew",
        "progress",
        "fail",
        "release",
    ),
    "cache": (
        "lookup",
        "publish",
        "quarantine",
        "evict",
        "pin",
        "remove",
        "record_miss",
        "record_script_use",
        "agree",
    ),
    "access": (
        "authenticate",
        "charge",
    ),
    "admission": ("save_request",),
    "search": (
        "find_tunings",
        "store_tunings",
    ),
    "jobs": (
        "create_job",
        "lease_job",
        "change_job",
        "record_tuning_item",
        "record_training_events",
        "add_training_file",
        "archive_training_events",
    ),
}
"""By folder of lua/. A script's name is its file's and that of its attribute below."""


Script = Callable[..., Awaitable[Any]]


class Scripts:
    """The Lua scripts, bound to a client; each is loaded again by itself when Redis has forgotten it."""

    acquire: Script
    renew: Script
    progress: Script
    fail: Script
    release: Script
    lookup: Script
    publish: Script
    quarantine: Script
    evict: Script
    pin: Script
    remove: Script
    record_miss: Script
    record_script_use: Script
    agree: Script
    authenticate: Script
    charge: Script
    save_request: Script
    find_tunings: Script
    store_tunings: Script
    create_job: Script
    lease_job: Script
    change_job: Script
    record_tuning_item: Script
    record_training_events: Script
    add_training_file: Script
    archive_training_events: Script

    def __init__(self, redis: Redis) -> None:
        folder = resources.files(__package__) / "lua"
        for group, names in SCRIPTS.items():
            for name in names:
                source = (folder / group / f"{name}.lua").read_text("utf-8")
                setattr(self, name, redis.register_script(source))
