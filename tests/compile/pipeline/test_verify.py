"""Before publishing: code that disagrees with eager is never published; rounding is no disagreement."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from captured_requests import eager_of, request_of
from torch import nn
from torchrelay.compiler.errors import CompileFailed, CompileKilled, VerifyFailed
from torchrelay.compiler.pipeline import inductor, lowered, pipeline, rebuilt_graph
from torchrelay.compiler.pipeline.verification import outcomes, random_rounding
from torchrelay.compiler.pipeline.verification import verify as verify_module
from torchrelay.compiler.pipeline.verification.verify import verify
from torchrelay.compiler.request import codec, schema

Callee = Callable[..., Any]


def wrapped(
    request: schema.GraphRequest, change: Callable[..., None] | None = None, scale: float = 1.0
) -> Callee:
    """The graph itself, with a mistake around it: `change` is applied to the inputs, `scale` to the first output."""
    eager = eager_of(request)

    def call(*inputs: Any) -> Any:
        outputs = eager(*inputs)
        if change is not None:
            change(*inputs)
        return [outputs[0] * scale, *outputs[1:]]

    return call


MISCOMPILE = """
    import json, sys, pathlib, msgspec
    from torchrelay.compiler.pipeline import pipeline
    from torchrelay.compiler.request import codec
    from torchrelay.compiler.errors import VerifyFailed

    folder = pathlib.Path(sys.argv[1])
    request = codec.unpack_request((folder / "request").read_bytes())
    wrong = [("cpp.inject_relu_bug_TESTING_ONLY", "accuracy")] if sys.argv[2] == "wrong" else []
    try:
        made = pipeline.compile_request(
            msgspec.structs.replace(request, options=[*request.options, *wrong]),
            key="k", worker="w", workdir=folder, progress=lambda stage, detail: None,
        )
        print(json.dumps({"published": len(made)}))
    except VerifyFailed as error:
        print(json.dumps({"refused": str(error)}))
"""


@pytest.mark.parametrize("how", ["right", "wrong"])
def test_a_miscompiled_graph_is_never_published(tmp_path: Path, how: str) -> None:
    """Inductor's own fault injection makes its C++ for relu add one."""
    request = request_of(lambda x: x.relu() * 2, torch.randn(4, 8))
    (tmp_path / "request").write_bytes(codec.pack_request(request))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MISCOMPILE), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if how == "right":
        assert answer["published"] > 0
    else:
        assert "output 0 differs from eager" in answer["refused"]


def test_a_right_answer_passes() -> None:
    request = request_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    found = verify(request, wrapped(request))
    assert (found.status, found.reason) == ("passed", "")


def test_the_seconds_of_a_run_of_compiled_code_are_told_apart_from_what_it_is_compared_with() -> None:
    """Its first run measures kernels, with or without verification."""
    request = request_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    seconds: list[float] = []
    waiting = wrapped(request, change=lambda *_: time.sleep(0.2))
    found = verify(request, waiting, on_run=seconds.append)
    assert len(seconds) == 1
    assert 0.2 <= seconds[0] < found.seconds


def test_a_wrong_output_is_named() -> None:
    request = request_of(lambda x: x.sin(), torch.randn(4, 8))
    with pytest.raises(VerifyFailed, match="output 0 differs"):
        verify(request, wrapped(request, scale=1.1))


@pytest.mark.parametrize(
    ("leaf", "in_place"),
    [(True, False), (False, False), (False, True)],
    ids=["leaf", "activation", "activation changed in place"],
)
def test_a_wrong_gradient_is_named(leaf: bool, in_place: bool) -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 0.5

    x = torch.randn(4, 8, requires_grad=True)
    request = request_of(lambda x: (x.mul_(2) if in_place else x).sin(), x if leaf else x * 1)
    eager = eager_of(request)
    with pytest.raises(VerifyFailed, match="gradient 0 differs"):
        verify(request, lambda *inputs: [Halved.apply(eager(*inputs)[0])])


def test_elements_that_share_memory_share_a_gradient() -> None:
    class Averaged(torch.autograd.Function):
        """A backward that gives the two elements of one place the mean of their gradients."""

        scale = 1.0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return (gradient + gradient.t()) / 2 * Averaged.scale

    x = (torch.randn(3, requires_grad=True) * 1).as_strided((2, 2), (1, 1))
    request = request_of(lambda x: x.sin(), x)
    eager = eager_of(request)

    def compiled(scale: float) -> Callee:
        Averaged.scale = scale
        return lambda x: eager(Averaged.apply(x))

    assert verify(request, compiled(1.0)).status == "passed"
    with pytest.raises(VerifyFailed, match="gradient 0 differs"):
        verify(request, compiled(2.0))


def test_a_missing_gradient_is_named() -> None:
    request = request_of(lambda x: x.sin(), torch.randn(4, 8, requires_grad=True))
    eager = eager_of(request)
    with pytest.raises(VerifyFailed, match="gradient 0 differs"):
        verify(request, lambda *inputs: [eager(*inputs)[0].detach().requires_grad_()])


def test_a_missing_change_in_place_is_named() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    request = request_of(change, torch.randn(4, 8))
    with pytest.raises(VerifyFailed, match="input after the call"):
        verify(request, wrapped(request, change=lambda x: x.sub_(1)))


def test_a_wrong_shape_and_a_missing_output_are_refused() -> None:
    request = request_of(lambda x: (x.sin(), x.cos()), torch.randn(4, 8))
    eager = eager_of(request)
    with pytest.raises(VerifyFailed, match="output 0 has"):
        verify(request, lambda *inputs: [eager(*inputs)[0].t(), eager(*inputs)[1]])
    with pytest.raises(VerifyFailed, match="1 outputs where eager gives 2"):
        verify(request, lambda *inputs: eager(*inputs)[:1])


def test_not_a_number_where_eager_has_numbers_is_refused() -> None:
    request = request_of(lambda x: x.sin(), torch.randn(4, 8))
    with pytest.raises(VerifyFailed, match="output 0 differs"):
        verify(request, wrapped(request, scale=float("nan")))
    with pytest.raises(VerifyFailed, match="output 0 differs"):
        verify(request, wrapped(request, scale=float("inf")))


def test_a_gradient_that_is_rounding_noise_is_no_disagreement() -> None:
    """Batch norm cancels the bias before it: its gradient is noise, and another order of sums is other noise."""
    request = request_of(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(64, 8))
    eager = eager_of(request)

    def in_double(*inputs: Any) -> Any:
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
        outputs = [o.float() for o in eager(*wide)]
        for given, changed in zip(inputs, wide, strict=True):
            if isinstance(given, torch.Tensor) and not given.requires_grad:
                given.copy_(changed)
        return outputs

    assert verify(request, in_double).status == "passed"


def test_what_cannot_be_compared_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = request_of(lambda x: x.sin(), torch.randn(4, 8))
    wrong = wrapped(plain, scale=2.0)
    with monkeypatch.context() as smaller:
        smaller.setattr("torchrelay.compiler.pipeline.verification.verify.INPUT_BYTES", 100)
        small = verify(plain, wrong)
    assert (small.status, small.reason) == ("skipped", "inputs need 128 bytes, limit 100")
    lacking = verify(plain, wrong, runnable="this worker's CPU lacks avx9")
    assert (lacking.status, lacking.reason) == ("skipped", "this worker's CPU lacks avx9")
    torch.compiler.reset()
    random = request_of(lambda x: torch.nn.functional.dropout(x), torch.randn(4, 8))
    drawn = verify(random, wrapped(random, scale=2.0))
    assert drawn.status == "skipped" and "draws random numbers" in drawn.reason


@pytest.mark.parametrize(
    "mask",
    [torch.ones(1, 8, dtype=torch.bool).expand(4, 8), torch.randn(16).as_strided((4, 8), (2, 1))],
    ids=["expanded", "overlapping"],
)
def test_inputs_whose_elements_share_memory_are_drawn_too(mask: torch.Tensor) -> None:
    torch.compiler.reset()
    request = request_of(lambda x, mask: (x * mask).sin(), torch.randn(4, 8), mask)
    assert verify(request, wrapped(request)).status == "passed"
    with pytest.raises(VerifyFailed):
        verify(request, wrapped(request, scale=2.0))


def test_a_small_gradient_that_is_not_zero_must_be_right() -> None:
    """What sums leave of zero is rounding; a thousandth of the largest gradient is none."""

    def program(factor: float) -> Callee:
        return lambda x, w, b: ((x * w).sum() + (x * b).sum() * factor,)

    inputs = [torch.randn(64, 64), *(torch.randn(64, 64, requires_grad=True) for _ in range(2))]
    request = request_of(program(1e-3), *inputs)
    verify(request, program(1e-3))
    with pytest.raises(VerifyFailed, match="gradient"):
        verify(request, program(1.02e-3))


def test_integers_are_drawn_over_the_dimension_that_they_index() -> None:
    table, scores = torch.randn(100, 4), torch.randn(8, 10)

    def program(token: torch.Tensor, label: torch.Tensor, table: torch.Tensor, scores: torch.Tensor) -> Any:
        return (
            table[token],
            nn.functional.cross_entropy(scores, label),
            torch.gather(table, 0, token[:, None]),
        )

    request = request_of(program, torch.randint(0, 100, (8,)), torch.randint(0, 10, (8,)), table, scores)
    eager, seen = eager_of(request), []

    def compiled(*inputs: Any) -> Any:
        seen.append([x.clone() for x in inputs if not x.is_floating_point()])
        return eager(*inputs)

    assert verify(request, compiled).status == "passed"
    assert verify(request, compiled).status == "passed"
    (token, label), again = seen
    assert token.max() > 50 and token.min() >= 0 and 2 < label.max() < 10
    assert torch.equal(token, again[0]) and torch.equal(label, again[1])

    def wrong_rows(*inputs: Any) -> Any:
        """As the review has it: a lowering that adds 1 to indices from 2 on."""
        return eager(
            *[torch.where(x >= 2, (x + 1) % 10, x) if not x.is_floating_point() else x for x in inputs]
        )

    with pytest.raises(VerifyFailed, match="output"):
        verify(request, wrong_rows)


def test_an_index_that_a_number_is_added_to_and_an_integer_mask_are_drawn_as_eager_takes_them() -> None:
    def program(place: torch.Tensor, mask: torch.Tensor, table: torch.Tensor) -> Any:
        hidden = table[place + 2]
        return hidden, (hidden.sum(-1) + (1 - mask) * torch.finfo(torch.float32).min).softmax(0)

    request = request_of(
        program, torch.randint(0, 10, (8,)), torch.ones(8, dtype=torch.int64), torch.randn(64, 4)
    )
    eager, seen = eager_of(request), []

    def compiled(*inputs: Any) -> Any:
        seen.append([x.clone() for x in inputs if not x.is_floating_point()])
        return eager(*inputs)

    assert verify(request, compiled).status == "passed"
    place, mask = seen[0]
    assert 2 < place.max() < 62 and set(mask.tolist()) == {0, 1}


def test_integers_of_integers_must_be_equal_and_those_of_floats_nearly() -> None:
    request = request_of(lambda x, y: (x * 3 - 1, y > 0.1), torch.arange(8192), torch.randn(8192))
    eager = eager_of(request)

    def changed(output: int) -> Callee:
        def call(*inputs: Any) -> Any:
            outputs = list(eager(*inputs))
            outputs[output] = outputs[output].clone()
            outputs[output][5] = ~outputs[output][5]
            return outputs

        return call

    with pytest.raises(VerifyFailed, match="output 0 differs from eager in 1 of 8192 integers"):
        verify(request, changed(0))
    assert verify(request, changed(1)).status == "passed"


def test_eight_bit_integers_take_all_values() -> None:
    request = request_of(lambda x: x.float() * 0.5, torch.zeros(4096, dtype=torch.int8))
    eager, seen = eager_of(request), []

    def compiled(*inputs: Any) -> Any:
        seen.append(inputs[0].clone())
        return eager(*inputs)

    assert verify(request, compiled).status == "passed"
    assert (seen[0].min(), seen[0].max()) == (-128, 127)


class Chaotic(nn.Module):
    """Rounding decides its second output, unless its weights are small."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, (y * 40).sin()


@pytest.mark.parametrize("always", [False, True])
def test_a_value_that_is_off_where_others_are_chaotic_is_judged_with_smaller_weights(always: bool) -> None:
    request = request_of(Chaotic(), torch.randn(64, 256, dtype=torch.bfloat16))
    eager = eager_of(request)
    largest: list[float] = []

    def off(*inputs: Any) -> Any:
        y, z = eager(*inputs)
        largest.append(float(y.detach().float().std()))
        return [y * (1.5 if always or largest[-1] > 0.5 else 1.0), (y.float() * 40).sin().to(z)]

    if always:
        with pytest.raises(VerifyFailed, match="output 0 differs"):
            verify(request, off)
    else:
        assert verify(request, off).status == "passed"
    assert largest[0] > 0.5 > largest[-1]


def test_a_gpu_without_room_is_no_fault_of_the_graph() -> None:
    request = request_of(lambda x: x.sin(), torch.randn(4, 8))
    for error in (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")):
        assert isinstance(inductor.failure(error), CompileKilled)
        assert verify(request, Mock(side_effect=error)).reason.startswith("the GPU has too little memory")
    assert isinstance(inductor.failure(RuntimeError("out of memory bounds")), CompileFailed)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: out of memory")]
)
def test_a_gpu_that_is_full_while_a_graph_is_rebuilt_or_verified_is_no_fault_of_the_graph(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nobody is told that the graph cannot be compiled: a CompileFailed would be remembered."""
    request = request_of(lambda x: x.sin(), torch.randn(4, 8))

    def compiled(request: Any) -> None:
        pipeline.compile_request(
            request, key="k", worker="w", workdir=tmp_path, progress=lambda stage, detail: None
        )

    with monkeypatch.context() as patch:
        patch.setattr(verify_module, "_example_sizes", Mock(side_effect=error))
        with pytest.raises(CompileKilled, match="GPU has no room"):
            compiled(request)
    monkeypatch.setattr(rebuilt_graph, "rebuild", Mock(side_effect=error))
    with pytest.raises(CompileKilled, match="GPU has no room"):
        compiled(request)
    with pytest.raises(CompileKilled, match="GPU has no room"):
        lowered.lower_request(
            msgspec.structs.replace(request, levels=["core_aten"]),
            key="k",
            worker="w",
            workdir=tmp_path,
            progress=lambda stage, detail: None,
        )


def test_a_value_that_is_off_in_one_of_two_draws_is_off_by_chance() -> None:
    """In the gradient of a few numbers, say, whose errors are those of one rounded number."""
    request = request_of(lambda x: x * 2, torch.randn(64, 64))
    eager = eager_of(request)
    calls: list[int] = []

    def off(*inputs: Any, times: int) -> Any:
        calls.append(1)
        return [value * (1.5 if len(calls) <= times else 1.0) for value in eager(*inputs)]

    assert verify(request, functools.partial(off, times=1)).status == "passed"
    assert len(calls) == 2
    calls.clear()
    with pytest.raises(VerifyFailed, match="output 0 differs"):
        verify(request, functools.partial(off, times=2))


def test_what_is_wrong_in_one_draw_and_chaotic_in_the_other_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = iter(
        (
            outcomes.Comparison(values=1, wrong={"output 0": "output 0 differs"}),
            outcomes.Comparison(values=1, chaotic=["output 0, at most 1, changes by 2 with other rounding"]),
        )
    )
    monkeypatch.setattr(verify_module, "_compared", lambda *_: next(found))
    request = request_of(lambda x: x * 2, torch.randn(4, 4))
    with pytest.raises(VerifyFailed, match="output 0 differs"):
        verify(request, eager_of(request))


def test_a_result_whose_size_rounding_decides_is_no_measure() -> None:
    expected = {"output 0": torch.randn(40), "output 1": torch.arange(40)}
    rounding = outcomes.EagerRounding(
        expected, lambda run: {name: value[:30] for name, value in expected.items()}, dict
    )
    precision = outcomes.Precision(0.01, 0.01, 20.0, 20.0, 10.0)
    for name, want in expected.items():
        with pytest.raises(outcomes.Chaotic):
            outcomes.judge(name, want, want + 1, rounding.of(name), 1e-3, precision, 1e-3)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_results_are_rounded_at_random_about_as_much_as_they_are_rounded(half: torch.dtype) -> None:
    x, weight = torch.randn(128, 256, dtype=half), torch.randn(256, 128, dtype=half, requires_grad=True)
    taken = [torch.relu(x @ weight)]
    exact = torch.relu(x.double() @ weight.double())
    for run in (1, 2, 1):
        with random_rounding.rounding_at_random(run):
            taken.append(torch.relu(x @ weight))
            (gradient,) = torch.autograd.grad(taken[-1].sum(), weight)
    own, other = ((taken[each] - exact).square().mean().sqrt() for each in (0, 1))
    assert torch.equal(taken[1], taken[3])
    assert not torch.equal(taken[1], taken[2])
    assert own < other < 2.5 * own
    assert bool((taken[0] == 0).eq(taken[1] == 0).all())  # what is exact stays so
    assert not torch.equal(gradient, torch.autograd.grad(torch.relu(x @ weight).sum(), weight)[0])


def test_masks_stay_masks_where_results_are_rounded_at_random() -> None:
    least = torch.finfo(torch.bfloat16).min
    scores = torch.randn(64, 64, dtype=torch.bfloat16)
    for mask in (least, -torch.inf):
        masked = torch.zeros(64, 64, dtype=torch.bfloat16).masked_fill(
            torch.ones(64, 64).triu(1).bool(), mask
        )
        with random_rounding.rounding_at_random(1):
            added = scores * 0 + masked
            taken = torch.softmax(scores + masked, -1)
        assert torch.equal(added, masked)
        assert bool(taken.isfinite().all())
        assert bool((taken.triu(1) == 0).all())
