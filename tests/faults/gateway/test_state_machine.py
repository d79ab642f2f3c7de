"""Cache, leases and eviction against a model, on a real Redis and a real folder of blobs.

Hypothesis picks what callers do and where they are interrupted: a publisher between writing its blob and
offering it, an evictor between the index and the blobs, a reader between the same two. An interrupted caller
goes on later, or never. A lease expires when its key is deleted, which is what Redis does at its expiry.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from request_parts import manifest_of
from service_parts import NEEDS, TOKEN, RedisServer, queue_and_take
from signed import sign
from torchrelay.compiler.artifact import container
from torchrelay.compiler.errors import CompileKilled
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.cache.artifact_cache import Offer
from torchrelay.service.compile.single_flight import Lease, Leases
from torchrelay.service.gateway.parts import GatewayParts
from torchrelay.service.signing import key_files, keyring
from torchrelay.service.storage import installation
from torchrelay.service.storage.digests import DamagedStream
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts

KEYS = [f"{n:x}{n:x}" * 32 for n in (1, 2, 3)]
SMALL, LARGE, INLINE = 10, 3000, 2000
"""Bytes of an artifact's one member; artifacts up to INLINE lie in Redis, the others in the folder."""
LIMIT = 4000
"""Either a large artifact or two small ones."""
LONG_AGO = time.time() - 7200

a_key = st.sampled_from(KEYS)
a_content = st.tuples(st.sampled_from("ab"), st.sampled_from([SMALL, LARGE]))


Artifacts = dict[tuple[str, str, int], bytes]
"""By key, a letter and the bytes of its member."""


def make_artifacts(signer: Ed25519PrivateKey) -> Artifacts:
    """Real ones, signed: the cache gives out nothing else."""
    made: Artifacts = {}
    for key in KEYS:
        for letter in "ab":
            for size in (SMALL, LARGE):
                files = {"code.py": random.Random(f"{key}{letter}").randbytes(size)}
                packed = container.pack(manifest_of(key, files), files)
                made[key, letter, size] = sign(
                    packed, signer, key=key, namespace="default", epoch=0, signed_at=1_800_000_000
                )
    assert {len(data) <= INLINE for (_, _, size), data in made.items() if size == SMALL} == {True}
    return made


class Gate:
    """Around an asynchronous method: a call made while it is closed waits, after or before its work."""

    def __init__(
        self, call: Callable[..., Awaitable[Any]], *, before: bool, done: Callable[..., None]
    ) -> None:
        self._call = call
        self._before = before
        self._done = done
        self.closed = False
        self.waiting: list[asyncio.Future[None]] = []

    async def __call__(self, *arguments: Any) -> Any:
        if self._before:
            await self._pass()
        result = await self._call(*arguments)
        self._done(*arguments)
        if not self._before:
            await self._pass()
        return result

    async def _pass(self) -> None:
        if self.closed:
            self.closed = False
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]


class Holder:
    """Someone to whom a lease was granted once; the machine's `lease` says whose it is now."""

    def __init__(self, granted: Lease) -> None:
        self.granted = granted
        self.key = granted.key


class Interrupted:
    """A call that waits at a gate. What it may answer is known once it goes on."""

    def __init__(self, task: asyncio.Task[Any], gate: asyncio.Future[None], **about: Any) -> None:
        self.task = task
        self.gate = gate
        self.about = about


class CacheMachine(RuleBasedStateMachine):
    holders = Bundle("holders")
    publishers = Bundle("publishers")
    evictors = Bundle("evictors")
    readers = Bundle("readers")

    def __init__(self, server: RedisServer, keys_dir: Path, artifacts: Artifacts) -> None:
        super().__init__()
        self.artifacts = artifacts
        self.raw = server.client()
        self.raw.flushall()
        self.folder = Path(tempfile.mkdtemp(prefix="tr-"))
        configured = ServiceSettings(
            redis_url=server.url,
            state_dir=self.folder,
            keys_dir=keys_dir,
            token=TOKEN,
            lease_seconds=3600,
            blob_inline_bytes=INLINE,
            cache_limit_bytes=LIMIT,
            memory_cache_bytes=0,  # every reader reads the store
        )
        self.loop = asyncio.new_event_loop()
        self.gateway = GatewayParts(configured)
        self.cache = self.gateway.tenants.default.cache
        self.names = Keys(configured.redis_prefix)
        self.leases = Leases(self.names, Scripts(self.gateway.redis), configured)
        blobs: Any = self.cache._blobs
        self.put_gate = blobs.put = Gate(blobs.put, before=False, done=self._was_put)
        self.stream_gate = blobs.stream = Gate(blobs.stream, before=True, done=lambda *_: None)
        self.discard_gate = blobs.discard = Gate(blobs.discard, before=True, done=lambda *_: None)
        blobs.delete = Gate(blobs.delete, before=True, done=self._was_deleted)
        # the model
        self.lease: dict[str, str] = {}
        """Key to the token of its holder."""
        self.asked: set[str] = set()
        """Keys whose compile has begun and not ended: someone may take it over."""
        self.offered: dict[str, bytes] = {}
        """Key to the artifact that its index entry names; least recently used first."""
        self.blobs: set[str] = set()
        """Digests of blobs that are there and whole."""

    def teardown(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.do(asyncio.sleep(0))
        self.do(self.gateway.redis.aclose())
        self.loop.close()
        self.raw.close()
        shutil.rmtree(self.folder)

    def do(self, work: Awaitable[Any]) -> Any:
        time.sleep(0.002)  # last use is kept in milliseconds
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def until_interrupted(self, gate: Gate, work: Any, **about: Any) -> Interrupted | None:
        """Run `work` into `gate`; None if it came to its end without passing there."""
        before = len(gate.waiting)
        gate.closed = True
        task = self.loop.create_task(work)

        async def either() -> None:
            while not task.done() and len(gate.waiting) == before:
                await asyncio.sleep(0.0005)

        self.do(either())
        gate.closed = False
        return None if task.done() else Interrupted(task, gate.waiting[-1], **about)

    def go_on(self, call: Interrupted) -> Any:
        call.gate.set_result(None)
        return self.do(call.task)

    def crash(self, call: Interrupted) -> None:
        call.task.cancel()
        self.do(asyncio.wait({call.task}))

    def _was_put(self, key: str, digest: str, data: bytes) -> None:
        self.blobs.add(digest)

    def _was_deleted(self, key: str, digest: str, place: str) -> None:
        self.blobs.discard(digest)

    def _forget(self, key: str) -> None:
        """The index drops an entry; what lies in Redis goes in the same step, what lies in the folder later."""
        data = self.offered.pop(key)
        if len(data) <= INLINE:
            self.blobs.discard(hashlib.sha256(data).hexdigest())

    def _used(self, key: str) -> None:
        self.do(self.gateway.uses.write())  # as each second
        self.offered[key] = self.offered.pop(key)

    # leases

    @rule(target=holders, key=a_key)
    def ask(self, key: str) -> Any:
        answer = self.do(queue_and_take(self.leases, key, b"body", NEEDS))
        if key in self.offered:
            assert answer == "hit"
        elif key in self.lease:
            assert answer == "wait"
        else:
            assert isinstance(answer, Lease)
            return self._granted(answer)
        return multiple()

    @rule(target=holders, key=a_key)
    def take_over(self, key: str) -> Any:
        granted = self.do(self.leases.take(key, NEEDS))
        assert (granted is not None) is (
            key in self.asked and key not in self.lease and key not in self.offered
        )
        return multiple() if granted is None else self._granted(granted)

    def _granted(self, granted: Lease) -> Holder:
        assert granted.body == b"body"
        key = granted.key
        self.lease[key] = granted.token
        self.asked.add(key)
        return Holder(granted)

    @rule(key=a_key)
    def expire(self, key: str) -> None:
        self.raw.delete(self.names.lease(key))
        self.lease.pop(key, None)

    @rule(holder=holders)
    def renew(self, holder: Holder) -> None:
        before, key = holder.granted, holder.key
        verdict, holder.granted = self.do(self.leases.renew(holder.granted))
        if key in self.lease:
            ours = self.lease[key].startswith(f"{before.owner}:")
            assert verdict == ("held" if ours else "lost")
        elif key in self.offered:
            assert verdict == "published"
        else:
            assert verdict == "retaken"
            assert int(holder.granted.fence) > int(before.fence)
            self.lease[key] = holder.granted.token
            self.asked.add(key)

    @rule(holder=consumes(holders))
    def fail(self, holder: Holder) -> None:
        ours = self.lease.get(holder.key) == holder.granted.token
        error = CompileKilled("the worker died")
        assert self.do(self.leases.fail(holder.granted, error, remember_seconds=0)) is ours
        if ours:
            del self.lease[holder.key]
            self.asked.discard(holder.key)

    # publication

    def _publication(self, holder: Holder, content: tuple[str, int]) -> tuple[str, str, bytes, Any]:
        data = self.artifacts[holder.key, *content]
        lease = holder.granted
        digest = hashlib.sha256(data).hexdigest()
        offer = Offer(key=holder.key, digest=digest, data=data, seconds=1.0, components={})
        return holder.key, lease.token, data, self.cache.publish(lease.token, offer)

    def _check_publication(self, key: str, token: str, data: bytes, outcome: bool) -> None:
        """First publish wins, and only the lease's holder publishes, under its newest fence."""
        if key in self.offered:
            assert outcome is (self.offered[key] == data)
            return
        assert outcome is (self.lease.get(key) == token)
        if outcome:
            self.offered[key] = data
            del self.lease[key]
            self.asked.discard(key)

    @rule(holder=holders, content=a_content)
    def publish(self, holder: Holder, content: tuple[str, int]) -> None:
        key, token, data, work = self._publication(holder, content)
        self._check_publication(key, token, data, self.do(work))

    @rule(key=a_key, content=a_content)
    def compile(self, key: str, content: tuple[str, int]) -> None:
        """The way things go mostly, so that the cache fills."""
        answer = self.do(queue_and_take(self.leases, key, b"body", NEEDS))
        assert isinstance(answer, Lease) is (key not in self.lease and key not in self.offered)
        if isinstance(answer, Lease):
            self.publish(self._granted(answer), content)

    @rule(target=publishers, holder=holders, content=a_content)
    def publish_until_the_blob_is_written(self, holder: Holder, content: tuple[str, int]) -> Any:
        key, token, data, work = self._publication(holder, content)
        call = self.until_interrupted(self.put_gate, work, key=key, token=token, data=data)
        assert call is not None
        return call

    @rule(call=consumes(publishers))
    def go_on_publishing(self, call: Interrupted) -> None:
        self._check_publication(call.about["key"], call.about["token"], call.about["data"], self.go_on(call))

    @rule(call=consumes(publishers))
    def crash_while_publishing(self, call: Interrupted) -> None:
        self.crash(call)

    # lookups

    async def _served(self, key: str) -> bytes | None:
        """What a client gets whole."""
        found = await self.cache.lookup(key, "hit")
        if found is None:
            return None
        try:
            return b"".join([piece async for piece in found.pieces()])
        except DamagedStream:
            return None

    @rule(key=a_key)
    def lookup(self, key: str) -> None:
        found = self.do(self._served(key))
        if key not in self.offered:
            assert found is None
        elif hashlib.sha256(self.offered[key]).hexdigest() in self.blobs:
            assert found == self.offered[key]
            self._used(key)
        else:
            assert found is None
            self._forget(key)

    @rule(target=readers, key=a_key)
    def lookup_until_the_index_was_read(self, key: str) -> Any:
        data = self.offered.get(key, b"")
        if len(data) <= INLINE:  # not offered, or read in one step with the index
            return multiple()
        call = self.until_interrupted(self.stream_gate, self._served(key), key=key, data=data)
        assert call is not None
        return call

    @rule(call=consumes(readers))
    def go_on_looking_up(self, call: Interrupted) -> None:
        key, data = call.about["key"], call.about["data"]
        there = hashlib.sha256(data).hexdigest() in self.blobs
        assert self.go_on(call) == (data if there else None)
        if there and key in self.offered:
            self._used(key)
        if not there and self.offered.get(key) == data:
            self._forget(key)

    # eviction, harm, outages

    def _evict(self) -> None:
        """Least recently used first, until the rest fits; the newest always stays."""
        while sum(map(len, self.offered.values())) > LIMIT and len(self.offered) > 1:
            self._forget(next(iter(self.offered)))

    @precondition(lambda self: len(self.offered) > 1)
    @rule()
    def trim(self) -> None:
        self.do(self.cache.trim())
        self._evict()

    @precondition(lambda self: len(self.offered) > 1)
    @rule(target=evictors)
    def trim_until_the_index_has_forgotten(self) -> Any:
        call = self.until_interrupted(self.discard_gate, self.cache.trim())
        self._evict()
        return multiple() if call is None else call

    @rule(call=consumes(evictors))
    def go_on_trimming(self, call: Interrupted) -> None:
        self.go_on(call)

    @rule(call=consumes(evictors))
    def crash_while_trimming(self, call: Interrupted) -> None:
        self.crash(call)

    @precondition(lambda self: self.offered)
    @rule(data=st.data(), way=st.sampled_from(["lost", "flipped", "cut"]))
    def harm_a_blob(self, data: st.DataObject, way: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.offered)))
        good = self.offered[key]
        digest = hashlib.sha256(good).hexdigest()
        bad = {"lost": b"", "flipped": good[:-1] + b"!", "cut": good[:-1]}[way]
        if len(good) <= INLINE:
            name = self.names.blob(digest)
            self.raw.set(name, bad) if bad else self.raw.delete(name)
        else:
            for path in self._files(digest):
                path.write_bytes(bad) if bad else path.unlink()
        self.blobs.discard(digest)

    @rule()
    def sweep(self) -> None:
        offered = {hashlib.sha256(data).hexdigest() for data in self.offered.values()}
        for path in self._files():
            os.utime(path, (LONG_AGO, LONG_AGO))
            if path.name not in offered:
                self.blobs.discard(path.name)
        self.do(self.gateway.installation.adopt())  # Redis may have lost everything
        self.raw.hset(self.names.identity, "since", 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(installation, "MARKED", timedelta(seconds=-60))
            for _ in range(2):  # the first marks
                self.do(self.cache.sweep())
        assert {path.name for path in self._files()} <= offered

    @precondition(lambda self: len(self.offered) == len(KEYS))
    @rule()
    def redis_loses_everything(self) -> None:
        small = [name.decode().rpartition(":")[2] for name in self.raw.keys(self.names.blob("*"))]
        self.raw.flushall()
        self.blobs.difference_update(small)
        self.lease.clear()
        self.asked.clear()
        self.offered.clear()

    def _files(self, name: str = "*") -> list[Path]:
        return [
            path
            for path in (self.folder / "blobs").rglob(name)
            if path.is_file() and path.name != "installation"
        ]

    # what holds after every step

    @invariant()
    def the_index_offers_one_digest_for_a_key(self) -> None:
        for key in KEYS:
            digest = self.raw.hget(self.names.index(key), "digest")
            data = self.offered.get(key)
            assert (digest.decode() if digest else None) == (
                hashlib.sha256(data).hexdigest() if data is not None else None
            )

    @invariant()
    def the_books_agree_with_the_index(self) -> None:
        sizes = {key: len(data) for key, data in self.offered.items()}
        assert [key.decode() for key in self.raw.zrange(self.names.lru, 0, -1)] == list(self.offered)
        assert {key.decode(): int(size) for key, size in self.raw.hgetall(self.names.sizes).items()} == sizes
        stored = self.raw.zscore(self.names.namespace_bytes, self.names.lru) or 0
        assert stored == int(self.raw.get(self.names.bytes) or 0) == sum(sizes.values())
        inline = sum(size for size in sizes.values() if size <= INLINE)
        assert int(self.raw.get(self.names.inline) or 0) == inline

    @invariant()
    def nothing_stays_in_redis_for_ever_that_is_not_offered(self) -> None:
        offered = {self.names.blob(hashlib.sha256(data).hexdigest()) for data in self.offered.values()}
        for name in self.raw.keys(self.names.blob("*")):
            assert name.decode() in offered or self.raw.ttl(name) > 0


def check(server: RedisServer, folder: Path, examples: int, steps: int) -> None:
    keys_dir = folder / "keys"
    current = keyring.Keyring(keys_dir, {}).current
    artifacts = make_artifacts(key_files.read_private(keys_dir / f"{current}.pem"))
    run_state_machine_as_test(
        lambda: CacheMachine(server, keys_dir, artifacts),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=[Phase.generate],
        ),
    )


def test_cache_and_leases_do_what_the_model_says(redis_server: RedisServer, tmp_path: Path) -> None:
    check(redis_server, tmp_path, examples=60, steps=40)


@pytest.mark.slow
def test_cache_and_leases_do_what_the_model_says_at_length(redis_server: RedisServer, tmp_path: Path) -> None:
    check(redis_server, tmp_path, examples=800, steps=60)
