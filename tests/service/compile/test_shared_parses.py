"""Many ranks send one large body at one time: it is parsed once, by one process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from request_parts import request_of
from service_parts import NEEDS, ArtifactPool, Running, StartGateway, follow, graph, post
from torchrelay.compiler.errors import ForbiddenTarget
from torchrelay.compiler.request import codec, schema
from torchrelay.service.admission import admit
from torchrelay.service.admission.admit import Admission
from torchrelay.service.compile.compile_queue import QueuedRequest, QueuedRequests
from waiting import until

SENDERS = 30
LARGE = graph(nodes=40_000)
FORBIDDEN = graph(nodes=40_000, target="os.system")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The module of each process that parses a body, as they start: late, so that all senders are there by then."""
    started: list[str] = []
    start = asyncio.create_subprocess_exec

    async def noted(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(command[-1])
        await asyncio.sleep(1)
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return started


def together(gateway: Running, send: Callable[[httpx2.Client], httpx2.Response]) -> list[httpx2.Response]:
    """The answers to SENDERS clients that send at one time."""
    with gateway.http() as http, ThreadPoolExecutor(SENDERS) as threads:
        return list(threads.map(lambda _: send(http), range(SENDERS)))


def admission() -> Admission:
    return Admission(codec.Limits(), body_timeout_seconds=60)


def test_senders_of_one_body_share_one_parse(start_gateway: StartGateway, children: list[str]) -> None:
    gateway = start_gateway(ArtifactPool(seconds=5), lease_seconds=10.0)
    answers = together(gateway, lambda http: post(http, LARGE))
    assert {answer.status_code for answer in answers} == {202}
    late = together(gateway, lambda http: post(http, LARGE))  # the compile that uses the request still runs
    assert {answer.status_code for answer in late} == {202}
    assert len(children) == 1
    with gateway.http() as http:
        *_, (_, stage, _) = follow(http, answers[0].json()["key"])
    assert (stage, len(gateway.pool.calls)) == ("done", 1)


def test_lookups_without_a_compile_share_one_parse(gateway: Running, children: list[str]) -> None:
    for _ in range(2):
        answers = together(gateway, lambda http: post(http, LARGE, wait="cache"))
        assert {answer.status_code for answer in answers} == {404}
        assert len(children) == 1


def test_a_refusal_is_the_answer_to_each_sender(gateway: Running, children: list[str]) -> None:
    answers = together(gateway, lambda http: post(http, FORBIDDEN))
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {
        (422, "forbidden_target")
    }
    assert len(children) == 1


def test_a_refused_body_is_parsed_again_for_the_next_sender(children: list[str]) -> None:
    async def twice() -> None:
        mine = admission()
        for _ in range(2):
            with pytest.raises(ForbiddenTarget):
                await mine.key_of(FORBIDDEN, namespace="default")

    asyncio.run(twice())
    assert len(children) == 2


def test_a_sender_that_is_cancelled_does_not_end_the_parse_of_the_others(children: list[str]) -> None:
    async def scenario() -> tuple[str, str]:
        mine = admission()
        first, *others = [asyncio.create_task(mine.key_of(LARGE, namespace="default")) for _ in range(3)]
        await until(lambda: children)
        first.cancel()
        (one, _), (other, _) = await asyncio.gather(*others)
        assert first.cancelled()
        return one, other

    one, other = asyncio.run(scenario())
    assert one == other
    assert len(children) == 1


def test_namespaces_share_no_parse(children: list[str]) -> None:
    async def both() -> None:
        mine = admission()
        await asyncio.gather(*(mine.key_of(LARGE, namespace=name) for name in ("vision", "speech")))

    asyncio.run(both())
    assert len(children) == 2


def test_of_small_requests_too_only_the_latest_are_held() -> None:
    """As an object each takes ten times its bytes, and a limit of bytes alone held some hundred thousand."""
    parses: list[None] = []

    async def main() -> None:
        mine = Admission(codec.Limits(), body_timeout_seconds=60, on_parse=lambda: parses.append(None))
        for size in range(1025):
            await mine.request_of(graph(size), namespace="default")
        for size in (1024, 0):
            await mine.request_of(graph(size), namespace="default")

    asyncio.run(main())
    assert len(parses) == 1026


def test_of_small_requests_that_were_queued_only_the_latest_are_remembered() -> None:
    queued = QueuedRequests()
    for n in range(4097):
        queued.put("default", str(n), QueuedRequest(b"body", NEEDS))
    assert queued.get("default", "0") is None
    assert queued.get("default", "1") is not None


def test_the_process_that_parses_has_nothing_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []
    start = asyncio.create_subprocess_exec

    async def noted(*command: str, **options: Any) -> asyncio.subprocess.Process:
        child = await start(*command, **options)
        lines = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
        environments.append(dict(line.decode().split("=", 1) for line in lines if line))
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    monkeypatch.setenv("TORCHRELAY_SERVICE_REDIS_URL", "redis://somebody:secret@redis")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert asyncio.run(admission().parse(LARGE)).key
    (environment,) = environments
    assert "PATH" in environment and "secret" not in str(environment)


# --- memory ----------------------------------------------------------------------------------------------


def test_the_largest_request_that_is_valid_is_checked_within_a_checks_memory() -> None:
    """Nearly as many values and bytes as a request may have."""
    nodes = [schema.Node("placeholder", "", [])]
    for number in range(1, 60_000):
        texts = [letter * 970 for letter in (f"{number % 10}", "y")]
        refs = schema.ListArg([schema.Ref(max(0, number - back)) for back in range(1, 31)])
        nodes.append(schema.Node("call_function", "torch.cat", [refs, *texts]))
    nodes.append(schema.Node("output", "", [schema.TupleArg([schema.Ref(len(nodes) - 1)])]))
    request = request_of(nodes, [schema.TensorInput([8], [1], "float32", "cpu", requires_grad=False)])
    body = codec.pack_request(request)
    size = codec.unpacked_size(body, codec.Limits().request_bytes)
    assert size > 0.95 * codec.Limits().request_bytes
    assert len(asyncio.run(admission().parse(body)).canonical) == size


def test_few_medium_bodies_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def slow(*_: object) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.1)
        with lock:
            running -= 1

    monkeypatch.setattr(admit, "parse", slow)
    body = graph(nodes=2000)
    assert admit.INLINE_BYTES < codec.unpacked_size(body, 1 << 30) < admit.THREAD_BYTES

    async def parse_all() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(12))
        parser = admission()
        await asyncio.gather(*(parser.parse(body, namespace=str(each)) for each in range(12)))

    asyncio.run(parse_all())
    assert most == admit.TOGETHER
