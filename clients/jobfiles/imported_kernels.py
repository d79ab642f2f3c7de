"""A tuning job's kernel items in; kernels as they are sent out: source, candidates, grids, arguments.

Imports the module that an item names, so it runs where the user's own code runs, and nowhere else. What
`@triton.autotune` and `@triton.heuristics` compute in Python (pruning, derived parameters) is computed here, once for
each candidate; the service gets the outcome.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...compiler.api.tuning import kernels
from ...compiler.api.tuning.kernels import KernelSpec
from ...compiler.errors import Unsupported
from ...compiler.graph import triton_kernels
from ...compiler.request import schema, triton_source
from ...compiler.tuning.records import Operand
from . import kernel_entries
from .kernel_entries import KernelEntry


def resolve_kernel(item: KernelEntry, folder: Path | None = None) -> KernelSpec:
    """The kernel that an item names. folder: of the job's file; modules are looked for there first, then where the
    command runs. Raises BadTuneJob, with the line, for what cannot be sent."""
    try:
        import triton  # noqa: F401
    except ImportError:
        raise item.bad(
            "Triton is not installed here, and the kernel's module needs it: run this where the kernel's tests run",
            "kernel",
        ) from None
    found = _unwrapped(_function(item, folder), item)
    given = dict(item.arguments)
    _check_arguments(item, found, given)
    configs = kernel_entries.candidates(item, found.own)
    configs = [_with_derived(item, found, config) for config in configs]
    _check_parameters(item, found, given, configs)
    if len(configs) < 2:
        raise item.bad(
            "the kernel has one candidate, so there is nothing to search: list values under `tune`, `num_warps` or "
            "`num_stages`",
            "kernel",
        )
    try:
        source = triton_kernels.describe(found.function)
    except Unsupported as error:
        raise item.bad(error.message, "kernel") from None
    names = [parameter.name for parameter in found.function.params]
    tensors, constants = [], []
    for name in names:
        value = given.get(name)
        if isinstance(value, Operand):
            tensors.append((name, value))
        elif name in given:
            constants.append((name, value))
    return KernelSpec(
        source=msgspec.structs.replace(source, configs=configs),
        grids=[kernel_entries.grid_of(item, config) for config in configs],
        tensors=tensors,
        constants=constants,
    )


class _ImportedKernel(Struct, frozen=True):
    """A JITFunction and what was around it. own: the configurations of its @triton.autotune. derived: by parameter,
    what computes its value (@triton.heuristics)."""

    function: Any
    own: list[schema.KernelConfig]
    derived: dict[str, Any]


def _function(item: KernelEntry, folder: Path | None) -> Any:
    with _importable(folder):
        try:
            module = importlib.import_module(item.module)
        except Exception as error:
            raise item.bad(
                f"module {item.module} cannot be imported: {type(error).__name__}: {error!s:.300}", "kernel"
            ) from error
    try:
        return getattr(module, item.function)
    except AttributeError:
        raise item.bad(f"module {item.module} has no kernel {item.function}", "kernel") from None


@contextlib.contextmanager
def _importable(folder: Path | None) -> Iterator[None]:
    """Inside the block, modules of the folder and of where the command runs can be imported, as `python -m` does."""
    before = list(sys.path)
    sys.path[:0] = [str(path) for path in (folder, Path.cwd()) if path is not None]
    try:
        yield
    finally:
        sys.path[:] = before


def _unwrapped(made: Any, item: KernelEntry) -> _ImportedKernel:
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    own: list[schema.KernelConfig] = []
    derived: dict[str, Any] = {}
    kernel = made
    while type(kernel) is not JITFunction:
        if type(kernel) is Autotuner:
            own = _own(kernel, item)
        elif type(kernel) is Heuristics:
            derived = {**kernel.values, **derived}
        else:
            raise item.bad(f"{item.function} is a {type(made).__name__}, no kernel of triton.jit", "kernel")
        kernel = kernel.fn
    return _ImportedKernel(kernel, own, derived)


def _own(tuner: Any, item: KernelEntry) -> list[schema.KernelConfig]:
    """What @triton.autotune would try with these arguments. What it resets or restores before each run needs nothing:
    a search gives every candidate fresh arguments."""
    for what, hook in (
        ("pre_hook", tuner.user_defined_pre_hook),
        ("post_hook", tuner.user_defined_post_hook),
    ):
        if hook:
            raise item.bad(
                f"{what} of triton.autotune is Python that runs around each launch, and cannot be sent",
                "kernel",
            )
    configs = tuner.configs
    if tuner.early_config_prune:
        try:
            values = _values(item)
            plain = {name: values[name] for name, value in item.arguments if not isinstance(value, Operand)}
            configs = tuner.early_config_prune(configs, values, **plain)
        except Exception as error:
            raise item.bad(
                f"its early_config_prune fails on these arguments: {type(error).__name__}: {error!s:.300}",
                "kernel",
            ) from error
    try:
        made = [triton_kernels.config_of(config) for config in configs]
        return [msgspec.structs.replace(config, kwargs=sorted(config.kwargs)) for config in made]
    except triton_source.BadKernelSource as error:
        raise item.bad(str(error), "kernel") from None


def _values(item: KernelEntry, config: schema.KernelConfig | None = None) -> dict[str, Any]:
    """The arguments as Python code of the user's sees them; tensors have no data."""
    import torch

    made: dict[str, Any] = {}
    for name, value in item.arguments:
        if isinstance(value, Operand):
            dtype = getattr(torch, value.dtype)
            made[name] = torch.empty_strided(value.size, value.stride, dtype=dtype, device="meta")
        else:
            made[name] = triton_kernels.value_of(value)
    for name, value in () if config is None else config.kwargs:
        made[name] = triton_kernels.value_of(value)
    return made


def _with_derived(
    item: KernelEntry, found: _ImportedKernel, config: schema.KernelConfig
) -> schema.KernelConfig:
    """With the parameters that @triton.heuristics computes."""
    made = dict(config.kwargs)
    for name, compute in found.derived.items():
        values = _values(item, msgspec.structs.replace(config, kwargs=list(made.items())))
        try:
            made[name] = triton_kernels.constant_of(name, compute(values))
        except Exception as error:
            raise item.bad(
                f"its heuristic for {name} fails on these arguments: {type(error).__name__}: {error!s:.300}",
                "kernel",
            ) from error
    return msgspec.structs.replace(config, kwargs=sorted(made.items()))


def _check_arguments(item: KernelEntry, found: _ImportedKernel, given: Mapping[str, Any]) -> None:
    parameters = {parameter.name: parameter for parameter in found.function.params}
    for name, value in given.items():
        if name not in parameters:
            raise item.bad(
                f"{item.function} has no parameter {name}, but {', '.join(parameters)}", "arguments", name
            )
        constant = parameters[name].is_constexpr
        if constant and isinstance(value, Operand):
            raise item.bad(f"{name} is a tl.constexpr, and no tensor", "arguments", name)
        if not constant and isinstance(value, str | schema.TritonDType):
            raise item.bad(f"{name} is no tl.constexpr, and takes a tensor or a number", "arguments", name)
    for name, _ in item.tune:
        if name not in parameters or not parameters[name].is_constexpr:
            raise item.bad(f"{item.function} has no tl.constexpr {name} to try values of", "tune", name)


def _check_parameters(
    item: KernelEntry, found: _ImportedKernel, given: Mapping[str, Any], configs: list[schema.KernelConfig]
) -> None:
    for config in configs:
        chosen = {name for name, _ in config.kwargs}
        if twice := sorted(chosen & set(given)):
            raise item.bad(
                f"{twice[0]} is an argument, and set by configuration {kernels.config_text(config)}",
                "arguments",
                twice[0],
            )
        for parameter in found.function.params:
            known = chosen | set(given)
            if parameter.name not in known and not parameter.has_default:
                hint = " (or values under `tune`)" if parameter.is_constexpr else ""
                raise item.bad(f"{item.function} is given no {parameter.name}{hint}", "arguments")
