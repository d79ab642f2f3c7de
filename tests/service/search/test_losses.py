"""Searches when something goes wrong: candidates that end their process, lost workers, silence, floods, no Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import msgspec
import pytest
from redis.exceptions import RedisError
from search_parts import AIM, ASK, Site, of, run, task, winners
from service_parts import RedisServer
from torchrelay.compiler.tuning.queries import SearchResult
from torchrelay.compiler.tuning.records import TuningEntry
from torchrelay.service.compile.search import queue, scheduler, session
from torchrelay.service.compile.search import task as search_task
from torchrelay.service.compile.search.database import StoredEntry
from tuning_parts import PLACE, entry


def test_a_candidate_that_ends_the_process_is_avoided_and_the_search_goes_on(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        search = here.queue.submit(task(1, crash="ab"), AIM)
        outcome = await search.outcome()
        assert isinstance(outcome, SearchResult)
        assert outcome.entry.winner.candidate == "c"
        assert (search.task.avoid, search.losses) == (("a", "b"), 2)
        assert winners(await here.wanted(of(2, crash="a"))) == {of(2, crash="a"): "b"}

    run(redis_server, scenario)


def test_a_lost_worker_is_no_candidates_fault_unless_it_happens_again(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        held = here.queue.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: here.pool.began != [])
        await asyncio.sleep(0.1)
        here.pool.lose(here.pool.began[0][0])
        await here.until(lambda: len(here.pool.began) == 2)
        here.pool.release.set()
        assert isinstance(await held.outcome(), SearchResult)
        assert (held.task.avoid, held.losses) == ((), 1)
        assert here.pool.began[0][0] != here.pool.began[1][0]
        again = here.queue.submit(task(2, lose="a"), AIM)
        assert isinstance(await again.outcome(), SearchResult)
        assert (again.task.avoid, again.losses) == (("a",), 2)

    run(redis_server, scenario)


def test_a_task_that_ends_searchers_before_it_tries_anything_is_given_up_and_harms_no_other(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        here.pool.ahead = 3
        held = [here.queue.submit(each, AIM) for each in (task(1, hold="yes"), task(2, die="yes"), task(3))]
        await here.until(lambda: here.pool.began != [])
        here.pool.release.set()
        first, second, third = [await search.outcome() for search in held]
        assert isinstance(second, str)
        assert (
            "3 search sessions ended over it, at last: the search process ended with exit status 9" in second
        )
        assert isinstance(first, SearchResult)
        assert isinstance(third, SearchResult)
        assert held[2].losses <= 1
        assert (await here.wanted(of(9, die="yes"))).given_up == [of(9, die="yes")]

    run(redis_server, scenario)


def test_an_unfit_task_fails_with_the_searchers_words(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        assert await here.queue.submit(task(1, unfit="no such operator"), AIM).outcome() == "no such operator"
        assert (await here.wanted(of(2, unfit="no"))).given_up == [of(2, unfit="no")]
        assert await here.counted("unfit") == 2

    run(redis_server, scenario)


def test_a_new_worker_takes_part_and_a_lost_ones_tasks_go_to_others(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        batch = [here.queue.submit(task(size, hold="yes"), AIM) for size in (1, 2, 3)]
        await here.until(lambda: len(here.pool.began) == 1)
        here.pool.up |= {"b": PLACE, "c": PLACE}
        await here.until(lambda: len(here.pool.began) == 3)
        here.pool.lose("a")
        here.pool.release.set()
        outcomes = await asyncio.gather(*(search.outcome() for search in batch))
        assert all(isinstance(outcome, SearchResult) for outcome in outcomes)
        assert {worker for worker, _ in here.pool.began} == {"a", "b", "c"}

    run(redis_server, scenario)


def test_a_searchers_last_word_counts(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(here: Site) -> None:
        store = here.tunings.store
        keeping, lost = asyncio.Event(), asyncio.Event()

        async def slowly(entries: Sequence[TuningEntry]) -> list[StoredEntry[TuningEntry]]:
            keeping.set()
            await lost.wait()
            return await store(entries)

        monkeypatch.setattr(here.tunings, "store", slowly)
        search = here.queue.submit(task(1), AIM)
        await keeping.wait()
        here.pool.lose(search.worker)  # it has reported, and does not hear the answer
        lost.set()
        assert isinstance(await asyncio.wait_for(search.outcome(), 30), SearchResult)
        assert len(here.pool.began) == 1

    run(redis_server, scenario)


def test_with_all_workers_gone_compiles_go_on_without_and_batch_jobs_wait(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "STALL_SECONDS", 0.5)

    async def scenario(here: Site) -> None:
        up = here.pool.up
        here.pool.up = {}
        search = here.queue.submit(task(1), AIM)
        assert (await here.wanted(of(2))).given_up == [of(2)]
        assert await here.counted("stalled") == 1
        assert search.state == "queued"
        here.pool.up = up
        assert isinstance(await search.outcome(), SearchResult)

    run(redis_server, scenario)


def test_searchers_that_do_not_start_hold_up_no_compile_and_a_lane_that_works_is_found(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "BACKOFF_SECONDS", (0.05, 0.1))

    async def scenario(here: Site) -> None:
        here.pool.broken = {"a"}
        assert winners(await here.wanted(of(1), of(2), of(3))) == dict.fromkeys([of(1), of(2), of(3)], "a")
        here.pool.lose("b")
        await here.until(lambda: not here.pool.searching)
        known = await here.wanted(of(4))
        assert known.given_up == [of(4)]
        starts = here.pool.starts
        search = here.queue.submit(task(5), AIM)
        await here.until(lambda: here.pool.starts > starts + scheduler._FAILED_STARTS)
        assert search.state == "queued"
        starts = here.pool.starts
        await asyncio.sleep(1.0)
        assert here.pool.starts - starts < 25  # it rests between two tries
        here.pool.broken = set()
        assert isinstance(await search.outcome(), SearchResult)

    run(redis_server, scenario)


def test_a_searcher_that_falls_silent_is_killed_and_its_task_goes_on_elsewhere(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SILENT_SECONDS", 0.5)

    async def scenario(here: Site) -> None:
        search = here.queue.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: len(here.pool.began) == 2)
        here.pool.release.set()
        assert isinstance(await search.outcome(), SearchResult)
        assert search.losses >= 1

    run(redis_server, scenario)


def test_what_no_compile_asks_for_any_more_is_forgotten(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "FORGET_SECONDS", 0.3)

    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        await here.queue.want(PLACE, [of(1, hold="yes")], ASK)
        await here.until(lambda: here.pool.began != [])
        await here.queue.want(PLACE, [of(2)], ASK)
        await here.until(lambda: len(here.queue._wants) == 1)  # what is being searched goes on
        here.pool.release.set()
        await here.until(lambda: here.queue._wants == {})
        assert [shape for _, shape in here.pool.began] == [of(1).shape()]

    run(redis_server, scenario)


def test_compiles_that_have_ended_are_forgotten_though_another_still_waits(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "FORGET_SECONDS", 0.05)

    async def scenario(here: Site) -> None:
        here.pool.up.pop("b")
        await here.queue.want(PLACE, [of(1, hold="yes")], ASK)
        await here.until(lambda: here.pool.began != [])
        await here.tunings.store([entry(2)])
        for number in range(10):  # what they want is known, or searched by nobody yet
            ended = msgspec.structs.replace(ASK, key=f"ended {number}")
            await here.queue.want(PLACE, [entry(2).problem, of(3 + number)], ended)
        await here.until(lambda: [want.compile for want in here.queue._wants.values()] == [ASK.key])
        here.pool.release.set()

    run(redis_server, scenario)


def test_workers_that_are_gone_are_forgotten(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MOST_WORKERS", 2)
    monkeypatch.setattr(scheduler, "BACKOFF_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.05)

    async def scenario(here: Site) -> None:
        for number in range(4):
            here.pool.broken = {f"broken {number}"}
            here.pool.up = {f"broken {number}": PLACE}
            begun = here.queue.submit(task(number + 1), AIM)
            await here.until(lambda number=number: f"broken {number}" in here.scheduler._backoffs)
            here.pool.up = {f"worker {number}": PLACE}
            await begun.outcome()
            await here.until(lambda: not here.scheduler._sessions)
        assert len(here.scheduler._environments) <= 2
        assert len(here.scheduler._backoffs) <= 2

    run(redis_server, scenario)


def test_a_flood_of_problems_is_given_back_past_a_bound(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "MOST_WANTED", 100)

    async def scenario(here: Site) -> None:
        here.pool.up = {}
        known = await here.queue.want(PLACE, [of(size) for size in range(1, 257)], ASK)
        assert (known.open, len(known.given_up)) == (100, 156)

    run(redis_server, scenario)


def test_idle_searchers_end_after_a_while_and_others_start_when_there_is_work(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.3)

    async def scenario(here: Site) -> None:
        await here.queue.submit(task(1), AIM).outcome()
        await here.queue.submit(task(2), AIM).outcome()
        assert here.pool.starts == 1  # it was still there
        await here.until(lambda: not here.pool.searching)
        await here.queue.submit(task(3), AIM).outcome()
        assert here.pool.starts == 2

    run(redis_server, scenario)


def test_while_redis_is_away_searches_go_on_and_what_they_find_is_kept_later() -> None:
    server = RedisServer(persistent=True)
    server.start()

    async def scenario(here: Site) -> None:
        await here.tunings.store([entry(50)])
        await asyncio.to_thread(server.stop)
        search = here.queue.submit(task(1), AIM)
        assert isinstance(await search.outcome(), SearchResult)
        known = await here.wanted(of(2), of(3))
        assert winners(known) == {of(2): "a", of(3): "a"}
        began = len(here.pool.began)
        assert winners(await here.wanted(of(2))) == {of(2): "a"}  # it is remembered here
        assert len(here.pool.began) == began
        await asyncio.to_thread(server.start)

        async def kept() -> bool:
            with contextlib.suppress(RedisError):
                return len(await here.tunings.known(PLACE, [of(1), of(2), of(3)])) == 3
            return False

        await here.until(kept)

    try:
        run(server, scenario, socket_timeout=0.5, socket_connect_timeout=0.5)
    finally:
        server.close()


def test_a_gateway_that_stops_ends_its_searchers_and_tells_who_waits(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        search = here.queue.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: here.pool.began != [])
        await here.scheduler.close()
        assert await search.outcome() == "the gateway stops"
        assert here.pool.searching == {}

    run(redis_server, scenario)


def test_prefetched_tasks_are_left_to_who_has_nothing(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.pool.ahead = 3
        batch = [here.queue.submit(task(size, hold="yes"), AIM) for size in (1, 2)]
        await here.until(lambda: len(here.pool.began) == 2)
        assert {worker for worker, _ in here.pool.began} == {"a", "b"}
        here.pool.release.set()
        await asyncio.gather(*(search.outcome() for search in batch))

    run(redis_server, scenario)


def test_who_has_nothing_takes_over_what_another_has_not_begun_and_leaves_him_one(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.pool.ahead = 4
        here.pool.up.pop("b")
        problems = [of(9, hold="yes"), of(8), of(7), of(6)]
        await here.queue.want(PLACE, problems, ASK)
        await here.until(lambda: here.pool.began == [("a", of(9).shape())])
        here.pool.up["b"] = PLACE
        here.queue.expect(AIM)
        await here.until(lambda: len(here.pool.began) == 3)
        assert here.pool.began[1:] == [("b", of(6).shape()), ("b", of(7).shape())]
        here.pool.release.set()
        assert len(winners(await here.wanted(*problems))) == 4
        assert here.pool.began[3:] == [("a", of(8).shape())]
        assert (await here.counted("found"), await here.counted("lost")) == (4, 0)

    run(redis_server, scenario)


def test_what_another_has_not_begun_is_taken_over_though_a_tuning_jobs_tasks_wait_for_room(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.pool.ahead = 3
        here.pool.compiling = {"a", "b"}
        here.pool.up.pop("b")
        batch = here.queue.submit(task(50), AIM)
        await here.queue.want(PLACE, [of(9, hold="yes"), of(8), of(7)], ASK)
        await here.until(lambda: here.pool.began == [("a", of(9).shape())])
        here.pool.up["b"] = PLACE
        here.queue.expect(AIM)
        await here.until(lambda: here.pool.began[1:] == [("b", of(7).shape())])
        assert batch.state == "queued"
        here.pool.release.set()

    run(redis_server, scenario)


def test_what_nobody_wants_any_more_is_taken_over_by_nobody(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.pool.ahead = 4
        here.pool.up.pop("b")
        searches = [here.queue.submit(task(size, hold="yes"), AIM) for size in (9, 8, 7, 6)]
        await here.until(lambda: len(here.pool.began) == 1)
        for search in searches[1:3]:
            search.cancel()
        here.pool.up["b"] = PLACE
        here.queue.expect(AIM)
        await here.until(lambda: "b" in here.pool.searching)
        await asyncio.sleep(0.3)
        assert [worker for worker, _ in here.pool.began] == ["a"], "one that is wanted is left to him"
        here.pool.release.set()
        await asyncio.gather(searches[0].outcome(), searches[3].outcome())

    run(redis_server, scenario)


def test_what_was_taken_over_goes_on_elsewhere_when_its_searcher_is_lost(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.pool.ahead = 3
        here.pool.up.pop("b")
        problems = [of(9, hold="yes"), of(8), of(7, hold="yes")]
        await here.queue.want(PLACE, problems, ASK)
        await here.until(lambda: len(here.pool.began) == 1)
        here.pool.up["b"] = PLACE
        here.queue.expect(AIM)
        await here.until(lambda: here.pool.began[1:] == [("b", of(7).shape())])
        here.pool.lose("b")
        await here.until(lambda: "b" not in here.pool.searching)
        here.pool.release.set()
        assert len(winners(await here.wanted(*problems))) == 3
        assert [worker for worker, shape in here.pool.began if shape == of(7).shape()] == ["b", "a"]
        assert await here.counted("found") == 3

    run(redis_server, scenario)


def test_ten_thousand_tasks_do_not_stall_the_gateway(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        batch = [here.queue.submit(task(size, hold="yes"), AIM) for size in range(1, 10_001)]
        await here.until(lambda: len(here.pool.began) == 2)
        began = time.process_time()
        for _ in range(3):
            await here.scheduler._schedule()
        assert (time.process_time() - began) / 3 < 0.5
        for search in batch:
            search.cancel()

    run(redis_server, scenario)


def test_bad_luck_has_a_bound() -> None:
    async def scenario() -> None:
        search = search_task.SearchTask(task(1), AIM, turn=1)
        for number in range(20):
            search.lose(candidate=f"c{number}", certain=True, why="it died")
        outcome = await search.outcome()
        assert outcome == "17 of its candidates end the search process"

    asyncio.run(scenario())
