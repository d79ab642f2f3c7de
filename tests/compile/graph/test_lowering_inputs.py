"""A PyTorch whose lowering reads something that nobody has looked at fails here, before it gives a wrong hit."""

from __future__ import annotations

from pathlib import Path

import lowering_inputs
import pytest
import torch
from torchrelay.compiler.graph import annotations

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
        "change generated code. If it can, put it into the key or refuse it (clients/capture, compiler/graph) and add "
        "a change to tests/compile/parts/mutations.py. Then name it in tests/compile/parts/lowering_inputs.py."
    )


def test_annotations_are_sent_or_inert_or_refused_as_they_are_classified(
    sources: dict[str, dict[str, str]],
) -> None:
    inert = annotations.INERT_NODE_META | annotations.INERT_GRAPH_META
    for name, (verdict, _) in lowering_inputs.ANNOTATIONS.items():
        assert (name in inert) == (verdict in (lowering_inputs.KEY, lowering_inputs.NO_CODE)), name
    read = sources["annotation of a node or graph"]
    assert set(read) & inert, "the lowering reads annotations that a request leaves out"
