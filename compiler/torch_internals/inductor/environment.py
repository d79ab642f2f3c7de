"""Environment variables that change code and are no entry of a configuration module, which read_configuration reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

_OFF = ("", "0", "false", "n", "no", "off")
_ON = ("", "1", "on", "true", "y", "yes")

CHANGES_CODE = {
    # Inductor's, outside its config.py
    **dict.fromkeys(
        (
            "TORCHINDUCTOR_DEBUG_COMPILE",
            "TORCHINDUCTOR_DEBUG_SYMBOL",
            "TORCHINDUCTOR_NVGEMM_PREFETCH",
            "TRITON_INTERPRET",
            "TRITON_USE_META_WS",
        ),
        _OFF,
    ),
    # Triton's, of its own kernel keys: triton._C.libtriton.get_cache_invalidating_env_vars
    **dict.fromkeys(
        (
            "ALLOW_LHS_TMEM_LAYOUT_CONVERSION",
            "DISABLE_LLVM_OPT",
            "DISABLE_MMA_V3",
            "DISABLE_MMA_V5",
            "DISABLE_PTXAS_OPT",
            "TRITON_CONSAN_INIT_ALLOCATIONS",
            "TRITON_ENABLE_ASAN",
            "TRITON_ENABLE_EXPERIMENTAL_CONSAN",
            "TRITON_FORCE_DISABLE_FP_FUSION",
            "TRITON_OVERRIDE_ARCH",
            "TRITON_PREFER_TMEM_16x256_LAYOUT",
        ),
        _OFF,
    ),
    "TRITON_DEFAULT_FP_FUSION": _ON,
    **dict.fromkeys(("LLVM_PASS_PLUGIN_PATH", "TRITON_F32_DEFAULT", "TRITON_PLUGIN_PATHS"), ("",)),
}
"""Name -> the values that change nothing. Setting one of `triton.knobs` sets its variable."""


def variables_that_change_code() -> Iterator[str]:
    """Those of this process that change what it would compile itself, as NAME=VALUE. A worker has none of them."""
    for name, same in CHANGES_CODE.items():
        if (value := os.environ.get(name, "")).lower() not in same:
            yield f"{name}={value}"
