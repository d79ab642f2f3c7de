"""What a job asks of the service while it runs: the way there and back, and what cannot go wrong on it. No Ray."""

from __future__ import annotations

import asyncio
import os
import time

import engine
import forms
import msgspec
import pytest
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import CompileKilled
from torchrelay.compiler.tuning import queries as tuning_queries
from torchrelay.compiler.tuning import records
from torchrelay.workers.fork_server import queries as fork_server_queries
from torchrelay.workers.fork_server.queries import (
    COMPILE_QUERY_LIMIT,
    OPEN_QUERY_LIMIT,
    SEARCH_QUERY_LIMIT,
    QueryRelay,
    query_limit,
)
from torchrelay.workers.messages import (
    BadFrame,
    FrameDecoder,
    JobDone,
    JobFailed,
    JobQuery,
    QueryReply,
    WorkerJob,
    decode_answer,
)
from torchrelay.workers.messages import decode_reply as decoded
from torchrelay.workers.slot.actor import CompileSlot

NO_ANSWER = "the service has no answer about tuning"
RESTING = "the service did not answer a moment ago"


def warm_slot(tmp_path, names=("none",)):
    return forms.warm_slot(forms.settings(tmp_path, names, engine="engine"))


def known(question: bytes, *, note: str = "") -> bytes:
    """An answer: one entry whose winner names the size that was asked for."""
    (problem,) = decoding.from_msgpack(question, type=tuning_queries.EntryLookup).problems
    timing = records.Timing(f"size {problem.result.size[0]}", 1.0, 1.0, 1.0, 1)
    entry = records.TuningEntry(problem=problem, place=engine.PLACE, winner=timing, candidates=1, clock=note)
    return msgspec.msgpack.encode(tuning_queries.KnownEntries([entry]))


async def run(slot: CompileSlot, answer, job_id="j", seconds=60.0, **order):
    """What the job returns. `answer`: told each query, and replies as it likes."""
    request = msgspec.json.encode({"do": "inquire", **order})
    async for body in slot.compile(job_id, WorkerJob("key", request, seconds, engine.TARGET)):
        message = decode_answer(body)
        if isinstance(message, JobQuery):
            await answer(message)
        elif isinstance(message, JobFailed):
            raise message.error()
        elif isinstance(message, JobDone):
            return decoding.from_json(message.artifact)
    raise AssertionError("no answer")


def answering(slot, job_id="j", **more):
    async def answer(query):
        await slot.reply(job_id, query.id, known(query.question, **more))

    return answer


async def say_nothing(query):
    return


async def still_works(slot):
    assert await run(slot, answering(slot), how="in turn", sizes=[9]) == [["size 9"]]


@pytest.mark.parametrize("form", forms.CONFINING)
def test_a_job_asks_and_is_answered_however_it_is_shut_in(tmp_path, form):
    forms.require(form)

    async def scenario():
        async with warm_slot(tmp_path, (form, "none")) as (slot, ready):
            assert form in ready.isolation
            assert await run(slot, answering(slot), how="in turn", sizes=[2, 3]) == [["size 2"], ["size 3"]]

    asyncio.run(scenario())


def test_threads_ask_at_once_and_each_gets_its_own_answer(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            sizes = list(range(1, 21))
            answers = await run(slot, answering(slot), how="in threads", sizes=sizes)
            assert answers == [[f"size {size}"] for size in sizes]

    asyncio.run(scenario())


def test_an_answer_many_times_a_pipes_size_comes_whole(tmp_path):
    large = tuning_queries.KnownEntries(
        [
            records.TuningEntry(
                problem=engine.problem(5),
                place=engine.PLACE,
                candidates=1,
                clock="x" * 4000,
                winner=records.Timing(f"number {number}", 1.0, 1.0, 1.0, 1),
            )
            for number in range(1000)
        ]
    )

    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):

            async def answer(query):
                await slot.reply("j", query.id, msgspec.msgpack.encode(large))

            (found,) = await run(slot, answer, how="in turn", sizes=[5])
            assert found == [f"number {number}" for number in range(1000)]

    asyncio.run(scenario())


def test_without_an_answer_a_job_goes_on_and_asks_no_more_for_a_while(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            asked = []

            async def answer(query):
                asked.append(query.id)

            began = time.monotonic()
            found = await run(slot, answer, how="in turn", sizes=[2, 3, 4], wait=0.5)
            assert found == [NO_ANSWER, RESTING, RESTING]
            assert len(asked) == 1
            assert time.monotonic() - began >= 0.5
            await still_works(slot)

    asyncio.run(scenario())


def test_an_empty_answer_is_none_and_is_not_waited_for(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):

            async def answer(query):
                await slot.reply("j", query.id, b"")

            assert await run(slot, answer, how="in turn", sizes=[2], wait=1000, seconds=30) == [NO_ANSWER]

    asyncio.run(scenario())


def test_an_answer_that_comes_too_late_is_not_the_next_questions(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            late = []

            async def answer(query):
                late.append(query)
                if len(late) == 2:  # the first question's answer comes first
                    for each in late:
                        await slot.reply("j", each.id, known(each.question))

            found = await run(slot, answer, how="in turn", sizes=[2, 3], wait=1, rest=0)
            assert found == [NO_ANSWER, ["size 3"]]

    asyncio.run(scenario())


def test_who_is_never_answered_stops_asking_before_it_counts_as_a_flood(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            sizes = list(range(1, 2 * OPEN_QUERY_LIMIT))
            found = await run(slot, say_nothing, how="in turn", sizes=sizes, wait=0.05, rest=0)
            assert found[:OPEN_QUERY_LIMIT] == [NO_ANSWER] * OPEN_QUERY_LIMIT
            assert set(found[OPEN_QUERY_LIMIT:]) == {"this job has asked as much as it may"}

    asyncio.run(scenario())


def test_a_copy_of_a_job_is_refused_rather_than_given_the_jobs_answers(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            found = await run(slot, answering(slot), how="in a copy", size=2)
            assert found == ["a copy of the compile's process cannot ask the service", ["size 2"]]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("queries", "words"),
    [
        ([(i, 0) for i in range(OPEN_QUERY_LIMIT + 1)], "before earlier ones were answered"),
        ([(1, 0), (1, 0)], "before earlier ones were answered"),
        ([(1, tuning_queries.QUESTION_LIMIT + 1)], f"length <= {tuning_queries.QUESTION_LIMIT}"),
        ([(1 << 32, 0)], "invalid message"),
    ],
    ids=["too many at once", "one name for two", "too long", "a name out of range"],
)
def test_a_job_that_asks_as_no_compile_does_is_killed_and_the_server_serves_on(tmp_path, queries, words):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            with pytest.raises(CompileKilled, match=words):
                await run(slot, say_nothing, how="raw", queries=queries)
            await still_works(slot)

    asyncio.run(scenario())


@pytest.mark.parametrize("then", ["ignore", "close"])
def test_a_job_that_does_not_read_its_answers_loses_them_and_stops_nobody(tmp_path, then):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):

            async def answer(query):
                await slot.reply("j", query.id, bytes(3 << 20))

            began = time.monotonic()
            queries = [(number, 10) for number in range(OPEN_QUERY_LIMIT)]
            assert await run(slot, answer, how="raw", queries=queries, then=then) == "done"
            assert time.monotonic() - began < 30
            await still_works(slot)

    asyncio.run(scenario())


def test_a_job_cancelled_over_an_open_question_leaves_no_answer_for_the_next_one(tmp_path):
    async def scenario():
        async with warm_slot(tmp_path) as (slot, _):
            asked = asyncio.Event()
            first = []

            async def cancel(query):
                first.append(query)
                asked.set()

            job = asyncio.create_task(run(slot, cancel, job_id="a", how="in turn", sizes=[2]))
            await asked.wait()
            await slot.reply("another job", first[0].id, known(first[0].question))
            await slot.cancel("a")
            await slot.reply("a", first[0].id, known(first[0].question))
            with pytest.raises(CompileKilled, match="cancelled"):
                await asyncio.wait_for(job, 10)

            async def answer(query):
                assert query.id == first[0].id
                await slot.reply("a", query.id, known(first[0].question))
                await slot.reply("b", query.id, known(query.question))

            assert await run(slot, answer, job_id="b", how="in turn", sizes=[3]) == [["size 3"]]

    asyncio.run(scenario())


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    yield reading, writing
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("work", "most"),
    [("compile", COMPILE_QUERY_LIMIT), ("search", SEARCH_QUERY_LIMIT)],
    ids=["compile", "search"],
)
def test_one_job_asks_so_often_and_no_more(pipe, monkeypatch, work, most):
    monkeypatch.setattr(fork_server_queries, "SEARCH_QUERY_LIMIT", 2 * COMPILE_QUERY_LIMIT)
    most = min(most, 2 * COMPILE_QUERY_LIMIT)
    relay = QueryRelay(pipe[1], query_limit(WorkerJob("key", b"", 1.0, engine.TARGET, work=work)))
    for number in range(most):
        relay.ask(JobQuery(number, b""))
        relay.answer(QueryReply(number, b""))
        os.read(pipe[0], 1 << 20)
    with pytest.raises(BadFrame, match=f"more than {most}"):
        relay.ask(JobQuery(most, b""))


def test_an_answer_that_nobody_asked_for_is_not_handed_on(pipe):
    relay = QueryRelay(pipe[1])
    relay.ask(JobQuery(1, b""))
    relay.answer(QueryReply(2, b"another's"))
    relay.answer(QueryReply(1, b"own"))
    relay.answer(QueryReply(1, b"again"))
    assert [decoded(body).answer for body in FrameDecoder(QueryReply).feed(os.read(pipe[0], 1 << 20))] == [
        b"own"
    ]


def test_what_is_not_read_does_not_grow_without_bound_and_what_is_kept_is_whole(pipe):
    relay, frames = QueryRelay(pipe[1]), FrameDecoder(QueryReply)
    for number in range(100):
        relay.ask(JobQuery(number, b""))
        relay.answer(QueryReply(number, bytes(1 << 20)))
    assert len(relay._unread) <= fork_server_queries.UNREAD_BYTES + (1 << 20)
    got = []
    while relay.pending:
        got += frames.feed(os.read(pipe[0], 1 << 20))
        relay.flush()
    os.set_blocking(pipe[0], False)
    got += frames.feed(os.read(pipe[0], 1 << 20))
    replies = [decoded(body) for body in got]
    assert [reply.id for reply in replies] == list(range(len(replies)))
    assert 0 < len(replies) <= (fork_server_queries.UNREAD_BYTES >> 20) + 1
    assert {len(reply.answer) for reply in replies} == {1 << 20}
