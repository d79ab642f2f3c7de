"""One decision for each key in a job: a real TCPStore; ranks are threads with connections of their own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torchrelay.clients.artifacts.ranks import agreement as module
from torchrelay.clients.artifacts.ranks.agreement import (
    AgreementStore,
    Decision,
    Machine,
    StoreAgreement,
)
from torchrelay.compiler.errors import CannotLoad, JobUnreachable, NoWorker
from torchrelay.compiler.torch_internals.distributed import process_groups

KEY = "ab" * 32
RANKS = 4
SECONDS = timedelta(seconds=60)


@pytest.fixture
def server() -> Iterator[list[dist.TCPStore]]:
    """A list that holds the only reference: emptying it ends the server."""
    holder = [dist.TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False)]
    yield holder
    holder.clear()


@pytest.fixture
def rank(server: list[dist.TCPStore]) -> Callable[..., StoreAgreement]:
    def connect(readers: int = RANKS - 1) -> StoreAgreement:
        store = process_groups.job_store((server[0].host, server[0].port), SECONDS)
        return StoreAgreement(AgreementStore(store, "torchrelay/job/"), readers)

    return connect


def never() -> bytes:
    raise AssertionError("a follower must not obtain")


def decision_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_one_of_all_ranks_obtains_and_all_have_the_same_bytes(rank: Callable[..., StoreAgreement]) -> None:
    data, obtained = bytes(range(256)) * 40_000, []  # 10 MB: three chunks

    def obtain() -> bytes:
        obtained.append(threading.get_ident())
        time.sleep(0.1)
        return data

    def run(job: StoreAgreement) -> tuple[Decision, bytes | None]:
        decision = job.agree(KEY, 60, obtain)
        mine = obtained == [threading.get_ident()]
        return decision, data if mine else job.artifact(KEY, decision)

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(run, [rank() for _ in range(RANKS)]))
    assert len(obtained) == 1
    assert {decision.digest for decision, _ in found} == {decision_of(data)}
    assert all(got == data for _, got in found)


def test_the_bytes_leave_the_store_once_all_have_read_them_and_the_decision_stays(
    rank: Callable[..., StoreAgreement],
) -> None:
    leader, *others = [rank() for _ in range(RANKS)]
    decision = leader.agree(KEY, 60, lambda: b"bytes")
    for other in others:
        assert other.artifact(KEY, other.agree(KEY, 60, never)) == b"bytes"
        other.done(KEY, decision)
    assert leader.artifact(KEY, decision) is None
    assert rank().agree(KEY, 60, never) == decision


def test_all_fall_back_for_the_leaders_reason(rank: Callable[..., StoreAgreement]) -> None:
    error = NoWorker("none for this torch")

    def fail() -> bytes:
        raise error

    first = rank().agree(KEY, 60, fail)
    assert first.error is not None and first.error.code == "no_worker"
    assert rank().agree(KEY, 60, never) == first


def test_ranks_that_need_different_graphs_in_another_order_do_not_wait_for_each_other(
    rank: Callable[..., StoreAgreement],
) -> None:
    both = threading.Barrier(2)

    def run(job: StoreAgreement, keys: list[str]) -> list[str]:
        both.wait()
        return [job.agree(key, 60, lambda key=key: key.encode()).digest for key in keys]

    keys = ["aa" * 32, "bb" * 32]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(run, rank(), keys), pool.submit(run, rank(), keys[::-1])
    assert one.result() == two.result()[::-1] == [decision_of(key.encode()) for key in keys]


def test_a_leader_that_is_interrupted_is_replaced_at_once(rank: Callable[..., StoreAgreement]) -> None:
    leads = threading.Event()

    def interrupted() -> bytes:
        leads.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rank().agree(KEY, 60, interrupted)
    assert leads.is_set()
    assert rank().agree(KEY, 60, lambda: b"second").digest == decision_of(b"second")


def test_a_leader_that_stands_still_is_replaced_and_accepts_what_was_decided(
    rank: Callable[..., StoreAgreement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOST_SECONDS", 0.5)
    leads, decided = threading.Event(), threading.Event()

    def stands_still() -> bytes:
        leads.set()
        assert decided.wait(60)
        return b"late"

    with monkeypatch.context() as still, ThreadPoolExecutor(1) as pool:
        still.setattr(module, "HEARTBEAT_SECONDS", 600.0)
        slow = pool.submit(rank().agree, KEY, 60, stands_still)
        assert leads.wait(60)
        still.setattr(module, "HEARTBEAT_SECONDS", 0.1)
        decision = rank().agree(KEY, 60, lambda: b"second")
        decided.set()
        assert slow.result() == decision
    assert decision.digest == decision_of(b"second")


LEADER = """
import signal, sys
from datetime import timedelta
from torchrelay.clients.artifacts.ranks.agreement import AgreementStore, StoreAgreement
from torchrelay.compiler.torch_internals.distributed import process_groups

store = process_groups.job_store(("127.0.0.1", int(sys.argv[1])), timedelta(seconds=60))

def obtain():
    print("leads", flush=True)
    signal.pause()

StoreAgreement(AgreementStore(store, "torchrelay/job/"), 3).agree(sys.argv[2], 600, obtain)
"""


def test_a_leader_that_is_killed_is_replaced(
    rank: Callable[..., StoreAgreement], server: list[dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOST_SECONDS", 3.0)
    command = [sys.executable, "-c", LEADER, str(server[0].port), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None and leader.stdout.readline() == "leads\n"
        with ThreadPoolExecutor(2) as pool:
            followers = [pool.submit(rank().agree, KEY, 60, lambda: b"second") for _ in range(2)]
            leader.kill()
            found = [follower.result() for follower in followers]
    assert found[0] == found[1]
    assert found[0].digest == decision_of(b"second")


def test_at_the_deadline_all_decide_that_there_is_nothing(rank: Callable[..., StoreAgreement]) -> None:
    leads, over = threading.Event(), threading.Event()

    def slow() -> bytes:
        leads.set()
        assert over.wait(60)
        return b"late"

    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(rank().agree, KEY, 60, slow)
        assert leads.wait(60)
        decision = rank().agree(KEY, 0.3, never)
        over.set()
        assert leader.result() == decision
    assert decision.error is not None and decision.error.code == "deadline_exceeded"


def test_what_one_machine_of_a_job_cannot_load_is_refused_for_all(
    rank: Callable[..., StoreAgreement],
) -> None:
    new, old, strict = jobs = [rank(2) for _ in range(3)]
    old.machines.join(Machine({"GLIBC": "2.31"}))
    strict.machines.join(Machine({"GLIBC": "2.41"}, problem="/tmp is mounted noexec"))
    new.machines.join(Machine({"GLIBC": "2.41"}))
    for job in jobs:
        with pytest.raises(CannotLoad, match=r"GLIBC 2\.38, the machine of another .* has GLIBC 2\.31"):
            job.check_needs({"GLIBC": "2.38"})
        with pytest.raises(CannotLoad, match="/tmp is mounted noexec"):
            job.check_needs({"GLIBC": "2.14"})
        job.check_needs({})  # no library inside
        job.check_needs({"CUDA": "12.0"})


def test_the_store_is_asked_about_machines_once(
    rank: Callable[..., StoreAgreement], server: list[dist.TCPStore]
) -> None:
    jobs = [rank() for _ in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda job: job.machines.join(Machine({"GLIBC": "2.36"})), jobs))
    assert jobs[0].machines.known() == [Machine({"GLIBC": "2.36"})]
    server.clear()
    assert len(jobs[0].machines.known()) == 1


def test_a_process_that_joins_late_is_waited_for_once_and_known_from_then_on(
    rank: Callable[..., StoreAgreement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.3)
    first, second = rank(1), rank(1)
    first.machines.join(Machine({"GLIBC": "2.41"}))
    first.check_needs({"GLIBC": "2.38"})
    monkeypatch.setattr(module, "JOIN_SECONDS", 3600.0)
    first.check_needs({"GLIBC": "2.38"})
    second.machines.join(Machine({"GLIBC": "2.31"}))
    with pytest.raises(CannotLoad):
        first.check_needs({"GLIBC": "2.38"})


def test_too_many_bytes_for_the_store_are_taken_out_oldest_first(
    rank: Callable[..., StoreAgreement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POSTED_BYTES", 10)
    leader, other = rank(), rank()
    small = [leader.agree(f"{n:064x}", 60, lambda n=n: bytes([n]) * 6) for n in range(2)]
    large = leader.agree(KEY, 60, lambda: b"more than ten")
    found = [other.artifact(f"{n:064x}", decision) for n, decision in enumerate(small)]
    assert found == [None, b"\1" * 6]
    assert other.artifact(KEY, large) is None


def test_a_store_that_is_gone_is_a_typed_error(
    rank: Callable[..., StoreAgreement], server: list[dist.TCPStore]
) -> None:
    job = rank()
    server.clear()
    with pytest.raises(JobUnreachable, match="store failed"):
        job.agree(KEY, 60, never)


def test_all_ranks_run_a_graph_compiled_from_the_same_call_whatever_their_pace(
    rank: Callable[..., StoreAgreement],
) -> None:
    def run(number: int) -> int:
        """The first call that is compiled. The ranks receive the artifact at different calls."""
        calls = rank().common_call(KEY)
        assert calls.begin(eager=True)
        call = 0
        while calls.is_eager(call, ready=call > 20 * number):
            time.sleep(0.001 * number)
            call += 1
        assert not calls.is_eager(call, ready=False)
        return call

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(run, range(RANKS)))
    assert len(set(found)) == 1 and found[0] > 0


def test_the_first_rank_says_how_a_graph_begins(rank: Callable[..., StoreAgreement]) -> None:
    first, second = rank(), rank()
    compiled, same = first.common_call(KEY), second.common_call(KEY)
    assert not same.is_begun()
    assert not compiled.begin(eager=False)
    assert same.is_begun() and not same.begin(eager=True)
    assert not same.is_eager(0, ready=False)
    another = first.common_call(KEY)  # a second graph of this key
    assert another.begin(eager=True) and second.common_call(KEY).begin(eager=False)


def test_a_process_without_a_store_has_none() -> None:
    assert process_groups.job_store(None, SECONDS) is None


def test_a_name_that_goes_while_it_is_read_is_not_waited_for(server: list[dist.TCPStore]) -> None:
    """As a chunk that its leader drops. A wait would end the job's agreement for this rank."""
    endpoint = (server[0].host, server[0].port)
    writer, reader = (
        AgreementStore(process_groups.job_store(endpoint, timedelta(seconds=1)), "torchrelay/job/")
        for _ in range(2)
    )
    names = [f"chunk/{number}" for number in range(500)]
    gone: set[str] = set()

    def come_and_go() -> None:
        for name in names:
            writer.put(name, b"\0data")
            writer.delete(name)
            gone.add(name)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for name in names:
            while name not in gone:
                assert reader.get(name) in (None, b"\0data")
    finally:
        thread.join()
    assert reader.get(names[0]) is None
