"""Rewrite a compiled graph for another GPU or other process groups."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..triton.keys import kernel_key

_DEVICE_PATTERNS = (
    (re.compile(r"(_DeviceGuard\()0\)"), r"\g<1>{})"),
    (re.compile(r"(set_device\()0\)"), r"\g<1>{})"),
    (re.compile(r"(get_raw_stream\()0\)"), r"\g<1>{})"),
    (re.compile(r"(type='cuda', index=)0\b"), r"\g<1>{}"),
    (re.compile(r"(cuda:)0\b"), r"\g<1>{}"),
)
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
    for pattern, replacement in _DEVICE_PATTERNS:
        source = pattern.sub(replacement.format(index), source)
    return source


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
