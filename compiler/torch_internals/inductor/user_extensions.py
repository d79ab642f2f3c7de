"""Code of the user's own that Inductor would run while it compiles, and that no worker has."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.compiler.config
from torch._ops import OpOverload, OpOverloadPacket

OWN_NAMESPACES = frozenset({"aten", "prims", "inductor", "quantized", "_c10d_functional"})
"""Of PyTorch's operators. No graph that is sent has a user's operator, so its lowering changes none."""


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
