"""Requests that call user-written Triton kernels, made without Triton or a GPU."""

from __future__ import annotations

from typing import Any

from service_parts import AMBIENT
from torchrelay.compiler import names, user_kernels, wire

GPU = wire.Target(kind="cuda", name="NVIDIA H100", capability="9.0", units=132, cpu=[])
TOOLCHAIN = wire.Toolchain("cp312", "2.11.0+cu128", "3.6.0", "12.8", "linux-x86_64")


def kernel(factor: int = 2, name: str = "scale") -> wire.KernelSource:
    text = f"def {name}(x_ptr, BLOCK: tl.constexpr):\n    tl.store(x_ptr, {factor} * BLOCK)\n"
    return wire.KernelSource(name, user_kernels.module_text([], [], {name: text}), [])


def request(*kernels: wire.KernelSource, **call: Any) -> wire.GraphRequest:
    """A request that calls each of `kernels` on its input; `call` changes the arguments of the calls."""
    nodes = [wire.Node("placeholder", "", [])]
    for index in range(len(kernels)):
        given = {
            "constant_args": wire.DictArg([("BLOCK", 64)]),
            "grid": wire.ListArg([wire.TupleArg([1, 1, 1])]),
            "kernel": wire.UserKernel(index),
            "kwargs": wire.DictArg([("x_ptr", wire.Ref(0))]),
            **call,
        }
        nodes.append(wire.Node("call_function", names.TRITON_CALL, [], sorted(given.items())))
    nodes.append(wire.Node("output", "", [wire.TupleArg([wire.Ref(0)])]))
    return wire.GraphRequest(
        schema=wire.SCHEMA,
        graph=wire.Graph(nodes),
        inputs=[wire.TensorInput([8], [1], "float32", "cuda", requires_grad=False)],
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


def body(*kernels: wire.KernelSource, **call: Any) -> bytes:
    return wire.pack_request(request(*(kernels or (kernel(),)), **call))
