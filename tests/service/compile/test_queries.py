"""What a compile asks and reports while it runs, through a gateway: who is told what, and whose word counts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2
import msgspec
import pytest
import request_parts
from service_parts import ArtifactPool, RedisServer, Running, StartGateway, compiled, follow, graph, post
from torchrelay.compiler.api.tuning import kernels as tuning_kernels
from torchrelay.compiler.request import codec, schema
from torchrelay.compiler.tuning import queries, records
from torchrelay.compiler.tuning.records import DeviceEnvironment
from tuning_parts import PLACE, entries, entry, found, lookup, problem
from waiting import wait_until


def asked(running: Running, http: httpx2.Client, body: bytes, *questions: bytes) -> list[bytes]:
    """What the service answers to `questions` of the compile of `body`."""
    running.pool.questions, running.pool.answers = list(questions), []
    compiled(http, body)
    return running.pool.answers


def test_what_one_compile_found_the_next_one_knows(gateway: Running, http: httpx2.Client) -> None:
    told = asked(gateway, http, graph(1), lookup(2), found(entry(2)), lookup(2, 3))
    assert [entries(answer) for answer in told] == [[], [entry(2)], [entry(2)]]
    told = asked(gateway, http, graph(2), lookup(3, 2), found(entry(2, "another")))
    assert [entries(answer) for answer in told] == [[entry(2)], [entry(2)]]


def test_another_gateway_knows_it_too(start_gateway: StartGateway) -> None:
    one = start_gateway()
    with one.http() as http:
        asked(one, http, graph(1), found(entry(2)))
    one.stop()
    other = start_gateway()
    with other.http() as http:
        assert entries(*asked(other, http, graph(2), lookup(2))) == [entry(2)]


def test_each_namespace_has_a_database_of_its_own(gateway: Running, http: httpx2.Client) -> None:
    asked(gateway, http, graph(1), found(entry(2)))
    issued = {"name": "x", "roles": ["compile"], "namespace": "red"}
    with gateway.http(http.post("/v1/tokens", json=issued).json()["token"]) as red:
        told = asked(gateway, red, graph(1), lookup(2), found(entry(2, "red's")))
    assert [entries(answer) for answer in told] == [[], [entry(2, "red's")]]
    assert entries(*asked(gateway, http, graph(2), lookup(2))) == [entry(2)]


GPU_PLACE = DeviceEnvironment(
    device=request_parts.GPU.name,
    capability=request_parts.GPU.capability,
    driver="580",
    torch=request_parts.GPU_TOOLCHAIN.torch,
    triton=request_parts.GPU_TOOLCHAIN.triton,
    cuda=request_parts.GPU_TOOLCHAIN.cuda,
)
"""Where a compile for request_parts.GPU measures."""


def gpu_graph(size: int) -> bytes:
    """A request for a GPU, without source."""
    inputs = [schema.TensorInput([size], [1], "float32", "cuda", requires_grad=False)]
    return codec.pack_request(msgspec.structs.replace(request_parts.kernels_request(), inputs=inputs))


def test_a_compile_of_source_may_ask_and_is_not_believed(start_gateway: StartGateway) -> None:
    running = start_gateway(token_allow_source=True)
    stands, claimed = entry(2, place=GPU_PLACE), entry(3, "its own kernel", GPU_PLACE)
    with running.http() as http:
        assert entries(*asked(running, http, gpu_graph(1), found(stands))) == [stands]
        questions = (lookup(2, place=GPU_PLACE), found(claimed), found(entry(2, "its own", GPU_PLACE)))
        told = asked(running, http, request_parts.kernels_body(), *questions)
        assert [entries(answer) for answer in told] == [[stands], [], [stands]]
        assert entries(*asked(running, http, gpu_graph(2), lookup(3, place=GPU_PLACE))) == []


def kernel_entry(kernel: schema.KernelSource, winner: str = "BLOCK=64 num_warps=4") -> records.TuningEntry:
    """What a search among a user-written kernel's configurations finds."""
    operand = records.Operand("float32", (8,), (1,))
    call = tuning_kernels.KernelSpec(source=kernel, grids=[], tensors=[("x_ptr", operand)], constants=[])
    return msgspec.structs.replace(entry(2, winner, GPU_PLACE), problem=tuning_kernels.problem(call))


def test_a_compile_of_source_is_believed_of_its_own_kernel(start_gateway: StartGateway) -> None:
    running = start_gateway(token_allow_source=True)
    own, other = kernel_entry(request_parts.kernel()), kernel_entry(request_parts.kernel(3))
    renamed = kernel_entry(request_parts.kernel(name="scale2"))
    nameless = msgspec.structs.replace(own, problem=msgspec.structs.replace(own.problem, settings=()))
    with running.http() as http:
        questions = [found(each) for each in (own, other, renamed, nameless)]
        told = asked(running, http, request_parts.kernels_body(request_parts.kernel()), *questions)
        assert [entries(answer) for answer in told] == [[own], [], [], []]
        # everyone with this kernel knows it from now on, and the first entry stands
        again = request_parts.kernels_body(
            request_parts.kernel(), grid=schema.ListArg([schema.TupleArg([2, 1, 1])])
        )
        told = asked(
            running, http, again, found(kernel_entry(request_parts.kernel(), "BLOCK=128 num_warps=4"))
        )
        assert entries(*told) == [own]


def test_a_compile_of_several_sources_is_believed_of_none(start_gateway: StartGateway) -> None:
    """One of them could have taken the process over, and speak of another, which somebody else wrote."""
    running = start_gateway(token_allow_source=True)
    kernels = request_parts.kernel(2), request_parts.kernel(3)
    with running.http() as http:
        told = asked(
            running, http, request_parts.kernels_body(*kernels), *(found(kernel_entry(k)) for k in kernels)
        )
        assert [entries(answer) for answer in told] == [[], []]


def test_a_compile_without_source_is_not_believed_of_kernels(start_gateway: StartGateway) -> None:
    running = start_gateway()
    with running.http() as http:
        told = asked(running, http, gpu_graph(1), found(kernel_entry(request_parts.kernel())))
        assert entries(*told) == []


@pytest.mark.parametrize(
    "place",
    [
        msgspec.structs.replace(PLACE, torch="2.11.0"),
        msgspec.structs.replace(PLACE, triton="3.6.0"),
        msgspec.structs.replace(PLACE, cuda="13.0"),
        msgspec.structs.replace(PLACE, capability="avx2 avx512"),
        msgspec.structs.replace(PLACE, device="NVIDIA H100", capability="9.0", driver="580", threads=0),
        msgspec.structs.replace(PLACE, device="NVIDIA H100", threads=0),
    ],
    ids=["torch", "triton", "cuda", "vectors", "GPU", "GPU without a capability"],
)
def test_a_compile_is_not_believed_of_a_place_that_it_was_not_given(
    gateway: Running, http: httpx2.Client, place: DeviceEnvironment
) -> None:
    told = asked(gateway, http, graph(1), found(entry(2, place=place)), lookup(2, place=place))
    assert [entries(answer) for answer in told] == [[], []]


@pytest.mark.parametrize(
    "place",
    [
        msgspec.structs.replace(GPU_PLACE, device="NVIDIA H200"),
        msgspec.structs.replace(GPU_PLACE, capability="8.0"),
    ],
    ids=["device", "capability"],
)
def test_a_compile_for_one_gpu_is_not_believed_of_another(
    gateway: Running, http: httpx2.Client, place: DeviceEnvironment
) -> None:
    told = asked(gateway, http, gpu_graph(1), found(entry(2, place=place)), found(entry(2, place=GPU_PLACE)))
    assert [entries(answer) for answer in told] == [[], [entry(2, place=GPU_PLACE)]]


HUGE = msgspec.structs.replace(
    problem(2), operands=tuple(records.Operand("float32", (1 << 40,) * 64, (1,) * 64) for _ in range(64))
)


@pytest.mark.parametrize(
    "question",
    [
        b"",
        b"\xc1",
        b"\x82\xa1x" + b"\x91" * 200_000 + b"\xc0\xa4type\xa6lookup",
        msgspec.msgpack.encode({"type": "drop"}),
        msgspec.msgpack.encode({"type": "lookup", "place": PLACE, "problems": [{"op": "rm -rf"}]}),
        msgspec.msgpack.encode({"type": "found", "entry": {**msgspec.to_builtins(entry(2)), "more": 1}}),
        msgspec.msgpack.encode({"type": "lookup", "place": PLACE, "problems": [problem(2)] * 257}),
        b"\x83\xa4type\xa6lookup\xa5place\x81\xa6device\xa2\xff\xff",
        bytes(queries.QUESTION_LIMIT + 1),
        found(msgspec.structs.replace(entry(2), problem=HUGE)),
    ],
    ids=["empty", "never msgpack", "deep", "other", "name", "field", "many", "not utf-8", "long", "large"],
)
def test_a_question_that_is_none_has_no_answer_and_harms_nothing(
    gateway: Running, http: httpx2.Client, question: bytes
) -> None:
    told = asked(gateway, http, graph(1), question, found(entry(2)))
    assert told[0] == b""
    assert entries(told[1]) == [entry(2)]


def test_the_largest_answer_is_told_whole(gateway: Running, http: httpx2.Client) -> None:
    long = msgspec.structs.replace(entry(2).winner, candidate="c" * 4096)
    large = msgspec.structs.replace(entry(2), winner=long, runner_up=long, aten=long, clock="c" * 3500)
    assert len(msgspec.msgpack.encode(large)) > queries.ENTRY_LIMIT - 512
    often = msgspec.msgpack.encode(queries.EntryLookup(PLACE, [problem(2)] * 256))
    told = asked(gateway, http, graph(1), found(large), often)
    assert entries(told[1]) == [large] * 256
    assert len(told[1]) < 5 << 20


class Patient(ArtifactPool):
    """Its compile waits until it may ask."""

    def __init__(self) -> None:
        super().__init__()
        self.may_ask, self.has_asked = threading.Event(), threading.Event()

    async def compile(self, request_bytes: bytes, **order: Any) -> bytes:
        on_query = order.pop("on_query")

        async def when_it_may(question: bytes) -> bytes:
            assert await asyncio.to_thread(self.may_ask.wait, 20)
            try:
                return bytes(await on_query(question))
            finally:
                self.has_asked.set()

        return await super().compile(request_bytes, **order, on_query=when_it_may)


def test_while_redis_is_away_there_is_no_answer_and_the_compile_goes_on(start_gateway: StartGateway) -> None:
    server, pool = RedisServer(persistent=True), Patient()
    server.start()
    try:
        running = start_gateway(pool, redis_url=server.url, redis_timeout_seconds=0.5)
        pool.questions = [lookup(2)]
        with running.http() as http:
            key = post(http, graph(1)).json()["key"]
            server.stop()
            pool.may_ask.set()
            assert pool.has_asked.wait(20)
            server.start()
            wait_until(lambda: http.get(f"/v1/artifacts/{key}").status_code == 200, seconds=20)
        assert pool.answers == [b""]
    finally:
        server.close()


def test_published_compiles_count_what_they_measured_and_what_was_known(
    gateway: Running, http: httpx2.Client
) -> None:
    for size, problems in ((1, (3, 0)), (2, (1, 4))):
        gateway.pool.problems = problems
        compiled(http, graph(size))
    for size, problems in ((3, (-5, 0)), (4, (0, 1 << 63))):
        gateway.pool.problems = problems
        *_, (_, stage, _) = follow(http, post(http, graph(size)).json()["key"])
        assert stage == "failed"
    stats = http.get("/v1/stats").json()
    assert (stats["problems_searched"], stats["problems_recalled"]) == (4, 4)
    assert 'torchrelay_shared_problems_searched_total{namespace="default"} 4.0' in http.get("/metrics").text
