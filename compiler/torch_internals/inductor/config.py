"""PyTorch's configuration: read, compare, set inside a block; and what else a process has set that changes code.

Its modules are those that torch.utils._config_module.install_config_module makes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.compiler.config
from torch._ops import OpOverload, OpOverloadPacket

from ...request.allowed_names import words

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


def mode_options(mode: str) -> dict[str, Any]:
    """torch._inductor.list_mode_options: what a `mode=` stands for, as Inductor options."""
    from torch._inductor import list_mode_options

    return {} if mode == "default" else dict(list_mode_options(mode))


def check_options(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse unknown modes and options as Inductor does (torch._TorchCompileInductorWrapper); the merged options."""
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)  # type: ignore[no-untyped-call]
    return dict(wrapper.config)


TRACE_FILES = {
    "fx_graph": "fx_graph_readable.py",
    "fx_graph_transformed": "fx_graph_transformed.py",
    "ir_pre_fusion": "ir_pre_fusion.txt",
    "ir_post_fusion": "ir_post_fusion.txt",
    "graph_diagram": "graph_diagram.{}",
    "output_code": "output_code.py",
}
"""Entry of torch._inductor.config.trace -> the file that it stands for."""
_TRACE_ENTRIES = ("enabled", "debug_dir", "graph_diagram_format", *TRACE_FILES)


class TraceOptions(NamedTuple):
    """files: those wanted; none if the trace is off. debug_dir: None: Inductor's own."""

    files: dict[str, str]
    debug_dir: str | None


def split_trace_options(options: Mapping[str, Any]) -> tuple[TraceOptions, dict[str, Any]]:
    """What a compile writes for `trace.enabled`, by its options and this process' configuration; and its other
    options."""
    from torch._inductor import config

    names = {name for entry in _TRACE_ENTRIES if (name := f"trace.{entry}") in options}
    # the format is an entry since 2.13
    entries = {
        entry: options.get(f"trace.{entry}", getattr(config.trace, entry, None)) for entry in _TRACE_ENTRIES
    }
    ending = entries["graph_diagram_format"] or "svg"
    files = {entry: file.format(ending) for entry, file in TRACE_FILES.items() if entries[entry]}
    others = {name: value for name, value in options.items() if name not in names}
    return TraceOptions(files if entries["enabled"] else {}, entries["debug_dir"]), others


def trace_folder(name: str, debug_dir: str | None) -> str | None:
    """A new folder where Inductor would write its trace of a graph (DebugContext.create_debug_dir)."""
    from torch._inductor.debug import DebugContext

    with inductor_config({} if debug_dir is None else {"trace.debug_dir": debug_dir}):
        return DebugContext.create_debug_dir(name)


def inductor_config(options: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Set torch._inductor.config entries inside a block."""
    from torch._inductor import config

    manager: contextlib.AbstractContextManager[Any] = config.patch(dict(options))
    return manager


def codegen_threads() -> int:
    """Threads that Inductor compiles CPU kernels for (torch._inductor.codegen.cpp_utils.parallel_num_threads)."""
    from torch._inductor import config

    return config.cpp.threads if config.cpp.threads > 0 else torch.get_num_threads()


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


# --- entries of configuration modules, variables, extensions ---------------------------------------------


def config_entries(module: str) -> dict[str, Any]:
    """Every entry of a module as it is now; {} where this torch has no such module."""
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return {}
    return dict(found.get_config_copy())


def settable_entries(module: str) -> set[str]:
    """The entries of a module that still do something; setting a deprecated one only warns."""
    found: Any = importlib.import_module(module)
    return {name for name, entry in found._config.items() if not getattr(entry, "deprecated", False)}


def own_default(module: str, name: str) -> Any:
    """What an entry has in this process if no code has set it."""
    found: Any = importlib.import_module(module)
    return found._config[name].default


CHANGES_CODE = {
    **dict.fromkeys(
        words(
            # Inductor's, outside its config.py
            "TORCHINDUCTOR_DEBUG_COMPILE TORCHINDUCTOR_DEBUG_SYMBOL TORCHINDUCTOR_NVGEMM_PREFETCH "
            "TRITON_INTERPRET TRITON_USE_META_WS "
            # Triton's, of its own kernel keys: triton._C.libtriton.get_cache_invalidating_env_vars
            "ALLOW_LHS_TMEM_LAYOUT_CONVERSION DISABLE_LLVM_OPT DISABLE_MMA_V3 DISABLE_MMA_V5 DISABLE_PTXAS_OPT "
            "TRITON_CONSAN_INIT_ALLOCATIONS TRITON_ENABLE_ASAN TRITON_ENABLE_EXPERIMENTAL_CONSAN "
            "TRITON_FORCE_DISABLE_FP_FUSION TRITON_OVERRIDE_ARCH TRITON_PREFER_TMEM_16x256_LAYOUT"
        ),
        ("", "0", "false", "n", "no", "off"),
    ),
    "TRITON_DEFAULT_FP_FUSION": ("", "1", "on", "true", "y", "yes"),
    **dict.fromkeys(("LLVM_PASS_PLUGIN_PATH", "TRITON_F32_DEFAULT", "TRITON_PLUGIN_PATHS"), ("",)),
}
"""Name -> the values that change nothing. Setting one of `triton.knobs` sets its variable."""


def variables_that_change_code() -> Iterator[str]:
    """Those of this process that change what it would compile itself, as NAME=VALUE. A worker has none of them."""
    for name, same in CHANGES_CODE.items():
        if (value := os.environ.get(name, "")).lower() not in same:
            yield f"{name}={value}"


OWN_NAMESPACES = frozenset({"aten", "prims", "inductor", "quantized", "_c10d_functional"})
"""Namespaces of PyTorch's operators. No graph that is sent has a user's operator, so its lowering changes none."""


def user_extensions() -> Iterator[str]:
    """What this process has changed in Inductor's tables, in words.

    Looked at are custom_backend_passes, custom_backend_codegen_configs and device_codegens (torch._inductor.codegen
    .common), user_lowerings and lowerings (torch._inductor.lowering), decompositions (torch._inductor.decomposition),
    InductorChoices (torch._inductor.virtualized.V) and whether CompilerBisector leaves passes out. A module that is not
    imported yet has not been changed.
    """
    from torch._inductor.codegen import common
    from torch._inductor.compiler_bisector import CompilerBisector

    passes = getattr(common, "custom_backend_passes", {})
    configs = getattr(common, "custom_backend_codegen_configs", {})
    for device in {**passes, **configs}:
        if passes.get(device) or configs.get(device):
            yield f"a pass or configuration of your own for {device} graphs"
    for device in ("cpu", "cuda"):
        codegen = common.device_codegens.get(device)
        parts = () if codegen is None else (codegen.scheduling, codegen.wrapper_codegen)
        if not all(_is_from_torch(part) for part in parts):
            yield f"a code generator of your own for {device} graphs"
    lowering = sys.modules.get("torch._inductor.lowering")
    decomposition = sys.modules.get("torch._inductor.decomposition")
    for module, table, kind in (
        (lowering, "user_lowerings", "lowering"),  # since 2.12
        (lowering, "lowerings", "lowering"),
        (decomposition, "decompositions", "decomposition"),
    ):
        for operator, function in getattr(module, table, {}).items():
            if not _is_from_torch(function) and _is_own_operator(operator):
                yield f"a {kind} of your own for {operator}"
    if (virtualized := sys.modules.get("torch._inductor.virtualized")) is not None:
        choices = getattr(virtualized.threadlocal, virtualized._choices._key, None)
        if choices is not None and not _is_from_torch(type(choices)):
            yield f"InductorChoices of your own ({type(choices).__qualname__})"
    if getattr(torch.compiler.config, "compile_on_one_rank", False):  # since 2.14
        yield "code that all ranks share (compile_on_one_rank)"
    if CompilerBisector.bisection_enabled:
        yield "a search for a faulty pass (CompilerBisector)"


def _is_own_operator(operator: Any) -> bool:
    if isinstance(operator, OpOverload):
        return operator.namespace in OWN_NAMESPACES
    if isinstance(operator, OpOverloadPacket):
        return operator._qualified_op_name.split("::")[0] in OWN_NAMESPACES
    return True


def _is_from_torch(function: Any) -> bool:
    if str(getattr(function, "__module__", "")).startswith("torch."):
        return True
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            break
    module = str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
    return module == "torch" or module in sys.stdlib_module_names  # operator.add itself, before 2.13
