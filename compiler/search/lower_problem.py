"""Stage 8, in a search worker: makes the candidates among which a compile would choose for a problem.

A problem contains no code: its operator is in a closed table, its arguments are literals, and only known settings are
applied. It is lowered as a graph of one operator.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from ..api.tuning.operators import MASKS, PRECISIONS
from ..torch_internals import patching
from ..torch_internals.algorithm_selection import lower_operator, operator_candidates, padding_candidates
from ..torch_internals.dynamo.tensors import fake_tensors
from ..torch_internals.inductor import config
from ..tuning import records
from ..tuning.candidates import Candidates
from ..tuning.queries import TuningTask
from ..tuning.records import Operand, Problem
from . import numerics

aten = torch.ops.aten


class UnsupportedProblem(Exception):
    """A problem that cannot be rebuilt, and why."""


SPACES = operator_candidates.SEARCH_SPACE_OPTIONS
EXHAUSTIVE = {"max_autotune_gemm_search_space": "EXHAUSTIVE", "max_autotune_flex_search_space": "EXHAUSTIVE"}
_MODES = frozenset({"precision", "cudnn.allow_tf32", "reduced_precision"})
_SHAPES = frozenset({"constants", "offsets", "sources"})
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int8")
}
_BOOLS = {"True": True, "False": False}

Arguments = Mapping[str, Any]


class _Operator(Struct, frozen=True):
    """How a graph calls an operator.

    operands: how many tensors it takes by position. optional: the name of one more tensor; '': there is none.
    arguments: the others, with their defaults.
    """

    target: Callable[..., Any]
    operands: int
    optional: str = ""
    arguments: Arguments = {}
    widened: Callable[..., Any] | None = None
    """The overload that takes the result's dtype."""

    @property
    def counts(self) -> list[int]:
        """How many operands it takes."""
        return [self.operands, self.operands + 1] if self.optional else [self.operands]

    @property
    def names(self) -> set[str]:
        """Names of the arguments that a problem's settings may have."""
        return {*self.arguments, *(["out_dtype"] if self.widened else [])}

    def call(self, nodes: Sequence[Any], arguments: Arguments) -> lower_operator.OperatorCall:
        named = {
            name: default if arguments.get(name) is None else arguments[name]
            for name, default in self.arguments.items()
        }
        if self.optional:
            named[self.optional] = next(iter(nodes[self.operands :]), None)
        operands = tuple(nodes[: self.operands])
        if self.target is aten.convolution.default:  # Inductor reads its arguments by position
            return self.target, (*operands, *named.values()), {}
        if self.widened is not None and arguments.get("out_dtype") is not None:
            return self.widened, (*operands, arguments["out_dtype"]), {}
        return self.target, operands, named


_SUM = {"alpha": 1, "beta": 1}
_GROUPED = {"out_dtype": None}
_SCALED = {"out_dtype": None, "use_fast_accum": False}
_CONVOLUTION = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "transposed": False,
    "output_padding": 0,
    "groups": 1,
}
_LENGTHS = ("stride", "padding", "dilation", "output_padding")
"""Arguments of a convolution that have a number for each dimension."""

OPERATORS = {
    "mm": _Operator(aten.mm.default, 2, widened=aten.mm.dtype),
    "bmm": _Operator(aten.bmm.default, 2, widened=aten.bmm.dtype),
    "int_mm": _Operator(aten._int_mm.default, 2),
    "addmm": _Operator(aten.addmm.default, 3, arguments=_SUM),
    "baddbmm": _Operator(aten.baddbmm.default, 3, arguments=_SUM),
    "mm_plus_mm": _Operator(lower_operator.mm_plus_mm, 4),
    "convolution": _Operator(aten.convolution.default, 2, "bias", _CONVOLUTION),
    "scaled_mm": _Operator(aten._scaled_mm.default, 4, "bias", _SCALED),
    "grouped_mm": _Operator(aten._grouped_mm.default, 2, "offs", _GROUPED),
    "scaled_grouped_mm": _Operator(aten._scaled_grouped_mm.default, 4, "offs", _SCALED),
}
COPY = "copy"


def lower_problem(task: TuningTask, device: str) -> Candidates:
    """The candidates among which a compile for `device` (`cpu` or `cuda`) chooses for the task's problem. Call it, and
    use them, inside `in_force`. Raises UnsupportedProblem."""
    problem = task.problem
    if problem.op == COPY:
        if len(problem.operands) != 1:
            raise UnsupportedProblem("a copy has one operand")
        return CopyCandidates(problem, device)
    if problem.op.startswith(padding_candidates.PADDING_PREFIX):
        return _padding(task, device)
    if problem.op == FLEX:
        return _flex_attention(task, device)
    operator = OPERATORS.get(problem.op)
    if operator is None:
        raise UnsupportedProblem(f"{problem.op} cannot be rebuilt from its operands")
    settings = dict(problem.settings)
    given = _arguments(problem, operator, settings)
    operands, offsets, constants = _operands(problem, settings)
    found: list[Candidates] = []
    for channels_last in (False, True) if task.exact and problem.op == "convolution" else (None,):
        try:
            selections = lower_operator.candidates_of_operator(
                lambda nodes: operator.call(nodes, given),
                operands,
                offsets,
                constants,
                torch.device(device, 0) if device == "cuda" else torch.device(device),
                channels_last=channels_last,
            )
        except Exception as error:  # PyTorch refuses the operands
            raise UnsupportedProblem(f"{type(error).__name__}: {_first_line(error)}") from error
        if task.exact:
            for selection in selections:
                if selection.problem == problem:
                    return selection
        found += selections
    if not found:
        raise UnsupportedProblem("Inductor has no candidates for it here")
    if task.exact:
        raise UnsupportedProblem(f"rebuilt, it is another problem: {found[-1].problem.text()}")
    return found[-1]


FLEX = "flex_attention"


def _flex_attention(task: TuningTask, device: str) -> Candidates:
    """Attention in inference, with a mask from a closed table. A compile's own mask is code and has no name."""
    problem, settings = task.problem, dict(task.problem.settings)
    mask = settings.get("mask", "none")
    if task.exact or not re.fullmatch(MASKS, mask) or settings.keys() - {"mask"} - _MODES - SPACES:
        raise UnsupportedProblem(f"{problem.text()[:500]} has no mask of none, causal, window:N and prefix:N")
    operands, _, _ = _operands(problem, {})
    if len(operands) != 3 or any(len(operand.size) != 4 for operand in operands):
        raise UnsupportedProblem("flex_attention takes query, key and value of four dimensions")
    if device == "cpu":
        raise UnsupportedProblem(
            "for a CPU Inductor has one candidate for flex_attention, which cannot be run by itself"
        )
    name, _, width = mask.partition(":")
    allows = _mask_of(name, int(width or 0))
    query, key, value = (
        torch.empty_strided(x.size, x.stride, dtype=getattr(torch, x.dtype), device=device) for x in operands
    )
    graphs: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def traced(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, inputs))
        raise _Traced

    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    grouped = operands[0].size[1] != operands[1].size[1]
    try:
        lengths = operands[0].size[2], operands[1].size[2]
        blocks = None if allows is None else create_block_mask(allows, None, None, *lengths, device=device)
        torch.compiler.reset()
        with contextlib.suppress(_Traced):
            torch.compile(
                lambda q, k, v: flex_attention(q, k, v, block_mask=blocks, enable_gqa=grouped),
                backend=traced,
                fullgraph=True,
            )(query, key, value)
        selections = lower_operator.candidates_of_graph(*graphs[0]) if graphs else []
    except Exception as error:
        raise UnsupportedProblem(f"{type(error).__name__}: {_first_line(error)}") from error
    if not selections:
        raise UnsupportedProblem("Inductor has no candidates for it here")
    return selections[-1]


class _Traced(BaseException):
    """Ends Dynamo's trace once it has produced the graph."""


def _mask_of(name: str, width: int) -> Callable[[Any, Any, Any, Any], Any] | None:
    if name == "causal":
        return lambda batch, head, query, key: query >= key
    if name == "window":
        return lambda batch, head, query, key: (query >= key) & (query - key <= width)
    if name == "prefix":
        return lambda batch, head, query, key: (query >= key) | (key < width)
    return None


_PADDED = {"mm": 2, "addmm": 3, "bmm": 2}


def _padding(task: TuningTask, device: str) -> Candidates:
    problem, settings = task.problem, dict(task.problem.settings)
    op = problem.op.removeprefix(padding_candidates.PADDING_PREFIX)
    excluded = settings.get("excluded", "").split()
    if len(problem.operands) != _PADDED.get(op) or not {"mat1", "mat2"}.issuperset(excluded):
        raise UnsupportedProblem(f"{problem.op} of {len(problem.operands)} operands cannot be rebuilt")
    operands, _, _ = _operands(problem, {})
    found = padding_candidates.PaddingCandidates(op, fake_tensors.fake_operands(operands, device), excluded)
    if task.exact and found.problem != problem:
        raise UnsupportedProblem(f"rebuilt, it is another problem: {found.problem.text()}")
    return found


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:500]


def _arguments(problem: Problem, operator: _Operator, settings: Mapping[str, str]) -> dict[str, Any]:
    if len(problem.operands) not in operator.counts:
        raise UnsupportedProblem(f"{problem.op} takes {operator.counts} operands")
    given: dict[str, Any] = {}
    for name, text in settings.items():
        kind, _, rest = name.partition(".")
        if kind == "arg":
            if rest not in operator.names:
                raise UnsupportedProblem(f"{problem.op} has no argument {rest}")
            given[rest] = _literal(text)
        elif kind != "given" and name not in _MODES | _SHAPES | SPACES:
            raise UnsupportedProblem(f"the setting {name}={text} cannot be applied")
    dtypes = {problem.operands[i].dtype for i in (0, 1) if i < len(problem.operands)}
    if "out_dtype" in operator.names and "out_dtype" not in given and problem.result.dtype not in dtypes:
        given["out_dtype"] = _DTYPES.get(f"torch.{problem.result.dtype}")
    if problem.op == "convolution":
        dims = len(problem.operands[1].size) - 2
        given |= {name: list(given.get(name) or [operator.arguments[name]] * dims) for name in _LENGTHS}
    return given


def _literal(text: str) -> Any:
    """`(1, 1)`, `False`, `torch.bfloat16`: as `repr` writes them."""
    if text in _DTYPES:
        return _DTYPES[text]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UnsupportedProblem(f"{text[:80]} is no literal") from None
    if isinstance(value, list | tuple):
        if len(value) <= 8 and all(type(item) is int for item in value):
            return value
    elif value is None or type(value) in (bool, int, float):
        return value
    raise UnsupportedProblem(f"{text[:80]} is no argument of an operator")


def _operands(
    problem: Problem, settings: Mapping[str, str]
) -> tuple[list[Operand], list[int], frozenset[int]]:
    operands = list(problem.operands)
    for name, text in settings.items():
        kind, _, position = name.partition(".")
        if kind == "given":
            try:
                operands[int(position)] = records.parse_operand(text)
            except (ValueError, IndexError):
                raise UnsupportedProblem(f"{name}={text} is no operand") from None
    for operand in (*operands, problem.result):
        if f"torch.{operand.dtype}" not in _DTYPES or len(operand.size) != len(operand.stride):
            raise UnsupportedProblem(f"{operand.text()} is no operand of a product")
    offsets = _numbers(settings.get("offsets", ""), 1 << 53) or [0] * len(operands)
    constants = frozenset(_numbers(settings.get("constants", ""), len(operands)))
    if len(offsets) != len(operands) or any(offsets[i] for i in constants):
        raise UnsupportedProblem("its offsets do not match its operands")
    return operands, offsets, constants


def _numbers(text: str, limit: int) -> list[int]:
    numbers = text.split()
    if not all(re.fullmatch(r"[0-9]{1,18}", number) and int(number) < limit for number in numbers):
        raise UnsupportedProblem(f"{text[:80]!r} are no numbers below {limit}")
    return [int(number) for number in numbers]


@contextlib.contextmanager
def in_force(task: TuningTask) -> Iterator[None]:
    """Inside the block the task's settings apply to this process; one block at a time. Raises UnsupportedProblem."""
    settings = dict(task.problem.settings)
    options = {name: settings[name] for name in SPACES & settings.keys()}
    if not all(re.fullmatch(r"[A-Za-z0-9_,]{1,64}", value) for value in options.values()):
        raise UnsupportedProblem(f"{options} is no search space")
    if task.space == "exhaustive":
        options |= EXHAUSTIVE
    precision = settings.get("precision", "highest")
    if precision not in PRECISIONS:
        raise UnsupportedProblem(f"precision={precision[:80]} is none of {', '.join(sorted(PRECISIONS))}")
    matmul = torch.backends.cuda.matmul
    reduced = {"fp16": True, "bf16": True, **_reduced(settings.get("reduced_precision", ""))}
    flags: list[tuple[Any, str, bool]] = [
        (matmul, "allow_fp16_reduced_precision_reduction", reduced["fp16"]),
        (matmul, "allow_bf16_reduced_precision_reduction", reduced["bf16"]),
        (torch.backends.cudnn, "allow_tf32", _bool(settings.get("cudnn.allow_tf32", "True"))),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in flags:
            if getattr(owner, name) != value:
                stack.enter_context(patching.patched(owner, name, value))
        before = torch.get_float32_matmul_precision()
        if precision != before:
            torch.set_float32_matmul_precision(precision)
            stack.callback(torch.set_float32_matmul_precision, before)
        stack.enter_context(config.inductor_config(options))
        stack.enter_context(torch.no_grad())
        yield


def _bool(text: str) -> bool:
    if text not in _BOOLS:
        raise UnsupportedProblem(f"{text[:80]!r} is neither True nor False")
    return _BOOLS[text]


def _reduced(text: str) -> dict[str, bool]:
    pairs = [part.partition("=") for part in text.split()]
    if any(name not in ("fp16", "bf16") for name, _, _ in pairs):
        raise UnsupportedProblem(f"the setting reduced_precision={text[:80]} cannot be applied")
    return {name: _bool(value) for name, _, value in pairs}


class CopyCandidates(Candidates):
    """A copy of one tensor. It has no reference: nothing is computed."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem = problem
        self.device = device
        self.candidates = ["aten copy"]
        self.aten = [0]
        self._source = self._target = torch.empty(0)

    def prepare(self, seed: int) -> None:
        (operand,) = self.problem.operands
        dtype = getattr(torch, operand.dtype)
        source = torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=self.device)
        self._source = numerics.fill(source, torch.Generator(self.device).manual_seed(seed))
        self._target = torch.empty_like(source)

    def run(self, index: int, body: Callable[[Callable[[], Any]], None]) -> torch.Tensor:
        body(lambda: self._target.copy_(self._source))
        return self._target

    def close(self) -> None:
        self._source = self._target = torch.empty(0)
