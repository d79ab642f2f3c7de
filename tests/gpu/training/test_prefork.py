"""Forks of a warm process use CUDA; those of one that has used it say that they cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FORKS = """
import os, sys
from torchrelay.clients.training.rank import main as rank
from torchrelay.workers.training.prefork import server as warm

def in_a_fork(ask):
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if ask() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

rank.preload()
import torch
assert warm._unfit(rank.fit) == "", warm._unfit(rank.fit)
assert in_a_fork(lambda: torch.ones(3, device="cuda").sum().item() == 3) == 0
assert in_a_fork(lambda: torch.cuda.device_count() > 0 and torch.cuda.is_available()) == 0
torch.cuda.init()
assert in_a_fork(rank.fit) == 1
assert "CUDA" in warm._unfit(rank.fit)
"""


def test_what_is_imported_for_ranks_does_not_keep_them_from_the_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
