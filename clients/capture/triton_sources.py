"""Stage 1, for user-written Triton kernels: the kernels that a graph calls in; their sources in closed form out.

A kernel's source alone does not say what it is: it refers by name to helpers, constants and parts of Triton. All of
them are gathered, recursively, into one module (compiler/request/triton_source.py). Whatever that form cannot
hold raises
Unsupported, which names it. Some of it Triton could run, but Inductor's generated code not: it holds kernels as text.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...compiler.errors import LimitExceeded, Unsupported
from ...compiler.graph import triton_kernels
from ...compiler.request import codec, schema, triton_source
from ...compiler.request.triton_source import BadKernelSource

_SETTINGS = ("num_warps", "num_stages", "num_ctas")
_CONFIG = {"kwargs", "maxnreg", *_SETTINGS}


class KernelSources:
    """The kernels of one request, in order of first use."""

    def __init__(self, limits: codec.Limits | None = None) -> None:
        self.found: list[schema.KernelSource] = []
        self._limits = limits or codec.Limits()
        self._positions: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps ids in _positions from being reused

    def position(self, kernel: Any) -> int:
        """A kernel's place in `found`. Raises Unsupported, LimitExceeded."""
        if id(kernel) not in self._positions:
            source = describe(kernel)
            if source not in self.found:
                self.found.append(source)
                self._check_size()
            self._kept.append(kernel)
            self._positions[id(kernel)] = self.found.index(source)
        return self._positions[id(kernel)]

    def _check_size(self) -> None:
        if len(self.found) > self._limits.kernels:
            raise LimitExceeded(f"more than {self._limits.kernels} user-written Triton kernels")
        if sum(len(kernel.source.encode()) for kernel in self.found) > self._limits.source_bytes:
            raise LimitExceeded(f"source of more than {self._limits.source_bytes} bytes")


def describe(kernel: Any) -> schema.KernelSource:
    """What is sent of a Triton kernel. Raises Unsupported."""
    from triton.runtime.autotuner import Autotuner

    name = _name(kernel)
    try:
        configs = []
        if type(kernel) is Autotuner:
            _check_tuner(kernel)
            configs = [config_of(config) for config in kernel.configs]
            kernel = kernel.fn
        module = _Module()
        module.add(kernel)
        source = schema.KernelSource(kernel.__name__, module.text(), configs)
        triton_source.check(source)
        return source
    except BadKernelSource as error:
        raise Unsupported(f"user-written Triton kernel {name}: {error}") from None


def _name(kernel: Any) -> str:
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", type(kernel).__name__))


# --- @triton.autotune ------------------------------------------------------------------------------------


def _check_tuner(tuner: Any) -> None:
    # `key` is not sent: Inductor measures once for each compiled graph, whatever it says.
    for what, value in (
        ("restore_value", tuner.restore_value),
        ("reset_to_zero", tuner.reset_to_zero),
        ("prune_configs_by", tuner.perf_model or tuner.early_config_prune),
        ("pre_hook", tuner.user_defined_pre_hook),
        ("post_hook", tuner.user_defined_post_hook),
    ):
        if value:
            raise BadKernelSource(f"{what} of triton.autotune cannot be sent")


def config_of(config: Any) -> schema.KernelConfig:
    """A triton.Config as it is sent. Raises BadKernelSource."""
    for name, value in vars(config).items():
        if name not in _CONFIG and value is not None:
            raise BadKernelSource(f"{name} of triton.Config cannot be sent")
    settings = {name: getattr(config, name) for name in _SETTINGS}
    maxnreg = getattr(config, "maxnreg", None)
    if not all(type(value) is int for value in (*settings.values(), 0 if maxnreg is None else maxnreg)):
        raise BadKernelSource("a setting of triton.Config is no integer")
    return schema.KernelConfig(
        kwargs=[(name, triton_kernels.constant_of(name, value)) for name, value in config.kwargs.items()],
        maxnreg=maxnreg,
        **settings,
    )


# --- sources ---------------------------------------------------------------------------------------------


class _Module:
    """The closed module of one kernel while it is gathered: texts by the names that they define."""

    def __init__(self) -> None:
        self._functions: dict[str, str] = {}
        self._constants: dict[str, str] = {}
        self._imports: dict[str, str] = {"triton": "import triton", "tl": "import triton.language as tl"}
        self._seen: set[int] = set()

    def text(self) -> str:
        return triton_source.module_text(self._imports.values(), self._constants.values(), self._functions)

    def add(self, kernel: Any) -> None:
        """A function decorated with triton.jit, and what it refers to. Raises BadKernelSource."""
        from triton.runtime.jit import JITFunction

        if type(kernel) is not JITFunction:
            raise BadKernelSource(
                f"a {type(kernel).__name__} cannot be sent, only functions decorated with triton.jit"
            )
        if id(kernel) in self._seen:
            return
        self._seen.add(id(kernel))
        function = kernel.fn
        text = triton_source.function_text(kernel.src)
        if function.__code__.co_freevars:
            raise BadKernelSource(
                f"{kernel.__name__} uses {function.__code__.co_freevars[0]} of the function around it"
            )
        self._define(self._functions, kernel.__name__, text)
        definition = ast.parse(text).body[0]
        assert isinstance(definition, ast.FunctionDef)
        for name in sorted(triton_source.names_used(definition)):
            self._refer(name, function.__globals__, kernel.__name__)

    def _refer(self, name: str, module: Mapping[str, Any], user: str) -> None:
        from triton.language import constexpr
        from triton.runtime.jit import JITFunction

        if name not in module:
            if name not in triton_source.BUILTINS:
                raise BadKernelSource(f"{user} uses {name}, which its module does not define")
            return
        value = module[name]
        origin = str(getattr(value, "__module__", ""))
        if isinstance(value, ModuleType):
            self._define(self._imports, name, _import(value, name))
        elif isinstance(value, JITFunction) and not origin.startswith("triton."):
            if value.__name__ != name:
                raise BadKernelSource(f"{user} calls {value.__name__} by another name, {name}")
            self.add(value)
        elif isinstance(value, constexpr):
            text = triton_source.constant_text(
                name, triton_kernels.plain_of(name, value.value), constexpr=True
            )
            self._define(self._constants, name, text)
        elif value is None or type(value) in (bool, int, float, str) or triton_kernels.dtype_of(value):
            text = triton_source.constant_text(name, triton_kernels.plain_of(name, value), constexpr=False)
            self._define(self._constants, name, text)
        elif origin.startswith("triton.language"):
            self._define(self._imports, name, f"from {origin} import {value.__name__} as {name}")
        else:
            raise BadKernelSource(f"{user} uses {name}, a {type(value).__name__}, which cannot be sent")

    def _define(self, texts: dict[str, str], name: str, text: str) -> None:
        for others in (self._functions, self._constants, self._imports):
            if others.get(name, text) != text or (others is not texts and name in others):
                raise BadKernelSource(f"two different things are called {name}")
        texts[name] = text


def _import(module: ModuleType, name: str) -> str:
    if module.__name__ == "triton" and name == "triton":
        return "import triton"
    if module.__name__.partition(".")[0] != "triton":
        raise BadKernelSource(f"{name} is the module {module.__name__}, and only Triton's own can be sent")
    return f"import {module.__name__} as {name}"
