"""Items that measure what a device can do at most, added to those of a tuning job."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....compiler.api.tuning import operators
from ....compiler.api.tuning.jobs import OperatorTuneItem, TuneItem
from ....compiler.request import schema
from ....compiler.tuning.records import Operand, Problem, contiguous
from ...compile.search.task import SearchTarget

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
_SIDE = {"cuda": 8192, "cpu": 2048}
_SLOW_SIDE = 256
_INSTRUCTIONS = {
    "float16": {"avx512_fp16", "amx_fp16"},
    "bfloat16": {"avx512bw", "avx512_bf16", "amx_bf16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8"},
}
"""A CPU with none of these multiplies a dtype in a plain loop, a hundred times slower."""


def ceilings(
    items: Sequence[TuneItem], requests: Sequence[schema.GraphRequest], search_target: SearchTarget
) -> list[OperatorTuneItem]:
    """A large copy, and a large square product for each dtype and precision of the job."""
    kind = search_target.target.kind
    count = _COPY_BYTES[kind] // 4
    memory = Operand("float32", (count,), (1,))
    found = [Problem("copy", (memory,), memory)]
    wanted: dict[tuple[str, str], None] = {}
    for item in items:
        if isinstance(item, OperatorTuneItem):
            wanted[item.problem.operands[0].dtype, dict(item.problem.settings).get("precision", "")] = None
    for request in requests:
        wanted |= dict.fromkeys(_dtypes(request))
    for dtype, precision in wanted:
        problem = _square(dtype, precision, _side(dtype, search_target.target))
        if problem is not None:
            found.append(problem)
    return [
        OperatorTuneItem(0, problem, ceiling=True)
        for problem in dict.fromkeys(found)
        if _possible(problem, search_target)
    ]


def _side(dtype: str, target: schema.Target) -> int:
    if target.kind == "cpu" and dtype in _INSTRUCTIONS and not _INSTRUCTIONS[dtype] & set(target.cpu):
        return _SLOW_SIDE
    return _SIDE[target.kind] // (2 if dtype in ("float32", "float64") else 1)


def _dtypes(request: schema.GraphRequest) -> list[tuple[str, str]]:
    """Dtypes and precisions that a graph's matrix products may have."""
    dtypes = [
        each.dtype for each in request.inputs if isinstance(each, schema.TensorInput) and len(each.shape) > 1
    ]
    dtypes += [each.dtype for each in request.ambient.autocast if each.device == request.target.kind]
    precision = request.ambient.matmul_precision
    return [(dtype, precision if dtype == "float32" else "") for dtype in dict.fromkeys(dtypes)]


def _square(dtype: str, precision: str, side: int) -> Problem | None:
    size = (side, side)
    row = Operand(dtype, size, contiguous(size))
    if dtype in operators.FP8:
        one = Operand("float32", (), ())
        a = msgspec.structs.replace(row, dtype=operators.FP8[0])
        b = msgspec.structs.replace(a, stride=(1, side))
        result = msgspec.structs.replace(row, dtype="bfloat16")
        return Problem("scaled_mm", (a, b, one, one), result, (("arg.use_fast_accum", "True"),))
    if dtype == "int8":
        return Problem("int_mm", (row, row), msgspec.structs.replace(row, dtype="int32"))
    if dtype not in operators.FLOATS:
        return None
    return Problem("mm", (row, row), row, (("precision", precision),) if precision else ())


def _possible(problem: Problem, search_target: SearchTarget) -> bool:
    try:
        operators.check(problem)
        operators.check_device(problem, search_target.target)
    except ValueError:
        return False
    return True
