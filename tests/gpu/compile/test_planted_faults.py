"""A fault in compiled code is found on a GPU, at real sizes."""

from __future__ import annotations

import pytest
import torch
from planted_faults import KINDS, Compiled, request, with_fault
from torchrelay.compiler.errors import VerifyFailed
from torchrelay.compiler.pipeline.verification.verify import verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PRECISIONS = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])


@PRECISIONS
@pytest.mark.parametrize(("program", "backward", "kind"), KINDS)
def test_a_fault_is_found(program: str, backward: bool, kind: str, half: bool) -> None:
    call = with_fault(request(program, half, "cuda"), program, backward, kind)
    with pytest.raises(VerifyFailed, match="differ"):
        verify(request(program, half, "cuda"), call)
    assert call.applied == [True]


@PRECISIONS
@pytest.mark.parametrize("program", ["layer", "convolutions"])
def test_right_code_passes(program: str, half: bool) -> None:
    wanted = request(program, half, "cuda")
    found = verify(wanted, Compiled(wanted))
    assert (found.status, found.reason) == ("passed", "")
