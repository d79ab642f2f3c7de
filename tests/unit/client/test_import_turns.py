"""A thread that imports while the program does: neither sees a half-made module, and neither waits for ever."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrelay.compiler.torch_internals.loading import import_turns
from torchrelay.compiler.torch_internals.loading.import_turns import ImportTurns

pytestmark = pytest.mark.quick

CYCLE = {
    "left": "import time\ntime.sleep(0.1)\nimport {p}right\ntime.sleep(0.1)\nvalue = {p}right.__name__\n",
    "right": "import time\ntime.sleep(0.1)\nimport {p}left\ntime.sleep(0.1)\nother = {p}left.__name__\n",
}
"""Two modules that import each other."""


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of modules of this test's own, which other tests have not imported."""
    found = f"turns_{os.getpid()}_{time.monotonic_ns()}_"
    for name, text in CYCLE.items():
        (tmp_path / f"{found}{name}.py").write_text(text.format(p=found))
    monkeypatch.syspath_prepend(tmp_path)
    yield found
    for name in [name for name in sys.modules if name.startswith(found)]:
        del sys.modules[name]
    assert importlib._bootstrap._find_and_load.__code__ is import_turns._PYTHONS_OWN  # type: ignore[attr-defined]


class Early:
    """A thread that imports one module in a turn. `began`: the turn has begun."""

    def __init__(self, module: str) -> None:
        self.began, self.ended = threading.Event(), threading.Event()
        self.took = False
        self._module = module
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with ImportTurns() as turns:
            self.took = turns.take(self._import, lambda: False)
        self.ended.set()

    def _import(self) -> None:
        self.began.set()
        importlib.import_module(self._module)


def test_modules_that_import_each_other_are_whole_in_both_threads(prefix: str) -> None:
    early = Early(f"{prefix}left")
    assert early.began.wait(10)
    right = importlib.import_module(f"{prefix}right")
    assert right.other == f"{prefix}left"
    assert sys.modules[f"{prefix}left"].value == f"{prefix}right"
    assert early.ended.wait(10) and early.took


def test_without_turns_one_of_them_is_half_made(prefix: str) -> None:
    """What the turns are for: if this fails, Python needs them no more."""
    thread = threading.Thread(target=importlib.import_module, args=[f"{prefix}left"])
    thread.start()
    time.sleep(0.1)
    right = importlib.import_module(f"{prefix}right")
    half = not hasattr(sys.modules[f"{prefix}left"], "value") or not hasattr(right, "other")
    thread.join()
    assert half


def test_an_import_that_began_before_is_waited_for(prefix: str) -> None:
    def long() -> None:
        importlib.import_module(f"{prefix}left")

    thread = threading.Thread(target=long)
    thread.start()
    time.sleep(0.1)
    early = Early(f"{prefix}right")
    thread.join()
    assert early.ended.wait(10) and early.took
    assert sys.modules[f"{prefix}left"].value and sys.modules[f"{prefix}right"].other


def test_a_thread_that_holds_a_lock_which_the_turn_needs_goes_on(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As logging.config does, which imports under a lock that each logging.getLogger takes."""
    monkeypatch.setattr(import_turns, "_PATIENCE_SECONDS", 0.2)
    (tmp_path / f"{prefix}locks.py").write_text("import logging\nwith logging._lock: pass\n")
    import logging

    with logging._lock:  # type: ignore[attr-defined]
        early = Early(f"{prefix}locks")
        assert early.began.wait(10)
        assert importlib.import_module(f"{prefix}right").other
    assert early.ended.wait(10) and early.took


def test_what_gives_up_imports_nothing(prefix: str) -> None:
    with ImportTurns() as turns:
        assert not turns.take(lambda: importlib.import_module(f"{prefix}left"), lambda: True)
    assert f"{prefix}left" not in sys.modules


def test_an_error_ends_the_turn_and_others_import(prefix: str) -> None:
    with ImportTurns() as turns, pytest.raises(ModuleNotFoundError):
        turns.take(lambda: importlib.import_module(f"{prefix}nowhere"), lambda: False)
    assert importlib.import_module(f"{prefix}right").other


def test_there_is_one_block_at_a_time(prefix: str) -> None:
    with ImportTurns(), pytest.raises(RuntimeError, match="another thread"):
        ImportTurns().__enter__()


def test_a_fork_waits_for_the_turn_and_its_child_imports_all(prefix: str, tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(f"""
import importlib, os, sys, threading
from torchrelay.compiler.torch_internals.loading.import_turns import ImportTurns

began, go_on = threading.Event(), threading.Event()
def early():
    with ImportTurns() as turns:
        turns.take(lambda: (began.set(), importlib.import_module("{prefix}left")), lambda: False)
        go_on.wait(30)

threading.Thread(target=early, daemon=True).start()
began.wait(30)
child = os.fork()
assert sys.modules["{prefix}left"].value == "{prefix}right"
import colorsys
assert child or not hasattr(importlib._bootstrap._find_and_load, "__self__")
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
go_on.set()
""")
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)
