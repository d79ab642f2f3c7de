"""What one process may hold: shares of it, turns at work, and connections that give way."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys

import pytest
from torchrelay.compiler.errors import Overloaded
from torchrelay.service.base import budgets
from torchrelay.service.base.budgets import Connections, FairWork, Shares


def test_one_that_floods_gets_half_and_the_next_half_of_what_is_left() -> None:
    shares = Shares("memory", 96)
    held = dict.fromkeys(("red", "blue", "green"), 0)
    for owner in held:
        with pytest.raises(Overloaded) as refused:
            while True:
                shares.take(1, (owner,))
                held[owner] += 1
        assert refused.value.retry_after
    assert held == {"red": 48, "blue": 24, "green": 12}
    shares.give(48, ("red",))
    shares.take(12, ("green",))


def test_a_tokens_share_is_a_part_of_its_namespaces() -> None:
    shares = Shares("streams", 100, most=20)
    for token in ("one", "two"):
        with pytest.raises(Overloaded, match="share"):
            while True:
                shares.take(1, (token,))
    assert shares.used == 40


def test_a_refusal_takes_nothing() -> None:
    shares = Shares("memory", 10)
    shares.take(4, ("team", "one"))
    with pytest.raises(Overloaded):
        shares.take(3, ("team", "two"))
    assert shares.used == 4
    shares.take(3, ("others", "two"))


def test_somebody_elses_work_begins_although_one_has_queued_much() -> None:
    async def scenario() -> list[str]:
        work, order = FairWork(3), []

        async def one(owner: str, seconds: float) -> None:
            async with work.turn(owner):
                order.append(owner)
                await asyncio.sleep(seconds)

        heavy = [asyncio.create_task(one("evil", 0.05)) for _ in range(12)]
        await asyncio.sleep(0)
        assert order == ["evil", "evil"]
        await one("good", 0)
        assert order == ["evil", "evil", "good"]
        await asyncio.gather(*heavy)
        return order

    assert len(asyncio.run(scenario())) == 13


def test_turns_go_by_the_time_that_work_takes_and_not_by_its_pieces() -> None:
    async def scenario() -> list[str]:
        work, order = FairWork(1), []

        async def one(owner: str, seconds: float) -> None:
            async with work.turn(owner):
                order.append(owner)
                await asyncio.sleep(seconds)

        await asyncio.gather(
            one("long", 0.3), *(one("long", 0.3) for _ in range(2)), *(one("short", 0.01) for _ in range(5))
        )
        return order

    assert asyncio.run(scenario()) == ["long", *["short"] * 5, "long", "long"]


def test_a_turn_that_is_cancelled_goes_to_the_next() -> None:
    async def scenario() -> None:
        work, release = FairWork(1), asyncio.Event()

        async def one(owner: str) -> str:
            async with work.turn(owner):
                await release.wait()
            return owner

        first, second, third = (asyncio.create_task(one(owner)) for owner in ("a", "b", "c"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        first.cancel()
        release.set()
        assert await third == "c"

    asyncio.run(scenario())


class Connection:
    gone = False

    def give_way(self) -> None:
        self.gone = True


def test_silent_connections_give_way_and_those_that_work_do_not() -> None:
    connections = Connections(3)
    first, second, third, fourth = (Connection() for _ in range(4))
    assert all(map(connections.add, (first, second, third)))
    connections.works(first)
    assert connections.add(fourth)
    assert [each.gone for each in (first, second, third)] == [False, True, False]
    for each in (third, fourth):
        connections.works(each)
    assert not connections.add(Connection())
    connections.rests(third)
    assert connections.add(Connection())
    assert third.gone and len(connections) == 3


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, %d));"
        "from torchrelay.service.base import budgets; print(budgets.raise_descriptor_limit())"
    )
    out = subprocess.run(
        [sys.executable, "-c", program % hard], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert int(out) == (min(hard, budgets.DESCRIPTORS) if hard > 0 else budgets.DESCRIPTORS)
