"""Kernels in batch jobs over HTTP: by permission, refused with the line, compiled, and known afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import msgspec
import pytest
import request_parts
from service_parts import TARGET, TOOLCHAIN, Running, registered
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning import kernels
from torchrelay.compiler.api.tuning.jobs import KernelTuneItem
from torchrelay.compiler.request import key as keys
from torchrelay.compiler.request import schema
from torchrelay.compiler.tuning import queries, records
from torchrelay.compiler.tuning.records import DeviceEnvironment, Operand, Timing
from tune_parts import SearchingPool, begin, begun, ended, job, results, states, with_workers

StartGateway = Callable[..., Running]
PLACE = DeviceEnvironment(
    request_parts.GPU.name, request_parts.GPU.capability, "580", TOOLCHAIN.torch, "", ""
)
CONFIGS = [schema.KernelConfig([("BLOCK", block)], 4, 3, 1, None) for block in (64, 128)]


@pytest.fixture
def pool() -> SearchingPool:
    made = SearchingPool()
    made.target = request_parts.GPU
    made.searchers.up = dict.fromkeys(made.searchers.up, PLACE)
    return made


@pytest.fixture
def http(start_gateway: StartGateway, pool: SearchingPool) -> Iterator[httpx2.Client]:
    with with_workers(start_gateway(pool, token_allow_source=True)).http() as client:
        yield client


def kernel(size: int = 1000, dtype: str = "float32", factor: int = 2) -> kernels.KernelSpec:
    return kernels.KernelSpec(
        source=msgspec.structs.replace(request_parts.kernel(factor), configs=CONFIGS),
        grids=[(-(-size // 64), 1, 1), (-(-size // 128), 1, 1)],
        tensors=[("x_ptr", Operand(dtype, (size,), (1,)))],
        constants=[],
    )


def item(line: int = 7, **changes: Any) -> KernelTuneItem:
    return KernelTuneItem(line, "kernels:scale", kernel(**changes))


def refused(http: httpx2.Client, *items: KernelTuneItem, **fields: Any) -> tuple[str, str]:
    answer = begin(http, job(*items, **fields))
    assert answer.status_code >= 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["message"]


def measured(of: kernels.KernelSpec) -> queries.SearchResult:
    """What the compile of a kernel tells when it has searched."""
    first, second = (
        Timing(kernels.config_text(config), 1.0 + at, 1.0, 4.0, 10) for at, config in enumerate(CONFIGS)
    )
    entry = records.TuningEntry(
        problem=kernels.problem(of),
        place=PLACE,
        winner=first,
        runner_up=second,
        candidates=2,
        seconds=3.0,
    )
    return queries.SearchResult(entry, timings=[first, second])


def test_a_kernel_is_compiled_for_the_jobs_device_and_told_with_all_timings(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    pool.questions = [msgspec.msgpack.encode(measured(kernel()))]
    name = begun(http, item())
    assert ended(http, name)["state"] == "done"
    assert ("kernel", "done") in states(http, name)
    told = http.get(f"/v1/tunes/{name}").json()["progress"][0]
    assert (told["line"], told["text"]) == (7, "kernels:scale")
    assert told["detail"].startswith("BLOCK=64 num_warps=4 num_stages=3")
    request = kernels.request(kernel(), TOOLCHAIN, request_parts.GPU)
    made = keys.key_of(request)
    assert pool.calls == [made]
    (found,) = (each for each in results(http, name) if not each.ceiling)
    assert (found.line, found.known) == (7, False)
    assert found.entry == measured(kernel()).entry
    assert found.timings == measured(kernel()).timings
    assert found.graphs == [(made, 1)]


def test_a_kernel_that_is_known_is_not_compiled_again(http: httpx2.Client, pool: SearchingPool) -> None:
    pool.questions = [msgspec.msgpack.encode(measured(kernel()))]
    ended(http, begun(http, item()))
    again = begun(http, item(line=9))
    ended(http, again)
    assert ("kernel", "known") in states(http, again)
    assert len(pool.calls) == 1
    (found,) = (each for each in results(http, again) if not each.ceiling)
    assert (found.line, found.known, found.entry) == (9, True, measured(kernel()).entry)


def test_a_kernel_that_was_not_measured_has_failed(http: httpx2.Client, pool: SearchingPool) -> None:
    name = begun(http, item())
    ended(http, name)
    told = http.get(f"/v1/tunes/{name}").json()["progress"][0]
    assert told["state"] == "failed"
    assert "nothing was measured" in told["detail"]


def test_a_kernels_compile_is_not_believed_of_another_kernel(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    pool.questions = [msgspec.msgpack.encode(measured(kernel(factor=3)))]
    ended(http, begun(http, item()))
    pool.questions = [
        msgspec.msgpack.encode(queries.EntryLookup(PLACE, [kernels.problem(kernel(factor=3))])),
    ]
    pool.answers = []
    ended(http, begun(http, item(factor=4)))
    (answer,) = pool.answers
    assert decoding.from_msgpack(answer, type=queries.KnownEntries).entries == []


def test_a_host_with_a_gpu_and_workers_for_its_cpu_is_asked_for_its_gpu(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    pool.others = [TARGET]
    registered(http, pool)
    pool.questions = [msgspec.msgpack.encode(measured(kernel()))]
    name = begun(http, item())
    assert ended(http, name)["target"]["name"] == request_parts.GPU.name
    pool.others = [TARGET, msgspec.structs.replace(request_parts.GPU, name="NVIDIA A100")]
    registered(http, pool)
    code, message = refused(http, item())
    assert code == "bad_tune_job" and message.endswith(
        f"several kinds: NVIDIA A100 with torch {TOOLCHAIN.torch}; NVIDIA H100 with torch {TOOLCHAIN.torch}"
    )


def test_a_job_does_not_go_to_a_cpu_because_the_gpu_has_not_started_yet(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    pool.target, pool.starting, pool.starts = TARGET, ["c"], request_parts.GPU
    registered(http, pool)
    assert refused(http, item(), threads=2) == ("unavailable", "no worker with a GPU has started yet")
    assert int(begin(http, job(item(), threads=2)).headers["retry-after"]) == 15
    code, message = refused(http, item(), threads=2, device="cpu")
    assert (code, message[:16]) == ("bad_tune_job", "job.yaml, line 7")
    pool.starts = TARGET
    registered(http, pool)
    assert refused(http, item(), threads=2)[0] == "bad_tune_job"


def test_a_token_without_the_permission_sends_no_kernels(
    http: httpx2.Client, start_gateway: StartGateway
) -> None:
    issued = {"name": "ada", "roles": ["tune"], "allow_source": False}
    token = http.post("/v1/tokens", json=issued).json()["token"]
    http.headers["authorization"] = f"Bearer {token}"
    code, message = refused(http, item())
    assert code == "source_forbidden"
    assert message.startswith("job.yaml, line 7: the token of 'ada' may not send source")
    assert "scale" in message


def test_a_job_that_holds_source_is_resumed_by_who_may_send_it_and_the_log_names_it(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    pool.searchers.go.clear()
    name = begun(http, item())
    assert http.post(f"/v1/tunes/{name}/cancel").status_code == 200
    issued = {"name": "ada", "roles": ["tune"], "allow_source": False}
    token = http.post("/v1/tokens", json=issued).json()["token"]
    answer = http.post(f"/v1/tunes/{name}/resume", headers={"authorization": f"Bearer {token}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "source_forbidden")
    assert http.post(f"/v1/tunes/{name}/resume").status_code == 200
    told = {each["action"]: each["detail"] for each in http.get("/v1/audit").json()["entries"]}
    assert told["tune_begun"].endswith("; source: scale")
    pool.searchers.go.set()
    ended(http, name)


def test_a_job_for_a_cpu_holds_no_kernels(start_gateway: StartGateway) -> None:
    with start_gateway(SearchingPool(), token_allow_source=True).http() as http:
        code, message = refused(http, item())
    assert code == "bad_tune_job"
    assert message == "job.yaml, line 7: Triton kernels are for GPUs, and this job is for a CPU"


def test_a_dtype_that_the_device_lacks_is_refused_with_the_line(
    http: httpx2.Client, pool: SearchingPool
) -> None:
    pool.target = msgspec.structs.replace(request_parts.GPU, name="NVIDIA A100", capability="8.0")
    registered(http, pool)
    code, message = refused(http, item(dtype="float8_e4m3fn"))
    assert code == "bad_tune_job"
    assert message == (
        "job.yaml, line 7: NVIDIA A100 has compute capability 8.0, and float8_e4m3fn needs 8.9"
    )


@pytest.mark.parametrize(
    ("grids", "configs"), [(1, 2), (3, 2), (1, 0)], ids=["fewer", "more", "no configurations"]
)
def test_grids_for_other_configurations_are_refused(http: httpx2.Client, grids: int, configs: int) -> None:
    told = msgspec.to_builtins(job(item()))
    kernel = told["items"][0]["kernel"]
    kernel["grids"] = [[1, 1, 1]] * grids
    kernel["source"]["configs"] = kernel["source"]["configs"][:configs]
    answer = http.post("/v1/tunes", json=told)
    assert answer.status_code == 422, answer.text
    assert f"a grid for each configuration: {grids} for {configs}" in answer.json()["error"]["message"]
