"""A job's driver: an order in; Ray Train run until the job has ended, and its news kept for whoever fetches them, out.

A Ray actor with a name, which outlives the gateway that made it and is started again where its node is lost. What it
must know then is in the job's folder. Its methods are called by gateways, by the job's Ray Train controller and by its
ranks' workers, from several threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
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
from .. import ray_internals
from ..scheduling.ray_resources import DRIVER_SHARE, OFFER
from .attempt import RankAttempt
from .journal import JobJournal
from .messages import JobReference, RankDevice, StopOrder
from .prefork.nodes import PreforkNodes

log = logging.getLogger(__name__)


CANCEL_SECONDS = 5.0
"""Ranks of a cancelled job have so long to save and end."""


RESIZE_SECONDS = 30.0
"""Ranks of an elastic job have so long before they start again in another number."""


_LAST_SECONDS = 2.0
"""Ranks whose job starts again have so long to tell what they have."""


_ABANDON_SECONDS = 2.0
"""Past the grace of a cancel, Ray Train's controller is killed, and all that it started with it."""


_UNSTARTED = 3
"""So often, and once for each retry, workers may fail before their ranks start."""


_WHY = 1500


_ORDER = "order.msgpack"


_STATE = "driver.json"


class _Kept(Struct, frozen=True):
    """What a driver must know of the job besides its news. resumes: of the order; failures: since then; error: the last
    one's, if it was the script's own and came before any step. controller, run: ids of Ray Train's last one. cancelled;
    detail: why it has failed if it was cancelled for that. since: when all of its ranks were there first."""

    resumes: int = 0
    failures: int = 0
    error: str = ""
    controller: str = ""
    run: str = ""
    cancelled: bool = False
    detail: str = ""
    since: float = 0.0


class JobDriverActor:
    """One job's. Everything that crosses Ray is bytes or a plain value."""

    def __init__(self, name: str, folder: str) -> None:
        """name: the actor's own. folder: of the job."""
        self._job = JobReference(name, folder)
        self._folder = Path(folder)
        self._ledger = JobJournal(self._folder)
        self._lock = threading.Condition()
        self._order: TrainOrder | None = None
        self._attempt: RankAttempt | None = None
        self._numbered = self._unstarted = 0
        self._held: list[RankDevice] = []
        self._controller: Any = None
        self._stop = StopOrder()
        self._stopped = -1.0
        """When its ranks were told to end."""
        self._cancelled = self._over = False
        self._state: TrainState | None = None
        self._said: tuple[str, str, int] | None = None
        self._detail = ""
        self._fitting: threading.Thread | None = None
        self._deadline: threading.Timer | None = None
        self._warm = PreforkNodes()
        self._warmed: TrainOrder | None = None
        """Without its package."""
        self._warming = threading.Lock()
        self._kept = _Kept()
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._kept = decoding.from_json((self._folder / _STATE).read_bytes(), type=_Kept)
            self._cancelled, self._detail = self._kept.cancelled, self._kept.detail
        if _started_again():  # else a gateway is about to give the order, with a token that is good
            with contextlib.suppress(OSError, msgspec.MsgspecError), self._lock:
                self._take(decoding.from_msgpack((self._folder / _ORDER).read_bytes(), type=TrainOrder))

    # --- for gateways ----------------------------------------------------------------------------------

    def warm(self, order: bytes) -> None:
        """Have processes with PyTorch imported where ranks may come to be, of which they are forked."""
        self._warm_up(decoding.from_msgpack(order, type=TrainOrder))

    def begin(self, order: bytes) -> None:
        """Run the job, unless it runs, or has ended under this number of resumes."""
        given = decoding.from_msgpack(order, type=TrainOrder)
        with self._lock:
            if self._fitting is not None and not (self._over and given.resumes != self._kept.resumes):
                return
            if self._kept.resumes == given.resumes and self._ledger.ended is not None:
                return
            if given.resumes != self._kept.resumes:
                self._ledger.turned_anew()
                self._keep(_Kept(given.resumes, controller=self._kept.controller, run=self._kept.run))
            self._cancelled, self._over = self._kept.cancelled, False
            self._detail, self._unstarted = self._kept.detail, 0
            self._attempt, self._deadline = None, None
            self._order_ranks(StopOrder())
            if not _put(self._folder / _ORDER, order):
                self._ledger.add(
                    [
                        JobNote(
                            level="warning", text="the job's folder takes no files: it cannot change its node"
                        )
                    ]
                )
            self._take(given)

    def news(self, after: int, seconds: float) -> bytes | None:
        """News past `after`, encoded; None: this driver was never told its order, or has lost it."""
        if self._order is None and self._ledger.ended is None:
            return None
        return msgspec.msgpack.encode(self._ledger.after(after, seconds))

    def cancel(self) -> None:
        """Have the ranks end within CANCEL_SECONDS."""
        with self._lock:
            if self._cancelled or self._over or self._fitting is None:
                return
            self._cancelled = True
            self._keep(msgspec.structs.replace(self._kept, cancelled=True, detail=self._detail))
            self._order_ranks(StopOrder(CANCEL_SECONDS))
            nobody = self._attempt is None or not self._attempt.running
        wait = 0.0 if nobody else CANCEL_SECONDS + _ABANDON_SECONDS
        killing = threading.Timer(wait, self._abandon)
        killing.daemon = True
        killing.start()

    def held(self) -> bytes:
        """The devices that its ranks hold now: a list of RankDevice, encoded."""
        with self._lock:
            return msgspec.msgpack.encode(self._held)

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
            self._keep(
                msgspec.structs.replace(self._kept, controller=ray_internals.actor_id(handle), run=run)
            )
            cancelled = self._cancelled
        if cancelled:
            self._abandon()

    def attempt(self, world_size: int, held: list[tuple[str, str]]) -> int:
        """The number of the attempt that begins; `held`: each rank's node and GPUs."""
        with self._lock:
            number = max(self._ledger.attempts, self._numbered)
            self._numbered = number + 1
            self._attempt = RankAttempt(number, world_size)
            self._held = [RankDevice(node, gpus) for node, gpus in sorted(set(held))]
            if not self._cancelled:
                self._order_ranks(StopOrder())
            return number

    def turned(self, state: str, cause: str, error: str) -> None:
        """Its controller's state has changed. The state's name, and that of the `cause`'s type, are Ray's; '': a rank's
        own end."""
        if state == "ReschedulingState" and cause == "WorkerGroupStartupTimeoutError":
            self._say(self._state or "starting", "waits until its nodes have enough free for all ranks")
        elif state == "ReschedulingState":
            self._not_started(error)
        elif state == "RestartingState":
            self._end_ranks()
            self._failed(cause, error)
        elif state == "ShuttingDownState":
            self._end_ranks()

    def _end_ranks(self) -> None:
        """Ray Train is about to kill them: have them end before, and what they have told is not lost."""
        with self._lock:
            if (attempt := self._attempt) is None:
                return
            if attempt.running and not self._cancelled:
                self._order_ranks(StopOrder(0.0))
                self._lock.wait_for(lambda: not attempt.running or self._cancelled, _LAST_SECONDS)
            attempt.give_up()

    def _failed(self, cause: str, error: str) -> None:
        """Its ranks are to start again; for good if their script ends before any step, and so did it the last time."""
        with self._lock:
            self._held = []
            attempt, why = self._attempt, self._why(error)
            own = attempt.own_error() if attempt and not cause and not self._ledger.stepped else ""
            again = own != "" and own == self._kept.error and not self._cancelled
            if again:
                self._detail = f"{why[:_WHY]}; not tried again: it ended so twice, before any step"
            else:
                self._failed_once(own)
        if again:
            self._abandon_soon()
        else:
            self._say("recovering", why)

    def _not_started(self, error: str) -> None:
        """Workers failed before their ranks: for good if their requirements cannot be had, or if it goes on."""
        assert self._order is not None
        self._unstarted += 1
        if _of_requirements(error) or self._unstarted > self._order.spec.retries + _UNSTARTED:
            self._detail = _unstarted(error)
            self._abandon_soon()
        else:
            self._say(self._state or "starting", "a worker did not start; it is tried again")

    def _abandon_soon(self) -> None:
        """The controller that is to be killed waits for an answer now."""
        self._cancelled = True
        killing = threading.Timer(0.1, self._abandon)
        killing.daemon = True
        killing.start()

    def resize(self) -> None:
        """Return once the ranks that run have ended; they start again in another number."""
        with self._lock:
            attempt = self._attempt
            if attempt is None or not attempt.running or self._cancelled:
                return
            self._order_ranks(StopOrder(RESIZE_SECONDS))
            self._ledger.restarts += 1
        self._say("recovering", "the number of ranks changes")
        with self._lock:
            self._lock.wait_for(lambda: not attempt.running, RESIZE_SECONDS + 5)
            self._held = []

    # --- for ranks' workers ----------------------------------------------------------------------------

    def brief(self) -> bytes:
        """The order without its package."""
        assert self._order is not None
        return msgspec.msgpack.encode(msgspec.structs.replace(self._order, package=b""))

    def package(self) -> bytes:
        assert self._order is not None
        return self._order.package

    def warm_process(self, node: str) -> str:
        """The socket of the process there of which ranks are forked; '' if there is none."""
        return self._warm.on(node)

    def tell(self, rank: int, attempt: int, events: bytes) -> bytes:
        """What a rank's worker has; the answer says whether the rank may go on."""
        told = decoding.from_msgpack(events, type=list[TrainEvent])
        if told:
            self._ledger.add(told)
        complete = False
        with self._lock:
            current = self._attempt
            if current is None or attempt != current.number:
                return msgspec.msgpack.encode(StopOrder(0.0))  # of ranks that were given up
            for event in told:
                if isinstance(event, RankStarted | RankEnded):
                    current.hear(event, self._stopped)
                    self._lock.notify_all()
                if isinstance(event, RankStarted):
                    complete = not current.over and len(current.started) == current.world_size
                    self._unstarted = 0
            answer = StopOrder(0.0) if current.over and not self._cancelled else self._stop
        if complete:
            self._say("running", "", ranks=current.world_size)
            self._watch_time()
        return msgspec.msgpack.encode(answer)

    # --- its own thread --------------------------------------------------------------------------------

    def _take(self, order: TrainOrder) -> None:
        """Go on with `order`, if there is anything to do. Two gateways may give it at once: the lock is held."""
        self._order = order
        if self._ledger.ended is not None:
            return
        self._fitting = threading.Thread(target=self._run, daemon=True, name=f"fit {order.job}")
        self._fitting.start()

    def _warm_up(self, order: TrainOrder) -> None:
        order = msgspec.structs.replace(order, package=b"")
        with self._warming:
            if order != self._warmed and not self._cancelled:
                self._warm.end()
                self._warm.start(order, self._job.folder)
                self._warmed = order

    def _end_warm(self) -> None:
        with self._warming:
            self._warm.end()
            self._warmed = None

    def _keep(self, kept: _Kept) -> None:
        self._kept = kept
        _put(self._folder / _STATE, msgspec.json.encode(kept))

    def _order_ranks(self, order: StopOrder) -> None:
        """Answer ranks with this from now on. The lock is held."""
        self._stop, self._stopped = order, time.time() if order.stop >= 0 else -1.0

    def _failed_once(self, error: str = "") -> None:
        """The lock is held. `error`: as _Kept has it."""
        self._keep(msgspec.structs.replace(self._kept, failures=self._kept.failures + 1, error=error))
        self._ledger.restarts += 1

    def _run(self) -> None:
        assert self._order is not None
        again = self._ledger.attempts > 0
        if again:
            self._ledger.restarts += 1
        self._say("recovering" if again else "starting", "its driver was started again" if again else "")
        self._warm_up(self._order)
        try:
            state, detail = self._fit(self._order)
        except Exception as error:  # nobody else would tell the job's end
            state, detail = "failed", f"its driver failed: {type(error).__name__}: {error}"
        if self._deadline is not None:
            self._deadline.cancel()
        self._clear()
        with contextlib.suppress(OSError):
            (self._folder / _ORDER).unlink()
        self._say(state, detail)
        self._end_warm()
        with self._lock:
            self._over = True
            self._held = []

    def _fit(self, order: TrainOrder) -> tuple[TrainState, str]:
        from ray.exceptions import RayActorError, RayError
        from ray.train import TrainingFailedError

        from . import ray_train

        ray_train.prepare()
        ray_internals.start_autoscaling_coordinator({OFFER: DRIVER_SHARE})
        while True:
            self._clear()
            with self._lock:
                if self._cancelled:
                    return self._cancelled_as()
                self._controller = None
            left = max(0, order.spec.retries - self._kept.failures)
            try:
                ray_train.trainer(order.spec, self._job, self._storage(), left).fit()
            except TrainingFailedError as error:
                return self._cancelled_as() if self._cancelled else ("failed", self._why(str(error)))
            except RayActorError:
                if self._cancelled:
                    return self._cancelled_as()
                with self._lock:
                    self._failed_once()
                    self._attempt = None
                if self._kept.failures > order.spec.retries:
                    return "failed", "Ray Train's controller was lost"
                self._say("recovering", "Ray Train's controller was lost")
                time.sleep(1)
            except RayError as error:
                return "failed", _first_line(str(error))
            else:
                return self._cancelled_as() if self._cancelled else ("done", "")

    def _clear(self) -> None:
        """Free what the last controller left, if it was killed."""
        if self._kept.controller:
            from ray.exceptions import RayError

            try:
                ray_internals.remove_placement_groups_of(self._kept.controller)
            except (RayError, RuntimeError, ConnectionError, AttributeError) as error:
                log.warning("what a lost controller held may stay taken: %s", error)
            ray_internals.cancel_resource_request(self._kept.run)

    def _cancelled_as(self) -> tuple[TrainState, str]:
        if self._detail:
            return "failed", self._detail
        return "cancelled", ""

    def _storage(self) -> Path:
        """Where Ray Train keeps its own: nothing that the job needs."""
        for folder in (self._folder / "ray", Path("/tmp") / f"torchrelay-ray-{os.getuid()}"):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
            return folder
        return Path("/tmp")

    def _watch_time(self) -> None:
        """All ranks are there: the job's time began when they first were."""
        assert self._order is not None
        seconds = self._order.spec.timeout_seconds
        if not seconds or self._deadline is not None:
            return
        with self._lock:
            if not self._kept.since:
                self._keep(msgspec.structs.replace(self._kept, since=time.time()))
        left = max(0.0, seconds - (time.time() - self._kept.since))
        self._deadline = threading.Timer(left, self._out_of_time, [seconds])
        self._deadline.daemon = True
        self._deadline.start()

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
        """What stopped the ranks: the first that ended badly, or what Ray Train says."""
        with self._lock:
            failed = self._attempt.failed if self._attempt else None
        if failed is not None:
            return describe_rank_exit(failed)
        if _of_requirements(error):
            return _unstarted(error)
        lines = [line.strip() for line in error.splitlines() if line.strip()]
        told = [line for line in lines if "died" in line or "rank" in line or "Error" in line]
        return (told[0] if told else "a worker was lost")[:1000]

    def _say(self, state: TrainState, detail: str, *, ranks: int = 0) -> None:
        with self._lock:
            if (state, detail, ranks) == self._said:
                return
            self._state, self._said = state, (state, detail, ranks)
            turned = StateChanged(
                state=state, at=time.time(), detail=detail, ranks=ranks, restarts=self._ledger.restarts
            )
        self._ledger.add([turned])


def _started_again() -> bool:
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _put(path: Path, data: bytes) -> bool:
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
    """Why workers do not start: the end of what was said is the nearest to it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
    what = "its requirements cannot be installed" if _of_requirements(error) else "its workers do not start"
    return f"{what}: {said}"[:2000]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
