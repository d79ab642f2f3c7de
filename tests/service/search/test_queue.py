"""The search queue: who searches what for whom, and in which order (what goes wrong: test_losses.py)."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from search_parts import AIM, ASK, Site, of, run, task, winners
from service_parts import TOOLCHAIN, RedisServer
from torchrelay.compiler.tuning.queries import KnownEntries, SearchResult
from torchrelay.service.compile.search import queue, scheduler, session
from torchrelay.service.compile.single_flight import Priority
from tuning_parts import PLACE, entry


def test_what_a_compile_wants_is_searched_by_all_lanes_and_then_known(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        problems = [of(size) for size in range(1, 9)]
        first = await here.queue.want(PLACE, problems, ASK)
        assert first == KnownEntries([], open=8)
        known = await here.wanted(*problems)
        assert winners(known) == dict.fromkeys(problems, "a")
        assert {worker for worker, _ in here.pool.began} == {"a", "b"}
        assert len(here.pool.began) == 8
        assert {each.problem for each in await here.tunings.known(PLACE, problems)} == set(problems)
        assert await here.counted("found") == 8

    run(redis_server, scenario)


def test_the_largest_problems_are_searched_first(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        await here.wanted(*(of(size) for size in (3, 500, 20, 100)))
        assert [shape for _, shape in here.pool.began] == [of(size).shape() for size in (500, 100, 20, 3)]

    run(redis_server, scenario)


def test_what_a_compile_wants_later_is_put_in_its_order_and_another_compiles_behind(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        first, other = of(1, hold="yes"), msgspec.structs.replace(ASK, key="another")
        await here.queue.want(PLACE, [first], ASK)
        await here.until(lambda: here.pool.began != [])
        await here.queue.want(PLACE, [of(900)], other)
        await here.queue.want(PLACE, [first, of(3), of(20)], ASK)
        await here.queue.want(PLACE, [of(500)], ASK)
        here.pool.release.set()
        await here.wanted(*(of(size) for size in (3, 20, 500, 900)))
        assert [shape for _, shape in here.pool.began] == [of(size).shape() for size in (1, 500, 20, 3, 900)]

    run(redis_server, scenario)


def test_what_a_person_waits_for_is_searched_before_what_a_jobs_compile_waits_for(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        job, person = (msgspec.structs.replace(ASK, key=key) for key in ("a job's", "a person's"))
        await here.queue.want(PLACE, [of(1, hold="yes")], ASK)
        await here.until(lambda: here.pool.began != [])
        await here.queue.want(PLACE, [of(900), of(800)], job, priority=Priority.BATCH)
        await here.queue.want(PLACE, [of(3), of(800)], person)
        here.pool.release.set()
        await here.until(lambda: len(here.pool.began) == 4)
        assert [shape for _, shape in here.pool.began] == [of(size).shape() for size in (1, 800, 3, 900)]

    run(redis_server, scenario)


def test_a_compile_without_problems_hears_of_none(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        assert await here.queue.want(PLACE, [], ASK, wait_seconds=5.0) == KnownEntries([])

    run(redis_server, scenario)


def test_a_patient_compile_hears_of_what_was_found_when_it_is(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        problems = [of(1, hold="yes"), of(2, hold="yes")]
        known = await here.queue.want(PLACE, problems, ASK, wait_seconds=0.05)
        assert (known.entries, known.open) == ([], 2)
        asked = asyncio.create_task(here.queue.want(PLACE, problems, ASK, wait_seconds=60.0))
        await here.until(lambda: len(here.pool.began) == 2)
        assert not asked.done()
        here.pool.release.set()
        assert (await asked).entries

    run(redis_server, scenario)


def test_a_patient_compile_hears_at_once_that_something_is_given_up(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        problems = [of(1, hold="yes"), of(2, unfit="it is another")]
        known = await here.queue.want(PLACE, problems, ASK, wait_seconds=60.0)
        assert (known.given_up, known.open) == ([problems[1]], 1)
        here.pool.release.set()

    run(redis_server, scenario)


def test_compiles_that_want_the_same_cause_one_search(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        told = await asyncio.gather(*(here.wanted(of(1, hold="yes"), of(2)) for _ in range(5)), release(here))
        assert all(winners(known) == {of(1, hold="yes"): "a", of(2): "a"} for known in told[:5])
        assert len(here.pool.began) == 2

    async def release(here: Site) -> None:
        await here.until(lambda: len(here.pool.began) == 2)
        here.pool.release.set()

    run(redis_server, scenario)


def test_what_is_known_is_told_at_once_and_searched_by_nobody(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        await here.tunings.store([entry(1), entry(2)])
        known = await here.queue.want(PLACE, [of(1), of(2)], ASK)
        assert (known.open, known.given_up, len(known.entries)) == (0, [], 2)
        assert here.pool.starts == 0

    run(redis_server, scenario)


def test_entries_are_told_in_the_order_asked_for_wherever_they_are_known_from(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        await here.wanted(of(1), of(3))
        await here.redis.flushdb()  # what was found for a compile is remembered in the gateway
        await here.tunings.store([entry(2)])
        known = await here.queue.want(PLACE, [of(1), of(2), of(3)], ASK)
        assert [each.problem for each in known.entries] == [of(1), of(2), of(3)]

    run(redis_server, scenario)


def test_a_place_that_the_compile_could_not_measure_in_is_not_searched_for_it(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        for changed in ({"torch": "1.0"}, {"threads": 1 << 20}, {"capability": "avx512"}):
            place = msgspec.structs.replace(PLACE, **changed)  # type: ignore[arg-type]
            assert (await here.queue.want(place, [of(1)], ASK)).given_up == [of(1)]
        assert here.pool.starts == 0

    run(redis_server, scenario)


def test_a_compile_on_another_model_of_processor_is_told_that_nobody_searches_there(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        elsewhere = msgspec.structs.replace(PLACE, device="another CPU")
        known = await here.wanted(of(1), place=elsewhere)
        assert known.given_up == [of(1)]
        assert here.pool.began == []
        here.pool.up["c"] = elsewhere
        assert winners(await here.wanted(of(2), place=elsewhere)) == {of(2): "a"}
        assert here.pool.began == [("c", of(2).shape())]

    run(redis_server, scenario)


def test_without_a_worker_nothing_is_open(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        other = msgspec.structs.replace(TOOLCHAIN, python="cp399")
        ask = msgspec.structs.replace(ASK, toolchain=other)
        await here.queue.want(PLACE, [of(1)], ask)
        await here.until(lambda: not here.queue.waiting)
        assert (await here.queue.want(PLACE, [of(1)], ask)).given_up == [of(1)]
        assert await here.counted("no_searcher") == 1

    run(redis_server, scenario)


# --- batch jobs ------------------------------------------------------------------------------------------


def test_a_batch_task_is_searched_and_its_owner_hears_by_which_worker(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        heard: list[str] = []
        search = here.queue.submit(task(1), AIM, heard.append)
        outcome = await search.outcome()
        assert isinstance(outcome, SearchResult)
        assert [timing.candidate for timing in outcome.timings] == ["a", "b", "c"]
        assert outcome.entry == (await here.tunings.known(PLACE, [of(1)]))[0]
        assert heard == [here.pool.began[0][0]]
        assert search.state == "done"

    run(redis_server, scenario)


def test_a_batch_task_that_is_known_is_not_searched(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        await here.tunings.store([entry(1, "theirs")])
        search = here.queue.submit(task(1), AIM)
        outcome = await search.outcome()
        assert isinstance(outcome, SearchResult)
        assert (outcome.entry.winner.candidate, outcome.timings) == ("theirs", [])
        assert here.pool.began == []

    run(redis_server, scenario)


def test_a_task_of_any_settings_takes_the_problem_that_the_searcher_made_of_it(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        loose = msgspec.structs.replace(task(1, other="yes"), exact=False)
        outcome = await here.queue.submit(loose, AIM).outcome()
        assert isinstance(outcome, SearchResult)
        assert outcome.entry.problem == of(99)
        exact = await here.queue.submit(task(2, other="yes"), AIM).outcome()
        assert isinstance(exact, str)
        assert "another problem" in exact

    run(redis_server, scenario)


def test_compiles_come_before_batch_jobs(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        searches = [here.queue.submit(task(size), AIM) for size in range(1, 21)]
        await here.until(lambda: len(here.pool.began) >= 2)
        await here.wanted(of(100), of(101))
        done = sum(search.state == "done" for search in searches)
        assert done < 20
        order = [shape for _, shape in here.pool.began]
        assert max(order.index(of(size).shape()) for size in (100, 101)) <= done + 3
        await asyncio.gather(*(search.outcome() for search in searches))

    run(redis_server, scenario)


def test_batch_tasks_leave_workers_to_compiles(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.pool.compiling = {"a", "b"}
        search = here.queue.submit(task(1), AIM)
        assert winners(await here.wanted(of(2))) == {of(2): "a"}  # a compile's, beside it
        assert search.state == "queued"
        here.pool.compiling = {"a"}
        here.pool.queued = 1
        await asyncio.sleep(1.2)
        assert search.state == "queued"
        here.pool.queued = 0
        await search.outcome()
        assert here.pool.began[-1][0] == "b"

    run(redis_server, scenario)


def test_a_cancelled_task_is_not_searched_and_one_under_way_is_kept_all_the_same(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        first, second = here.queue.submit(task(1, hold="yes"), AIM), here.queue.submit(task(2), AIM)
        await here.until(lambda: here.pool.began != [])
        first.cancel()
        second.cancel()
        assert [await each.outcome() for each in (first, second)] == ["cancelled", "cancelled"]
        here.pool.release.set()
        third = here.queue.submit(task(3), AIM)
        await third.outcome()
        assert [shape for _, shape in here.pool.began] == [of(1).shape(), of(3).shape()]
        assert len(await here.tunings.known(PLACE, [of(1, hold="yes")])) == 1
        await here.queue.submit(task(2), AIM).outcome()

    run(redis_server, scenario)


def test_a_task_is_searched_that_is_submitted_again_while_the_cancelled_one_is_under_way(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        first = here.queue.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: here.pool.began != [])
        first.cancel()
        again = here.queue.submit(task(1, hold="yes"), AIM)
        here.pool.release.set()
        outcome = await asyncio.wait_for(again.outcome(), 20)
        assert not isinstance(outcome, str)

    run(redis_server, scenario)


def test_namespaces_share_the_devices(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TURN_SECONDS", 0.2)

    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        other = here.another("red")
        slow = [here.queue.submit(task(size), AIM) for size in range(1, 200)]
        await here.until(lambda: here.pool.began != [])
        theirs = other.submit(task(1), AIM)
        await theirs.outcome()  # long before all of the first queue's
        assert sum(search.state == "done" for search in slow) < 199
        assert here.pool.namespaces[:2] == ["default", "red"]
        await here.wanted(of(300), queue=other)
        assert sum(search.state == "done" for search in slow) < 199

    run(redis_server, scenario)


# --- before a compile wants anything ---------------------------------------------------------------------


def test_searchers_are_warm_when_a_compile_that_tunes_wants_something(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.queue.expect(AIM)
        await here.until(lambda: len(here.pool.searching) == 2)
        assert here.pool.began == []
        assert len(winners(await here.wanted(of(1), of(2)))) == 2
        assert here.pool.starts == 2

    run(redis_server, scenario)


def test_after_compiles_that_wanted_nothing_no_searcher_is_warmed_until_one_wants_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "EXPECT_SECONDS", 0.5)
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.1)

    async def expected(here: Site) -> int:
        before = here.pool.starts
        here.queue.expect(AIM)
        await here.until(lambda: not here.queue.expects() and not here.pool.searching)
        return here.pool.starts - before

    async def scenario(here: Site) -> None:
        assert [await expected(here) for _ in range(4)] == [2, 2, 0, 0]
        await here.wanted(of(1))
        await here.until(lambda: not here.pool.searching)
        assert await expected(here) == 2

    run(redis_server, scenario)


def test_who_expects_takes_no_lane_from_who_has_work(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        other = here.another("red")
        search = here.queue.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: here.pool.began != [])
        other.expect(AIM)
        await asyncio.sleep(0.7)
        assert here.pool.namespaces == ["default"]
        here.pool.release.set()
        await search.outcome()
        second = here.queue.submit(task(2), AIM)
        await second.outcome()

    run(redis_server, scenario)


def test_an_expecting_searcher_yields_to_a_compile_at_once(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        other = here.another("red")
        other.expect(AIM)
        await here.until(lambda: here.pool.namespaces == ["red"])
        await asyncio.sleep(0.1)
        began = time.monotonic()
        assert winners(await here.wanted(of(1))) == {of(1): "a"}
        assert time.monotonic() - began < session.IDLE_SECONDS / 2

    run(redis_server, scenario)


def test_an_expecting_searcher_yields_to_a_batch_job_once_nothing_is_expected(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "EXPECT_SECONDS", 3.0)

    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        other = here.another("red")
        other.expect(AIM)
        await here.until(lambda: here.pool.namespaces == ["red"])
        batch = here.queue.submit(task(3), AIM)
        await asyncio.sleep(0.3)
        assert batch.state == "queued"
        assert isinstance(await batch.outcome(), SearchResult)

    run(redis_server, scenario)
