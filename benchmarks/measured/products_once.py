"""One process, many matrix products: in: flags; out: a line of JSON for each product, in a file as it goes.

A service's client. `--search` has the products of a group searched by compiling them as one graph; `--compare`
compiles each on its own, by PyTorch's own max-autotune in this process and through the service, and times both and
ATen by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchrelay
from interleaved import interleaved
from products import Product, all_at_once, products
from torchrelay.clients.jobfiles import tuning_lock
from torchrelay.compiler.artifact import container
from torchrelay.compiler.graph import toolchain
from torchrelay.compiler.search import ranking
from torchrelay.compiler.tuning import records as tuning_records

MODE = "max-autotune-no-cudagraphs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True, choices=("cpu", "cuda"))
    parser.add_argument("--records", type=Path, required=True, help="where the lines of JSON go")
    parser.add_argument("--seconds", type=float, required=True, help="after these nothing is begun")
    parser.add_argument("--skip", type=int, default=0, help="products")
    parser.add_argument("--most", type=int, default=1000, help="products")
    parser.add_argument("--group", type=int, default=24, help="products of one graph")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--share", type=int, default=0, help="of the products, counted from 0")
    parser.add_argument("--shares", type=int, default=1)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--lock", type=Path, help="a loose lock to be made, that pins nothing here")
    parser.add_argument(
        "--before", type=Path, help="an autotune.json: what it compares is not compared again"
    )
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if args.lock is not None:
        args.lock.write_text(tuning_lock.write([elsewhere(args.device)]))
        os.environ |= {"TORCHRELAY_TUNING_LOCK": str(args.lock), "TORCHRELAY_TUNING_LOCK_MODE": "loose"}
    begun = time.monotonic()
    every = products(args.device)[args.skip :][: args.most]
    if args.before is not None:
        every = [product for product in every if product.name not in compared_in(args.before)]
    every = every[args.share :: args.shares]
    with args.records.open("a") as lines:

        def tell(record: dict[str, Any]) -> None:
            lines.write(json.dumps(record) + "\n")
            lines.flush()

        for first in range(0, len(every), args.group):
            group = every[first : first + args.group]
            if time.monotonic() - begun > args.seconds:
                break
            if args.search:
                say(f"products {first + 1} to {first + len(group)} of {len(every)}: searched as one graph")
                torch.compiler.reset()
                tell(record := searched(group, args.device))
                say(f"  {record['relay_s']:.1f} s {record['relay'].get('failed', '')}")
            for product in group if args.compare else []:
                if time.monotonic() - begun > args.seconds:
                    break
                torch.compiler.reset()
                record = compared(product, args.device, args.rounds)
                tell(record)
                say(line(record))


def compared_in(file: Path) -> set[str]:
    records = json.loads(file.read_text())["products"]
    return {record["product"] for record in records if "to_inductor" in record}


def elsewhere(device: str) -> tuning_records.TuningEntry:
    """A winner for a problem that nobody has, here: with a lock, a worker of a version that leaves a GPU's choices to
    Inductor searches there too."""
    made, aim = toolchain.local_toolchain(), toolchain.local_target(device)
    place = tuning_records.DeviceEnvironment(aim.name, aim.capability, "", made.torch, made.triton, made.cuda)
    problem = tuning_records.parse_problem("mm(f64[1,1], f64[1,1]) -> f64[1,1]")
    return tuning_records.TuningEntry(
        problem=problem, place=place, winner=tuning_records.Timing("aten mm", 1.0, 1.0, 1.0, 1), candidates=1
    )


def searched(group: list[Product], device: str) -> dict[str, Any]:
    inputs = [product.inputs(device) for product in group]
    every = all_at_once([product.call() for product in group], [len(each) for each in inputs])
    flat = [tensor for each in inputs for tensor in each]
    record: dict[str, Any] = {"group": [product.name for product in group]}
    _, record["relay_s"], record["relay"] = compiled(every, flat, "torchrelay")
    return record


def compared(product: Product, device: str, rounds: int) -> dict[str, Any]:
    """Both compiles, and their times; where one fails, what it said."""
    inputs = product.inputs(device)
    record: dict[str, Any] = {"product": product.name, "op": product.op, "dtype": str(product.dtype)}
    upstream, record["inductor_s"], record["inductor"] = compiled(product.call(), inputs, "inductor")
    ours, record["relay_s"], record["relay"] = compiled(product.call(), inputs, "torchrelay")
    if ours is None or upstream is None:
        return record
    eager = product.call()
    calls = {
        "torchrelay": lambda: ours(*inputs),
        "inductor": lambda: upstream(*inputs),
        "aten": lambda: eager(*inputs),
    }
    with torch.no_grad():
        results = {name: call().float() for name, call in calls.items()}
        largest = float(results["aten"].abs().max())
        record["differs"] = {
            name: float((result - results["aten"]).abs().max()) / largest for name, result in results.items()
        }
        del results
        times = interleaved(calls, device, rounds=rounds, seconds=1.2)
    record["milliseconds"] = {name: statistics.median(taken) for name, taken in times.items()}
    for other in ("inductor", "aten"):
        told = ranking.summary([a / b for a, b in zip(times["torchrelay"], times[other], strict=True)])
        record[f"to_{other}"] = {"ratio": told.median, "low": told.low, "high": told.high}
    record["rounds"] = len(times["aten"])
    return record


def compiled(
    function: Callable[..., Any], inputs: list[torch.Tensor], backend: str
) -> tuple[Callable[..., Any] | None, float, dict[str, Any]]:
    """The compiled function, the seconds that it took to its first result, and what is known of the compile."""
    known = {record.key for record in torchrelay.report().graphs}
    told: dict[str, Any] = {}
    begin = time.perf_counter()
    try:
        with torch.no_grad(), winners_of(backend) as told["winners"]:
            made = torch.compile(function, backend=backend, mode=MODE, fullgraph=True)
            made(*inputs)
            if inputs[0].is_cuda:
                torch.cuda.synchronize()
    except Exception as error:
        return None, time.perf_counter() - begin, {"failed": f"{type(error).__name__}: {error}"[:2000]}
    seconds = time.perf_counter() - begin
    if backend == "torchrelay":
        keys = [record.key for record in torchrelay.report().graphs if record.key not in known]
        told = {"manifests": [manifest for key in keys for manifest in manifests(key)]}
    return made, seconds, told


class winners_of:  # noqa: N801, used as a function
    """Inside the block, what Inductor's own search of this process prefers: candidate and milliseconds, by problem."""

    def __init__(self, backend: str) -> None:
        self._active = backend == "inductor"

    def __enter__(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._active:
            from torch._inductor.select_algorithm import add_feedback_saver

            def saver(timings: dict[Any, float], name: str, *rest: Any) -> None:
                best = min(timings, key=lambda choice: timings[choice])
                text = f"{best.name} {getattr(best, 'description', '')}".strip()
                found[f"{name} {len(found)}"] = [text, timings[best], len(timings)]

            add_feedback_saver(saver)
        return found

    def __exit__(self, *error: object) -> None:
        if self._active:
            from torch._inductor.select_algorithm import clear_feedback_savers

            clear_feedback_savers()


def manifests(key: str) -> list[dict[str, Any]]:
    """Of the artifact that this machine keeps by that name."""
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "torchrelay" / "artifacts"
    found = []
    for path in folder.rglob(f"{key}*"):
        told = container.read_manifest(path.read_bytes())
        found.append(
            {
                "stages": dict(told.stages),
                "searched": told.searched,
                "recalled": told.recalled,
                "winners": [
                    [each.problem, each.winner, each.milliseconds, each.candidates] for each in told.tuning
                ],
            }
        )
    return found


def line(record: dict[str, Any]) -> str:
    if "to_inductor" not in record:
        failed = record["relay"].get("failed") or record["inductor"].get("failed")
        return f"  {record['product']}: FAILED: {failed}"
    own, aten = record["to_inductor"], record["to_aten"]
    times = " ".join(f"{name} {took:.4f}" for name, took in record["milliseconds"].items())
    return (
        f"  {record['product']:<58} {own['ratio']:.3f} ({own['low']:.3f} to {own['high']:.3f}) of Inductor's, "
        f"{aten['ratio']:.3f} of ATen's; ms: {times}; compiled in {record['relay_s']:.1f} and "
        f"{record['inductor_s']:.1f} s"
    )


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    main()
