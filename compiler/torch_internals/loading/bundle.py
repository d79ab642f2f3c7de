"""Turn a serialized bundle back into a callable, forward and backward, for this GPU and these process groups."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import compatibility
from ..dynamo.programs import generated_code
from ..triton.caches import kernel_key
from ..triton.extensions import prebuilt_extensions
from .light_imports import needs_no_lowering, unpickle, with_light_imports
from .prebuilt_libraries import install_library_lookup, loading_from
from .preload import preload_loader


def deserialize(
    bundle: bytes,
    libraries: Mapping[tuple[tuple[str, ...], str], Path],
    triton_modules: Mapping[str, Path],
    inputs: Sequence[Any],
    folder: Path,
    *,
    cudagraphs: bool,
    device_index: int = 0,
    groups: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """A serialized callable back into one that runs, forward and backward.

    UNPICKLES `bundle`: call it only with bytes whose signature holds. Follows
    torch/_functorch/_aot_autograd/aot_autograd_result.py: deserialize_bundled_cache_entry, but gives the real
    inputs and the caller's CUDA-graph choice, and leaves guards to the caller.

    libraries: C++ kernels, by what generated code asks for. triton_modules: Triton's own C extensions, by
    triton_module_id. inputs: the example inputs Dynamo gave. folder: this process's own, for generated code and GPU
    binaries; no other user can write to it. device_index: the GPU to run on (artifacts are
    compiled for GPU 0). groups: what generated code calls a process group, and its name here. Raises Unsupported
    with a torch that lacks what this needs (compatibility.py).
    """
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    preload_loader()  # running the code needs all of it, whether a download imported it meanwhile or not
    compatibility.check("load")
    entry, kernels, constant_args = unpickle(bundle, device_index)
    if kernels or constant_args:
        raise TypeError("the artifact refers to user-written Triton kernels")
    entry.guards_expr = None
    graphs: list[Any] = [
        part.result
        for part in (entry.compiled_fw, entry.compiled_bw)
        if getattr(part, "result", None) is not None
    ]
    without_lowering = not cudagraphs and all(needs_no_lowering(graph.source_code) for graph in graphs)
    for graph in graphs:
        if without_lowering:
            graph.source_code = with_light_imports(graph.source_code)
        if device_index:
            move_to_device(graph, device_index)
        if groups:
            rename_process_groups(graph, groups)
    if triton_modules:
        prebuilt_extensions.add(triton_modules)
    install_library_lookup()
    generated_code.install()
    with loading_from(libraries, folder, imports_lowering=not without_lowering):
        compiled = entry.wrap_post_compile(
            list(inputs),
            entry.sanitized_aot_config,
            {"cudagraphs": BoxedBool(cudagraphs), "boxed_forward_device_index": BoxedDeviceIndex(None)},
        )

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        return compiled(list(args))

    return call


_GPU_0 = re.compile(r"((?:_DeviceGuard|set_device|get_raw_stream)\()0(?=\))|(type='cuda', index=|cuda:)0\b")
"""How Inductor's generated Python spells GPU 0."""


def move_to_device(graph: Any, index: int) -> None:
    """Rewrite a CompiledFxGraph compiled for GPU 0 so that it runs on GPU `index`. Raises ValueError where its code
    names GPU 0 in a way that is not known here.

    The Triton kernels' own sources are part of the text: their cached binaries are found by the new text's key.
    """
    before = graph.source_code
    graph.source_code = _for_device(before, index)
    if index and (left := next(_gpu_0(graph.source_code), None)) is not None:
        raise ValueError(f"generated code names GPU 0: {left[:200]}")
    graph.device_idxs = type(graph.device_idxs)(index if i == 0 else i for i in graph.device_idxs)
    graph.cache_key = f"{graph.cache_key}_{index}"
    bundle = graph._triton_bundle
    if bundle is None:
        return
    renamed = {
        kernel_key(source): kernel_key(_for_device(source, index)) for source in _kernel_sources(before)
    }
    moved = []
    for static in bundle.static_autotuners:
        static.kernel.triton_meta["device"] = index
        static.kernel.device_props = static.kernel.device_props._replace(index=index)
        for result in static.kernel.compile_results:
            result.compile_meta["device"] = index
        moved.append(dataclasses.replace(static, cache_key=renamed.get(static.cache_key, static.cache_key)))
    graph._triton_bundle = dataclasses.replace(bundle, static_autotuners=moved)


def rename_process_groups(graph: Any, groups: Mapping[str, str]) -> None:
    """Have a CompiledFxGraph's collectives use process groups of these names."""
    for name, here in groups.items():
        graph.source_code = graph.source_code.replace(repr(name), repr(here))
    graph.cache_key = f"{graph.cache_key}_{'_'.join(groups.values())}"


def _for_device(source: str, index: int) -> str:
    return _GPU_0.sub(lambda found: f"{found[1] or found[2]}{index}", source)


def _gpu_0(generated: str) -> Iterator[str]:
    """Calls for a device or a stream in generated Python that still seem to name GPU 0."""
    for node in ast.walk(ast.parse(generated)):
        if isinstance(node, ast.Call) and re.search("(?i)device|stream", ast.unparse(node.func)):
            named = [each.value for each in node.keywords if each.arg in ("device", "index", "device_index")]
            if any(ast.unparse(each) in ("0", "'cuda:0'") for each in (*node.args, *named)):
                yield ast.unparse(node)


def _kernel_sources(generated: str) -> Iterator[str]:
    """The Triton sources that generated Python passes to `async_compile.triton(name, source, ...)`."""
    for node in ast.walk(ast.parse(generated)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "triton":
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value
