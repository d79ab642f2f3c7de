"""A fault in compiled code is found at real sizes, where weights are large and results in bfloat16 are rounded."""

from __future__ import annotations

import pytest
from planted_faults import KINDS, Compiled, request, with_fault
from torchrelay.compiler.errors import VerifyFailed
from torchrelay.compiler.pipeline.verification.verify import verify

PRECISIONS = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])


@pytest.mark.slow
@PRECISIONS
@pytest.mark.parametrize(("program", "backward", "kind"), KINDS)
def test_a_fault_is_found(program: str, backward: bool, kind: str, half: bool) -> None:
    call = with_fault(request(program, half), program, backward, kind)
    with pytest.raises(VerifyFailed, match="differ"):
        verify(request(program, half), call)
    assert call.applied == [True]


@PRECISIONS
@pytest.mark.parametrize("program", ["layer", "convolutions"])
def test_right_code_passes(program: str, half: bool) -> None:
    found = verify(request(program, half), Compiled(request(program, half)))
    assert (found.status, found.reason) == ("passed", "")
