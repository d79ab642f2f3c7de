"""Redis under an idle installation: in: sizes; out: rows of benchmarks/scale.py's table.

A real redis-server, as many gateways and dispatchers as said, each with its own connections and background tasks, as
ASGI apps in this process. Kubernetes' probes and Prometheus ask each of them as often as in deploy/. Workers are names
of slots that dispatchers share through Redis. Entries are written by publish.lua with the arguments that ArtifactCache
makes; no bytes lie in the store, where artifacts of this number would be.

    python benchmarks/support/scale_idle.py --namespaces 10 100 1000 --gateways 1 10 50 --keys 10000 100000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, cast

import httpx2
import structlog
from support.local_redis import redis_server
from support.scale_rows import Row, at_most, exponent, table
from torchrelay.compiler.api import compiles
from torchrelay.compiler.request import schema
from torchrelay.service.access.audit import AuditEvent, AuditLog
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.cache.artifact_cache import ArtifactCache, Offer
from torchrelay.service.cache.components import EntryComponents
from torchrelay.service.compile.single_flight import CompileNeeds
from torchrelay.service.compile.slot_claims import SlotClaims
from torchrelay.service.gateway.app import create_app
from torchrelay.service.gateway.parts import GatewayParts
from torchrelay.service.local.dispatcher import create_dispatcher_app
from torchrelay.service.parts.shared import SharedParts
from torchrelay.service.storage.blobs import BlobStore
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import DEFAULT_NAMESPACE, Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.pool import WorkerPool

TOKEN = "benchmark-" + "0" * 32
TOOLCHAIN = schema.Toolchain(python="cp311", torch="2.13.0+cpu", triton="", cuda="", platform="linux-x86_64")
TARGET = schema.Target(kind="cpu", name="", capability="", units=0, cpu=[])
PROBE_SECONDS = 10.0
SCRAPE_SECONDS = 15.0
SLOT_SECONDS = 2.0
"""As workers/pool.py claims its slots."""
SETTLE_SECONDS = 5.0
MOST_OPERATIONS, MOST_SCRIPT_MS, MOST_KEY_BYTES = 100, 5.0, 2000
_SWEEPING = ("hmget", "hexists", "hscan", "xlen")
_PIPELINE = 500
_SCRIPT_RUNS = 40
_MEASURING = {"info", "config|resetstat", "slowlog|get", "slowlog|reset", "config", "slowlog"}


@dataclass(frozen=True)
class Size:
    namespaces: int
    gateways: int
    dispatchers: int = 10
    slots: int = 500
    keys: int = 0


@dataclass
class Found:
    """What one size costs. operations: commands a second, those of scripts too; busy: seconds of Redis' time a second;
    scripts: ms of the runs of each; key_bytes: of Redis' memory."""

    size: Size
    operations: float = 0.0
    busy: float = 0.0
    by_command: dict[str, float] = field(default_factory=dict)
    scripts: dict[str, list[float]] = field(default_factory=dict)
    key_bytes: float = math.nan


class IdlePool:
    """Slots that are claimed as workers/pool.py claims them, and no workers."""

    queued = elsewhere = 0
    cluster = ""

    def __init__(self, claims: SlotClaims, slots: Sequence[str], toolchain: schema.Toolchain) -> None:
        self._claims = claims
        self._slots = slots
        self._toolchain = toolchain
        self._own: list[str] = []
        self._claiming: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._claiming = asyncio.create_task(self._claim(), name="claim slots")

    async def _claim(self) -> None:
        while True:
            self._own = sorted(await self._claims.claim("cluster|cpu||", self._slots, self._own))
            await asyncio.sleep(SLOT_SECONDS)

    async def close(self) -> None:
        if self._claiming is not None:
            self._claiming.cancel()

    def workers(self) -> list[compiles.WorkerInfo]:
        return [compiles.WorkerInfo(name, self._toolchain, TARGET, "idle", 0) for name in self._own]

    def node_resources(self) -> list[dict[str, float]]:
        return []

    def on_change(self, call: Callable[[], None]) -> None:
        return

    def on_failure(self, call: Callable[[str, Exception | None], None]) -> None:
        return

    def room(self, toolchain: schema.Toolchain, target: schema.Target) -> int | None:
        return 0


async def measure(size: Size, folder: Path, *, seconds: float) -> Found:
    """Starts an installation of this size, and looks at its Redis for so long."""
    found = Found(size)
    with redis_server(folder) as port:
        settings = ServiceSettings(
            redis_url=f"redis://127.0.0.1:{port}/0",
            state_dir=folder / "state",
            token=TOKEN,  # type: ignore[arg-type]
            training=True,
            log_level="error",
        )
        redis: Any = connect(settings)  # redis-py's: also what RedisClient does not name
        names = [f"team-{number}" for number in range(1, size.namespaces)]
        if names:
            await redis.hset(Keys(settings.redis_prefix).namespaces, mapping=dict.fromkeys(names, "{}"))
        if size.keys:
            found.key_bytes = await _fill(redis, settings, [DEFAULT_NAMESPACE, *names], size.keys)
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(_serving(create_app(settings))) for _ in range(size.gateways)
            ]
            slots = [f"node-{number}" for number in range(size.slots)]
            for _ in range(size.dispatchers):
                claims = SlotClaims(Keys(settings.redis_prefix), Scripts(redis), settings)
                pool = cast(WorkerPool, IdlePool(claims, slots, TOOLCHAIN))
                clients.append(
                    await stack.enter_async_context(_serving(create_dispatcher_app(settings, pool)))
                )
            asking = [
                asyncio.create_task(_ask(client, number / len(clients)))
                for number, (client, _) in enumerate(clients)
            ]
            await _settled(redis, Keys(settings.redis_prefix))
            await redis.config_resetstat()
            await asyncio.sleep(seconds)
            commands = await redis.info("commandstats")
            counted = {
                name.removeprefix("cmdstat_"): stat
                for name, stat in commands.items()
                if name.removeprefix("cmdstat_") not in _MEASURING
            }
            found.by_command = {name: stat["calls"] / seconds for name, stat in counted.items()}
            found.operations = sum(found.by_command.values())
            found.busy = sum(stat["usec"] for stat in counted.values()) / 1e6 / seconds
            if failing := [each for _, app in clients for each in _failing(app).items()]:
                raise RuntimeError(f"what is measured does not work: {failing}")
            found.scripts = await _time_scripts(redis, clients[0][1].state.gateway)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await redis.aclose()
    return found


async def _settled(redis: Any, keys: Keys) -> None:
    """Waits until what is done at the start alone is over: a sum of all counters, and a count and a sweep of the cache,
    which look at each namespace."""
    async with asyncio.timeout(300):
        looked = -1
        while looked or await redis.exists(keys.summed, keys.swept) != 2:
            await redis.config_resetstat()
            await asyncio.sleep(SETTLE_SECONDS)
            looked = len(
                (await redis.info("commandstats")).keys() & {f"cmdstat_{name}" for name in _SWEEPING}
            )


def _failing(app: Any) -> dict[str, str]:
    """Background tasks of a gateway or a dispatcher that fail, and the kind of error."""
    parts = getattr(app.state, "gateway", None) or app.state.dispatcher.shared
    failing: dict[str, str] = parts.supervisor.failing()
    return failing


@contextlib.asynccontextmanager
async def _serving(app: Any) -> AsyncIterator[tuple[httpx2.AsyncClient, Any]]:
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://service", timeout=60) as client:
            yield client, app


async def _ask(client: httpx2.AsyncClient, phase: float) -> None:
    """What an orchestrator and Prometheus ask of each process."""

    async def every(seconds: float, path: str) -> None:
        await asyncio.sleep(phase * seconds)
        while True:
            assert (await client.get(path)).status_code in (200, 503)
            await asyncio.sleep(seconds)

    await asyncio.gather(every(PROBE_SECONDS, "/readyz"), every(SCRAPE_SECONDS, "/metrics"))


# --- entries -----------------------------------------------------------------------------------------------


class _Recorded:
    """Gathers the calls of scripts in place of running them: hundreds go to Redis together."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], list[Any]]] = []

    async def publish(self, keys: list[str], args: list[Any]) -> list[bytes]:
        self.calls.append(("publish", keys, args))
        return [b"published"]

    async def describe(self, keys: list[str], args: list[Any]) -> None:
        self.calls.append(("describe", keys, args))


def _key(number: int) -> str:
    return hashlib.sha256(f"key {number}".encode()).hexdigest()


def _text(script: str) -> str:
    """A script as Redis gets it."""
    lua = resources.files("torchrelay.service.storage.redis") / "lua"
    return "".join((lua / f"{name}.lua").read_text("utf-8") for name in ("shared/prelude", script))


class _NoBytes:
    async def put(self, key: str, digest: str, data: bytes) -> str:
        return "store"


async def _fill(redis: Any, settings: ServiceSettings, namespaces: list[str], count: int) -> float:
    """Publishes `count` keys, each compiled for somebody, as the audit log says; bytes of Redis' memory for each."""
    shared = SharedParts(settings)
    recorded = _Recorded()
    audits = {
        name: AuditLog(redis, shared.keys.of(name), entries=settings.audit_entries) for name in namespaces
    }
    caches = {
        name: ArtifactCache(
            redis,
            shared.keys.of(name),
            cast(Scripts, recorded),
            cast(BlobStore, _NoBytes()),
            shared.memory,
            shared.uses,
            shared.metrics,
            audits[name],
            shared.keyring,
            EntryComponents(
                redis, shared.keys.of(name), cast(Scripts, recorded), limit=settings.explain_bytes
            ),
            settings,
        )
        for name in namespaces
    }
    shas = {name: await redis.script_load(_text(f"cache/{name}")) for name in ("publish", "describe")}
    before = await _memory(redis)
    dice = random.Random(0)
    data = bytes(100)
    for first in range(0, count, _PIPELINE):
        for number in range(first, min(first + _PIPELINE, count)):
            key = _key(number)
            offer = Offer(
                key, hashlib.sha256(key.encode()).hexdigest(), data, 20.0, _components(dice), "w0", "s" * 16
            )
            await caches[namespaces[number % len(namespaces)]].publish("import", offer)
        async with redis.pipeline(transaction=False) as pipe:
            for name, keys, args in recorded.calls:
                pipe.evalsha(shas[name], len(keys), *keys, *args)
            for number in range(first, min(first + _PIPELINE, count)):
                event = AuditEvent(action="compile", name="somebody", token="0" * 12, key=_key(number))
                namespace = namespaces[number % len(namespaces)]
                await audits[namespace].append(event, within=pipe)
                pipe.delete(shared.keys.of(namespace).events(_key(number)))  # as an hour later
            await pipe.execute()
        recorded.calls.clear()
    used = await _memory(redis) - before
    shared.keyring.close()
    await shared.redis.aclose()
    return used / count


async def _memory(redis: Any) -> int:
    return int((await redis.info("memory"))["used_memory"])


def _components(dice: random.Random) -> dict[str, str]:
    """As many and as random bytes as those of a GPT-2 with 12 layers: 7.4 kB, 1.9 kB with zstd."""
    kinds = [
        ["call_function torch.nn.functional.layer_norm", 25],
        ["call_method view", 48],
        ["call_function _operator.add", 24],
    ]
    order = " ".join(f"{dice.randrange(14)}:{dice.randrange(1 << 32):08x}" for _ in range(230))
    inputs = [
        {
            "type": "tensor",
            "shape": [64 * dice.randrange(1, 9), 64],
            "stride": [64, 1],
            "dtype": "float32",
            "device": "cpu",
            "requires_grad": True,
            "storage_bytes": 256 * number,
        }
        for number in range(16)
    ]
    return {
        "schema": "1",
        "graph": f"{dice.randrange(1 << 64):016x}",
        "graph.order": order,
        "graph.kinds": str(kinds).replace("'", '"') * 2,
        "inputs": f"{dice.randrange(1 << 64):016x}",
        "inputs.kinds": str(inputs).replace("'", '"').replace("True", "true"),
        "inputs.order": str([dice.randrange(16) for _ in range(100)]),
        "mode": "default",
        **{f"ambient.flags.{number}": "false" for number in range(40)},
        **{f"toolchain.{name}": "2.13.0+cpu" for name in ("torch", "python", "triton", "cuda", "platform")},
    }


# --- scripts -----------------------------------------------------------------------------------------------


async def _time_scripts(redis: Any, gateway: GatewayParts) -> dict[str, list[float]]:
    """Milliseconds that Redis took for each script of a request's way, each run some times."""
    tenant = gateway.tenants.default
    keys = tenant.keys
    known = [key.decode() for key in await redis.zrange(keys.lru, 0, _SCRIPT_RUNS - 1)]
    needs = CompileNeeds(TOOLCHAIN, TARGET, schema.REVISION)

    async def lookup(number: int) -> None:
        key = known[number] if number < len(known) else "0" * 64
        await gateway.scripts.lookup(keys=keys.entry_keys(key), args=[key, keys.blob_prefix, "hit"])

    async def queue(number: int) -> None:
        await tenant.leases.queue(f"{number:064x}", b"no pool here has room for it", needs)

    async def trim(number: int) -> None:
        await tenant.cache.trim()

    async def ask(number: int) -> None:
        await gateway.tokens.check(issued.secret, "127.0.0.1")

    owner = await gateway.tokens.check(TOKEN, "127.0.0.1")
    issued = await gateway.tokens.issue("somebody", frozenset({"compile"}), by=owner)
    works: dict[str, Callable[[int], Awaitable[None]]] = {
        "access/authenticate": ask,
        "cache/lookup": lookup,
        "lease/acquire": queue,
        "cache/evict": trim,
    }
    await redis.config_set("slowlog-max-len", 10_000)
    await redis.config_set("slowlog-log-slower-than", 0)
    times: dict[str, list[float]] = {}
    for name, work in works.items():
        await redis.slowlog_reset()
        for number in range(_SCRIPT_RUNS):
            await work(number)
        log = await redis.slowlog_get(10_000)
        call = b"EVALSHA " + hashlib.sha1(_text(name).encode()).hexdigest().encode()
        times[name] = [entry["duration"] / 1000 for entry in log if entry["command"].startswith(call)]
    await redis.config_set("slowlog-log-slower-than", 10_000)
    return times


# --- rows --------------------------------------------------------------------------------------------------


def rows(
    *,
    namespaces: Sequence[int] = (10, 100, 1000),
    gateways: Sequence[int] = (1, 10, 50),
    keys: Sequence[int] = (10_000, 100_000),
    dispatchers: int = 10,
    slots: int = 500,
    seconds: float = 60.0,
    folder: Path | None = None,
) -> list[Row]:
    """Each size with the largest of the others; what is idle is looked at for `seconds`."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    most_names, most_gateways = max(namespaces), max(gateways)

    def found(**changes: int) -> Found:
        most = {"namespaces": most_names, "gateways": most_gateways}
        size = Size(**{**most, "dispatchers": dispatchers, "slots": slots, **changes})
        with tempfile.TemporaryDirectory(dir=folder) as own:
            result = asyncio.run(measure(size, Path(own), seconds=seconds))
        often = sorted(result.by_command.items(), key=lambda item: -item[1])[:9]
        text = f"{size}: {result.operations:.1f}/s, {result.busy:.3%} busy, {result.key_bytes:.0f} B a key"
        print(text, [f"{name} {rate:.1f}" for name, rate in often], file=sys.stderr, flush=True)
        return result

    filled = [found(keys=count) for count in keys]
    by_names = [found(namespaces=count) for count in namespaces if count != most_names] + filled[:1]
    by_gateways = [found(gateways=count) for count in gateways if count != most_gateways] + filled[:1]
    last, names = filled[-1], [each.size.namespaces for each in by_names]
    laws = (
        _law("namespaces", names, [each.operations for each in by_names]),
        _law(
            "gateways",
            [each.size.gateways for each in by_gateways],
            [each.operations for each in by_gateways],
        ),
        _law("keys", list(keys), [each.operations for each in filled]),
    )
    found_rows = [
        at_most(
            "idle: commands to Redis, also in scripts",
            max(each.operations for each in filled),
            "/s",
            MOST_OPERATIONS,
            "; ".join(filter(None, laws)),
        ),
        Row(
            "idle: Redis' processor",
            100 * last.busy,
            "% of a core",
            law=_law("namespaces", names, [each.busy for each in by_names]),
        ),
        at_most(
            f"Redis' memory for a key, {last.size.keys:,} keys",
            last.key_bytes,
            "B",
            MOST_KEY_BYTES,
            _law("keys", list(keys), [each.key_bytes for each in filled]),
        ),
    ]
    for name, times in last.scripts.items():
        law = _law("namespaces", names, [statistics.median(each.scripts[name]) for each in by_names])
        slow = statistics.quantiles(times, n=10)[-1]
        found_rows.append(at_most(f"{name}.lua, 9 of 10 calls", slow, "ms", MOST_SCRIPT_MS, law))
    return found_rows


def _law(what: str, sizes: list[int], values: list[float]) -> str:
    if len(sizes) < 2:
        return ""
    return f"{what}^{exponent(sizes, values):.2f}, {min(sizes):,} to {max(sizes):,}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, sizes in (
        ("namespaces", (10, 100, 1000)),
        ("gateways", (1, 10, 50)),
        ("keys", (10_000, 100_000)),
    ):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=sizes)
    parser.add_argument("--dispatchers", type=int, default=10)
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path)
    began = time.monotonic()
    print(table(rows(**vars(parser.parse_args()))))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
