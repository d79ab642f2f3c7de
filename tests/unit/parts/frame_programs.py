"""Programs that are not those of any function."""

from __future__ import annotations

from torchrelay.compiler.artifact.programs.records import FrameProgram, ProgramGraph


def program(number: int = 0) -> FrameProgram:
    return FrameProgram(
        bytecode=b"bytecode %d" % number,
        constants=[],
        sources=[],
        guards=[],
        key_order=[],
        sizes=[],
        same_inputs=[],
        builtins="",
        globals=[],
        graphs=[ProgramGraph("compiled", "0" * 64, b"request")],
        traced=[],
        asked=[],
        registered=[],
        kernels="",
        shapes=[],
        automatic=[],
    )
