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
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning.jobs import SearchJobSpec
from torchrelay.compiler.kernel_store.libraries import KernelExchange
from torchrelay.compiler.request import schema
from torchrelay.compiler.search import ranking
from torchrelay.compiler.tuning import queries, records

SETTINGS = ranking.RankingSettings(seconds=1.0)
LIMIT_SECONDS = 600.0


class Start(Struct):
    """What the script is told at first. fault: of FAULTS."""

    order: SearchJobSpec
    store: str
    settings: ranking.RankingSettings
    fault: str = ""


class Told(Struct):
    """What came of a searcher: all that it asked, in order, and its exit status."""

    asked: list[queries.TuningQuery]
    status: int
    log: str

    def found(self) -> dict[str, queries.SearchResult]:
        return {q.task: q for q in self.asked if isinstance(q, queries.SearchResult)}

    def unfit(self) -> dict[str, str]:
        return {q.task: q.why for q in self.asked if isinstance(q, queries.UnsupportedTask)}

    def tried(self, task: str) -> list[str]:
        return [q.candidate for q in self.asked if isinstance(q, queries.CandidateAttempt) and q.task == task]


def search(
    tasks: Sequence[queries.TuningTask],
    target: schema.Target,
    toolchain: schema.Toolchain,
    store: Path,
    *,
    known: Sequence[records.TuningEntry] = (),
    threads: int = 1,
    settings: ranking.RankingSettings = SETTINGS,
    fault: str = "",
    watch: Callable[[queries.TuningQuery], None] = lambda question: None,
) -> Told:
    """Have `tasks` searched, one handed out at a time, until the searcher ends."""
    start = Start(SearchJobSpec(toolchain, target, threads), str(store), settings, fault)
    waiting, asked = list(tasks), list[queries.TuningQuery]()
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
            question: queries.TuningQuery = decoding.from_msgpack(data, type=queries.TuningQuery)
            asked.append(question)
            watch(question)
            answer: queries.TuningReply
            if isinstance(question, queries.TaskRequest):
                answer = queries.TaskBatch([waiting.pop(0)] if waiting else [], over=not waiting)
            elif isinstance(question, queries.EntryLookup):
                answer = queries.KnownEntries(
                    [entry for entry in known if entry.problem in question.problems]
                )
            else:
                answer = queries.KnownEntries([])
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
    from torchrelay.compiler.search import benchmark as search_benchmark
    from torchrelay.compiler.search import search_worker
    from torchrelay.compiler.torch_internals.loading import preload

    questions, answers = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)
    start = decoding.from_msgpack(_received(answers), type=Start)
    preload.preload_compiler()

    def ask(question: queries.TuningQuery) -> queries.TuningReply:
        _send(questions, msgspec.msgpack.encode(question))
        answer: queries.TuningReply = decoding.from_msgpack(_received(answers), type=queries.TuningReply)
        return answer

    if start.fault:
        search_benchmark.FIRST_SECONDS = search_benchmark.SAMPLE_SECONDS = 5.0
        FAULTS[start.fault]()
    store = Path(start.store)
    with tempfile.TemporaryDirectory() as folder:
        search_worker.serve(
            start.order,
            ask,
            workdir=Path(folder),
            progress=lambda stage, detail: print(stage, detail),
            kernels=KernelExchange(store, store),
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
