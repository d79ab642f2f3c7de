"""A fork server that starts before its slot's actor is as one that the actor starts, and never outlives its use. Real
processes, no Ray."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest
from test_slot import HERE, alive, engine_on_the_path, run, settings, sleepers
from torchrelay.compiler.errors import CompileKilled
from torchrelay.workers.fork_server.prestart import PrestartedServer
from torchrelay.workers.messages import ForkServerReady, decode_answer
from torchrelay.workers.slot.actor import CompileSlot
from waiting import until, wait_until

__all__ = ["engine_on_the_path"]

_ACTOR = """
    # an actor with limits and priorities of its own, as Ray gives them: what its server has of them
    import asyncio, json, os, resource, sys
    from pathlib import Path
    import msgspec
    from torchrelay.compiler import decoding
    from torchrelay.workers.messages import decode_answer
    from torchrelay.workers.settings import SlotSettings
    from torchrelay.workers.slot.actor import CompileSlot

    def seen(pid):
        process = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        environment = dict(e.split("=", 1) for e in (process / "environ").read_text().split("\\0") if e)
        return {
            "limits": (process / "limits").read_text(),
            "nice": os.getpriority(os.PRIO_PROCESS, pid),
            "score": (process / "oom_score_adj").read_text(),
            "processors": sorted(os.sched_getaffinity(pid)),
            "leads its session": os.getsid(pid) == pid,
            "cgroup": (process / "cgroup").read_text(),
            "folder": str((process / "cwd").readlink()),
            "input": str((process / "fd/0").readlink()),
            "output is its actor's": [
                (process / f"fd/{n}").stat().st_ino == Path(f"/proc/self/fd/{n}").stat().st_ino for n in (1, 2)
            ],
            "descriptors": len(list((process / "fd").iterdir())),
            "privileges": {name: status[name] for name in status if name.startswith(("Cap", "Umask", "Uid", "NoNew"))},
            "environment": {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "TORCHRELAY_SLOT")},
            "named": environment["TORCHRELAY_SLOT"] != "" and environment["PYTHONPATH"] != "",
        }

    async def main(settings):
        slot = CompileSlot(settings)
        ready = decode_answer(await slot.start())
        told = seen(ready.pid)
        await slot.close()
        return told

    os.nice(5)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 2000))
    Path("/proc/self/oom_score_adj").write_text("700")
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    print(json.dumps(asyncio.run(main(decoding.from_json(sys.argv[1], type=SlotSettings)))))
"""


def early(tmp_path, server):
    return msgspec.structs.replace(settings(tmp_path), early_server=server.early_server)


def python(program, *arguments):
    """What it prints."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, timeout=120, env=environment
    ).stdout


async def started(slot):
    ready = decode_answer(await slot.start())
    assert isinstance(ready, ForkServerReady), ready
    return ready


def test_an_adopted_server_has_all_that_it_would_have_inherited_from_its_actor(tmp_path):
    def seen(slot_settings):
        return json.loads(python(textwrap.dedent(_ACTOR), msgspec.json.encode(slot_settings).decode()))

    with PrestartedServer("engine") as server:
        adopted, own = seen(early(tmp_path, server)), seen(settings(tmp_path))
    assert adopted == own
    assert adopted["nice"] == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)


def test_jobs_of_an_adopted_server_share_the_folder_that_those_of_a_started_one_share(tmp_path):
    async def shared(slot_settings):
        slot = CompileSlot(slot_settings)
        try:
            await started(slot)
            return (await run(slot, "name_shared_folder"))[1].decode()
        finally:
            await slot.close()

    with PrestartedServer("engine") as server:
        adopted = asyncio.run(shared(early(tmp_path, server)))
    assert Path(adopted).is_dir()
    assert adopted == asyncio.run(shared(settings(tmp_path)))


def test_an_adopted_server_that_is_killed_is_no_zombie_of_the_process_that_started_it(tmp_path):
    async def scenario(server):
        slot = CompileSlot(early(tmp_path, server))
        await started(slot)
        psutil.Process(server.early_server.pid).kill()
        await slot.lost()
        await until(lambda: not psutil.pid_exists(server.early_server.pid))
        await slot.close()

    with PrestartedServer("engine") as server:
        asyncio.run(scenario(server))


def test_an_adopted_server_runs_jobs_and_leaves_nothing(tmp_path):
    async def scenario(server):
        slot = CompileSlot(early(tmp_path, server))
        ready = await started(slot)
        assert ready.pid == server.early_server.pid
        assert not Path(server.early_server.socket).parent.exists()
        assert (await run(slot, "answer"))[1] == b"artifact"
        await slot.close()
        assert not alive(ready.pid)

    with PrestartedServer("engine") as server:
        asyncio.run(scenario(server))
    assert list(tmp_path.iterdir()) == []


def test_an_adopted_server_that_dies_takes_its_job_along_and_the_slot_starts_its_own(tmp_path):
    async def scenario(server):
        slot = CompileSlot(early(tmp_path, server))
        ready = await started(slot)
        job = asyncio.create_task(run(slot, "hang"))
        below = await sleepers(ready)
        psutil.Process(ready.pid).kill()
        with pytest.raises(CompileKilled):
            await job
        await slot.lost()
        assert not any(alive(pid) for pid in below)
        assert (await started(slot)).pid != ready.pid
        await run(slot, "answer")
        await slot.close()

    with PrestartedServer("engine") as server:
        asyncio.run(scenario(server))
    assert list(tmp_path.glob("torchrelay-jobs-*")) == []


@pytest.mark.parametrize("ends", ["before", "while it waits for the server"])
def test_a_slot_starts_its_own_server_where_the_early_one_ends(tmp_path, ends):
    async def scenario(server):
        slot = CompileSlot(early(tmp_path, server))
        process = psutil.Process(server.early_server.pid)
        if ends == "before":
            process.kill()
            process.wait()
            ready = await started(slot)
        else:
            process.suspend()
            starting = asyncio.create_task(started(slot))
            await until(lambda: list(tmp_path.glob("torchrelay-jobs-*")))
            process.kill()
            ready = await starting
        assert ready.pid != server.early_server.pid
        await slot.close()

    with PrestartedServer("engine") as server:
        asyncio.run(scenario(server))
    assert list(tmp_path.glob("torchrelay-jobs-*")) == []


def test_a_server_has_one_actor(tmp_path):
    async def scenario(server):
        one, other = CompileSlot(early(tmp_path, server)), CompileSlot(early(tmp_path, server))
        assert (await started(one)).pid == server.early_server.pid
        assert (await started(other)).pid != server.early_server.pid
        await one.close()
        await other.close()

    with PrestartedServer("engine") as server:
        asyncio.run(scenario(server))


def test_a_server_without_an_actor_ends_with_its_owner(tmp_path):
    server = PrestartedServer("engine")
    server.close()
    assert not alive(server.early_server.pid)
    assert not Path(server.early_server.socket).parent.exists()
    program = (
        "import os\n"
        "from torchrelay.workers.fork_server.prestart import PrestartedServer\n"
        "server = PrestartedServer('engine')\n"
        "print(server.early_server.pid, server.early_server.socket, flush=True)\n"
        "os._exit(0)\n"
    )
    pid, socket = python(program).split()
    wait_until(lambda: not alive(int(pid)))
    assert not Path(socket).parent.exists()
