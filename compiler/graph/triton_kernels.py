"""Stages 1 and 7, for user-written Triton kernels: a kernel's source in closed form, and the kernel from a checked one.

A kernel's source alone does not say what it is: it refers by name to helpers, constants and parts of Triton. All of
them are gathered, recursively, into one module (request/triton_source.py). Whatever that form cannot hold raises
Unsupported, which names it. Some of it Triton could run, but Inductor's generated code not: it holds kernels as text.

`build` RUNS the source: only a compile child calls it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import msgspec

from .. import decoding
from ..errors import MalformedRequest, RelayError, Unsupported
from ..request import allowed_names, schema, triton_source
from ..request.triton_source import _INT64, BadKernelSource

_SETTINGS = ("num_warps", "num_stages", "num_ctas")
_CONFIG = {"kwargs", "maxnreg", *_SETTINGS}


class KernelSources:
    """The kernels of one request, in order of first use."""

    def __init__(self) -> None:
        self.sources: list[schema.KernelSource] = []
        self._positions: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps ids in _positions from being reused

    def position(self, kernel: Any) -> int:
        """A kernel's place in `sources`. Raises Unsupported."""
        if id(kernel) not in self._positions:
            source = describe(kernel)
            if source not in self.sources:
                self.sources.append(source)
            self._kept.append(kernel)
            self._positions[id(kernel)] = self.sources.index(source)
        return self._positions[id(kernel)]


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
        kwargs=[(name, constant_of(name, value)) for name, value in config.kwargs.items()],
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
            text = triton_source.constant_text(name, plain_of(name, value.value), constexpr=True)
            self._define(self._constants, name, text)
        elif value is None or type(value) in (bool, int, float, str) or dtype_of(value):
            text = triton_source.constant_text(name, plain_of(name, value), constexpr=False)
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


# --- constants -------------------------------------------------------------------------------------------


def constant_of(name: str, value: Any) -> schema.KernelConstant:
    """The wire format of a parameter's constant. Raises BadKernelSource."""
    if not allowed_names.IDENTIFIER.fullmatch(name):
        raise BadKernelSource(f"the name {name[:80]!r} is too long")
    if isinstance(value, str) and not allowed_names.OPTION_TEXT.fullmatch(value):
        raise BadKernelSource(f"the text of {name} is too long, or has characters that could end a literal")
    return plain_of(name, value)


def plain_of(name: str, value: Any) -> schema.KernelConstant:
    """The wire format of a module's constant, which may be any text. Raises BadKernelSource."""
    dtype = dtype_of(value)
    if dtype is not None:
        return dtype
    if value is None or type(value) in (bool, float, str) or (type(value) is int and value in _INT64):
        plain: schema.KernelConstant = value
        return plain
    raise BadKernelSource(f"{name} is a {type(value).__name__}, which cannot be sent")


def value_of(value: Any) -> Any:
    """The value that Triton takes for a constant on the wire."""
    if not isinstance(value, schema.TritonDType):
        return value
    import triton.language

    if value.name not in allowed_names.TRITON_DTYPES or not hasattr(triton.language, value.name):
        raise MalformedRequest(f"Triton has no dtype {value.name[:40]!r}")
    return getattr(triton.language, value.name)


def dtype_of(value: object) -> schema.TritonDType | None:
    """The wire format of a triton.language dtype; None for any other value."""
    if type(value).__module__ != "triton.language.core" or type(value).__name__ != "dtype":
        return None
    import triton.language

    found = (
        name for name in sorted(allowed_names.TRITON_DTYPES) if getattr(triton.language, name, None) == value
    )
    name = next(found, None)
    return None if name is None else schema.TritonDType(name)


# --- on the worker ---------------------------------------------------------------------------------------


def build(kernel: schema.KernelSource) -> Any:
    """The Triton kernel of a checked source: a JITFunction, or an Autotuner of one. RUNS the source.

    Calls with equal kernels return the same object. Raises MalformedRequest.
    """
    return _built(msgspec.msgpack.encode(kernel))


@functools.lru_cache(maxsize=256)
def _built(encoded: bytes) -> Any:
    kernel = decoding.from_msgpack(encoded, type=schema.KernelSource)
    try:
        triton_source.check(kernel)
    except BadKernelSource as error:
        raise MalformedRequest(f"the source of kernel {kernel.name!r} is refused: {error}") from None
    import triton

    module = f"torchrelay_kernel_{hashlib.sha256(kernel.source.encode()).hexdigest()[:16]}"
    file = f"<{module}>"
    # Triton and Inductor read a function's source by its file's name. linecache keeps an entry that has no mtime.
    lines = kernel.source.splitlines(keepends=True)
    linecache.cache[file] = (len(kernel.source), None, lines, file)
    namespace: dict[str, Any] = {"__name__": module}
    try:
        exec(compile(kernel.source, file, "exec", dont_inherit=True), namespace)
        made = namespace[kernel.name]
        if kernel.configs:
            made = triton.autotune(
                configs=[_config(config) for config in kernel.configs],
                key=[],
                do_bench=_FirstThatRuns(len(kernel.configs)),
            )(made)
    except RelayError:
        raise
    except Exception as error:
        raise MalformedRequest(
            f"kernel {kernel.name!r} cannot be defined: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    return made


class _FirstThatRuns:
    """Takes the place of triton.autotune's benchmark where the kernel is only a reference for verification.

    The first configuration that the GPU has room for is good enough: it gets time 0, those after it get time 1 and do
    not run. Autotune calls it for each of `configs` in turn.
    """

    def __init__(self, configs: int) -> None:
        self._configs = configs
        self._calls = 0
        self._fits = False

    def __call__(self, run: Callable[[], object], quantiles: object) -> tuple[float, float, float]:
        if self._calls % self._configs == 0:
            self._fits = False
        self._calls += 1
        if self._fits:
            return 1.0, 1.0, 1.0
        run()  # raises what triton.autotune catches if the configuration does not fit
        self._fits = True
        return 0.0, 0.0, 0.0


def _config(config: schema.KernelConfig) -> Any:
    import triton

    return triton.Config(
        {name: value_of(value) for name, value in config.kwargs},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=config.num_ctas,
        maxnreg=config.maxnreg,
    )
