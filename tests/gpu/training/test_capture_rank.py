"""The capture run on a GPU: what one process finds with one GPU is what two nccl ranks ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from capture_parts import asked_by_ranks, captured, keys  # noqa: E402
from keys_script import KINDS  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return asked_by_ranks(tmp_path_factory.mktemp("ranks"), KEYS_ON="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_captured_with_one_gpu_is_what_real_ranks_ask_for(
    kind: str, asked: dict[str, list[str]], tmp_path: Path
) -> None:
    found, _ = captured(tmp_path, "--", "keys_script.py", kind, KEYS_ON="cuda", CUDA_VISIBLE_DEVICES="0")
    assert (found.ended, found.skipped) == ("at the first optimizer step", [])
    assert keys(found) == asked[kind] != []
