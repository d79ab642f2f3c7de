"""A PyTorch whose lowering reads something that nobody has looked at fails here, before it gives a wrong hit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lowering_inputs
import pytest
import torch
from torchrelay.compiler.graph import encode
from torchrelay.compiler.torch_internals.inductor import config

TORCH = Path(torch.__file__).parent


@pytest.fixture(scope="module")
def sources() -> dict[str, dict[str, str]]:
    return lowering_inputs.read_sources(TORCH)


@pytest.mark.parametrize("kind", lowering_inputs.CLASSIFIED)
def test_all_that_lowering_reads_is_in_the_key_or_reaches_no_code_or_is_refused(
    kind: str, sources: dict[str, dict[str, str]]
) -> None:
    known = lowering_inputs.CLASSIFIED[kind]
    new = [f"{name!r} ({place})" for name, place in sources[kind].items() if name not in known]
    assert len(sources[kind]) >= 20, "the sources were read"
    assert not new, (
        f"torch {torch.__version__} has a {kind} that is not classified: {'; '.join(new)}. Find out whether it can "
        "change generated code. If it can, put it into the key or refuse it (compiler/graph) and add "
        "a change to tests/compile/parts/mutations.py. Then name it in tests/compile/parts/lowering_inputs.py."
    )


def test_annotations_are_sent_or_inert_or_refused_as_they_are_classified(
    sources: dict[str, dict[str, str]],
) -> None:
    inert = encode.INERT_NODE_META | encode.INERT_GRAPH_META
    for name, (verdict, _) in lowering_inputs.ANNOTATIONS.items():
        assert (name in inert) == (verdict in (lowering_inputs.KEY, lowering_inputs.NO_CODE)), name
    read = sources["annotation of a node or graph"]
    assert set(read) & inert, "the lowering reads annotations that a request leaves out"


def test_variables_that_change_code_are_refused_as_they_are_classified() -> None:
    refused = {
        name for name, (what, _) in lowering_inputs.VARIABLES.items() if what == lowering_inputs.REFUSED
    }
    assert refused <= config.CHANGES_CODE.keys()


def test_each_variable_of_tritons_own_keys_is_refused_or_changes_no_code() -> None:
    libtriton = pytest.importorskip("triton._C.libtriton", reason="needs Triton, not a GPU")
    named = set(
        re.findall(rb"[A-Z]{2,20}_[A-Z][A-Za-z0-9_]{2,50}(?=\0)", Path(libtriton.__file__).read_bytes())
    )
    run = subprocess.run(
        [sys.executable, "-c", TRITON_KEYS],
        input="\n".join(sorted(name.decode() for name in named)),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    in_keys = {name for name in run.stdout.split() if not name.startswith(lowering_inputs.TRITON_FOR_AMD)}
    assert "DISABLE_LLVM_OPT" in in_keys
    assert in_keys - config.CHANGES_CODE.keys() - lowering_inputs.TRITON_LOGS == set()


TRITON_KEYS = """
import os, sys
from triton._C.libtriton import get_cache_invalidating_env_vars
names = sys.stdin.read().split()
for start in range(0, len(names), 200):  # setenv looks through all that there are
    for name in names[start : start + 200]:
        os.environ[name] = "1"
    print(*get_cache_invalidating_env_vars())
    for name in names[start : start + 200]:
        del os.environ[name]
"""
