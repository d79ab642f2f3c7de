"""Inductor's configuration for a request, and for a search that has no request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..request import schema
from ..request.operator_table import rules, table
from ..torch_internals.inductor import config, config_modules


def options_of(request: schema.GraphRequest, threads: int) -> dict[str, Any]:
    """Inductor's configuration for a request. threads: parallel g++ and Triton compilers."""
    options = {**config.mode_options(request.mode), **dict(request.options)}
    return _options(request.toolchain.torch, options, request.ambient.threads, threads)


def search_options(torch_version: str, kernel_threads: int, threads: int) -> dict[str, Any]:
    """Inductor's configuration for a search. kernel_threads: of a CPU's kernels. threads: as for `options_of`."""
    options = config.mode_options("max-autotune-no-cudagraphs")
    return _options(torch_version, options, kernel_threads, threads)


def _options(
    torch_version: str, options: Mapping[str, Any], kernel_threads: int, threads: int
) -> dict[str, Any]:
    present = config_modules.settable_entries(rules.INDUCTOR)  # a torch newer than the table may lack some
    return {
        **{
            name: entry.default
            for name, entry in table.load(torch_version).options.items()
            if name in present
        },
        **options,
        "cpp.threads": kernel_threads,
        "compile_threads": threads,
        "fx_graph_cache": True,
        "fx_graph_remote_cache": False,
        "autotune_local_cache": True,
        "autotune_remote_cache": False,
        "bundle_triton_into_fx_graph_cache": True,
        "use_static_triton_launcher": True,
        **config.STATIC_USER_KERNELS,
        "force_disable_caches": False,
    }
