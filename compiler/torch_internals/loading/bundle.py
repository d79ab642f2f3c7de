"""Turn a serialized bundle back into a callable, forward and backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import compatibility
from ..dynamo.programs import generated_code
from ..triton.extensions import prebuilt_extensions
from .light_imports import needs_no_lowering, unpickle, with_light_imports, without_lowering_import
from .prebuilt_libraries import install_library_lookup, loading_from
from .preload import preload_loader
from .relocation import move_to_device, rename_process_groups


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
    entry, kernels, constant_args = unpickle(bundle)
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(loading_from(libraries, folder))
        if without_lowering:
            stack.enter_context(without_lowering_import())
        compiled = entry.wrap_post_compile(
            list(inputs),
            entry.sanitized_aot_config,
            {"cudagraphs": BoxedBool(cudagraphs), "boxed_forward_device_index": BoxedDeviceIndex(None)},
        )

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        return compiled(list(args))

    return call
