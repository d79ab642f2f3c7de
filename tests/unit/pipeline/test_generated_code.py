"""Generated Python code is compiled once: its bytecode is kept, and read for the same text."""

from __future__ import annotations

import builtins
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from torch._inductor.runtime import compile_tasks
from torchrelay.compiler.torch_internals.dynamo.programs import generated_code

TEXT = """
CONSTANT = (1, 2.5, None)


def call(x):
    def inner():
        return x + CONSTANT[0]

    return inner()
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that Python has compiled."""
    generated_code.install()
    found: list[str] = []
    compile_now = builtins.compile

    def counted(source: Any, filename: Any, *rest: Any, **options: Any) -> Any:
        found.append(Path(filename).name)
        return compile_now(source, filename, *rest, **options)

    monkeypatch.setattr(builtins, "compile", counted)
    return found


def load(folder: Path, text: str, name: str) -> Any:
    path = folder / f"{name}.py"
    path.write_text(text)
    return compile_tasks._reload_python_module(name, str(path))


def kept(folder: Path, text: str = TEXT) -> dict[str, bytes]:
    with generated_code.collecting() as made:
        load(folder, text, "made")
    return generated_code.write(made)


def test_the_same_text_is_not_compiled_again(tmp_path: Path, compiled: list[str]) -> None:
    bytecode = kept(tmp_path)
    with generated_code.known(bytecode):
        assert load(tmp_path, TEXT, "again").call(2) == 3
    assert compiled == ["made.py"]
    assert load(tmp_path, TEXT, "after").call(2) == 3
    assert compiled == ["made.py", "after.py"]


def test_another_text_is_compiled(tmp_path: Path, compiled: list[str]) -> None:
    with generated_code.known(kept(tmp_path)):
        assert load(tmp_path, TEXT.replace("x +", "x -"), "other").call(2) == 1
    assert compiled == ["made.py", "other.py"]


def test_what_was_read_is_kept_again(tmp_path: Path, compiled: list[str]) -> None:
    bytecode = kept(tmp_path)
    with generated_code.known(bytecode):
        assert kept(tmp_path) == bytecode


def test_bytecode_is_for_one_thread(tmp_path: Path, compiled: list[str]) -> None:
    with generated_code.known(kept(tmp_path)):
        thread = Thread(target=load, args=(tmp_path, TEXT, "thread"))
        thread.start()
        thread.join()
    assert compiled == ["made.py", "thread.py"]


def test_what_has_no_room_is_compiled_at_each_start(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated_code, "MOST_BYTES", 10)
    assert kept(tmp_path) == {}
