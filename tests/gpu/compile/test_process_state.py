"""The state of a process that decides a graph's kernels: read and set at any time, before or after a GPU was used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_BEGIN = """
import torch
from torchrelay.compiler.torch_internals import ambient_state
query = torch.ones(1, 1, 16, 64, dtype=torch.bfloat16, device="cuda")
"""


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_choice_of_attention_is_the_same_before_and_after_the_first_attention() -> None:
    # PyTorch puts cuDNN first at a process' first attention on Hopper.
    before, after = _run("""
print(ambient_state.read_choices())
torch.nn.functional.scaled_dot_product_attention(query, query, query)
print(ambient_state.read_choices())
""").splitlines()

    assert before == after


def test_an_order_that_was_set_before_the_first_attention_stays() -> None:
    order = _run("""
ambient_state.apply_choices({ambient_state.PRIORITY: "2 1 0 3 4"})
torch.nn.functional.scaled_dot_product_attention(query, query, query)
print(ambient_state.read_choices()[ambient_state.PRIORITY])
""")

    assert order == "2 1 0 3 4"
