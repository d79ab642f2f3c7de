"""A searcher in a process of its own, and the service's side of its questions: tasks handed out from a list.

As a script it is the searcher: it serves an order, and its questions and their answers are frames on two pipes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from torchrelay.compiler import decoding, measure, tuning, wire
from torchrelay.compiler.kernel_store import Exchange
from torchrelay.compiler.search_order import SearchOrder

SETTINGS = measure.Settings(seconds=1.0)
LIMIT_SECONDS = 600.0


class Start(Struct):
    """What the script is told at first. fault: of FAULTS."""

    order: SearchOrder
    store: str
    settings: measure.Settings
    fault: str = ""


class Told(Struct):
    """What came of a searcher: all that it asked, in order, and its exit status."""

    asked: list[tuning.Question]
    status: int
    log: str

    def found(self) -> dict[str, tuning.Found]:
        return {q.task: q for q in self.asked if isinstance(q, tuning.Found)}

    def unfit(self) -> dict[str, str]:
        return {q.task: q.why for q in self.asked if isinstance(q, tuning.Unfit)}

    def tried(self, task: str) -> list[str]:
        return [q.candidate for q in self.asked if isinstance(q, tuning.Trying) and q.task == task]


def search(
    tasks: Sequence[tuning.Task],
    target: wire.Target,
    toolchain: wire.Toolchain,
    store: Path,
    *,
    known: Sequence[tuning.Entry] = (),
    threads: int = 1,
    settings: measure.Settings = SETTINGS,
    fault: str = "",
    watch: Callable[[tuning.Question], None] = lambda question: None,
) -> Told:
    """Have `tasks` searched, one handed out at a time, until the searcher ends."""
    start = Start(SearchOrder(toolchain, target, threads), str(store), settings, fault)
    waiting, asked = list(tasks), list[tuning.Question]()
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # as workers have it
        process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None
        _send(process.stdin, msgspec.msgpack.encode(start))
        while data := _received(process.stdout):
            question: tuning.Question = decoding.from_msgpack(data, type=tuning.Question)
            asked.append(question)
            watch(question)
            answer: tuning.Answer
            if isinstance(question, tuning.Next):
                answer = tuning.Work([waiting.pop(0)] if waiting else [], over=not waiting)
            elif isinstance(question, tuning.Lookup):
                answer = tuning.Known([entry for entry in known if entry.problem in question.problems])
            else:
                answer = tuning.Known([])
            try:
                _send(process.stdin, msgspec.msgpack.encode(answer))
            except BrokenPipeError:
                break
        status = process.wait(LIMIT_SECONDS)
        process.stdin.close()
        process.stdout.close()
        log.seek(0)
        return Told(asked, status, log.read().decode(errors="replace"))


def _send(stream, data: bytes) -> None:  # type: ignore[no-untyped-def]
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def _received(stream) -> bytes:  # type: ignore[no-untyped-def]
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 4 else b""


def _serve() -> None:
    from torchrelay.compiler import pipeline, searcher, trials

    questions, answers = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)
    start = decoding.from_msgpack(_received(answers), type=Start)
    pipeline.torch_internals.preload_compiler()

    def ask(question: tuning.Question) -> tuning.Answer:
        _send(questions, msgspec.msgpack.encode(question))
        answer: tuning.Answer = decoding.from_msgpack(_received(answers), type=tuning.Answer)
        return answer

    if start.fault:
        trials.FIRST_SECONDS = trials.SAMPLE_SECONDS = 5.0
        FAULTS[start.fault]()
    store = Path(start.store)
    with tempfile.TemporaryDirectory() as folder:
        searcher.serve(
            start.order,
            ask,
            workdir=Path(folder),
            progress=lambda stage, detail: print(stage, detail),
            kernels=Exchange(store, store),
            settings=start.settings,
        )


# --- candidates that misbehave, on a GPU -------------------------------------------------------------------


def _templates(body: Callable[[], None]) -> Callable[[], None]:
    """Have Triton's templates, and not PyTorch's own kernels, do something else when they are first run."""

    def patch() -> None:
        from torch._inductor.select_algorithm import TritonTemplateCaller

        original = TritonTemplateCaller.benchmark

        def benchmark(self, *inputs, out):  # type: ignore[no-untyped-def]
            body()
            return original(self, *inputs, out=out)

        TritonTemplateCaller.benchmark = benchmark  # type: ignore[method-assign]

    return patch


def _hang() -> None:
    import torch

    torch.cuda._sleep(1 << 40)
    torch.cuda.synchronize()


def _break() -> None:
    """An illegal access, as a wild index in a kernel makes."""
    import torch

    x = torch.ones(4, device="cuda")
    x.as_strided((1,), (1,), 0)[torch.tensor([1 << 40], device="cuda")]
    torch.cuda.synchronize()


FAULTS: dict[str, Callable[[], None]] = {"hangs": _templates(_hang), "breaks": _templates(_break)}

if __name__ == "__main__":
    _serve()
