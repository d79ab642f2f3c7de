"""The farm: who searches what for whom, in which order, and what becomes of it when something goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from farm_parts import AIM, ASK, Lanes, Site, of, site, task, winners
from service_parts import TOOLCHAIN, RedisServer
from torchrelay.compiler.errors import NoWorker
from torchrelay.compiler.tuning import Entry, Found, Known
from torchrelay.service import crew, farm, searcher, tickets
from torchrelay.service.farm import Aim
from torchrelay.service.tunings import Kept
from tuning_parts import PLACE, entry

Scenario = Callable[[Site], Coroutine[None, None, None]]


def run(server: RedisServer, scenario: Scenario, lanes: Callable[[], Lanes] = Lanes, **options: Any) -> None:
    async def opened() -> None:
        async with site(server, lanes(), **options) as here:
            async with asyncio.timeout(60):
                await scenario(here)

    asyncio.run(opened())


def test_what_a_compile_wants_is_searched_by_all_lanes_and_then_known(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        problems = [of(size) for size in range(1, 9)]
        first = await here.farm.want(PLACE, problems, ASK)
        assert first == Known([], open=8)
        known = await here.wanted(*problems)
        assert winners(known) == dict.fromkeys(problems, "a")
        assert {worker for worker, _ in here.lanes.began} == {"a", "b"}
        assert len(here.lanes.began) == 8
        assert {each.problem for each in await here.tunings.known(PLACE, problems)} == set(problems)
        assert here.counted("found") == 8

    run(redis_server, scenario)


def test_the_largest_problems_are_searched_first(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        await here.wanted(*(of(size) for size in (3, 500, 20, 100)))
        assert [shape for _, shape in here.lanes.began] == [of(size).shape() for size in (500, 100, 20, 3)]

    run(redis_server, scenario)


def test_what_a_compile_wants_later_is_put_in_its_order_and_another_compiles_behind(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        first, other = of(1, hold="yes"), msgspec.structs.replace(ASK, key="another")
        await here.farm.want(PLACE, [first], ASK)
        await here.until(lambda: here.lanes.began != [])
        await here.farm.want(PLACE, [of(900)], other)
        await here.farm.want(PLACE, [first, of(3), of(20)], ASK)
        await here.farm.want(PLACE, [of(500)], ASK)
        here.lanes.release.set()
        await here.wanted(*(of(size) for size in (3, 20, 500, 900)))
        assert [shape for _, shape in here.lanes.began] == [of(size).shape() for size in (1, 500, 20, 3, 900)]

    run(redis_server, scenario)


def test_a_patient_compile_hears_of_what_was_found_when_it_is(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        problems = [of(1, hold="yes"), of(2, hold="yes")]
        known = await here.farm.want(PLACE, problems, ASK, patience=0.05)
        assert (known.entries, known.open) == ([], 2)
        asked = asyncio.create_task(here.farm.want(PLACE, problems, ASK, patience=60.0))
        await here.until(lambda: len(here.lanes.began) == 2)
        assert not asked.done()
        here.lanes.release.set()
        assert (await asked).entries

    run(redis_server, scenario)


def test_a_patient_compile_hears_at_once_that_something_is_given_up(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        problems = [of(1, hold="yes"), of(2, unfit="it is another")]
        known = await here.farm.want(PLACE, problems, ASK, patience=60.0)
        assert (known.given_up, known.open) == ([problems[1]], 1)
        here.lanes.release.set()

    run(redis_server, scenario)


def test_compiles_that_want_the_same_cause_one_search(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        told = await asyncio.gather(*(here.wanted(of(1, hold="yes"), of(2)) for _ in range(5)), release(here))
        assert all(winners(known) == {of(1, hold="yes"): "a", of(2): "a"} for known in told[:5])
        assert len(here.lanes.began) == 2

    async def release(here: Site) -> None:
        await here.until(lambda: len(here.lanes.began) == 2)
        here.lanes.release.set()

    run(redis_server, scenario)


def test_what_is_known_is_told_at_once_and_searched_by_nobody(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        await here.tunings.keep([entry(1), entry(2)])
        known = await here.farm.want(PLACE, [of(1), of(2)], ASK)
        assert (known.open, known.given_up, len(known.entries)) == (0, [], 2)
        assert here.lanes.starts == 0

    run(redis_server, scenario)


def test_entries_are_told_in_the_order_asked_for_wherever_they_are_known_from(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        await here.wanted(of(1), of(3))
        await here.redis.flushdb()  # what was found for a compile is remembered in the gateway
        await here.tunings.keep([entry(2)])
        known = await here.farm.want(PLACE, [of(1), of(2), of(3)], ASK)
        assert [each.problem for each in known.entries] == [of(1), of(2), of(3)]

    run(redis_server, scenario)


def test_a_place_that_the_compile_could_not_measure_in_is_not_searched_for_it(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        for changed in ({"torch": "1.0"}, {"threads": 1 << 20}, {"capability": "avx512"}):
            place = msgspec.structs.replace(PLACE, **changed)  # type: ignore[arg-type]
            assert (await here.farm.want(place, [of(1)], ASK)).given_up == [of(1)]
        assert here.lanes.starts == 0

    run(redis_server, scenario)


def test_a_compile_on_another_model_of_processor_is_told_that_nobody_searches_there(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        elsewhere = msgspec.structs.replace(PLACE, device="another CPU")
        known = await here.wanted(of(1), place=elsewhere)
        assert known.given_up == [of(1)]
        assert here.lanes.began == []
        here.lanes.up["c"] = elsewhere
        assert winners(await here.wanted(of(2), place=elsewhere)) == {of(2): "a"}
        assert here.lanes.began == [("c", of(2).shape())]

    run(redis_server, scenario)


def test_without_a_worker_nothing_is_open(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        other = msgspec.structs.replace(TOOLCHAIN, python="cp399")
        with pytest.raises(NoWorker, match="toolchain"):
            here.farm.check(Aim(other, AIM.target, 1))
        ask = msgspec.structs.replace(ASK, toolchain=other)
        await here.farm.want(PLACE, [of(1)], ask)
        await asyncio.sleep(0.05)
        assert (await here.farm.want(PLACE, [of(1)], ask)).given_up == [of(1)]
        assert here.counted("no_searcher") == 1

    run(redis_server, scenario)


# --- batch jobs ------------------------------------------------------------------------------------------


def test_a_batch_task_is_searched_and_its_owner_hears_all_of_it(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        heard: list[tuple[str, str]] = []
        ticket = here.farm.submit(task(1), AIM, on_change=lambda *change: heard.append(change))
        outcome = await ticket.outcome()
        assert isinstance(outcome, Found)
        assert [timing.candidate for timing in outcome.timings] == ["a", "b", "c"]
        assert outcome.entry == (await here.tunings.known(PLACE, [of(1)]))[0]
        worker = here.lanes.began[0][0]
        assert heard == [("searching", worker), ("done", worker)]
        assert not ticket.known

    run(redis_server, scenario)


def test_a_batch_task_that_is_known_is_not_searched(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        await here.tunings.keep([entry(1, "theirs")])
        ticket = here.farm.submit(task(1), AIM)
        outcome = await ticket.outcome()
        assert isinstance(outcome, Found)
        assert (outcome.entry.winner.candidate, ticket.known) == ("theirs", True)
        assert here.lanes.began == []

    run(redis_server, scenario)


def test_two_open_tasks_have_two_names(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.farm.submit(task(1, hold="yes"), AIM)
        with pytest.raises(ValueError, match="t1 is open"):
            here.farm.submit(task(1), AIM)

    run(redis_server, scenario)


def test_a_task_of_any_settings_takes_the_problem_that_the_searcher_made_of_it(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        loose = msgspec.structs.replace(task(1, other="yes"), exact=False)
        outcome = await here.farm.submit(loose, AIM).outcome()
        assert isinstance(outcome, Found)
        assert outcome.entry.problem == of(99)
        exact = await here.farm.submit(task(2, other="yes"), AIM).outcome()
        assert isinstance(exact, str)
        assert "another problem" in exact

    run(redis_server, scenario)


def test_compiles_come_before_batch_jobs(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        tickets = [here.farm.submit(task(size), AIM) for size in range(1, 21)]
        await here.until(lambda: len(here.lanes.began) >= 2)
        await here.wanted(of(100), of(101))
        done = sum(ticket.state == "done" for ticket in tickets)
        assert done < 20
        order = [shape for _, shape in here.lanes.began]
        assert max(order.index(of(size).shape()) for size in (100, 101)) <= done + 3
        await asyncio.gather(*(ticket.outcome() for ticket in tickets))

    run(redis_server, scenario)


def test_batch_tasks_leave_workers_to_compiles(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.compiling = {"a", "b"}
        ticket = here.farm.submit(task(1), AIM)
        assert winners(await here.wanted(of(2))) == {of(2): "a"}  # a compile's, beside it
        assert ticket.state == "queued"
        here.lanes.compiling = {"a"}
        here.lanes.queue = 1
        await asyncio.sleep(1.2)
        assert ticket.state == "queued"
        here.lanes.queue = 0
        await ticket.outcome()
        assert here.lanes.began[-1][0] == "b"

    run(redis_server, scenario)


def test_a_cancelled_task_is_not_searched_and_one_under_way_is_kept_all_the_same(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        first, second = here.farm.submit(task(1, hold="yes"), AIM), here.farm.submit(task(2), AIM)
        await here.until(lambda: here.lanes.began != [])
        first.cancel()
        second.cancel()
        assert [await each.outcome() for each in (first, second)] == ["cancelled", "cancelled"]
        here.lanes.release.set()
        third = here.farm.submit(task(3), AIM)
        await third.outcome()
        assert [shape for _, shape in here.lanes.began] == [of(1).shape(), of(3).shape()]
        assert len(await here.tunings.known(PLACE, [of(1, hold="yes")])) == 1
        again = here.farm.submit(task(2), AIM)  # its name is free
        await again.outcome()

    run(redis_server, scenario)


def test_a_task_is_searched_that_is_submitted_again_while_the_cancelled_one_is_under_way(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        first = here.farm.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: here.lanes.began != [])
        first.cancel()
        again = here.farm.submit(task(1, hold="yes"), AIM)
        here.lanes.release.set()
        outcome = await asyncio.wait_for(again.outcome(), 20)
        assert not isinstance(outcome, str)

    run(redis_server, scenario)


def test_namespaces_share_the_lanes(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_TURN_SECONDS", 0.2)

    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        other = here.another("red")
        slow = [here.farm.submit(task(size), AIM) for size in range(1, 200)]
        await here.until(lambda: here.lanes.began != [])
        theirs = other.submit(task(1), AIM)
        await theirs.outcome()  # long before all of the first farm's
        assert sum(ticket.state == "done" for ticket in slow) < 199
        assert here.lanes.namespaces[:2] == ["default", "red"]
        await here.wanted(of(300), farm=other)
        assert sum(ticket.state == "done" for ticket in slow) < 199
        await other.close()

    run(redis_server, scenario)


# --- what goes wrong -------------------------------------------------------------------------------------


def test_a_candidate_that_ends_the_process_is_avoided_and_the_search_goes_on(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        ticket = here.farm.submit(task(1, crash="ab"), AIM)
        outcome = await ticket.outcome()
        assert isinstance(outcome, Found)
        assert outcome.entry.winner.candidate == "c"
        assert (ticket.task.avoid, ticket.losses) == (("a", "b"), 2)
        assert winners(await here.wanted(of(2, crash="a"))) == {of(2, crash="a"): "b"}

    run(redis_server, scenario)


def test_a_lost_worker_is_no_candidates_fault_unless_it_happens_again(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        held = here.farm.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: here.lanes.began != [])
        await asyncio.sleep(0.1)
        here.lanes.lose(here.lanes.began[0][0])
        await here.until(lambda: len(here.lanes.began) == 2)
        here.lanes.release.set()
        assert isinstance(await held.outcome(), Found)
        assert (held.task.avoid, held.losses) == ((), 1)
        assert here.lanes.began[0][0] != here.lanes.began[1][0]
        again = here.farm.submit(task(2, lose="a"), AIM)
        assert isinstance(await again.outcome(), Found)
        assert (again.task.avoid, again.losses) == (("a",), 2)

    run(redis_server, scenario)


def test_a_task_that_ends_searchers_before_it_tries_anything_is_given_up_and_harms_no_other(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        here.lanes.ahead = 3
        held = [here.farm.submit(each, AIM) for each in (task(1, hold="yes"), task(2, die="yes"), task(3))]
        await here.until(lambda: here.lanes.began != [])
        here.lanes.release.set()
        first, second, third = [await ticket.outcome() for ticket in held]
        assert isinstance(second, str)
        assert "3 searchers ended over it, at last: the search process ended with exit status 9" in second
        assert isinstance(first, Found)
        assert isinstance(third, Found)
        assert held[2].losses <= 1
        assert (await here.wanted(of(9, die="yes"))).given_up == [of(9, die="yes")]

    run(redis_server, scenario)


def test_an_unfit_task_fails_with_the_searchers_words(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        assert await here.farm.submit(task(1, unfit="no such operator"), AIM).outcome() == "no such operator"
        assert (await here.wanted(of(2, unfit="no"))).given_up == [of(2, unfit="no")]
        assert here.counted("unfit") == 2

    run(redis_server, scenario)


def test_a_new_worker_takes_part_and_a_lost_ones_tasks_go_to_others(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        batch = [here.farm.submit(task(size, hold="yes"), AIM) for size in (1, 2, 3)]
        await here.until(lambda: len(here.lanes.began) == 1)
        here.lanes.up |= {"b": PLACE, "c": PLACE}
        await here.until(lambda: len(here.lanes.began) == 3)
        here.lanes.lose("a")
        here.lanes.release.set()
        outcomes = await asyncio.gather(*(ticket.outcome() for ticket in batch))
        assert all(isinstance(outcome, Found) for outcome in outcomes)
        assert {worker for worker, _ in here.lanes.began} == {"a", "b", "c"}

    run(redis_server, scenario)


def test_a_searchers_last_word_counts(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(here: Site) -> None:
        keep = here.tunings.keep
        keeping = asyncio.Event()

        async def slowly(entries: Sequence[Entry]) -> list[Kept]:
            keeping.set()
            await asyncio.sleep(0.2)
            return await keep(entries)

        monkeypatch.setattr(here.tunings, "keep", slowly)
        ticket = here.farm.submit(task(1), AIM)
        await keeping.wait()
        here.lanes.lose(ticket.detail)  # it has reported, and does not hear the answer
        assert isinstance(await asyncio.wait_for(ticket.outcome(), 5), Found)
        assert len(here.lanes.began) == 1

    run(redis_server, scenario)


def test_with_all_workers_gone_compiles_go_on_without_and_batch_jobs_wait(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farm, "STALL_SECONDS", 0.5)

    async def scenario(here: Site) -> None:
        up = here.lanes.up
        here.lanes.up = {}
        ticket = here.farm.submit(task(1), AIM)
        assert (await here.wanted(of(2))).given_up == [of(2)]
        assert here.counted("stalled") == 1
        assert ticket.state == "queued"
        here.lanes.up = up
        assert isinstance(await ticket.outcome(), Found)

    run(redis_server, scenario)


def test_searchers_that_do_not_start_hold_up_no_compile_and_a_lane_that_works_is_found(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "_BACKOFF_SECONDS", (0.05, 0.1))

    async def scenario(here: Site) -> None:
        here.lanes.broken = {"a"}
        assert winners(await here.wanted(of(1), of(2), of(3))) == dict.fromkeys([of(1), of(2), of(3)], "a")
        here.lanes.lose("b")
        await here.until(lambda: not here.lanes.searching)
        known = await here.wanted(of(4))
        assert known.given_up == [of(4)]
        ticket = here.farm.submit(task(5), AIM)
        await here.until(lambda: ticket.detail != "")
        assert (ticket.state, ticket.detail) == (
            "queued",
            "no searcher starts: the worker cannot start: there is no disk",
        )
        starts = here.lanes.starts
        await asyncio.sleep(1.0)
        assert here.lanes.starts - starts < 25  # it rests between two tries
        here.lanes.broken = set()
        assert isinstance(await ticket.outcome(), Found)

    run(redis_server, scenario)


def test_a_searcher_that_falls_silent_is_killed_and_its_task_goes_on_elsewhere(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searcher, "_SILENT_SECONDS", 0.5)

    async def scenario(here: Site) -> None:
        ticket = here.farm.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: len(here.lanes.began) == 2)
        here.lanes.release.set()
        assert isinstance(await ticket.outcome(), Found)
        assert ticket.losses >= 1

    run(redis_server, scenario)


def test_what_no_compile_asks_for_any_more_is_forgotten(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farm, "FORGET_SECONDS", 0.3)

    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        await here.farm.want(PLACE, [of(1, hold="yes")], ASK)
        await here.until(lambda: here.lanes.began != [])
        await here.farm.want(PLACE, [of(2)], ASK)
        await here.until(lambda: len(here.farm._wants) == 1)  # what is being searched goes on
        here.lanes.release.set()
        await here.until(lambda: here.farm._wants == {})
        assert [shape for _, shape in here.lanes.began] == [of(1).shape()]

    run(redis_server, scenario)


def test_a_flood_of_problems_is_given_back_past_a_bound(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farm, "MOST_WANTED", 100)

    async def scenario(here: Site) -> None:
        here.lanes.up = {}
        known = await here.farm.want(PLACE, [of(size) for size in range(1, 257)], ASK)
        assert (known.open, len(known.given_up)) == (100, 156)

    run(redis_server, scenario)


def test_idle_searchers_end_after_a_while_and_others_start_when_there_is_work(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searcher, "LINGER_SECONDS", 0.3)

    async def scenario(here: Site) -> None:
        await here.farm.submit(task(1), AIM).outcome()
        await here.farm.submit(task(2), AIM).outcome()
        assert here.lanes.starts == 1  # it was still there
        await here.until(lambda: not here.lanes.searching)
        await here.farm.submit(task(3), AIM).outcome()
        assert here.lanes.starts == 2

    run(redis_server, scenario)


def test_while_redis_is_away_searches_go_on_and_what_they_find_is_kept_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(farm, "_KEEP_AGAIN_SECONDS", (0.1, 0.2, 60.0))
    server = RedisServer(persistent=True)
    server.start()

    async def scenario(here: Site) -> None:
        await here.tunings.keep([entry(50)])
        await asyncio.to_thread(server.stop)
        ticket = here.farm.submit(task(1), AIM)
        assert isinstance(await ticket.outcome(), Found)
        known = await here.wanted(of(2), of(3))
        assert winners(known) == {of(2): "a", of(3): "a"}
        began = len(here.lanes.began)
        assert winners(await here.wanted(of(2))) == {of(2): "a"}  # it is remembered here
        assert len(here.lanes.began) == began
        await asyncio.to_thread(server.start)
        for _ in range(200):
            try:
                if len(await here.tunings.known(PLACE, [of(1), of(2), of(3)])) == 3:
                    return
            except Exception:
                pass
            await asyncio.sleep(0.1)
        raise AssertionError("they were not kept")

    try:
        run(server, scenario, socket_timeout=0.5, socket_connect_timeout=0.5)
    finally:
        server.close()


def test_a_gateway_that_stops_ends_its_searchers_and_tells_who_waits(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        ticket = here.farm.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: here.lanes.began != [])
        await here.farm.close()
        assert await ticket.outcome() == "the gateway stops"
        assert here.lanes.searching == {}

    run(redis_server, scenario)


def test_prefetched_tasks_are_left_to_who_has_nothing(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.ahead = 3
        batch = [here.farm.submit(task(size, hold="yes"), AIM) for size in (1, 2)]
        await here.until(lambda: len(here.lanes.began) == 2)
        assert {worker for worker, _ in here.lanes.began} == {"a", "b"}
        here.lanes.release.set()
        await asyncio.gather(*(ticket.outcome() for ticket in batch))

    run(redis_server, scenario)


def test_who_has_nothing_takes_over_what_another_has_not_begun_and_leaves_him_one(
    redis_server: RedisServer,
) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.ahead = 4
        here.lanes.up.pop("b")
        problems = [of(9, hold="yes"), of(8), of(7), of(6)]
        await here.farm.want(PLACE, problems, ASK)
        await here.until(lambda: here.lanes.began == [("a", of(9).shape())])
        here.lanes.up["b"] = PLACE
        here.farm.expect(AIM)
        await here.until(lambda: len(here.lanes.began) == 3)
        assert here.lanes.began[1:] == [("b", of(6).shape()), ("b", of(7).shape())]
        here.lanes.release.set()
        assert len(winners(await here.wanted(*problems))) == 4
        assert here.lanes.began[3:] == [("a", of(8).shape())]
        assert (here.counted("found"), here.counted("lost")) == (4, 0)

    run(redis_server, scenario)


def test_what_nobody_wants_any_more_is_taken_over_by_nobody(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.ahead = 4
        here.lanes.up.pop("b")
        tickets = [here.farm.submit(task(size, hold="yes"), AIM) for size in (9, 8, 7, 6)]
        await here.until(lambda: len(here.lanes.began) == 1)
        for ticket in tickets[1:3]:
            ticket.cancel()
        here.lanes.up["b"] = PLACE
        here.farm.expect(AIM)
        await here.until(lambda: "b" in here.lanes.searching)
        await asyncio.sleep(0.3)
        assert [worker for worker, _ in here.lanes.began] == ["a"], "one that is wanted is left to him"
        here.lanes.release.set()
        await asyncio.gather(tickets[0].outcome(), tickets[3].outcome())

    run(redis_server, scenario)


def test_what_was_taken_over_goes_on_elsewhere_when_its_searcher_is_lost(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.ahead = 3
        here.lanes.up.pop("b")
        problems = [of(9, hold="yes"), of(8), of(7, hold="yes")]
        await here.farm.want(PLACE, problems, ASK)
        await here.until(lambda: len(here.lanes.began) == 1)
        here.lanes.up["b"] = PLACE
        here.farm.expect(AIM)
        await here.until(lambda: here.lanes.began[1:] == [("b", of(7).shape())])
        here.lanes.lose("b")
        await here.until(lambda: "b" not in here.lanes.searching)
        here.lanes.release.set()
        assert len(winners(await here.wanted(*problems))) == 3
        assert [worker for worker, shape in here.lanes.began if shape == of(7).shape()] == ["b", "a"]
        assert here.counted("found") == 3

    run(redis_server, scenario)


def test_ten_thousand_tasks_do_not_stall_the_gateway(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        batch = [here.farm.submit(task(size, hold="yes"), AIM) for size in range(1, 10_001)]
        await here.until(lambda: len(here.lanes.began) == 2)
        began = time.process_time()
        for _ in range(3):
            await here.crew._look()
        assert (time.process_time() - began) / 3 < 0.5
        for ticket in batch:
            ticket.cancel()

    run(redis_server, scenario)


def test_bad_luck_has_a_bound() -> None:
    async def scenario() -> None:
        ticket = tickets.Ticket(task(1), AIM)
        for number in range(20):
            ticket.lose(candidate=f"c{number}", certain=True, why="it died")
        outcome = await ticket.outcome()
        assert outcome == "17 of its candidates end the searcher's process"

    asyncio.run(scenario())


# --- before a compile wants anything ---------------------------------------------------------------------


def test_searchers_are_warm_when_a_compile_that_tunes_wants_something(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.farm.expect(AIM)
        await here.until(lambda: len(here.lanes.searching) == 2)
        assert here.lanes.began == []
        assert len(winners(await here.wanted(of(1), of(2)))) == 2
        assert here.lanes.starts == 2

    run(redis_server, scenario)


def test_after_compiles_that_wanted_nothing_no_searcher_is_warmed_until_one_wants_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farm, "EXPECT_SECONDS", 0.1)
    monkeypatch.setattr(searcher, "LINGER_SECONDS", 0.1)

    async def expected(here: Site) -> int:
        before = here.lanes.starts
        here.farm.expect(AIM)
        await asyncio.sleep(0.3)
        await here.until(lambda: not here.lanes.searching)
        return here.lanes.starts - before

    async def scenario(here: Site) -> None:
        assert [await expected(here) for _ in range(4)] == [2, 2, 0, 0]
        await here.wanted(of(1))
        await here.until(lambda: not here.lanes.searching)
        assert await expected(here) == 2

    run(redis_server, scenario)


def test_who_expects_takes_no_lane_from_who_has_work(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        other = here.another("red")
        ticket = here.farm.submit(task(1, hold="yes"), AIM)
        await here.until(lambda: here.lanes.began != [])
        other.expect(AIM)
        await asyncio.sleep(0.7)
        assert here.lanes.namespaces == ["default"]
        here.lanes.release.set()
        await ticket.outcome()
        second = here.farm.submit(task(2), AIM)
        await second.outcome()
        await other.close()

    run(redis_server, scenario)


def test_an_expecting_searcher_yields_to_a_compile_at_once(redis_server: RedisServer) -> None:
    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        other = here.another("red")
        other.expect(AIM)
        await here.until(lambda: here.lanes.namespaces == ["red"])
        await asyncio.sleep(0.1)
        began = time.monotonic()
        assert winners(await here.wanted(of(1))) == {of(1): "a"}
        assert time.monotonic() - began < searcher.LINGER_SECONDS / 2
        await other.close()

    run(redis_server, scenario)


def test_an_expecting_searcher_yields_to_a_batch_job_once_nothing_is_expected(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farm, "EXPECT_SECONDS", 1.5)

    async def scenario(here: Site) -> None:
        here.lanes.up.pop("b")
        other = here.another("red")
        other.expect(AIM)
        await here.until(lambda: here.lanes.namespaces == ["red"])
        batch = here.farm.submit(task(3), AIM)
        await asyncio.sleep(0.3)
        assert batch.state == "queued"
        assert isinstance(await batch.outcome(), Found)
        await other.close()

    run(redis_server, scenario)
