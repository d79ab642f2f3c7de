"""Requests, and manifests of artifacts, in which nothing is special but what a test says.

User-written Triton kernels are made without Triton or a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.manifest import Manifest, Verification
from torchrelay.compiler.request import allowed_names, codec, schema, triton_source

TOOLCHAIN = schema.Toolchain(python="cp311", torch="2.13.0+cpu", triton="", cuda="", platform="linux-x86_64")
TARGET = schema.Target(kind="cpu", name="", capability="", units=0, cpu=[])
GPU_TOOLCHAIN = schema.Toolchain("cp312", "2.11.0+cu128", "3.6.0", "12.8", "linux-x86_64")
GPU = schema.Target(kind="cuda", name="NVIDIA H100", capability="9.0", units=132, cpu=[])
AMBIENT = schema.usual_ambient(grad=True, threads=1, flags=[])


def request_of(
    nodes: Sequence[schema.Node] = (), inputs: Sequence[schema.Input] = (), /, **changes: Any
) -> schema.GraphRequest:
    plain = schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=schema.Graph(list(nodes)),
        inputs=list(inputs),
        symbols=[],
        relations=[],
        constants=[],
        ambient=AMBIENT,
        mode="default",
        options=[],
        aot_options=[],
        toolchain=TOOLCHAIN,
        target=TARGET,
    )
    return msgspec.structs.replace(plain, **changes)


def manifest_of(key: str, files: Mapping[str, bytes], **changes: Any) -> Manifest:
    plain = Manifest(
        schema=schema.SCHEMA,
        key=key,
        toolchain=TOOLCHAIN,
        target=TARGET,
        members=[container.member(name, data) for name, data in files.items()],
        guards=[],
        stages=[("aot", 1.0)],
        verification=Verification("passed", "", 0.0, 0.1),
        tuning=[],
        kernels=1,
        created="2026-01-01T00:00:00Z",
        worker="w0",
    )
    return msgspec.structs.replace(plain, **changes)


def kernel(factor: int = 2, name: str = "scale") -> schema.KernelSource:
    text = f"def {name}(x_ptr, BLOCK: tl.constexpr):\n    tl.store(x_ptr, {factor} * BLOCK)\n"
    return schema.KernelSource(name, triton_source.module_text([], [], {name: text}), [])


def kernels_request(*kernels: schema.KernelSource, **call: Any) -> schema.GraphRequest:
    """A request that calls each of `kernels` on its input; `call` changes the arguments of the calls."""
    nodes = [schema.Node("placeholder", "", [])]
    for index in range(len(kernels)):
        given = {
            "constant_args": schema.DictArg([("BLOCK", 64)]),
            "grid": schema.ListArg([schema.TupleArg([1, 1, 1])]),
            "kernel": schema.UserKernel(index),
            "kwargs": schema.DictArg([("x_ptr", schema.Ref(0))]),
            **call,
        }
        nodes.append(schema.Node("call_function", allowed_names.TRITON_CALL, [], sorted(given.items())))
    nodes.append(schema.Node("output", "", [schema.TupleArg([schema.Ref(0)])]))
    tensor = schema.TensorInput([8], [1], "float32", "cuda", requires_grad=False)
    return request_of(nodes, [tensor], toolchain=GPU_TOOLCHAIN, target=GPU, kernels=list(kernels))


def kernels_body(*kernels: schema.KernelSource, **call: Any) -> bytes:
    return codec.pack_request(kernels_request(*(kernels or (kernel(),)), **call))
