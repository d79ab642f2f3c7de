"""User-written kernels in tuning jobs: a kernel with candidates and arguments, its request and its problem.

No torch and no Triton."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ...request import allowed_names, schema
from ...tuning.records import Operand, Problem

MAX_CANDIDATES = 1024
"""Limit of one kernel, as in any request (compiler/request/validate.py)."""

MAX_ARGUMENTS = 56
"""Limit of a kernel's tensors, and of its other arguments: a problem has room for as many."""

_OPERATOR = "triton."


class KernelSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel with all candidates, their grids in the same order, and its arguments.

    tensors: parameter and shape, in the order of the function's signature. constants: all other arguments, in that
    order.
    """

    source: schema.KernelSource
    grids: Annotated[list[tuple[int, int, int]], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    tensors: Annotated[list[tuple[str, Operand]], Meta(min_length=1, max_length=MAX_ARGUMENTS)]
    constants: Annotated[list[tuple[str, schema.KernelConstant]], Meta(max_length=MAX_ARGUMENTS)]

    def __post_init__(self) -> None:
        if len(self.grids) != len(self.source.configs):
            raise ValueError(
                f"a kernel has a grid for each configuration: {len(self.grids)} for {len(self.source.configs)}"
            )


def constant_text(value: schema.KernelConstant) -> str:
    """For people, and for a problem's settings."""
    return f"tl.{value.name}" if isinstance(value, schema.TritonDType) else repr(value)


def config_text(config: schema.KernelConfig) -> str:
    """A candidate's name: `BLOCK=128 num_warps=4 num_stages=3`."""
    parts = [f"{name}={constant_text(value)}" for name, value in sorted(config.kwargs)]
    parts += [f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"]
    parts += [f"num_ctas={config.num_ctas}"] if config.num_ctas != 1 else []
    parts += [f"maxnreg={config.maxnreg}"] if config.maxnreg is not None else []
    return " ".join(parts)


def request(kernel: KernelSpec, toolchain: schema.Toolchain, target: schema.Target) -> schema.GraphRequest:
    """The request for a kernel item: a graph of one call, whose compile searches among the configurations.

    It is checked like any request with source, and needs the same permission (docs/decisions/0015).
    """
    nodes = [schema.Node("placeholder", "", []) for _ in kernel.tensors]
    call: dict[str, schema.Arg] = {
        "constant_args": schema.DictArg([*kernel.constants]),
        "grid": schema.ListArg([schema.TupleArg([*grid]) for grid in kernel.grids]),
        "kernel": schema.UserKernel(0),
        "kwargs": schema.DictArg([(name, schema.Ref(at)) for at, (name, _) in enumerate(kernel.tensors)]),
    }
    nodes.append(schema.Node("call_function", allowed_names.TRITON_CALL, [], sorted(call.items())))
    nodes.append(schema.Node("output", "", [schema.TupleArg([])]))
    return schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=schema.Graph(nodes),
        inputs=[
            schema.TensorInput(
                shape=[*operand.size],
                stride=[*operand.stride],
                dtype=operand.dtype,
                device=target.kind,
                requires_grad=False,
            )
            for _, operand in kernel.tensors
        ],
        symbols=[],
        relations=[],
        constants=[],
        ambient=schema.usual_ambient(grad=False, threads=1, flags=[]),
        mode="max-autotune-no-cudagraphs",
        options=[],
        aot_options=[],
        toolchain=toolchain,
        target=target,
        kernels=[kernel.source],
    )


def source_digest(source: schema.KernelSource) -> str:
    """The digest of a kernel's code without its configurations; hexadecimal."""
    return hashlib.sha256(msgspec.msgpack.encode((source.name, source.source))).hexdigest()


def is_of_source(problem: Problem) -> bool:
    """Whether the problem is a user-written kernel's."""
    return problem.op.startswith(_OPERATOR)


def source_of(problem: Problem) -> str:
    """The source's digest in a user-written kernel's problem; '' for other problems."""
    return dict(problem.settings).get("source", "") if is_of_source(problem) else ""


def problem(kernel: KernelSpec) -> Problem:
    """A call's problem in the tuning database.

    Its settings name the source and the candidates by digests, so a winner is valid for these candidates of this source
    only. The result is the last tensor: kernels write to arguments.
    """
    source = kernel.source
    tried = sorted(
        f"{config_text(config)} {grid[0]},{grid[1]},{grid[2]}"
        for config, grid in zip(source.configs, kernel.grids, strict=True)
    )
    settings = {f"arg.{name}": constant_text(value) for name, value in kernel.constants}
    settings["configs"] = hashlib.sha256("\n".join(tried).encode()).hexdigest()[:32]
    settings["source"] = source_digest(source)
    settings["tensors"] = " ".join(name for name, _ in kernel.tensors)
    operands = tuple(operand for _, operand in kernel.tensors)
    return Problem(f"{_OPERATOR}{source.name}", operands, operands[-1], tuple(sorted(settings.items())))
