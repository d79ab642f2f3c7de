"""Requests that call user-written Triton kernels, made without Triton or a GPU."""

from __future__ import annotations

from typing import Any

from service_parts import AMBIENT
from torchrelay.compiler.request import allowed_names, codec, schema, triton_source

GPU = schema.Target(kind="cuda", name="NVIDIA H100", capability="9.0", units=132, cpu=[])
TOOLCHAIN = schema.Toolchain("cp312", "2.11.0+cu128", "3.6.0", "12.8", "linux-x86_64")


def kernel(factor: int = 2, name: str = "scale") -> schema.KernelSource:
    text = f"def {name}(x_ptr, BLOCK: tl.constexpr):\n    tl.store(x_ptr, {factor} * BLOCK)\n"
    return schema.KernelSource(name, triton_source.module_text([], [], {name: text}), [])


def request(*kernels: schema.KernelSource, **call: Any) -> schema.GraphRequest:
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
    return schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=schema.Graph(nodes),
        inputs=[schema.TensorInput([8], [1], "float32", "cuda", requires_grad=False)],
        symbols=[],
        relations=[],
        constants=[],
        ambient=AMBIENT,
        mode="default",
        options=[],
        aot_options=[],
        toolchain=TOOLCHAIN,
        target=GPU,
        kernels=list(kernels),
    )


def body(*kernels: schema.KernelSource, **call: Any) -> bytes:
    return codec.pack_request(request(*(kernels or (kernel(),)), **call))
