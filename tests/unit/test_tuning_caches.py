"""PyTorch's files of kernels' winners: neither a compile nor who loads an artifact has any use for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor import config
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torchrelay.compiler import torch_internals


def caches(folder: Path) -> bool:
    return AutotuneCache.create({}, str(folder / "kernel.py"), "digest") is not None


def test_a_compile_has_none_and_others_keep_theirs(tmp_path: Path) -> None:
    assert caches(tmp_path)
    with torch_internals.without_tuning_caches():
        assert not caches(tmp_path)
    assert caches(tmp_path)


def test_who_loads_an_artifact_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_internals._install_library_lookup()
    assert caches(tmp_path)
    monkeypatch.setattr(torch_internals._loading, "table", {})
    assert not caches(tmp_path)


def test_options_that_changed_are_told_all_or_of_those_named() -> None:
    named = torch_internals.SPACES
    with config.patch(max_autotune_gemm_search_space="EXHAUSTIVE", max_autotune=True):
        every = torch_internals.changed_options()
        assert every["max_autotune"] is True
        assert torch_internals.changed_options(named) == {"max_autotune_gemm_search_space": "EXHAUSTIVE"}
        assert torch_internals.changed_options(named) == {k: v for k, v in every.items() if k in named}
    assert torch_internals.changed_options(named) == {}
