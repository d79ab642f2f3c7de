"""Before a rank's script begins: torchrelay becomes the back end of its torch.compile, if the job's spec asks
for it."""

from __future__ import annotations

from typing import Literal

import torch

TUNED_MODE: Literal["max-autotune-no-cudagraphs"] = "max-autotune-no-cudagraphs"


def compile_through_service(*, tune: bool = False) -> None:
    """Make torchrelay the back end of every torch.compile in this process that names none, or PyTorch's default. tune:
    and TUNED_MODE the mode of those that name none."""
    from ...backend import enable, torchrelay
    from ...capture.patch_compile import DEFAULT, compile_with_backend

    enable()
    torch.compile = compile_with_backend(
        torchrelay, ("torchrelay", DEFAULT), mode=TUNED_MODE if tune else None
    )
