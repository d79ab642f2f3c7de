"""PyTorch's files of kernels' winners: neither a compile nor who loads an artifact has any use for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor import config
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torchrelay.compiler.torch_internals.algorithm_selection import operator_candidates
from torchrelay.compiler.torch_internals.inductor import config as inductor_config
from torchrelay.compiler.torch_internals.loading import prebuilt_libraries
from torchrelay.compiler.torch_internals.triton import caches as triton_caches


def caches(folder: Path) -> bool:
    return AutotuneCache.create({}, str(folder / "kernel.py"), "digest") is not None


def test_a_compile_has_none_and_others_keep_theirs(tmp_path: Path) -> None:
    assert caches(tmp_path)
    with triton_caches.without_autotune_cache():
        assert not caches(tmp_path)
    assert caches(tmp_path)


def test_who_loads_an_artifact_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt_libraries.install_library_lookup()
    assert caches(tmp_path)
    monkeypatch.setattr(prebuilt_libraries.prebuilt_libraries, "table", {})
    assert not caches(tmp_path)


def test_options_that_changed_are_told_all_or_of_those_named() -> None:
    named = operator_candidates.SEARCH_SPACE_OPTIONS
    with config.patch(max_autotune_gemm_search_space="EXHAUSTIVE", max_autotune=True):
        every = inductor_config.changed_options()
        assert every["max_autotune"] is True
        assert inductor_config.changed_options(named) == {"max_autotune_gemm_search_space": "EXHAUSTIVE"}
        assert inductor_config.changed_options(named) == {k: v for k, v in every.items() if k in named}
    assert inductor_config.changed_options(named) == {}
