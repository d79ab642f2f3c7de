"""Load and run generated code without importing all of Inductor's lowering."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from ..patching import replace


def without_lowering_import(function: Callable[..., Any]) -> Callable[..., Any]:
    """FxGraphCache.cache_hit_post_compile without its `from .graph import GraphLowering`, which imports all of
    Inductor's lowering only to look whether a test asked to see the generated code. `function` itself where it is
    imported already."""
    if _LOWERING in sys.modules or not isinstance(function, FunctionType) or function.__closure__:
        return function

    def import_module(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if (name, level) == ("graph", 1):
            return SimpleNamespace(GraphLowering=SimpleNamespace(save_output_code=None))
        return builtins.__import__(name, globals, locals, fromlist, level)

    names = {**function.__globals__, "__builtins__": {**vars(builtins), "__import__": import_module}}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


_LOWERING = "torch._inductor.graph"


@contextlib.contextmanager
def libraries_when_used() -> Iterator[None]:
    """Modules of PyTorch's that are imported inside the block get a stub of libraries that they only use to compile:
    networkx (0.1 s) cuts joint graphs, redis (0.1 s) is Inductor's remote cache. It becomes the library when it is
    asked for anything."""
    stubs: dict[str, ModuleType] = {}
    for name, user in _ONLY_TO_COMPILE.items():
        if not {name, user} & sys.modules.keys() and (spec := importlib.util.find_spec(name)) is not None:
            stubs[name] = _LibraryStub(name)
            stubs[name].__spec__ = spec  # find_spec raises for a module without
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, stub in stubs.items():
            if sys.modules.get(name) is stub:
                del sys.modules[name]


_ONLY_TO_COMPILE = {"networkx": "torch._functorch.partitioners", "redis": "torch._inductor.remote_cache"}
"""Libraries, and the module of PyTorch's that imports each."""
_ANNOTATED = frozenset(
    {
        "torch._functorch._activation_checkpointing.graph_info_provider",
        "torch._functorch._activation_checkpointing.knapsack_evaluator",
        "torch._inductor.remote_cache",
    }
)
"""Modules that ask such a library for classes as they are imported, for annotations alone."""


_ASKED_BY_USERS = frozenset({"__path__", "__version__", "__file__", "__all__"})


class _LibraryStub(ModuleType):
    """Stands for a module, in those that were imported before anybody used it, until it is asked for anything else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _ASKED_BY_USERS:  # the import system's own questions
            raise AttributeError(name)
        asker = sys._getframe(1).f_globals
        if asker.get("__name__") in _ANNOTATED and getattr(asker.get("__spec__"), "_initializing", False):
            return object
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def without_debug_import() -> None:
    """Answer what a compiled graph asks of torch._inductor.debug at each call without importing that module, which
    imports Inductor's scheduler."""
    import torch._inductor as package

    if not hasattr(package, "debug"):
        replace(package, "debug", _DebugStub("torch._inductor.debug"))


class _DebugStub(_LibraryStub):
    RECORD_GRAPH_EXECUTION = False


class _ExternKernels:
    """torch._inductor.select_algorithm.extern_kernels for generated code that runs where nothing is compiled: PyTorch's
    own functions directly. That module imports all of Inductor's lowering, and is imported when another one is asked
    for."""

    def __getattr__(self, name: str) -> Any:
        if name in _TORCH_KERNELS and hasattr(torch, name):
            value = getattr(torch, name)
        else:
            from torch._inductor.select_algorithm import extern_kernels as upstream

            value = getattr(upstream, name)
        setattr(self, name, value)
        return value


_TORCH_KERNELS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "convolution", "_int_mm", "_scaled_mm", "_grouped_mm"}
)


_OPERATOR = re.compile(
    r"extern_kernels\.(?P<kernel>\w+)|torch\.ops\.(?P<space>\w+)\b(?P<rest>(?:\.\w+)*)|inductor_ops\.(?P<inductor>\w+)"
)


def needs_no_lowering(source: str) -> bool:
    """Whether generated Python calls nothing that Inductor's lowering modules define when they are imported."""
    for found in _OPERATOR.finditer(source):
        name = found["kernel"] or found["inductor"] or f"{found['space']}{found['rest']}"
        plain = (
            name in _TORCH_KERNELS
            if found["kernel"]
            else found["space"] in ("aten", "prims", "_quantized")
            or name in ("inductor", "inductor._alloc_from_pool")
        )
        if not plain:
            return False
    return True


_LIGHT_IMPORTS = {
    "from torch._inductor.select_algorithm import extern_kernels\n": f"from {__name__} import extern_kernels\n",
    "from torch._inductor.codegen.memory_planning import _align as align\n": (
        "from torch._inductor.utils import _align as align\n"
    ),
}
"""Lines of generated code that import lowering modules, and lines that give the same names without."""


def with_light_imports(source: str) -> str:
    """Generated Python that needs_no_lowering, which does not import it either."""
    for heavy, light in _LIGHT_IMPORTS.items():
        source = source.replace(heavy, light)
    return source


extern_kernels = _ExternKernels()


def select_decomp_table(*args: Any) -> Any:
    """torch._inductor.decomposition.select_decomp_table, which compiled graphs refer to and do not call. Its module
    goes through all of torch's operators when it is imported: 0.2 s."""
    from torch._inductor import decomposition

    return decomposition.select_decomp_table(*args)


class _LightUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, device_index: int) -> None:
        super().__init__(io.BytesIO(data))
        self._device_index = device_index

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return self._storage
        if (module, name) == ("torch._inductor.decomposition", "select_decomp_table"):
            return select_decomp_table
        return super().find_class(module, name)

    def _storage(self, saved: bytes) -> Any:
        """A constant's memory; what was on GPU 0 comes to this one."""
        places = {"cuda:0": f"cuda:{self._device_index}"}
        return torch.load(io.BytesIO(saved), map_location=places, weights_only=False)


def unpickle(data: bytes, device_index: int = 0) -> Any:
    """UNPICKLES `data`: call it only with bytes whose signature holds. device_index: the GPU for its constants."""
    return _LightUnpickler(data, device_index).load()
