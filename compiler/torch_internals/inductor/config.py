"""Configuration of Inductor and AOTAutograd: read, compare, set inside a block."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

AOT_SERIALIZABLE: dict[str, Any] = {
    "strict_autograd_cache": True,
    "bundled_autograd_cache": True,
    "force_non_lazy_backward_lowering": True,
    "bypass_autograd_cache_key": True,
    "enable_autograd_cache": True,
}
"""torch._functorch.config under which compile_fx returns a callable that can be serialized, backward included
(as torch/_dynamo/aot_compile.py sets them; the cache key is ours, so theirs may be a nonce)."""


STATIC_USER_KERNELS: dict[str, Any] = {"static_launch_user_defined_triton_kernels": True}
"""torch._inductor.config under which user-written Triton kernels are saved with their binaries, as its own are."""


def aot_config(patches: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Set torch._functorch.config entries inside a block."""
    manager: contextlib.AbstractContextManager[Any] = torch._functorch.config.patch(dict(patches))
    return manager


def mode_options(mode: str, dynamic: bool | None = None) -> dict[str, Any]:
    """torch._inductor.list_mode_options: what a `mode=` stands for, as Inductor options."""
    from torch._inductor import list_mode_options

    return {} if mode == "default" else dict(list_mode_options(mode, dynamic))


def check_options(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse unknown modes and options as Inductor does (torch._TorchCompileInductorWrapper); the merged options."""
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)  # type: ignore[no-untyped-call]
    return dict(wrapper.config)


def inductor_config(options: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Set torch._inductor.config entries inside a block."""
    from torch._inductor import config

    manager: contextlib.AbstractContextManager[Any] = config.patch(dict(options))
    return manager


def codegen_threads() -> int:
    """Threads that Inductor compiles CPU kernels for (torch._inductor.codegen.cpp_utils.parallel_num_threads)."""
    from torch._inductor import config

    return config.cpp.threads if config.cpp.threads > 0 else torch.get_num_threads()


def current_options() -> dict[str, Any]:
    """torch._inductor.config as it is now, however it came to be so."""
    from torch._inductor import config

    return dict(config.get_config_copy())


def changed_options(among: Collection[str] | None = None) -> dict[str, Any]:
    """Entries of torch._inductor.config that this process set to something else: all, or of those named."""
    import torch._inductor.config

    config: Any = torch._inductor.config

    # By value, not by "was it set": Inductor itself sets some entries to what they are.
    entries = config._config
    values = config.get_config_copy() if among is None else {name: getattr(config, name) for name in among}
    return {
        name: value for name, value in values.items() if name in entries and value != entries[name].default
    }
