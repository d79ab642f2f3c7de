"""C++ kernels: for which instruction set, their shared libraries (recorded, and reused from earlier compiles), and the
precompiled header that they include."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CompileFailed
from ..kernel_store.libraries import KernelExchange
from ..request import cpu_isa, schema
from .patching import patched, replace


@contextlib.contextmanager
def cpu_target(target: schema.Target) -> Iterator[None]:
    """Make Inductor generate and build C++ for a target instead of this CPU, without test builds. Raises
    Unsupported."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    build, cpu = cpu_isa.target_of(target), target.cpu
    chosen, vector_sets = [], set(build.vector_sets(cpu))
    for isa in cpu_vec_isa.supported_vec_isa_list:
        if str(isa).split() and set(str(isa).split()) <= vector_sets:
            if isinstance(isa, cpu_vec_isa.VecAVX512):
                replace(isa, "_is_avx512_bf16_supported", "avx512_bf16" in cpu)
            chosen.append(isa)
    original = cpp_builder._get_optimization_cflags

    @functools.wraps(original)
    def optimization_flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        cflags, ldflags = original(*args, **kwargs)
        kept = [flag for flag in cflags if not flag.startswith(("march=", "mcpu="))]
        return kept + build.compiler_flags(cpu), ldflags

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(cpu_vec_isa, "valid_vec_isa_list", lambda: chosen))
        stack.enter_context(patched(cpu_vec_isa.VecISA, "check_build", lambda self, code: True))
        stack.enter_context(patched(cpp_builder, "_get_optimization_cflags", optimization_flags))
        if build.compiler and build != cpu_isa.NATIVE:
            stack.enter_context(patched(cpp_builder, "get_cpp_compiler", lambda: build.compiler))
        if not build.is_native:
            stack.enter_context(_another_machines_torch(build.torch_folder))
        yield


@contextlib.contextmanager
def _another_machines_torch(torch_folder: Path) -> Iterator[None]:
    """Kernels include the headers of the torch in `torch_folder` and link its libraries."""
    from torch._inductor import cpp_builder

    own = str(Path(torch.__file__).parent)
    original = cpp_builder._get_torch_related_args

    @functools.wraps(original)
    def torch_related_args(*args: Any, **kwargs: Any) -> tuple[list[str], list[str], list[str]]:
        include_dirs, library_dirs, libraries = original(*args, **kwargs)
        include_dirs, library_dirs = (
            [path.replace(own, str(torch_folder), 1) for path in paths]
            for paths in (include_dirs, library_dirs)
        )
        return include_dirs, library_dirs, libraries

    with patched(cpp_builder, "_get_torch_related_args", torch_related_args):
        yield


@contextlib.contextmanager
def _without_loading() -> Iterator[None]:
    """Libraries that are built inside the block get a module whose kernel cannot be called: they are for another
    machine."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def not_loaded(path: str, key: str) -> types.ModuleType:
        module = types.ModuleType(key)
        module.__file__ = path
        module.kernel = types.MethodType(_refuse_call, module)  # type: ignore[attr-defined]
        return module

    with patched(CppPythonBindingsCodeCache, "_load_library_inner", staticmethod(not_loaded)):
        yield


def _refuse_call(module: types.ModuleType, *args: Any) -> None:
    raise CompileFailed(f"{module.__file__} is for another machine")


# --- libraries ---------------------------------------------------------------------------------------------


def cpp_compiler_output(error: BaseException) -> str | None:
    """What the C++ compiler printed, if `error` says that it failed; else None. torch._inductor.exc.CppCompileError."""
    from torch._inductor.exc import CppCompileError

    return str(error.output) if isinstance(error, CppCompileError) else None


class CppLibraries:
    """The C++ kernel libraries of a compile. `waited`: seconds that it had to wait for g++ so far. loaded: whether this
    process loads what is built."""

    def __init__(self, *, loaded: bool = True) -> None:
        self.waited = 0.0
        self.loading = contextlib.nullcontext if loaded else _without_loading
        self._kernels: dict[tuple[tuple[str, ...], str], Callable[[], Any]] = {}

    def files(self) -> list[tuple[list[str], str, Path]]:
        """(argument types, source, file) of each, all of them built. Raises what the build of one raised."""
        return [
            (list(argtypes), source, Path(kernel().__self__.__file__))
            for (argtypes, source), kernel in self._kernels.items()
        ]

    def settle(self) -> None:
        """Wait until nothing is being built, so that something can be measured; errors come with `files`."""
        waited = self.waited
        for kernel in self._kernels.values():
            with contextlib.suppress(Exception):
                kernel()
        self.waited = waited

    def later(self, argtypes: Sequence[str], source: str, kernel: Any) -> Any:
        """The kernel, or in place of its future a callable whose first call waits for it."""
        if not hasattr(kernel, "result"):
            self._kernels[tuple(argtypes), source] = lambda: kernel
            return kernel

        def built() -> Any:
            start = time.perf_counter()
            try:
                with self.loading():
                    return kernel.result()
            finally:
                self.waited += time.perf_counter() - start

        self._kernels[tuple(argtypes), source] = built
        return lambda *args: built()(*args)


@contextlib.contextmanager
def recording_cpp_libraries(target: schema.Target) -> Iterator[CppLibraries]:
    """Record every C++ kernel library built inside the block. Those of a target for another machine are not loaded.

    Futures are not waited for at the end of each graph (AsyncCompile.wait): the backward is lowered, and the forward's
    reference run, while g++ works. Its errors come when the library is asked for.
    """
    from torch._inductor.async_compile import AsyncCompile

    libraries = CppLibraries(loaded=cpu_isa.target_of(target).is_native)
    original = AsyncCompile.cpp_pybinding

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        with libraries.loading():
            kernel = original(self, argtypes, source_code)
        return libraries.later(argtypes, source_code, kernel)

    with patched(AsyncCompile, "cpp_pybinding", cpp_pybinding):
        yield libraries


@contextlib.contextmanager
def without_cpp_builds() -> Iterator[None]:
    """Inside the block, generated code loads without its C++ kernels (AsyncCompile.cpp_pybinding)."""
    from torch._inductor.async_compile import AsyncCompile

    def not_built(*args: Any) -> Any:
        raise AssertionError("this kernel was not built")

    with patched(AsyncCompile, "cpp_pybinding", lambda self, argtypes, source_code: not_built):
        yield


@dataclasses.dataclass
class CppBuildCounts:
    """How many C++ libraries a compile built, and how many it found built."""

    built: int = 0
    reused: int = 0


@contextlib.contextmanager
def sharing_cpp_libraries(exchange: KernelExchange | None) -> Iterator[CppBuildCounts]:
    """Take C++ libraries from earlier compiles instead of building them, and offer those that are built.

    Wraps torch._inductor.codecache._worker_compile_cpp, which is given builders whose last target is the library.
    """
    from torch._inductor import codecache

    builds, lock = CppBuildCounts(), threading.Lock()
    original = codecache._worker_compile_cpp

    @functools.wraps(original)
    def worker_compile_cpp(lock_path: str, cpp_builders: Sequence[Any]) -> None:
        target = Path(cpp_builders[-1].get_target_file_path())
        if target.suffix != ".so" or target.exists():  # a precompiled header, or done by another thread
            original(lock_path, cpp_builders)
            return
        found = exchange is not None and exchange.copy_to(target.name, target)
        if not found:
            original(lock_path, cpp_builders)
            if exchange is not None:
                exchange.offer(target)
        if _building_candidate.get():
            return
        with lock:
            builds.reused += found
            builds.built += not found

    with patched(codecache, "_worker_compile_cpp", worker_compile_cpp):
        yield builds


_building_candidate: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "torchrelay_on_trial", default=False
)


def candidate_context() -> contextvars.Context:
    """This thread's context, options included, for a thread that builds a candidate: no kernel of the artifact yet."""
    context = contextvars.copy_context()
    context.run(_building_candidate.set, True)
    return context


# --- the precompiled header --------------------------------------------------------------------------------


@contextlib.contextmanager
def header_directory(folder: Path) -> Iterator[None]:
    """Inside the block, precompiled headers lie in `folder` (torch._inductor.codecache._HEADER_DIR)."""
    from torch._inductor import codecache

    with (
        patched(codecache, "_HEADER_DIR", str(folder)),
        patched(codecache, "_HEADER_LOCK_DIR", str(folder / "locks")),
    ):
        yield


def precompile_header(options: Mapping[str, Any]) -> Path:
    """Have the header that C++ kernels include precompiled, as their first one would have it; returns its file.

    Enters torch._inductor.codecache.CppPythonBindingsCodeCache.load_pybinding_async, which builds no kernel until what
    it returns is called.
    """
    from torch._inductor import codecache, config

    used: list[Path] = []
    original = codecache._precompile_header

    def recorded(*args: Any, **kwargs: Any) -> str:
        path: str = original(*args, **kwargs)
        used.append(Path(path + ".gch"))
        return path

    with patched(codecache, "_precompile_header", recorded), config.patch(dict(options)):
        source = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'
        codecache.CppPythonBindingsCodeCache.load_pybinding_async(["float*"], source)
    return used[0]
