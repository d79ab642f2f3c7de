"""Operators of known libraries in programs: they are those of the library's file, as it is now, and of nobody else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from program_changes import Change
from program_starts import Recorded, Start, from_records
from torchrelay.compiler.request.operator_table import table

LIBRARY = """
import torch


@torch.library.custom_op("known_for_test::longer", mutates_args=())
def longer(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones(MORE + 12)


@longer.register_fake
def _(x):
    return x.new_empty(MORE + 12)


MORE = 1
"""
TEXT = """
import known_for_test


def program(x):
    y = torch.ops.known_for_test.longer(x.detach())
    return y * 2 + y.shape[0]
"""
ANOTHER_FAKE = """

@torch.library.register_fake("known_for_test::longer", allow_override=True)
def _(x):
    return x.new_empty(13)
"""


class Library:
    """A library whose operators are known, in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = Recorded()

    def start(self, library: str, text: str = TEXT) -> Start:
        """Another process, that has this text of the library."""
        sys.modules.pop("known_for_test", None)
        (self.folder / "known_for_test.py").write_text(library)
        return from_records(self.programs, self.folder / "program.py", Change(text=text).before())


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    operator = "torch.ops.known_for_test.longer"
    known = table.KnownLibrary("known_for_test", frozenset({operator}))
    monkeypatch.setitem(table.LIBRARIES, "known_for_test", known)
    monkeypatch.setitem(table.LIBRARY_OF, operator, "known_for_test")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    return Library(tmp_path)


def test_a_program_is_used_as_long_as_its_librarys_file_is_the_same(library: Library) -> None:
    first = library.start(LIBRARY)
    assert first.how == "traced"
    assert library.start(LIBRARY) == Start(first.results, "used")
    changed = library.start(LIBRARY.replace("MORE = 1", "MORE = 2"))
    assert changed.how == "traced"
    assert changed.results != first.results
    assert library.start(LIBRARY) == Start(first.results, "used")


def test_a_fake_that_is_not_the_librarys_leaves_no_program(library: Library) -> None:
    found = library.start(LIBRARY, TEXT + ANOTHER_FAKE)
    assert found.how == "traced"
    assert "an operator's function that is not the library's, known_for_test.longer" in str(found.reasons)
    assert library.start(LIBRARY, TEXT + ANOTHER_FAKE).how == "traced"


def test_a_program_is_not_used_with_a_fake_that_is_not_the_librarys(library: Library) -> None:
    library.start(LIBRARY)
    found = library.start(LIBRARY, TEXT + ANOTHER_FAKE)
    assert found.how == "traced"
    assert "an operator's function that is not the library's" in str(found.reasons)
