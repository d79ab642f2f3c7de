"""Versions of symbols that libraries need and define, read from this machine's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torchrelay.compiler.artifact import symbol_versions
from torchrelay.compiler.errors import CannotLoad

TORCH = (Path(torch.__file__).parent / "lib" / "libtorch_python.so").read_bytes()


def mapped(name: str) -> bytes:
    """A library that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(path) for line in lines if name in (path := line.split()[-1])).read_bytes()


def test_what_torch_needs_is_there_since_it_was_loaded() -> None:
    needs = symbol_versions.needed(TORCH)
    assert {"GLIBC", "GLIBCXX", "CXXABI"} <= needs.keys() <= symbol_versions.offered().keys()
    symbol_versions.check_needs(needs, symbol_versions.offered(), "this machine")


def test_the_c_library_defines_the_version_that_it_says_it_has() -> None:
    assert symbol_versions.defined(mapped("/libc.so.6"))["GLIBC"] == symbol_versions.offered()["GLIBC"]


def test_the_highest_version_counts() -> None:
    library = mapped("/libstdc++.so.6")
    number = max(int(number) for number in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)(?=\0)", library))
    assert symbol_versions.defined(library)["GLIBCXX"] == f"3.4.{number}"


def test_a_refusal_names_both_versions() -> None:
    with pytest.raises(CannotLoad, match=r"GLIBC 2\.99, GLIBCXX 3\.4\.30, .* GLIBC 2\.36, GLIBCXX 3\.4\.9"):
        symbol_versions.check_needs(
            {"GLIBC": "2.99", "GLIBCXX": "3.4.30", "CXXABI": "1.3.9", "GOMP": "5.0"},
            {
                "GLIBC": "2.36",
                "GLIBCXX": "3.4.9",
                "CXXABI": "1.3.13",
            },  # as numbers, 13 > 9; GOMP is not known
            "this machine",
        )


def test_what_is_no_library_is_an_error() -> None:
    for data in (b"", b"\x7fELF", b"MZ" * 80, TORCH[:4] + b"\1\1" + TORCH[6:]):
        with pytest.raises(ValueError, match="ELF"):
            symbol_versions.needed(data)


SMALL = mapped("/libgcc_s.so.1")


@example(0x28, b"\xff" * 8, False)  # the offset of the table of sections, over 2**63
@given(st.integers(0, len(SMALL) - 1), st.binary(min_size=1, max_size=8), st.booleans())
def test_a_damaged_library_gives_no_other_error(position: int, junk: bytes, cut: bool) -> None:
    data = SMALL[:position] + junk + (b"" if cut else SMALL[position + len(junk) :])
    try:
        symbol_versions.needed(data)
        symbol_versions.defined(data)
    except ValueError:
        pass
