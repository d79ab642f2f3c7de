"""Trains a small graph once for each call that torchrelay makes, and raises an error in that call.

Arguments: WHERE PART PARTS. WHERE: backend: calls of the back end, when its function is traced. record: all others
while a function is traced and recorded. start: those of a start without tracing. Tries one call in PARTS, and prints a
JSON line for each. A call is a function of torchrelay, or one that torchrelay calls, and the line that calls it. Not
tried is what compiles locally, since nothing can replace it, what checks the caller's options and what runs a compiled
graph: their errors are the caller's.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torchrelay
from torch._dynamo import convert_frame
from torchrelay.clients import backend
from torchrelay.clients.reports.run_report import process_report

ROOT = str(Path(torchrelay.__file__).parent)
FOLDERS = tuple(f"{ROOT}/{name}/" for name in ("clients", "compiler"))
BACKEND = backend.torchrelay.__code__
where, first, every = sys.argv[1], *map(int, sys.argv[2:])
SPARED = ("_compile_locally", "check_options", "split_options")
RELEASES = (
    *("lock.__exit__", "RLock.__exit__", "Condition.__exit__", "ForkSafeLock.__exit__"),
    *("lock.release", "RLock.release", "DisableTorchFunctionSubclass.__exit__"),
)
"""The release of a lock cannot fail, and whoever comes next would wait for ever if it did; nor can a mode's end."""
PROGRAMS = Path(os.environ["TORCHRELAY_CACHE_DIR"]) / "programs"
STAND_INS = ("compiled", "looked_at", "invokes", "called", "found", "noted", "measured", "ordered", "updated")
"""What stands in place of PyTorch's functions: it calls those, whose errors are PyTorch's, and what catches ours."""
HANG_SECONDS = 300
"""After which a trial ends the script, with all threads' stacks."""
Site = tuple[str, str, int]


class Injected(Exception):
    """An error that no code expects."""


def ours(code: CodeType) -> bool:
    return code.co_filename.startswith(FOLDERS)


def site(frame: FrameType, event: str, argument: Any) -> Site | None:
    """The call, if it is one of those to be tried."""
    if event == "c_call":
        caller: FrameType | None = frame
        name = getattr(argument, "__qualname__", repr(argument))
    elif event == "call":
        caller, name = frame.f_back, frame.f_code.co_qualname
    else:
        return None
    if caller is None or name == backend.torchrelay.__qualname__ or name in RELEASES:
        return None
    if caller.f_code.co_name in STAND_INS or name.rpartition(".")[2] in STAND_INS:
        return None
    if not ours(caller.f_code) and not (event == "call" and ours(frame.f_code)):
        return None
    return name, caller.f_code.co_filename.removeprefix(ROOT), caller.f_lineno


def spared(frame: FrameType | None) -> bool:
    """Whether errors of calls in this frame are not this program's to try."""
    within = {BACKEND} if threading.current_thread() is not threading.main_thread() else set()
    while frame is not None:
        name = frame.f_code.co_name
        if name in SPARED or (name == "<module>" and ours(frame.f_code)):
            return True
        within.add(frame.f_code)
        frame = frame.f_back
    if where == "backend":
        return BACKEND not in within
    return BACKEND in within or convert_frame._compile.__code__ not in within


def step(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 8).requires_grad_()
    loss = torch.compile(lambda x: (x.sin() * factor).square().sum(), backend="torchrelay")(x)
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def expected(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 8).requires_grad_()
    loss = (x.sin() * factor).square().sum()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


class Injection:
    """A profile function that raises at the first call of a site."""

    def __init__(self, wanted: Site) -> None:
        self.wanted = wanted
        self.raised = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.raised and site(frame, event, argument) == self.wanted and not spared(frame):
            self.raised = True
            raise Injected(f"at {self.wanted[0]}")


def attempt(profile: Any) -> dict[str, Any]:
    """What came of one step with `profile` in force."""
    begun = time.monotonic()
    backend.process_backend.cache_clear()
    process_report.cache_clear()
    torch.compiler.reset()
    if where != "start":
        shutil.rmtree(PROGRAMS, ignore_errors=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            found, error = step(0.625), ""
        except BaseException as raised:
            found, error = None, f"{type(raised).__name__}: {raised}"[:300]
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    right = found is not None and all(map(torch.allclose, found, expected(0.625)))
    told = [str(w.message) for w in caught if w.category is torchrelay.FallbackWarning]
    report = torchrelay.report()
    return {
        "error": error,
        "right": right,
        "told": len(told),
        "hits": report.hits + report.disk_hits,
        "programs": report.programs,
        "fallbacks": report.fallbacks,
        "raised": getattr(profile, "raised", False),
        "seconds": round(time.monotonic() - begun, 2),
    }


def main() -> None:
    step(0.625)
    sites: dict[Site, None] = {}

    def record(frame: FrameType, event: str, argument: Any) -> None:
        found = site(frame, event, argument)
        if found is not None and found not in sites and not spared(frame):
            sites[found] = None

    attempt(record)
    attempt(record)
    chosen = list(sites)[first::every]
    print(json.dumps({"sites": len(sites), "chosen": len(chosen)}), flush=True)
    for wanted in chosen:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        print(json.dumps({"site": wanted, **attempt(Injection(wanted))}), flush=True)


if __name__ == "__main__":
    main()
