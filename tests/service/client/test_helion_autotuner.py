"""Helion's own remote cache with the team's winners: its real classes and kernels, real gateway and Redis, no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from autotune_parts import H100, machine, replace_data
from service_parts import RedisServer, Running, free_port
from torchrelay.clients.reports.run_report import process_report

pytest.importorskip("triton", reason="needs Triton, not a GPU")
helion = pytest.importorskip("helion", reason="needs Helion, not a GPU")
from helion import language as hl  # noqa: E402
from helion.autotuner.base_cache import LooseAutotuneCacheKey  # noqa: E402
from helion.autotuner.base_search import BaseSearch  # noqa: E402
from helion.autotuner.remote_cache import RemoteAutotuneCache, _load_remote_backend  # noqa: E402
from torchrelay.clients.artifacts.autotune_cache import helion_cache  # noqa: E402

BEST = {"block_sizes": [64], "num_warps": 8, "num_stages": 2}
OTHER = {"block_sizes": [16], "num_warps": 2, "num_stages": 2}


@helion.kernel()
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        out[tile] = x[tile] + y[tile]
    return out


class Cache(RemoteAutotuneCache):  # type: ignore[misc]
    """With a key for tensors on a CPU, whose runtime Helion has no name for."""

    def _generate_key(self) -> LooseAutotuneCacheKey:
        return LooseAutotuneCacheKey(
            specialization_key=("add",),
            extra_results=(),
            kernel_source_hash="0" * 64,
            hardware="NVIDIA H200",
            runtime_name="13.0",
            backend="triton",
            config_spec_hash="0" * 64,
        )


class Search(BaseSearch):  # type: ignore[misc]
    """Whose measurements find `winner`."""

    winner = BEST
    searches = 0

    def autotune(self, *, skip_cache: bool = False) -> Any:
        type(self).searches += 1
        return helion.Config(**self.winner)


Tune = Callable[..., int]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tune]:
    """Autotunes a kernel in a new process; returns how many searches that took."""
    monkeypatch.setenv("HELION_REMOTE_CACHE_BACKEND", "torchrelay.integrations.HelionCache")
    x = torch.ones(128)
    bound = add.bind((x, x))

    def run(winner: dict[str, Any], expected: dict[str, Any] = BEST) -> int:
        monkeypatch.setattr(Search, "winner", winner)
        monkeypatch.setattr(Search, "searches", 0)
        found = Cache(Search(bound, (x, x))).autotune()
        assert dict(found) == expected
        return Search.searches

    yield run


def test_the_name_in_helions_setting_is_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELION_REMOTE_CACHE_BACKEND", "torchrelay.integrations.HelionCache")
    backend = _load_remote_backend()
    assert type(backend).__name__ == "HelionCache"
    assert list(backend.list(max_results=5)) == []
    assert backend.get("0" * 64) is None  # no caller whose kernel could be compared


def test_a_second_machine_of_the_same_kind_searches_nothing(
    gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    hits = process_report().snapshot().autotune_hits
    with machine(tmp_path / "first", gateway.url):
        assert tune(BEST) == 1
    with machine(tmp_path / "second", gateway.url):
        assert tune(OTHER) == 0
    with machine(tmp_path / "other", gateway.url, gpu=H100):
        assert tune(OTHER, OTHER) == 1
    assert process_report().snapshot().autotune_hits == hits + 1
    with redis_server.client() as client:
        stored = client.hvals("torchrelay:autotunes")
    assert all(b"kernel_source_hash" not in data for data in stored)


def test_what_a_search_may_try_is_accepted() -> None:
    x = torch.ones(128)
    spec = add.bind((x, x)).config_spec
    space = spec.create_config_generation()
    for _ in range(100):
        helion_cache.check_within(spec, dict(space.random_config()))


def altered(**fields: Any) -> str:
    return json.dumps({**OTHER, **fields})


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{",
        "[]",
        "{}",
        altered(num_stages=float("nan")),
        altered().replace("16", "1e999"),
        altered(block_sizes=[10**400]),
        altered(block_sizes=[1 << 40]),
        altered(block_sizes=[17]),
        altered(block_sizes=["16"]),
        altered(num_warps=4096),
        altered(num_warps=3),
        altered(num_stages=1.5),
        altered(indexing=["nothing"] * 3),
        altered(unknown=1),
        altered(self=1),
        altered(block_sizes=[[[[[[16]]]]]]),
        altered(advanced_controls_file="/tmp/controls"),
        "[" * 100_000,
    ],
    ids=lambda answer: answer[:80],
)
def test_an_answer_that_the_kernel_cannot_have_is_a_miss(
    answer: str, gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    with machine(tmp_path / "first", gateway.url):
        tune(BEST)
    replace_data(redis_server, answer)
    with machine(tmp_path / "second", gateway.url):
        assert tune(BEST) == 1


def test_a_file_of_this_machine_is_not_sent(
    gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    named = {**BEST, "advanced_controls_file": "/tmp/controls"}
    with machine(tmp_path / "first", gateway.url):
        assert tune(named, named) == 1
    with redis_server.client() as client:
        assert client.hlen("torchrelay:autotunes") == 0


def test_a_dead_service_stops_no_kernel(tune: Tune, tmp_path: Path) -> None:
    before = sum(process_report().snapshot().autotune_failures.values())
    with machine(tmp_path / "first", f"http://127.0.0.1:{free_port()}"):
        assert tune(BEST) == 1
        assert tune(OTHER) == 0  # from its disk
    assert sum(process_report().snapshot().autotune_failures.values()) == before + 1
