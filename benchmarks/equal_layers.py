"""What lowering equal layers once saves: one training step, compiled as a worker does, with and without it by turns.

    python benchmarks/equal_layers.py --layers 24 --rounds 3 --steps 20
    python benchmarks/equal_layers.py --device cuda --amp --layers 24 --width 1024 --batch 8 --tokens 512

Prints JSON: medians of processor seconds from the request to the compiled step (the C++ compiler's are its own), the
ratio of the steps' processor time, or on a GPU time, taken by turns (--at-once of them before it is waited for), and
whether the loss and all gradients are the same bits. On a GPU also the kernels that a step launches, and its peak
memory."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import nn
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.graph.captured_graph import CapturedGraph
from torchrelay.compiler.pipeline import equal_layers, inductor, rebuilt_graph, warm_up
from torchrelay.compiler.torch_internals import patching
from torchrelay.compiler.torch_internals.inductor import naming

VOCABULARY = 1000


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            t.view(rows, tokens, 4, width // 4).transpose(1, 2)
            for t in self.attend(self.before(x)).split(width, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.mix(y.transpose(1, 2).reshape(rows, tokens, width)), self.dropout)
        y = self.second(F.gelu(self.first(self.between(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout)


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.table(tokens), self.dropout)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def captured_step(
    model: nn.Module, tokens: torch.Tensor, *, dynamic: bool, amp: bool
) -> tuple[CapturedGraph, list[Any]]:
    graphs: list[tuple[CapturedGraph, list[Any]]] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        def first_call(*inputs: Any) -> Any:
            graphs.append((captured, list(inputs)))
            return gm(*inputs)

        captured = capture(gm, examples, mode="default", options={})
        return first_call

    if dynamic:
        torch._dynamo.mark_dynamic(tokens, (0, 1))
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=amp):
        torch.compile(model, backend=backend)(tokens)
    (only,) = graphs
    return only


def compiled(graph: CapturedGraph, *, once: bool) -> tuple[Callable[..., Any], float]:
    """The step, and the processor seconds that its compile took in this process."""
    began = time.process_time()
    rebuilt = rebuilt_graph.rebuild(graph.request)
    if once and not equal_layers.outline(rebuilt, graph.request):
        raise SystemExit("the graph has no equal layers")
    with naming.restoring_graph_counters():
        done = inductor.compile_rebuilt(
            rebuilt, graph.request, threads=2, progress=lambda stage, detail: None
        )
    seconds = time.process_time() - began
    done.building.files()  # waits for the C++ compiler
    return done.run, seconds


def step(run: Callable[..., Any], inputs: list[Any]) -> list[torch.Tensor]:
    """The loss and all gradients."""
    torch.manual_seed(0)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    (loss,) = run(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def loop(run: Callable[..., Any], inputs: list[Any], steps: int) -> float:
    """Seconds of so many steps: of the processor, or until the GPU has done all of them."""
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    began = clock()
    for _ in range(steps):
        step(run, inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - began


def gpu_costs(run: Callable[..., Any], inputs: list[Any]) -> tuple[int, int]:
    """How many kernels a step launches, and the bytes that it allocates at most."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(run, inputs)
    peak = torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(run, inputs)
    kernels = sum(event.count for event in profile.key_averages() if event.self_device_time_total)
    return kernels, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 24), ("width", 256), ("rounds", 3), ("steps", 20), ("at-once", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("batch", 4), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes of batch and sequence")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.device(chosen.device):
        model = Transformer(chosen.layers, chosen.width, chosen.dropout)
        tokens = torch.randint(VOCABULARY, (chosen.batch, chosen.tokens))
    graph, inputs = captured_step(model, tokens, dynamic=chosen.dynamic, amp=chosen.amp)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    runs: dict[bool, Callable[..., Any]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        warm_up.warm_up(Path(folder))
        stack.enter_context(patching.cache_folders(Path(folder)))
        for _ in range(chosen.rounds):
            for once in (False, True):
                runs[once], took = compiled(graph, once=once)
                seconds[once].append(took)
        same = all(map(torch.equal, step(runs[False], inputs), step(runs[True], inputs)))
        costs = {once: gpu_costs(runs[once], inputs) for once in runs} if tokens.is_cuda else {}
        pairs = [
            (loop(runs[True], inputs, chosen.at_once), loop(runs[False], inputs, chosen.at_once))
            for _ in range(chosen.steps)
        ]
    apart, together = statistics.median(seconds[False]), statistics.median(seconds[True])
    print(
        json.dumps(
            {
                "torch": str(torch.__version__),
                "layers": chosen.layers,
                "width": chosen.width,
                "device": torch.cuda.get_device_name() if tokens.is_cuda else "cpu",
                "amp": chosen.amp,
                "dropout": chosen.dropout,
                "steps at once": chosen.at_once,
                "dynamic": chosen.dynamic,
                "compile seconds, each layer": round(apart, 2),
                "compile seconds, layers once": round(together, 2),
                "compile ratio": round(together / apart, 3),
                "step ratio": round(statistics.median(a / b for a, b in pairs), 4),
                "same bits": same,
                **{
                    f"{name}, {'layers once' if once else 'each layer'}": costs[once][which]
                    for which, name in enumerate(("kernels", "peak bytes"))
                    for once in costs
                },
            }
        )
    )


if __name__ == "__main__":
    main()
