"""Machines of a team whose libraries share winners: each has its own folders, its GPU, and a process' state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from service_parts import TOKEN, RedisServer
from torchrelay.clients.artifacts.autotune_cache import team_winners
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning.database import AutotuneEntry
from torchrelay.compiler.tuning.records import DeviceEnvironment

H200 = DeviceEnvironment("NVIDIA H200", "9.0", "580.65", "2.13.0", "3.7.0", "13.0")
H100 = msgspec.structs.replace(H200, device="NVIDIA H100 PCIe")


@contextmanager
def machine(
    folder: Path, url: str, *, token: str = TOKEN, gpu: DeviceEnvironment | None = H200
) -> Iterator[None]:
    """A new process, as far as the winners go, on a machine that is configured for the service at `url`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "TORCHRELAY_URL": url,
            "TORCHRELAY_TOKEN": token,
            "XDG_CONFIG_HOME": str(folder / "config"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "HELION_CACHE_DIR": str(folder / "helion"),
        }.items():
            patch.setenv(name, value)
        patch.setattr(team_winners, "current_gpu", lambda: gpu)
        team_winners.process_winners.cache_clear()
        try:
            yield
        finally:
            team_winners.process_winners.cache_clear()


def replace_data(redis: RedisServer, data: str, key: str | None = None) -> None:
    """Let the service have other data for the one winner that it knows."""
    with redis.client() as client:
        ((field, stored),) = client.hgetall("torchrelay:autotunes").items()
        entry = decoding.from_msgpack(stored, type=AutotuneEntry)
        client.hset(
            "torchrelay:autotunes", field, msgspec.msgpack.encode(AutotuneEntry(key or entry.key, data))
        )
