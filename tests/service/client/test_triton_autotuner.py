"""Triton's own autotuner with the team's winners: real Autotuner, gateway and Redis; a driver of the test's own."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from autotune_parts import H100, machine, replace_data
from service_parts import RedisServer, Running, free_port
from torchrelay.clients.reports.run_report import process_report

triton = pytest.importorskip("triton", reason="needs Triton, not a GPU")
from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.cache import get_cache_manager, get_dump_manager  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

CONFIGS = {block: triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 128, 256)}
SECONDS = {64: 0.3, 128: 0.1, 256: 0.2}


@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


class SomeGpu:
    """Triton's driver, as far as an autotuner needs one."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


Tune = Callable[..., int]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tune:
    """Launches a kernel in a new process; returns how many configurations were measured."""
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "torchrelay.integrations:TritonCacheManager")
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setattr(fill, "run", lambda *arguments, **options: launched.append(options["BLOCK"]))
    launched: list[int] = []
    monkeypatch.setattr(driver, "_active", SomeGpu())

    def run(
        seconds: Mapping[int, float] = SECONDS, n: int = 7, configs: Sequence[Any] = (), best: int = 128
    ) -> int:
        launched.clear()

        def bench(launch: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
            launch()
            if launched[-1] not in seconds:
                raise OutOfResources(2, 1, "shared memory")
            return [seconds[launched[-1]]] * len(quantiles)

        kernel = triton.autotune(
            configs=list(configs or CONFIGS.values()), key=["n"], do_bench=bench, cache_results=True
        )(fill)
        kernel.run(torch.zeros(256), n, grid=(1,), warmup=False)
        *measured, launch = launched
        assert launch == kernel.best_config.kwargs["BLOCK"] == best
        return len(measured)

    return run


def held(redis: RedisServer) -> int:
    with redis.client() as client:
        return int(client.hlen("torchrelay:autotunes"))


def failures() -> int:
    return sum(process_report().snapshot().autotune_failures.values())


def test_a_second_machine_of_the_same_kind_measures_nothing(
    gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    hits = process_report().snapshot().autotune_hits
    with machine(tmp_path / "first", gateway.url):
        assert tune() == 3
    with machine(tmp_path / "second", gateway.url):
        assert tune({}) == 0
        assert tune({}) == 0  # from its disk
    with machine(tmp_path / "other", gateway.url, gpu=H100):
        assert tune({64: 0.1, 128: 0.2, 256: 0.3}, best=64) == 3
    with machine(tmp_path / "second", gateway.url):
        assert tune(n=8) == 3
    assert held(redis_server) == 3
    assert process_report().snapshot().autotune_hits == hits + 1
    (file,) = (tmp_path / "first" / "triton").rglob("*.autotune.json")
    assert len(json.loads(file.read_text())["configs_timings"]) == 3


def test_configurations_that_do_not_run_are_no_obstacle(
    gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    with machine(tmp_path / "first", gateway.url):
        assert tune({128: 0.1}) == 3
    with machine(tmp_path / "second", gateway.url):
        assert tune({}) == 0


def test_kernels_and_overrides_stay_on_this_machine(
    gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    timings = json.dumps({"key": [7], "configs_timings": [[vars(CONFIGS[64]), [0.1, 0.1, 0.1]]]})
    with machine(tmp_path / "first", gateway.url):
        cache, dumps = get_cache_manager("ab" * 32), get_dump_manager("ab" * 32)
        assert Path(cache.put(b"binary", "kernel.cubin")).read_bytes() == b"binary"
        cache.put(timings, "kernel.json")
        dumps.put(timings, "kernel.autotune.json")
        assert held(redis_server) == 0
        cache.put(timings, "kernel.autotune.json")
        assert held(redis_server) == 1


def test_where_none_runs_there_is_no_winner(
    gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    with machine(tmp_path / "first", gateway.url):
        assert tune({}, best=64) == 3
    assert held(redis_server) == 0


def test_a_thousand_configurations_fit(gateway: Running, tune: Tune, tmp_path: Path) -> None:
    many = [
        triton.Config({"BLOCK": 1 << (n % 10), "GROUP": n // 10}, num_warps=4, num_stages=3)
        for n in range(1000)
    ]
    seconds = {1 << n: 1.0 + n for n in range(10)}
    with machine(tmp_path / "first", gateway.url):
        assert tune(seconds, configs=many, best=1) == 1000
    with machine(tmp_path / "second", gateway.url):
        assert tune({}, configs=many, best=1) == 0


def test_a_reader_takes_winners_and_sends_none(
    gateway: Running, http: httpx2.Client, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    made = http.post("/v1/tokens", json={"name": "reader", "roles": ["read"]}).json()["token"]
    before = failures()
    with machine(tmp_path / "reader", gateway.url, token=made):
        assert tune() == 3
        assert held(redis_server) == 0
    with machine(tmp_path / "member", gateway.url):
        assert tune() == 3
    with machine(tmp_path / "second reader", gateway.url, token=made):
        assert tune({}) == 0
    assert failures() == before


def altered(**fields: Any) -> str:
    config = {**vars(CONFIGS[64]), **fields}
    return json.dumps({"config": config, "timing": [0.1, 0.1, 0.1]})


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{",
        "[]",
        altered().replace("0.1]", "NaN]"),
        altered().replace("0.1]", "1e999]"),
        altered().replace("0.1]", "-1]"),
        altered().replace('"timing"', '"timings"'),
        altered(num_warps=1 << 40),
        altered(num_warps=8),  # none of the candidates
        altered(kwargs={"BLOCK": 1 << 20}),
        altered(kwargs={"BLOCK": [64]}),
        altered(kwargs={"BLOCK": 10**400}),
        altered(kwargs={"BLOCK": 64, "EVEN": True}),
        altered(pre_hook="print"),
        altered(ir_override="/etc/passwd"),
        altered(unknown=1),
        altered(kwargs={"BLOCK": "x" * 10_000_000}),
    ],
    ids=lambda answer: answer[:80],
)
def test_an_answer_that_is_no_candidate_is_a_miss(
    answer: str, gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    with machine(tmp_path / "first", gateway.url):
        tune()
    replace_data(redis_server, answer)
    with machine(tmp_path / "second", gateway.url):
        assert tune() == 3


def test_the_winner_of_another_key_is_a_miss(
    gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    with machine(tmp_path / "first", gateway.url):
        tune()
    replace_data(redis_server, altered(), key="another")
    with machine(tmp_path / "second", gateway.url):
        assert tune() == 3


@pytest.mark.parametrize("config", [{"ir_override": "file.ptx"}, {"pre_hook": print}])
def test_what_names_a_file_or_a_function_is_not_sent(
    config: dict[str, Any], gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    special = triton.Config({"BLOCK": 128}, num_warps=4, **config)
    with machine(tmp_path / "first", gateway.url):
        assert tune(configs=[special, CONFIGS[64]]) == 2
    assert held(redis_server) == 0


def test_a_dead_service_costs_one_notice_and_is_left_alone_for_a_while(
    gateway: Running, tune: Tune, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = failures()
    with (
        caplog.at_level(logging.INFO, "torchrelay"),
        machine(tmp_path / "first", f"http://127.0.0.1:{free_port()}"),
    ):
        started = time.monotonic()
        assert [tune(n=n) for n in range(3)] == [3, 3, 3]
        assert time.monotonic() - started < 10
    assert failures() == before + 1
    assert len([r for r in caplog.records if "autotune winners cannot be had" in r.message]) == 1


def test_without_a_url_or_a_gpu_nothing_is_requested(
    gateway: Running, tune: Tune, tmp_path: Path, redis_server: RedisServer
) -> None:
    before = failures()
    with machine(tmp_path / "first", ""):
        assert tune() == 3
    with machine(tmp_path / "second", gateway.url, gpu=None):
        assert tune() == 3
    assert (held(redis_server), failures()) == (0, before)


def test_settings_that_cannot_be_read_stop_no_kernel(tune: Tune, tmp_path: Path) -> None:
    before = failures()
    with machine(tmp_path / "first", "no address"):
        assert tune() == 3
    assert failures() == before + 1
