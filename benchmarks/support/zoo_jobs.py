"""The zoo's phases: in: a plan and models, out: a record of each job, appended when it ends.

A job is one process (measured/zoo_once.py), and several run at once. Those that are timed do so in turn, when all that
were begun with them are ready: each holds a lock with others, and takes it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from support.variants import MEASURED
from support.zoo_records import Records
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService
from zoo_models.entry import ZooModel

PHASES = ("programs", "fill", "first-step", "accuracy", "time", "cuda-graphs")
WITHOUT_SERVICE = ("programs",)
_TIMED = ("first-step", "time", "cuda-graphs")
_TAIL = 12
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """memory: bytes, of each process. minutes: for everything. ways: of `eager`, `inductor` and `torchrelay`. batch:
    models that go through all phases before others begin; 0: all."""

    phases: tuple[str, ...]
    batch: int
    device: str
    small: bool
    precision: str
    parallel: int
    minutes: float
    timeout: float
    memory: int
    again: bool
    ways: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class Job:
    """way: under which it is recorded. flags: of zoo_once.py. machine: on whose caches it works. forget: whether these
    are removed afterwards."""

    model: str
    phase: str
    way: str
    flags: tuple[str, ...]
    machine: str
    compiler: bool = True
    programs: bool = False
    forget: bool = False


class Zoo:
    def __init__(
        self,
        plan: Plan,
        models: dict[str, ZooModel],
        records: Records,
        state: Path,
        service: PrivateService | None,
    ) -> None:
        self._plan = plan
        self._models = models
        self._records = records
        self._state = state
        self._service = service
        self._ends = time.monotonic() + 60 * plan.minutes
        self._stopped = threading.Event()

    def run_all(self) -> None:
        for names in self._batches():
            for phase in self._plan.phases:
                self._run(phase, names)

    def _batches(self) -> Iterator[list[str]]:
        """Names of models of which anything is wanted."""
        names = [
            name for name in self._models if any(self._wanted(phase, name) for phase in self._plan.phases)
        ]
        size = self._plan.batch or max(1, len(names))
        return (names[start : start + size] for start in range(0, len(names), size))

    def _run(self, phase: str, names: Sequence[str]) -> None:
        jobs = [job for name in names for job in self._wanted(phase, name)]
        at_once = self._plan.parallel
        while jobs:
            batch = at_once if phase in _TIMED else len(jobs)
            batches = [jobs[start : start + batch] for start in range(0, len(jobs), batch)]
            without_room = [job for each in batches for job in self._run_together(each, at_once)]
            jobs = without_room if at_once > 1 else []
            at_once = max(1, at_once // 3)  # together they had too little memory

    def _run_together(self, jobs: list[Job], at_once: int) -> list[Job]:
        """Which of them had no room."""
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(at_once) as pool:
            turns = [self._turn(stack) if job.phase in _TIMED else None for job in jobs]
            try:
                had_room = list(pool.map(self._run_job, jobs, turns))
            except BaseException:  # Ctrl-C, SIGTERM: end what runs, begin nothing
                self._stopped.set()
                raise
        return [job for job, had in zip(jobs, had_room, strict=True) if not had]

    def _turn(self, stack: contextlib.ExitStack) -> TextIO:
        """The lock, held with others, for a process that takes it alone when it is ready."""
        turn = stack.enter_context((self._state / "turn.lock").open("w"))
        fcntl.flock(turn, fcntl.LOCK_SH)
        return turn

    def _jobs(self, phase: str, name: str) -> list[Job]:
        mega = str(self._folder(name) / f"mega-cache-{self._plan.precision}.bin")
        ways = self._plan.ways
        if self._models[name].missing:
            return [Job(name, "fill", "torchrelay", (), "torchrelay")]
        if phase == "programs":
            return [Job(name, phase, "all", (), "programs", forget=True)]
        if phase == "fill":
            relay = Job(name, phase, "torchrelay", ("--job", "start"), "torchrelay", programs=True)
            local = Job(
                *(name, phase, "inductor", ("--job", "start", "--way", "inductor", "--save-artifacts", mega)),
                "inductor",
            )
            return [job for job in (relay, local) if job.way in ways]
        if not self._was_filled(name):
            return []
        if phase == "accuracy":
            return [Job(name, phase, "torchrelay", ("--job", "accuracy"), "torchrelay")]
        if phase in ("time", "cuda-graphs"):
            flags = ("--job", "time", "--ways", ",".join(ways), "--rounds", str(self._plan.rounds))
            mode = ("--mode", "reduce-overhead") if phase == "cuda-graphs" else ()
            return [Job(name, phase, "all", (*flags, *mode), "both")]
        start = ("--job", "start")
        jobs = [
            Job(name, phase, "eager", (*start, "--way", "eager"), "eager", forget=True),
            Job(name, phase, "hit", start, "hit", compiler=False, forget=True),
            Job(name, phase, "programs", start, "programs", compiler=False, programs=True, forget=True),
        ]
        if Path(mega).exists():
            flags = (*start, "--way", "inductor", "--load-artifacts", mega)
            jobs.append(Job(name, phase, "mega-cache", flags, "mega", forget=True))
        return jobs

    def _was_filled(self, name: str) -> bool:
        record = self._records.get(name, "fill", "torchrelay", self._plan.precision)
        return record is None or record["status"] == "pass"

    def _wanted(self, phase: str, name: str) -> list[Job]:
        return [job for job in self._jobs(phase, name) if self._is_wanted(job)]

    def _is_wanted(self, job: Job) -> bool:
        """A model that was filled on another machine is filled again where a later phase needs its caches."""
        known = self._records.get(job.model, job.phase, job.way, self._plan.precision)
        if known is None or self._plan.again:
            return True
        if job.phase != "fill" or (self._folder(job.model) / job.machine).exists():
            return False
        later = self._plan.phases[self._plan.phases.index("fill") + 1 :]
        return any(self._wanted(phase, job.model) for phase in later)

    def _folder(self, name: str) -> Path:
        folder = self._state / "machines" / name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _run_job(self, job: Job, turn: TextIO | None) -> bool:
        """Whether there was room for it on the GPU. When the time is over, nothing is recorded."""
        try:
            return self._run_and_record(job, turn)
        finally:
            if turn is not None:
                turn.close()

    def _run_and_record(self, job: Job, turn: TextIO | None) -> bool:
        plan = self._plan
        left = self._ends - time.monotonic()
        if left <= 0 or self._stopped.is_set():
            return True
        began = time.monotonic()
        model = self._models[job.model]
        if model.missing:
            outcome: dict[str, Any] = {"status": "model_fail_to_load", "error": model.missing}
        elif job.phase == "programs":
            outcome = self._start_three_times(job, min(plan.timeout, left))
        else:
            outcome = self._child(job, min(plan.timeout, left), turn)
        over = time.monotonic() >= self._ends or self._stopped.is_set()
        if outcome["status"] == "timeout" and over:
            return True
        about = {
            "model": job.model,
            "phase": job.phase,
            "way": job.way,
            "precision": plan.precision,
            "device": plan.device,
            "small": plan.small,
            "wall": round(time.monotonic() - began, 2),
        }
        self._records.append(about | outcome)
        print(
            f"[{time.strftime('%H:%M:%S')}] {job.phase} {job.way} {job.model}: {summary(outcome)}", flush=True
        )
        return not had_no_room(outcome)

    def _child(self, job: Job, timeout: float, turn: TextIO | None) -> dict[str, Any]:
        plan = self._plan
        command = [sys.executable, str(MEASURED / "zoo_once.py"), "--model", job.model, *job.flags]
        command += ["--device", plan.device]
        command += ["--small"] if plan.small else []
        command += ["--amp"] if plan.precision == "amp" else []
        command += [] if turn is None else ["--turn", str(turn.fileno())]
        root = self._folder(job.model)
        machine = FreshMachine(
            root / ("torchrelay" if job.machine == "both" else job.machine), compiler=job.compiler
        )
        at_once = 1 if job.phase == "first-step" else plan.parallel  # a start that is timed has them all
        assert self._service is not None, "only the phase `programs` runs without a service"
        more = {
            **self._service.environment,
            "TORCHRELAY_PROGRAMS": "team" if job.programs else "0",
            "TORCHRELAY_PROGRAMS_CHECK": "0",  # which start traces after all is drawn at random
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // at_once)),
        }
        if job.machine == "both":
            own = FreshMachine(root / "inductor").environment()
            more |= {name: own[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        try:
            return run_limited(
                *(command, machine.environment(**more), timeout, plan.memory, root / "child.log"),
                *(self._stopped, [turn.fileno()] if turn is not None else []),
            )
        finally:
            if job.forget:
                shutil.rmtree(machine.root, ignore_errors=True)

    def _start_three_times(self, job: Job, timeout: float) -> dict[str, Any]:
        """The first process records its programs, the second starts from them, the third traces again and compares.
        Nothing is compiled."""
        root = self._folder(job.model) / job.machine
        command = [sys.executable, str(MEASURED / "start_once.py"), "--model", job.model]
        command += ["--folder", str(root / "programs")]
        environment = FreshMachine(root).environment()
        runs: list[dict[str, Any]] = []
        ends = time.monotonic() + timeout
        try:
            for flags in ([], [], ["--check"]):
                left = ends - time.monotonic()
                runs.append(
                    run_limited(
                        [*command, *flags],
                        environment,
                        left,
                        self._plan.memory,
                        root / "child.log",
                        self._stopped,
                    )
                )
                if runs[-1]["status"] != "pass":
                    return runs[-1]
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return judged(*runs)


def judged(traced: dict[str, Any], started: dict[str, Any], checked: dict[str, Any]) -> dict[str, Any]:
    """status: pass if each function started without tracing, computed the same to the last bit, and a new trace makes
    the same program."""
    same = all(traced[name] == started[name] for name in ("loss", "gradient_norm"))
    problems = {
        "traced": started["started"] != started["functions"] or not started["functions"],
        "differs": not same,
        "stale": bool(checked["stale"]) or checked["checked"] != started["started"],
    }
    reasons = {f"{function}: {reason}": None for function, reason in traced["reasons"] + started["reasons"]}
    return {
        "status": next((name for name, is_so in problems.items() if is_so), "pass"),
        "functions": started["functions"],
        "started": started["started"],
        "reasons": list(reasons),
        "stale": checked["stale"],
        "seconds": {"traced": traced["seconds"], "started": started["seconds"]},
    }


def run_limited(
    command: list[str],
    environment: dict[str, str],
    timeout: float,
    memory: int,
    log: Path,
    stopped: threading.Event,
    descriptors: Collection[int] = (),
) -> dict[str, Any]:
    """The JSON on the child's last line; its group is killed after `timeout` seconds, or above `memory` bytes.

    descriptors: which it has open, too."""
    out, err = log.with_suffix(f".{os.urandom(4).hex()}.out"), log.with_suffix(f".{os.urandom(4).hex()}.err")
    try:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            child = subprocess.Popen(
                command,
                env=environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                pass_fds=descriptors,
            )
        ended = ""
        deadline = time.monotonic() + timeout
        try:
            while child.poll() is None and not ended:
                time.sleep(0.1)
                if time.monotonic() > deadline or stopped.is_set():
                    ended = "timeout"
                elif resident_bytes(child.pid) > memory:
                    ended = "memory"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        lines = out.read_text(errors="replace").splitlines()
        tail = "\n".join(err.read_text(errors="replace").splitlines()[-_TAIL:])
    finally:
        out.unlink(missing_ok=True)
        err.unlink(missing_ok=True)
    if ended:
        return {"status": ended, "error": f"ended at its limit of {timeout:.0f} s or {memory} bytes"}
    if child.returncode != 0:
        return {"status": "crashed", "error": f"exit status {child.returncode}: {tail}"[:4000]}
    record: dict[str, Any] = json.loads(lines[-1])
    return record


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def had_no_room(outcome: dict[str, Any]) -> bool:
    """Whether a model, or the worker that compiled for it, found a GPU full."""
    said = [outcome.get("error", ""), outcome.get("float64", ""), *outcome.get("unverified", ())]
    said += map(str, outcome.get("reasons", ()))
    return any(words in text for text in said for words in _NO_ROOM)


_NO_ROOM = ("out of memory", "has no room", "too little memory", "CUBLAS_STATUS_ALLOC_FAILED")


def summary(outcome: dict[str, Any]) -> str:
    parts = [outcome["status"]]
    if "functions" in outcome:
        parts.append(f"{outcome['started']} of {outcome['functions']} functions without tracing")
        parts += outcome["reasons"][:3]
    if "graphs" in outcome:
        parts.append(f"{outcome['remote']} of {outcome['graphs']} graphs remote")
    if "first_step" in outcome:
        parts.append(f"{outcome['first_step']:.2f} s")
    parts += [f"{way} {time:.2f} ms" for way, time in outcome.get("milliseconds", {}).items()]
    parts += [f"{reason} {count}" for reason, count in outcome.get("fallbacks", {}).items()]
    parts += [f"unverified: {reason}" for reason in outcome.get("unverified", ())]
    if outcome.get("error"):
        parts.append(outcome["error"].splitlines()[0][:200])
    return ", ".join(parts)
