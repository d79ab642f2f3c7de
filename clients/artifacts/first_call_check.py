"""The first call of a graph compared with eager, on the user's own inputs.

A worker verifies an artifact against the request. What it cannot see is a client that described another graph, or that
binds the program's tensors to the wrong inputs. Here the graph that Dynamo captured runs eagerly, then the bound
artifact runs on the same memory; after each run the memory, the random state and the user's autograd graph are as
before. Compared are outputs, inputs changed in place and gradients, and what the outputs are: shape, stride, dtype,
device, whether they require a gradient, and which input's memory they share.

The values of a graph that draws random numbers are not compared: compiled code draws them in another order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from ...compiler.errors import RelayError, ResultsDiffer, VerifyFailed
from ...compiler.pipeline.verification import block_masks, outcomes
from ...compiler.pipeline.verification.outcomes import Outcome
from ...compiler.pipeline.verification.random_rounding import rounding_at_random
from ...compiler.torch_internals import devices
from ...compiler.torch_internals.distributed import process_groups
from ...compiler.torch_internals.dynamo import tracing
from ...compiler.torch_internals.dynamo.operators import in_float64, watching_calls
from ...compiler.torch_internals.dynamo.tensors.fake_tensors import storage_id
from ...compiler.torch_internals.dynamo.tensors.stand_ins import alone, is_subclass, parts, stand_ins
from ..reports.run_report import RunReport

_log = logging.getLogger(__name__)

Graph = Callable[..., Any]


class CheckedGraph:
    """A bound artifact whose first call is compared with eager. Safe for threads: calls that come meanwhile run
    eagerly."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        compiled: Graph,
        key: str,
        report: RunReport,
        refuse: Callable[[RelayError, Sequence[Any]], Graph],
    ) -> None:
        """refuse(error, inputs): what runs in place of an artifact that differs; may raise."""
        self._gm: torch.fx.GraphModule | None = gm
        self._run = compiled
        self._key = key
        self._report = report
        self._refuse = refuse
        self._checking = threading.Lock()

    def call(self, *inputs: Any) -> Any:
        gm = self._gm
        if gm is None:
            return self._run(*inputs)
        if not self._checking.acquire(blocking=False):
            return gm(*inputs)
        try:
            if self._gm is not None:
                self._check(gm, inputs)
                self._gm = None
        finally:
            self._checking.release()
        return self._run(*inputs)

    def _check(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        try:
            compare_with_eager(gm, self._run, inputs)
        except VerifyFailed as failure:
            error = ResultsDiffer(
                f"a graph of {len(gm.graph.nodes)} nodes does not give what eager gives on its first inputs: "
                f"{failure.message} (key {self._key})"
            )
            error.key = self._key
            self._report.count("checked")
            self._run = self._refuse(error, inputs)
        except Exception as error:
            text = str(error).partition("\n")[0]
            _log.info("torchrelay: %s was not compared with eager: %s", self._key[:12], text or repr(error))
            self._report.count("unchecked")
        else:
            self._report.count("checked")


class CannotCompare(Exception):
    """Eager and compiled code cannot be compared in this call; the text says why."""


def compare_with_eager(gm: torch.fx.GraphModule, compiled: Graph, inputs: Sequence[Any]) -> None:
    """Raises VerifyFailed with the first difference, or what eager raises. Leaves no trace of its runs."""
    if process_groups.has_peers() and _communicates(gm, inputs):
        raise CannotCompare("it communicates with other processes, which may not run it again")
    if block_masks.is_hidden(gm):
        raise CannotCompare("a block mask inside another operator's graph")
    memory = _Memory(gm, inputs)
    with _aside():
        with watching_calls(_check_reference) if block_masks.is_called(gm) else contextlib.nullcontext():
            expected = memory.run(gm, stand_ins(inputs))
        try:
            found = memory.run(compiled, stand_ins(inputs))
        except Exception as error:
            if isinstance(error, MemoryError) or devices.is_out_of_memory(error):
                raise
            first = str(error).strip().partition("\n")[0]
            raise VerifyFailed(f"it raises {type(error).__name__}: {first[:200]}") from None
        _compare_facts(expected, found, _strides_for_dynamo(gm))
        if outcomes.random_node(gm):
            return
        dtypes = outcomes.dtypes_of((*inputs, *expected.outcome.outputs)) | _autocast_dtypes()
        precision = outcomes.precision_of(gm, dtypes)
        rounding = outcomes.EagerRounding(
            dict(outcomes.named(expected.outcome)),
            lambda run: dict(outcomes.named(memory.run(gm, stand_ins(inputs), rounded=run).outcome)),
            lambda: dict(outcomes.named(memory.run(in_float64(gm), _float64_inputs(inputs)).outcome)),
        )
        comparison = outcomes.compare(expected.outcome, found.outcome, precision, rounding)
        if comparison.wrong:
            rounding.runs = outcomes.RUNS[1]
            comparison = outcomes.compare(expected.outcome, found.outcome, precision, rounding)
        if comparison.wrong:
            raise VerifyFailed(next(iter(comparison.wrong.values())))
        if 2 * len(comparison.chaotic) > comparison.values:
            raise CannotCompare(f"rounding decides most of its values: {comparison.chaotic[0]}")


def _check_reference(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator. Raises CannotCompare where eager does something else than it was asked for."""
    flex = block_masks.is_flex_attention(operator)
    if flex and not block_masks.block_mask_of(args, kwargs).has_tables_of_mask_mod():
        raise CannotCompare("a block mask's tables say something else than its mask_mod, which eager goes by")
    return operator(*args, **kwargs)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Surrounds runs that the program must not notice: hooks for saved tensors, as torch.utils.checkpoint has them,
    would count what they save."""
    if not tracing.saves_through_hooks():
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


class _Facts(Struct, frozen=True):
    """What an output is, besides its values. stride: of dimensions with more than one element. shares: the number of
    the memory of an input, or -1."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    shares: int
    layout: str


class _RunOutcome(Struct):
    outcome: Outcome
    facts: list[_Facts | None]


class _Memory:
    """The memory of a graph's inputs and of the tensors that it holds, as it was before the call."""

    def __init__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._inputs = [value.detach() for value in inputs if isinstance(value, torch.Tensor)]
        self._attributes = [(value, value.requires_grad) for value in _attribute_tensors(gm)]
        plain = [
            part
            for value in (*self._inputs, *(value for value, _ in self._attributes))
            for part in parts(value)[0]
        ]
        self._storages = {storage_id(part): part.untyped_storage() for part in plain}
        self._before = {
            number: _bytes(storage).clone().untyped_storage() for number, storage in self._storages.items()
        }
        self._gpus = {part.device for part in plain if part.device.type == "cuda"}

    def run(self, function: Graph, stand_ins: Sequence[Any], *, rounded: int = 0) -> _RunOutcome:
        """Call and differentiate `function`; then restore memory and random state. rounded: the number of a run that
        rounds at random."""
        facts: list[_Facts | None] = []

        def call(*args: Any) -> Any:
            result = function(*args)
            outputs = list(result) if isinstance(result, tuple | list) else [result]
            facts.extend(map(self._facts, outputs))
            return outputs

        try:
            with (
                torch.random.fork_rng(self._gpus, device_type="cuda"),
                rounding_at_random(rounded) if rounded else contextlib.nullcontext(),
            ):
                found = outcomes.outcome_of(call, stand_ins)
            changed = {number for number in self._storages if self._is_changed(number)}
            found.mutated = [
                _copy(stand_in) if changed & {storage_id(part) for part in parts(value)[0]} else value
                for value, stand_in in zip(self._inputs, found.mutated, strict=True)
            ]
        finally:
            self._restore()
        return _RunOutcome(_in_parts(found), facts)

    def _facts(self, value: Any) -> _Facts | None:
        if not isinstance(value, torch.Tensor):
            return None
        inner, layout = parts(value)
        shared = list(self._storages)
        number = storage_id(inner[0]) if inner else -1
        return _Facts(
            tuple(value.shape),
            _stride(value),
            value.dtype,
            value.device,
            value.requires_grad,
            shared.index(number) if number in self._storages else -1,
            layout,
        )

    def _is_changed(self, number: int) -> bool:
        now, before = self._storages[number], self._before[number]
        return now.nbytes() != before.nbytes() or not torch.equal(_bytes(now), _bytes(before))

    def _restore(self) -> None:
        for number, storage in self._storages.items():
            before = self._before[number]
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            storage.copy_(before)
        for value, required in self._attributes:
            if value.requires_grad and not required:
                value.detach_()


def _attribute_tensors(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Those that the graph and the graphs inside it have as attributes."""
    found = [
        value
        for module in gm.modules()
        for value in (
            *vars(module).values(),
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
        )
        if isinstance(value, torch.Tensor)
    ]
    return list({id(value): value for value in found}.values())


def _compare_facts(
    expected: _RunOutcome, actual: _RunOutcome, for_dynamo: Sequence[tuple[int, ...] | None]
) -> None:
    """Raises VerifyFailed. An output may have the strides that Dynamo takes it to have: some operators of ATen have
    others, which no compiled code can know."""
    if len(expected.facts) != len(actual.facts):
        raise VerifyFailed(f"{len(actual.facts)} outputs where eager gives {len(expected.facts)}")
    for position, (want, have) in enumerate(zip(expected.facts, actual.facts, strict=True)):
        if want is None or have is None:
            continue  # the values say it
        for name in ("shape", "dtype", "device", "layout", "requires_grad"):
            _same(f"output {position}", name, getattr(want, name), getattr(have, name))
        if position >= len(for_dynamo) or have.stride != for_dynamo[position]:
            _same(f"output {position}", "stride", want.stride, have.stride)
        if want.shares != have.shares:
            which = "none" if have.shares < 0 else "another one" if want.shares >= 0 else "one"
            eagers = "none" if want.shares < 0 else "one"
            raise VerifyFailed(
                f"output {position} shares the memory of {which} of the inputs, eager's of {eagers}"
            )


def _same(output: str, name: str, want: Any, have: Any) -> None:
    if want != have:
        raise VerifyFailed(f"{output} has the {name.replace('_', ' ')} {have}, eager {want}")


def _strides_for_dynamo(gm: torch.fx.GraphModule) -> list[tuple[int, ...] | None]:
    """The strides of each output as Dynamo's fake tensors have them; None where they are symbolic."""
    (output,) = gm.graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], tuple | list) else [output.args[0]]
    found: list[tuple[int, ...] | None] = []
    for node in results:
        value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and all(
            isinstance(n, int) for n in (*value.shape, *value.stride())
        ):
            found.append(_stride(value))
        else:
            found.append(None)
    return found


def _stride(value: torch.Tensor) -> tuple[int, ...]:
    if not value.numel():
        return ()
    return tuple(step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage)


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone()


def _in_parts(outcome: Outcome) -> Outcome:
    """The same of plain tensors alone."""

    def plain(values: Sequence[Any]) -> list[Any]:
        return [
            part
            for value in values
            for part in (parts(value)[0] if isinstance(value, torch.Tensor) else [value])
        ]

    return Outcome(plain(outcome.outputs), plain(outcome.mutated), plain(outcome.gradients))


def _float64_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Stand-ins with memory of their own. Raises TypeError where inputs share it."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if len({storage_id(value) for value in tensors}) < len(tensors) or any(map(is_subclass, tensors)):
        raise TypeError("inputs share memory")
    return [
        alone(value, value.data.double() if value.dtype.is_floating_point else value.data)
        if isinstance(value, torch.Tensor) else value
        for value in inputs
    ]  # fmt: skip


def _autocast_dtypes() -> set[torch.dtype]:
    kinds = ("cpu", "cuda")
    return {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


def _communicates(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether running the graph may take part in a collective operation."""
    if any(is_subclass(value) for value in inputs if isinstance(value, torch.Tensor)):
        return True
    nodes = (
        node
        for module in gm.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )
    return any("c10d" in str(node.target) or "all_reduce" in str(node.target) for node in nodes)
