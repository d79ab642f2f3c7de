"""What changes PyTorch's code changes the key or is refused; what does not change it keeps the key."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Model
from settings import hooks
from torch import nn
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import key
from torchrelay.compiler.request.operator_table import rules, table
from torchrelay.compiler.torch_internals.inductor import config


def ask(
    program: Callable[..., Any] | None = None,
    *inputs: torch.Tensor,
    dynamic: bool | None = None,
    mode: str = "default",
    options: dict[str, Any] | None = None,
) -> str:
    """The key of the first graph that Dynamo makes of a program, or the code of the refusal and its message."""
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        try:
            request = capture(gm, example, mode=mode, options=options or {}).request  # type: ignore[arg-type]
            found.append(key.key_of(request))
        except RelayError as error:
            found.append(f"{error.code}: {error}")
        return gm.forward

    torch.compiler.reset()
    torch.compile(program or Model(), backend=backend, dynamic=dynamic)(*(inputs or (torch.ones(4, 6),)))
    return found[0]


IN_A_PROCESS = """
import json, sys
import torch
sys.path += [{folder!r}, {parts!r}]
import test_key_is_closed as tests
print(json.dumps(tests.ask()))
"""


@functools.cache
def asked_in_a_process(**environment: str) -> str:
    program = IN_A_PROCESS.format(
        folder=str(Path(__file__).parent), parts=str(Path(__file__).parents[1] / "parts")
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return str(json.loads(run.stdout.splitlines()[-1]))


ENVIRONMENT = {
    "TORCHINDUCTOR_CPP_WRAPPER": "1",
    "TORCHINDUCTOR_FREEZING": "1",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    "TORCHINDUCTOR_DISABLED_PASSES": "joint_graph_passes",
}


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_an_environment_variable_changes_the_key_or_is_refused(variable: str) -> None:
    assert asked_in_a_process(**{variable: ENVIRONMENT[variable]}) != asked_in_a_process()


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"])
def test_where_and_how_to_compile_keeps_the_key(variable: str) -> None:
    assert asked_in_a_process(**{variable: "1"}) == asked_in_a_process()


def test_an_annotation_changes_the_key_or_is_refused_by_its_name() -> None:
    def annotated(values: dict[str, object]) -> str:
        def program(x: torch.Tensor) -> torch.Tensor:
            with torch.fx.traceback.annotate(values):
                x = torch.relu(x)
            return x + 1

        return ask(program, torch.ones(4))

    plain, eager, other = (
        annotated({}),
        annotated({"fallback_to_eager": True}),
        annotated({"memory_budget": 0.0}),
    )
    assert len(plain) == len(eager) == 64
    assert plain != eager
    assert "'custom'" in other
    with hooks():
        assert "hooks for saved tensors" in ask()


def test_a_node_that_is_to_run_eagerly_is_one_on_the_worker() -> None:
    from torchrelay.compiler.graph import encode
    from torchrelay.compiler.pipeline import rebuilt_graph

    def inner(x: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.annotate({"fallback_to_eager": True}):
            return torch.cos(x) + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)).sum()

    requests: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        requests.append(capture(gm, example, mode="default", options={}).request)
        return gm.forward

    torch.compiler.reset()
    torch.compile(outer, backend=backend)(torch.ones(4, requires_grad=True))
    assert len(requests[0].eager) == 3  # the subgraph's input, cos and the sum
    assert all(len(path) == 2 for path in requests[0].eager), "they are in the checkpoint's subgraph"
    assert encode.encode_graph(rebuilt_graph.rebuild(requests[0]).gm).eager == requests[0].eager


def test_inputs_change_the_key() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * 2 + y).sum()

    x, y = torch.ones(4, 6), torch.ones(4, 6)
    keys = [
        ask(program, x, y),
        ask(program, x.double(), y),
        ask(program, x.to(torch.bfloat16), y),
        ask(program, torch.ones(6, 4).t(), y),
        ask(program, torch.ones(4, 12)[:, ::2], y),
        ask(program, torch.ones(5, 6)[1:], y),
        ask(program, x.clone().requires_grad_(), y),
        ask(program, torch.ones(1, 6), y),
        ask(program, nn.Parameter(x), y),
        ask(program, x, x.view(4, 6)),
        ask(program, x, y, dynamic=True),
        ask(program, x, y, mode="max-autotune"),
        ask(program, x, y, options={"max_fusion_size": 3}),
    ]
    assert len(set(keys)) == len(keys)


def test_every_entry_of_the_configuration_is_sent_fixed_or_local() -> None:
    """A new PyTorch with an entry that nobody has looked at fails here."""
    known = table.load(torch.__version__)
    sent: dict[str, set[str]] = {rules.INDUCTOR: set(known.options), rules.FUNCTORCH: set(known.aot_options)}
    for module in rules.LOCAL_ENTRIES:
        entries = config.config_entries(module)
        assert entries
        for name in entries:
            places = [
                name in sent.get(module, ()),
                name in known.fixed[module],
                re.fullmatch(rules.LOCAL_ENTRIES[module], name) is not None,
            ]
            assert places.count(True) == 1, f"{module}.{name}: sent, fixed, local = {places}"


def test_what_pytorch_takes_from_pythons_own_library_is_not_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 2.13, operator.add itself is the lowering of operator.add."""
    import torch._inductor.lowering

    lowering: Any = torch._inductor.lowering
    monkeypatch.setattr(lowering, "lowerings", dict(lowering.lowerings))
    lowering.lowerings[operator.add] = functools.wraps(operator.add)(lambda *args: operator.add(*args))
    assert list(config.user_extensions()) == []
    lowering.lowerings[operator.add] = lambda *args: operator.add(*args)
    assert list(config.user_extensions()) == [f"a lowering of your own for {operator.add}"]


STATES = [
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'",
]


@pytest.mark.parametrize("state", STATES)
def test_a_worker_gets_the_precision_that_the_client_has(state: str) -> None:
    program = """
import torch
from torchrelay.compiler.torch_internals import ambient_state
{}
print((ambient_state.matmul_precision(), ambient_state.read_precisions()))
"""

    def run(statements: str) -> str:
        command = [sys.executable, "-c", program.format(statements)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    client = run(state)
    assert run(f"ambient_state.apply_precisions(*{client})") == client
