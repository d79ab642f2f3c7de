"""One process, one model of the zoo, one job: in: flags, out: one line of JSON on stdout.

    start      seconds of the first training step (forward and backward), by one way; what became of each graph
    accuracy   upstream's rule: eager twice, a float64 reference, and the compiled step no worse than eager by much
    time       a step's milliseconds eager, by Inductor and by torchrelay, in rounds in which they take turns

`status` is upstream's: pass, fail_accuracy, eager_1st_run_fail, eager_1st_run_OOM, eager_2nd_run_fail,
eager_two_runs_differ, fail_to_run, OOM, model_fail_to_load.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import gc
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import same

sys.path.append(str(Path(__file__).resolve().parents[1]))
from zoo_models import registry
from zoo_models.entry import Built, ZooModel, tensors_in

WAYS = ("eager", "inductor", "torchrelay")
Step = Callable[..., Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--job", choices=("start", "accuracy", "time"), required=True)
    parser.add_argument("--way", choices=WAYS, default="torchrelay")
    parser.add_argument("--ways", default=",".join(WAYS), help="that are timed, by turns")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="after these no round is begun; five are")
    parser.add_argument(
        "--turn", type=int, help="a descriptor, whose file is locked alone while this is timed"
    )
    parser.add_argument("--load-artifacts", type=Path, help="Mega-Cache artifacts to start from")
    parser.add_argument("--save-artifacts", type=Path, help="write Mega-Cache artifacts when done")
    args = parser.parse_args()

    record: dict[str, Any] = {"torch": torch.__version__}
    print(json.dumps(record | run(args)))


def run(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = registry.model(args.model)
    if model.build is None:
        return {"status": "model_fail_to_load", "error": model.missing}
    try:
        with device:
            built = model.build(args.small)
    except Exception as error:
        return {"status": "model_fail_to_load", "error": told(error)}
    trained = Trained(built, device, amp=args.amp and not model.float32_only, mode=args.mode)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if args.job == "start":
            with turn(args.turn):
                record = start(trained, args)
        elif args.job == "accuracy":
            record = accuracy(trained, model)
        else:
            record = step_times(trained, args)
    reasons = [str(each.message) for each in warned if each.category.__name__ == "FallbackWarning"]
    parameters = sum(p.numel() for p in built.model.parameters())
    return {**record, **relay_record(), "reasons": reasons, "parameters": parameters}


class Trained:
    """A model's training step on one batch, which leaves the model as it was."""

    def __init__(self, built: Built, device: torch.device, *, amp: bool, mode: str = "default") -> None:
        self.built = built
        self.device = device
        self._amp = amp
        self._mode = mode

    def compiled(self, way: str) -> Step:
        if way == "eager":
            return self.built.model
        if way == "torchrelay":
            import torchrelay

            return torchrelay.compile(self.built.model, mode=self._mode)
        return torch.compile(self.built.model, backend=way, mode=self._mode)

    def step(self, callable_: Step) -> tuple[Any, Tensor | None]:
        """Forward and backward: outputs and loss."""
        self.built.model.zero_grad(set_to_none=True)
        if self._mode != "default":  # it imports Inductor
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._amp):
            outputs = callable_(*self.built.args, **self.built.kwargs)
            loss = self.built.loss(outputs) if self.built.loss is not None else None
        if loss is not None:
            loss.backward()
        return outputs, loss

    def results(self, callable_: Step) -> list[Any]:
        """What upstream compares: outputs, loss, gradients, buffers."""
        model = self.built.model
        with restored_buffers(model):
            torch.manual_seed(1)
            random.seed(1)
            outputs, loss = self.step(callable_)
            values = [*tensors_in(outputs)] + ([loss] if loss is not None else [])
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            buffers = [b.clone() for b in model.buffers()]
        model.zero_grad(set_to_none=True)
        return [[each.detach() for each in group] for group in (values, gradients, buffers)]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def restored_buffers(model: torch.nn.Module) -> Iterator[None]:
    """And parameters that are not trained, which a model may change itself."""
    state = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
    before = [each.clone() for each in state]
    yield
    with torch.no_grad():
        for each, value in zip(state, before, strict=True):
            each.copy_(value)


@contextlib.contextmanager
def turn(descriptor: int | None) -> Iterator[None]:
    """Inside the block, no other process that was begun with this one prepares or is timed."""
    if descriptor is None:
        yield
        return
    leave_room()
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        leave_room()
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def start(trained: Trained, args: argparse.Namespace) -> dict[str, Any]:
    if args.way == "torchrelay":
        from torchrelay.clients.artifacts.prefetch import start_early

        start_early()
    trained.wait()
    began = time.perf_counter()
    try:
        if args.load_artifacts is not None:
            torch.compiler.load_cache_artifacts(args.load_artifacts.read_bytes())
        step = trained.compiled(args.way)
        trained.step(step)
        trained.wait()
    except Exception as error:
        return {"status": "OOM" if is_oom(error) else "fail_to_run", "error": told(error)}
    first = time.perf_counter() - began
    if args.save_artifacts is not None and (saved := torch.compiler.save_cache_artifacts()) is not None:
        args.save_artifacts.write_bytes(saved[0])
    return {"status": "pass", "first_step": first, "graph_breaks": graph_breaks()}


def accuracy(trained: Trained, model: ZooModel) -> dict[str, Any]:
    """Upstream's `check_accuracy` of pytorch/benchmarks/dynamo/common.py."""
    reference, cosine = None, False
    try:
        reference = in_float64(trained).results_of_eager()
    except Exception as error:
        cosine = True  # upstream compares so where the reference does not fit
        reference_error = told(error)
    else:
        reference_error = ""
    leave_room()
    told_of: list[str] = []

    def log(text: str, *values: Any, **_: Any) -> None:
        told_of.append(text % values if values else text)

    def agrees(expected: Any, value: Any) -> bool:
        return same(expected, value, reference, cosine, model.tolerance, equal_nan=True, log_error=log)

    results: list[Any] = []
    for number in ("1st", "2nd"):
        try:
            results.append(trained.results(trained.built.model))
        except Exception as error:
            kind = "OOM" if is_oom(error) else "fail"
            return {"status": f"eager_{number}_run_{kind}", "error": told(error)}
    record: dict[str, Any] = {"float64": reference_error or "compared"}
    try:
        if not agrees(*results):
            return {**record, "status": "eager_two_runs_differ", "error": told_of[-1] if told_of else ""}
    except torch.OutOfMemoryError as error:
        return {**record, "status": "eager_2nd_run_OOM", "error": told(error)}
    del results[1]
    leave_room()
    ways = ["torchrelay"]
    for way in ways:
        try:
            right = agrees(results[0], trained.results(trained.compiled(way)))
        except Exception as error:
            record[way] = "OOM" if is_oom(error) else "fail_to_run"
            record.setdefault("error", told(error))
        else:
            record[way] = "pass" if right else "fail_accuracy"
            record.setdefault("error", "" if right else (told_of or ["no value was named"])[-1])
        if record[way] != "pass" and way == "torchrelay":
            ways.append("inductor")  # is it PyTorch's, or ours?
            torch._dynamo.reset()
    return {**record, "status": record["torchrelay"]}


def leave_room() -> None:
    """For the others on this GPU, and for the worker, while this process waits for a compile."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Float64(Trained):
    def results_of_eager(self) -> list[Any]:
        return self.results(self.built.model)


def in_float64(trained: Trained) -> Float64:
    built = trained.built
    model = copy.deepcopy(built.model).double()
    args, kwargs = torch.utils._pytree.tree_map(as_float64, (built.args, built.kwargs))
    return Float64(Built(model=model, args=args, kwargs=kwargs, loss=built.loss), trained.device, amp=False)


def as_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def step_times(trained: Trained, args: argparse.Namespace) -> dict[str, Any]:
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    for way in args.ways.split(","):
        try:
            step = trained.compiled(way)
            for _ in range(3):  # compiles and warms up
                trained.step(step)
            trained.wait()
        except Exception as error:
            failed[way] = told(error)
            trained.built.model.zero_grad(set_to_none=True)
        else:
            steps[way] = step
    with turn(args.turn):
        times = time_by_turns(trained, steps, args.rounds, args.seconds)
    record: dict[str, Any] = {
        "status": "pass" if not failed else "fail_to_run",
        "milliseconds": {way: statistics.median(spent) for way, spent in times.items()},
        "rounds": len(times[next(iter(times))]) if times else 0,
    }
    if "torchrelay" in times and "inductor" in times:
        both = zip(times["torchrelay"], times["inductor"], strict=True)
        record["to_inductor"] = statistics.median(ours / theirs for ours, theirs in both)
    if trained.device.type == "cuda":
        record["peak_bytes"] = torch.cuda.max_memory_allocated(trained.device)
    return record | ({"error": "; ".join(f"{way}: {text}" for way, text in failed.items())} if failed else {})


def time_by_turns(
    trained: Trained, steps: dict[str, Step], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds of each step in each round; the first round is not counted."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    begun = time.monotonic()
    for number in range(rounds + 1):
        if number > 5 and time.monotonic() - begun > seconds:
            break
        for way in random.Random(number).sample(list(steps), len(steps)):
            trained.wait()
            before = time.perf_counter()
            trained.step(steps[way])
            trained.wait()
            if number:
                times[way].append((time.perf_counter() - before) * 1e3)
    return times


def relay_record() -> dict[str, Any]:
    """What torchrelay counted in this process, and what its artifacts' manifests say; nothing if it did nothing."""
    if "torchrelay.clients.backend" not in sys.modules:
        return {}
    import msgspec
    import torchrelay
    from torchrelay.compiler.artifact import container

    report: dict[str, Any] = msgspec.to_builtins(torchrelay.report())
    keys = {graph["key"] for graph in report["graphs"]}
    unverified: list[str] = []
    compiled: Counter[str] = Counter()
    size = 0
    artifacts = Path(os.environ["XDG_CACHE_HOME"]) / "torchrelay" / "artifacts"
    for path in artifacts.glob("*/*"):
        if len(path.name) == 64:
            data = path.read_bytes()
            manifest = container.read_manifest(data)
            if manifest.key in keys:
                size += len(data)
                compiled.update(dict(manifest.stages))
                if manifest.verification.status != "passed":
                    unverified.append(manifest.verification.reason)
    return {
        "graphs": len(report["graphs"]),
        "remote": sum(report[name] for name in ("hits", "disk_hits", "misses", "coalesced", "shared")),
        "misses": report["misses"],
        "fallbacks": report["fallbacks"],
        "refused": report["refused"],
        "unverified": unverified,
        "bytes": size,
        "programs": report["programs"],
        "traced": [f"{each['function']}: {each['reason']}" for each in report["traced"]],
        "stages": {name: round(seconds, 3) for name, seconds in report["seconds"].items() if seconds},
        "compile": {name: round(seconds, 3) for name, seconds in compiled.items()},
    }


def graph_breaks() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {reason.splitlines()[0][:200]: count for reason, count in counters["graph_break"].items()}


def is_oom(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def told(error: BaseException) -> str:
    """With its causes: of a model whose module cannot be imported, why."""
    said = f"{type(error).__name__}: {error}"[:2000]
    cause = error.__cause__
    return said if cause is None else f"{said}\nfrom {told(cause)}"


if __name__ == "__main__":
    main()
