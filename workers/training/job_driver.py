"""The driver of one training job: a Ray actor that runs Ray Train until the job has ended and stores its events.

The actor has a name, outlives the gateway that made it, and is started again on another node if its own is lost. Its
state is in the job's folder. Gateways, the job's Ray Train controller and the workers of its ranks call its methods,
from several threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.api.training.events import (
    JobNote,
    RankEnded,
    RankStarted,
    StateChanged,
    TrainEvent,
    describe_rank_exit,
)
from ...compiler.api.training.jobs import TrainState
from ...compiler.api.training.node_messages import TrainOrder
from ...compiler.process import own_files
from .. import ray_internals
from ..scheduling.ray_resources import ACTOR_SHARE, OFFER
from .attempt import RankAttempt
from .journal import JobJournal
from .messages import JobReference, RankDevice, RankReport, StopOrder
from .prefork.nodes import PreforkNodes

log = logging.getLogger(__name__)

CANCEL_SECONDS = 5.0
"""How long the ranks of a cancelled job may take to save and end."""
RESIZE_SECONDS = 30.0
"""How long the ranks of an elastic job may take to end before another number of them starts."""
_LAST_SECONDS = 2.0
"""How long ranks whose job starts again may take to report their last events."""
_ABANDON_SECONDS = 2.0
"""After the grace of a cancel, Ray Train's controller is killed, with all that it started."""
_UNSTARTED = 3
"""How often, besides the retries, workers may fail before their ranks start."""
_WHY = 1500
_ORDER = "order.msgpack"
_STATE = "driver.json"


class _SavedState(Struct, frozen=True):
    """The state of the job besides its journal.

    resumes: of the order. failures: since then. error: of the last failure, if it was the script's own and came before
    any step. controller, run: ids of Ray Train's last controller. detail: why the job has failed, if it was cancelled
    for that. since: when all of its ranks ran for the first time.
    """

    resumes: int = 0
    failures: int = 0
    error: str = ""
    controller: str = ""
    run: str = ""
    cancelled: bool = False
    detail: str = ""
    since: float = 0.0


class JobDriverActor:
    """The driver of one job. Arguments and results are bytes or plain values."""

    def __init__(self, name: str, folder: str) -> None:
        """name: of this actor. folder: of the job."""
        self._job = JobReference(name, folder)
        self._folder = Path(folder)
        self._journal = JobJournal(self._folder)
        self._lock = threading.Condition()
        self._train_order: TrainOrder | None = None
        self._attempt: RankAttempt | None = None
        self._numbered = self._unstarted = 0
        self._reported: dict[tuple[int, int], int] = {}
        """The last report of each attempt's rank. A driver that starts again needs none: its ranks end with it."""
        self._devices: list[RankDevice] = []
        self._controller: Any = None
        self._stop = StopOrder()
        self._stopped = -1.0
        """When its ranks were ordered to end."""
        self._cancelled = self._over = False
        self._state: TrainState | None = None
        self._last_state: tuple[str, str, int] | None = None
        self._detail = ""
        self._thread: threading.Thread | None = None
        self._deadline: threading.Timer | None = None
        self._warm = PreforkNodes()
        self._warmed: TrainOrder | None = None
        """Without its package."""
        self._warming = threading.Lock()
        self._saved = _SavedState()
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._saved = decoding.from_json((self._folder / _STATE).read_bytes(), type=_SavedState)
            self._cancelled, self._detail = self._saved.cancelled, self._saved.detail
        if _started_again():  # otherwise a gateway will call `begin`, with a valid token
            with contextlib.suppress(OSError, msgspec.MsgspecError), self._lock:
                self._take(decoding.from_msgpack((self._folder / _ORDER).read_bytes(), type=TrainOrder))

    # --- for gateways ----------------------------------------------------------------------------------

    def warm(self, train_order: bytes) -> None:
        """Start processes with PyTorch imported, from which ranks are forked, on the nodes likely to get ranks."""
        self._warm_up(decoding.from_msgpack(train_order, type=TrainOrder))

    def begin(self, train_order: bytes) -> None:
        """Run the job, unless it runs already, or has ended with the same number of resumes."""
        given = decoding.from_msgpack(train_order, type=TrainOrder)
        with self._lock:
            if self._thread is not None and not (self._over and given.resumes != self._saved.resumes):
                return
            if self._saved.resumes == given.resumes and self._journal.ended is not None:
                return
            if given.resumes != self._saved.resumes:
                self._journal.resumed()
                self._save(_SavedState(given.resumes, controller=self._saved.controller, run=self._saved.run))
            self._cancelled, self._over = self._saved.cancelled, False
            self._detail, self._unstarted = self._saved.detail, 0
            self._attempt, self._deadline = None, None
            self._order_ranks(StopOrder())
            if not _write_file(self._folder / _ORDER, train_order):
                self._journal.add(
                    [
                        JobNote(
                            level="warning", text="the job's folder takes no files: it cannot change its node"
                        )
                    ]
                )
            self._take(given)

    def events(self, after: int, seconds: float) -> bytes | None:
        """Events past number `after`, encoded; None if this driver has no order (any more)."""
        if self._train_order is None and self._journal.ended is None:
            return None
        return msgspec.msgpack.encode(self._journal.after(after, seconds))

    def cancel(self) -> None:
        """Order the ranks to end within CANCEL_SECONDS."""
        with self._lock:
            if self._cancelled or self._over or self._thread is None:
                return
            self._cancelled = True
            self._save(msgspec.structs.replace(self._saved, cancelled=True, detail=self._detail))
            self._order_ranks(StopOrder(CANCEL_SECONDS))
            idle = self._attempt is None or not self._attempt.running
        _later(0.0 if idle else CANCEL_SECONDS + _ABANDON_SECONDS, self._abandon)

    def held(self) -> bytes:
        """The devices that its ranks hold: a list of RankDevice, encoded."""
        with self._lock:
            return msgspec.msgpack.encode(self._devices)

    def close(self) -> None:
        """End at once."""
        with self._lock:
            self._cancelled = True
        self._abandon()
        self._end_warm()
        self._clear()

    # --- for Ray Train's controller --------------------------------------------------------------------

    def controller(self, handle: Any, run: str) -> None:
        with self._lock:
            self._controller = handle
            self._save(
                msgspec.structs.replace(self._saved, controller=ray_internals.actor_id(handle), run=run)
            )
            cancelled = self._cancelled
        if cancelled:
            self._abandon()

    def attempt(self, world_size: int, devices: list[tuple[str, str]]) -> int:
        """Begin an attempt; its number. `held`: each rank's node and GPUs."""
        with self._lock:
            number = max(self._journal.attempts, self._numbered)
            self._numbered = number + 1
            self._attempt = RankAttempt(number, world_size)
            self._reported = {of: last for of, last in self._reported.items() if of[0] >= number - 1}
            self._devices = [RankDevice(node, gpus) for node, gpus in sorted(set(devices))]
            if not self._cancelled:
                self._order_ranks(StopOrder())
            return number

    def turned(self, state: str, cause: str, error: str) -> None:
        """The controller's state has changed. `state` and `cause`: names of Ray's classes; cause '': a rank ended by
        itself."""
        if state == "ReschedulingState" and cause == "WorkerGroupStartupTimeoutError":
            self._set_state(self._state or "starting", "waits until its nodes have enough free for all ranks")
        elif state == "ReschedulingState":
            self._not_started(error)
        elif state == "RestartingState":
            self._end_ranks()
            self._failed(cause, error)
        elif state == "ShuttingDownState":
            self._end_ranks()

    def _end_ranks(self) -> None:
        """End the ranks before Ray Train kills them, so that their last events are not lost."""
        with self._lock:
            if (attempt := self._attempt) is None:
                return
            if attempt.running and not self._cancelled:
                self._order_ranks(StopOrder(0.0))
                self._lock.wait_for(lambda: not attempt.running or self._cancelled, _LAST_SECONDS)
            attempt.give_up()

    def _failed(self, cause: str, error: str) -> None:
        """Its ranks will start again, or fail for good if their script ended before any step twice in a row."""
        with self._lock:
            self._devices = []
            attempt, why = self._attempt, self._why(error)
            own = attempt.own_error() if attempt and not cause and not self._journal.stepped else ""
            again = own != "" and own == self._saved.error and not self._cancelled
            if again:
                self._detail = f"{why[:_WHY]}; not tried again: it ended so twice, before any step"
            else:
                self._failed_once(own)
        if again:
            self._abandon_soon()
        else:
            self._set_state("recovering", why)

    def _not_started(self, error: str) -> None:
        """Workers failed before their ranks started: for good if requirements cannot be installed, or too often."""
        assert self._train_order is not None
        self._unstarted += 1
        if _of_requirements(error) or self._unstarted > self._train_order.spec.retries + _UNSTARTED:
            self._detail = _unstarted(error)
            self._abandon_soon()
        else:
            self._set_state(self._state or "starting", "a worker did not start; it is tried again")

    def _abandon_soon(self) -> None:
        """Kill the controller in a moment: now it waits for an answer of this actor."""
        self._cancelled = True
        _later(0.1, self._abandon)

    def resize(self) -> None:
        """End the running ranks; another number of them starts then."""
        with self._lock:
            attempt = self._attempt
            if attempt is None or not attempt.running or self._cancelled:
                return
            self._order_ranks(StopOrder(RESIZE_SECONDS))
            self._journal.restarts += 1
        self._set_state("recovering", "the number of ranks changes")
        with self._lock:
            self._lock.wait_for(lambda: not attempt.running, RESIZE_SECONDS + 5)
            self._devices = []

    # --- for ranks' workers ----------------------------------------------------------------------------

    def order(self) -> bytes:
        """The order without its package."""
        assert self._train_order is not None
        return msgspec.msgpack.encode(msgspec.structs.replace(self._train_order, package=b""))

    def package(self) -> bytes:
        assert self._train_order is not None
        return self._train_order.package

    def warm_process(self, node: str) -> str:
        """The socket of the process on `node` from which ranks are forked; '' if there is none."""
        return self._warm.on(node)

    def record(self, attempt: int, reports: bytes) -> bytes:
        """Store what ranks report (a list of RankReport, encoded), but for what they sent before; the answer is a
        StopOrder, encoded."""
        received = self._new_events(attempt, decoding.from_msgpack(reports, type=list[RankReport]))
        if received:
            self._journal.add(received)
        complete = False
        with self._lock:
            current = self._attempt
            if current is None or attempt != current.number:
                return msgspec.msgpack.encode(StopOrder(0.0))  # of an earlier attempt
            for event in received:
                if isinstance(event, RankStarted | RankEnded):
                    current.record(event, self._stopped)
                    self._lock.notify_all()
                if isinstance(event, RankStarted):
                    complete = not current.over and len(current.started) == current.world_size
                    self._unstarted = 0
            answer = StopOrder(0.0) if current.over and not self._cancelled else self._stop
        if complete:
            self._watch_time()  # saved before anyone learns of it: a driver may be killed at once
            self._set_state("running", "", ranks=current.world_size)
        return msgspec.msgpack.encode(answer)

    def _new_events(self, attempt: int, reports: list[RankReport]) -> list[TrainEvent]:
        events: list[TrainEvent] = []
        for report in reports:
            with self._lock:
                known = self._reported.get((attempt, report.rank), 0)
                self._reported[attempt, report.rank] = max(known, report.number)
            if report.number > known:
                events += decoding.from_msgpack(report.events, type=list[TrainEvent])
        return events

    # --- its own thread --------------------------------------------------------------------------------

    def _take(self, train_order: TrainOrder) -> None:
        """Run `order` in a thread, unless the job has ended. The lock is held, as two gateways may call `begin`."""
        self._train_order = train_order
        if self._journal.ended is not None:
            return
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"fit {train_order.job}")
        self._thread.start()

    def _warm_up(self, train_order: TrainOrder) -> None:
        train_order = msgspec.structs.replace(train_order, package=b"")
        with self._warming:
            if train_order != self._warmed and not self._cancelled:
                self._warm.end()
                self._warm.start(train_order, self._job.folder)
                self._warmed = train_order

    def _end_warm(self) -> None:
        with self._warming:
            self._warm.end()
            self._warmed = None

    def _save(self, state: _SavedState) -> None:
        self._saved = state
        _write_file(self._folder / _STATE, msgspec.json.encode(state))

    def _order_ranks(self, stop: StopOrder) -> None:
        """Answer ranks with `stop` from now on. The lock is held."""
        self._stop, self._stopped = stop, time.time() if stop.stop >= 0 else -1.0

    def _failed_once(self, error: str = "") -> None:
        """The lock is held. `error`: see _SavedState."""
        self._save(msgspec.structs.replace(self._saved, failures=self._saved.failures + 1, error=error))
        self._journal.restarts += 1

    def _run(self) -> None:
        assert self._train_order is not None
        again = self._journal.attempts > 0
        if again:
            self._journal.restarts += 1
        self._set_state(
            "recovering" if again else "starting", "its driver was started again" if again else ""
        )
        self._warm_up(self._train_order)
        try:
            state, detail = self._fit(self._train_order)
        except Exception as error:  # the job's end must be recorded
            state, detail = "failed", f"its driver failed: {type(error).__name__}: {error}"
        if self._deadline is not None:
            self._deadline.cancel()
        self._clear()
        with contextlib.suppress(OSError):
            (self._folder / _ORDER).unlink()
        self._set_state(state, detail)
        self._end_warm()
        with self._lock:
            self._over = True
            self._devices = []

    def _fit(self, train_order: TrainOrder) -> tuple[TrainState, str]:
        from ray.exceptions import RayActorError, RayError
        from ray.train import TrainingFailedError

        from . import ray_train

        ray_train.prepare()
        ray_internals.start_autoscaling_coordinator({OFFER: ACTOR_SHARE})
        while True:
            self._clear()
            with self._lock:
                if self._cancelled:
                    return self._cancelled_as()
                self._controller = None
            left = max(0, train_order.spec.retries - self._saved.failures)
            try:
                ray_train.trainer(train_order.spec, self._job, self._ray_folder(), left).fit()
            except TrainingFailedError as error:
                return self._cancelled_as() if self._cancelled else ("failed", self._why(str(error)))
            except RayActorError:
                if self._cancelled:
                    return self._cancelled_as()
                with self._lock:
                    self._failed_once()
                    self._attempt = None
                if self._saved.failures > train_order.spec.retries:
                    return "failed", "Ray Train's controller was lost"
                self._set_state("recovering", "Ray Train's controller was lost")
                time.sleep(1)
            except RayError as error:
                return "failed", _first_line(str(error))
            else:
                return self._cancelled_as() if self._cancelled else ("done", "")

    def _clear(self) -> None:
        """Free the resources of the last controller, if it was killed."""
        if self._saved.controller:
            from ray.exceptions import RayError

            try:
                ray_internals.remove_placement_groups_of(self._saved.controller)
            except (RayError, RuntimeError, ConnectionError, AttributeError) as error:
                log.warning("the resources of a lost controller may stay taken: %s", error)
            ray_internals.cancel_resource_request(self._saved.run)

    def _cancelled_as(self) -> tuple[TrainState, str]:
        if self._detail:
            return "failed", self._detail
        return "cancelled", ""

    def _ray_folder(self) -> Path:
        """A folder for Ray Train's own files; the job needs none of them."""
        for folder in (self._folder / "ray", Path("/tmp") / f"torchrelay-ray-{os.getuid()}"):
            with contextlib.suppress(OSError), own_files.own_folder(folder):
                return folder
        return Path(tempfile.mkdtemp(prefix="torchrelay-ray-"))

    def _watch_time(self) -> None:
        """Start the job's time limit, which counts from when all ranks first ran."""
        assert self._train_order is not None
        seconds = self._train_order.spec.timeout_seconds
        if not seconds or self._deadline is not None:
            return
        with self._lock:
            if not self._saved.since:
                self._save(msgspec.structs.replace(self._saved, since=time.time()))
        left = max(0.0, seconds - (time.time() - self._saved.since))
        self._deadline = _later(left, lambda: self._out_of_time(seconds))

    def _out_of_time(self, seconds: float) -> None:
        self._detail = f"it ran longer than its {seconds:g} s"
        self.cancel()

    def _abandon(self) -> None:
        import ray

        with self._lock:
            controller = self._controller
        if controller is not None and not self._over:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(controller, no_restart=True)

    def _why(self, error: str) -> str:
        """What stopped the ranks: the first one that failed, or Ray Train's error."""
        with self._lock:
            failed = self._attempt.failed if self._attempt else None
        if failed is not None:
            return describe_rank_exit(failed)
        if _of_requirements(error):
            return _unstarted(error)
        lines = [line.strip() for line in error.splitlines() if line.strip()]
        matching = [line for line in lines if "died" in line or "rank" in line or "Error" in line]
        return (matching[0] if matching else "a worker was lost")[:1000]

    def _set_state(self, state: TrainState, detail: str, *, ranks: int = 0) -> None:
        with self._lock:
            if (state, detail, ranks) == self._last_state:
                return
            self._state, self._last_state = state, (state, detail, ranks)
            changed = StateChanged(
                state=state, at=time.time(), detail=detail, ranks=ranks, restarts=self._journal.restarts
            )
        self._journal.add([changed])


def _later(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


def _started_again() -> bool:
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _write_file(path: Path, data: bytes) -> bool:
    new = path.with_suffix(".new")
    try:
        new.touch(mode=0o600)
        new.write_bytes(data)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        return False
    return True


def _of_requirements(error: str) -> bool:
    return "runtime_env" in error or "runtime environment" in error or "RuntimeEnv" in error


def _unstarted(error: str) -> str:
    """Why workers do not start: the last line with an error, or the last line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
    what = "its requirements cannot be installed" if _of_requirements(error) else "its workers do not start"
    return f"{what}: {last}"[:2000]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
