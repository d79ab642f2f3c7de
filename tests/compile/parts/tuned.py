"""Compiles with a tuning database that answers from a list, and with candidates that misbehave.

As a script it is the worker's side: it works out what every compile needs, and then makes each compile in a copy of
itself, as a fork server does. `Worker` is the side of the tests.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from msgspec import Struct
from torchrelay.compiler import decoding, errors
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.kernel_store.libraries import KernelExchange
from torchrelay.compiler.pipeline import pipeline
from torchrelay.compiler.request import codec, schema
from torchrelay.compiler.search import benchmark as search_benchmark
from torchrelay.compiler.search import user_kernels
from torchrelay.compiler.torch_internals import patching
from torchrelay.compiler.torch_internals.inductor import lowering_speed
from torchrelay.compiler.torch_internals.triton import kernels as triton_kernels
from torchrelay.compiler.tuning import queries, records

_LENGTH = struct.Struct(">Q")
SEARCH = pipeline.ranking.RankingSettings(seconds=1.0)


class Case(Struct, kw_only=True):
    """known: what the database has; None: it does not answer. late: it has it only when somebody tells what he found.
    fault: of FAULTS. store: of built libraries. found_elsewhere: what others find, one problem each time they are
    asked again; they search on for ever where they do not find."""

    request: bytes
    known: list[records.TuningEntry] | None = []
    late: bool = False
    fault: str = ""
    found_elsewhere: list[records.TuningEntry] | None = None
    store: str


class Outcome(Struct, kw_only=True):
    """error: `code: message` of what the compile raised. code: what Inductor generated. measured: Inductor's own count
    of operators for which it ran candidates. benchmarks: how often Inductor measured anything by itself. rendered: C++
    templates. stages: in the order of their progress."""

    error: str = ""
    manifest: artifact_manifest.Manifest | None = None
    asked: list[queries.TuningQuery]
    code: list[str] = []
    measured: int = 0
    benchmarks: int = 0
    rendered: int = 0
    stages: list[tuple[str, str]] = []

    def found(self) -> list[records.TuningEntry]:
        return [question.entry for question in self.asked if isinstance(question, queries.SearchResult)]


class Worker:
    """The script, running. In a `with` block."""

    def __init__(self, store: Path) -> None:
        self._store = store
        store.mkdir()

    def __enter__(self) -> Worker:
        # as a worker's environment has it: to ask whether there is a GPU may not initialise CUDA before the fork
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def compile(
        self,
        request: schema.GraphRequest,
        known: Sequence[records.TuningEntry] | None = (),
        *,
        late: bool = False,
        fault: str = "",
        found_elsewhere: Sequence[records.TuningEntry] | None = None,
    ) -> Outcome:
        case = Case(
            request=codec.pack_request(request),
            known=None if known is None else list(known),
            late=late,
            fault=fault,
            found_elsewhere=None if found_elsewhere is None else list(found_elsewhere),
            store=str(self._store),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        data = msgspec.msgpack.encode(case)
        self._process.stdin.write(_LENGTH.pack(len(data)) + data)
        self._process.stdin.flush()
        (size,) = _LENGTH.unpack(self._process.stdout.read(_LENGTH.size))
        return decoding.from_msgpack(self._process.stdout.read(size), type=Outcome)


def _serve() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    pipeline.preload()
    while head := requests.read(_LENGTH.size):
        case = decoding.from_msgpack(requests.read(_LENGTH.unpack(head)[0]), type=Case)
        with tempfile.TemporaryDirectory() as folder:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    (Path(folder) / "outcome").write_bytes(msgspec.msgpack.encode(_outcome(case, folder)))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
            data = (Path(folder) / "outcome").read_bytes()
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


def _outcome(case: Case, folder: str) -> Outcome:
    FAULTS[case.fault]()
    outcome = Outcome(asked=[])
    bundles: list[bytes] = []
    polls: list[int] = []
    fix_winners = triton_kernels.fix_winners

    def recorded(bundle: bytes, triton: Any) -> Any:
        bundles.append(bundle)
        return fix_winners(bundle, triton)

    triton_kernels.fix_winners = recorded

    _count_benchmarks(outcome)
    _count_templates(outcome)

    def ask(question: queries.TuningQuery) -> queries.TuningReply:
        outcome.asked.append(question)
        if case.known is None:
            raise errors.Unavailable("the database does not answer")
        if isinstance(question, queries.SearchRequest) and case.found_elsewhere is not None:
            polls.append(len(question.problems))
            again = sum(later <= earlier for earlier, later in itertools.pairwise(polls))
            ready = [entry for entry in case.found_elsewhere if entry.problem in question.problems][:again]
            return queries.KnownEntries(ready, open=len(question.problems) - len(ready))
        if isinstance(question, queries.SearchResult):
            stand = [entry for entry in case.known if entry.problem == question.entry.problem]
            return queries.KnownEntries(stand or [question.entry])
        return queries.KnownEntries([] if case.late else case.known)

    try:
        data = pipeline.compile_request(
            codec.unpack_request(case.request),
            key="k",
            worker="w",
            workdir=Path(folder),
            progress=lambda stage, detail: outcome.stages.append((stage, detail)),
            kernels=KernelExchange(Path(case.store), Path(case.store)),
            ask=ask,
            threads=2,
            settings=SEARCH,
        )
    except errors.RelayError as error:
        outcome.error = f"{error.code}: {error.message}"
        return outcome
    outcome.manifest = container.read_manifest(data)
    entry, _, _ = pickle.loads(bundles[0])
    outcome.code = [
        part.result.source_code.replace(folder, "")  # "kernel path: ..." for a GPU
        for part in (entry.compiled_fw, entry.compiled_bw)
        if part is not None
    ]
    outcome.measured = torch._dynamo.utils.counters["inductor"]["select_algorithm_autotune"]
    return outcome


def _count_benchmarks(outcome: Outcome) -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def benchmark(*args: Any, **kwargs: Any) -> Any:
            outcome.benchmarks += 1
            return original(*args, **kwargs)

        return benchmark

    for name in ("benchmark", "benchmark_cpu", "benchmark_gpu"):
        setattr(type(benchmarker), name, counted(getattr(type(benchmarker), name)))


def _count_templates(outcome: Outcome) -> None:
    from torch._inductor.codegen.cpp_template import CppTemplate

    generate: Any = CppTemplate.generate

    def counted(self: Any, **kwargs: Any) -> Any:
        outcome.rendered += 1
        return generate(self, **kwargs)

    CppTemplate.generate = counted  # type: ignore[method-assign]


# --- candidates that misbehave -----------------------------------------------------------------------------


def _instead(caller: str, body: Callable[..., float]) -> Callable[[], None]:
    """Replace how a kind of candidate runs: body(original, candidate, *inputs, out=out)."""

    def patch() -> None:
        from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller
        from torch._inductor.select_algorithm import ExternKernelCaller

        owner: Any = {"cpp": CppTemplateCaller, "aten": ExternKernelCaller}[caller]
        original = owner.benchmark
        owner.benchmark = lambda self, *inputs, out: body(original, self, *inputs, out=out)

    return patch


def _crash(original: Any, self: Any, *inputs: Any, out: Any) -> float:
    signal.raise_signal(signal.SIGSEGV)
    return 0.0


def _hang(original: Any, self: Any, *inputs: Any, out: Any) -> float:
    signal.pause()
    return 0.0


def _raise(original: Any, self: Any, *inputs: Any, out: Any) -> float:
    raise RuntimeError("this candidate does not run")


def _wrong(original: Any, self: Any, *inputs: Any, out: Any) -> float:
    took = original(self, *inputs, out=out)
    out[..., 0, 0] += 0.01
    return cast(float, took)


def _silent(original: Any, self: Any, *inputs: Any, out: Any) -> float:
    from torch._inductor.runtime.benchmarking import benchmarker

    return benchmarker.benchmark_cpu(lambda: None)


def _slow(caller: str) -> Callable[[], None]:
    def body(original: Any, self: Any, *inputs: Any, out: Any) -> float:
        from torch._inductor.runtime.benchmarking import benchmarker

        benchmark = benchmarker.benchmark_cpu

        def slowly(function: Any, *args: Any, **kwargs: Any) -> float:
            return benchmark(lambda: (time.sleep(0.02), function())[1])

        with patching.patched(benchmarker, "benchmark_cpu", slowly):
            return cast(float, original(self, *inputs, out=out))

    return _instead(caller, body)


def _impatient() -> None:
    search_benchmark.FIRST_SECONDS = 5.0
    _instead("cpp", _hang)()


def _all() -> None:
    _instead("cpp", _crash)()
    _instead("aten", _raise)()


def _impatience() -> None:
    pipeline.in_compile.NO_PROGRESS_SECONDS = 0.3


def _undisturbed() -> None:
    pipeline.in_compile.DISTURBED_DEVICES = frozenset()


def _undisturbed_impatience() -> None:
    _undisturbed()
    _impatience()


def _spared_nothing() -> None:
    lowering_speed.faster_lowering = contextlib.nullcontext  # type: ignore[assignment]


def _unable() -> None:
    pipeline.why_not_runnable = lambda request: "this worker's CPU lacks avx512f"


FAULTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "cpp crashes": _instead("cpp", _crash),
    "cpp hangs": _impatient,
    "cpp raises": _instead("cpp", _raise),
    "cpp is wrong": _instead("cpp", _wrong),
    "cpp computes nothing": _instead("cpp", _silent),
    "cpp is slow": _slow("cpp"),
    "aten is slow": _slow("aten"),
    "none runs": _all,
    "unable": _unable,
    "is spared nothing": _spared_nothing,
    "kernels may run for 10 s": lambda: setattr(user_kernels, "RUN_SECONDS", 10.0),
    "nobody finds": _impatience,
    "goes on meanwhile": _undisturbed,
    "goes on, and nobody finds": _undisturbed_impatience,
}

if __name__ == "__main__":
    _serve()
