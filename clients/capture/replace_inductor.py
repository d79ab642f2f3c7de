"""Torchrelay in Inductor's place, in all of a process: whatever spelling a trainer has for torch.compile.

`torchrelay run` has this called at the end of every `import torch`, so it imports little and raises nothing.
"""

from __future__ import annotations

from .accelerate_backend import process_accelerate
from .patch_compile import process_patch


def replace_inductor() -> None:
    process_patch().enable()
    process_accelerate().enable()


def restore_inductor() -> None:
    process_patch().disable()
    process_accelerate().disable()
