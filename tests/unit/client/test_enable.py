"""torchrelay in Inductor's place in torch.compile: what a call becomes, and how it is undone among others who replace
torch.compile."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchrelay.clients.patch_compile import CompilePatch

ORIGINAL = torch.compile
Calls = list[dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """What reaches PyTorch's own torch.compile, `model` included."""
    made: Calls = []

    @functools.wraps(ORIGINAL)
    def compile(model: Any = None, **options: Any) -> Any:
        made.append({"model": model, **options})
        return model

    monkeypatch.setattr(torch, "compile", compile)
    yield made


def backends(calls: Calls) -> list[Any]:
    return [call.get("backend") for call in calls]


def replace_as_another() -> Callable[..., Any]:
    """As Lightning does when it is imported."""
    before = torch.compile

    @functools.wraps(before)
    def compile(*args: Any, **options: Any) -> Any:
        return before(*args, **options)

    torch.compile = compile
    return compile


def test_calls_that_mean_inductor_mean_torchrelay_and_others_do_not(calls: Calls) -> None:
    CompilePatch().enable()
    torch.compile(abs)
    torch.compile(abs, backend="inductor", mode="max-autotune", dynamic=True)
    torch.compile(backend="inductor")(abs)
    torch.compile(abs, backend="eager")
    torch.compile(abs, backend=len)
    torch.nn.Linear(2, 2).compile(backend="inductor", fullgraph=True)
    assert backends(calls) == ["torchrelay"] * 3 + ["eager", len, "torchrelay"]
    assert calls[1] == {"model": abs, "backend": "torchrelay", "mode": "max-autotune", "dynamic": True}
    assert calls[2]["model"] is abs
    assert calls[5]["fullgraph"] is True


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="before torch 2.13")
def test_a_default_that_the_program_set_stays(calls: Calls) -> None:
    CompilePatch().enable()
    torch.compiler.set_default_backend("eager")
    try:
        torch.compile(abs)
    finally:
        torch.compiler.set_default_backend(None)
    assert backends(calls) == [None]


def test_the_signature_and_the_name_stay_those_of_torch(calls: Calls) -> None:
    CompilePatch().enable()
    assert inspect.signature(torch.compile) == inspect.signature(ORIGINAL)
    assert (torch.compile.__name__, torch.compile.__doc__) == ("compile", ORIGINAL.__doc__)


def test_enabled_twice_and_disabled_twice_torch_has_its_own_function_again(calls: Calls) -> None:
    before, patch = torch.compile, CompilePatch()
    patch.disable()
    for _ in range(2):
        patch.enable()
    for _ in range(2):
        patch.disable()
        assert torch.compile is before
    patch.enable()
    torch.compile(abs)
    assert backends(calls) == ["torchrelay"]


@pytest.mark.parametrize("another_first", [True, False])
def test_another_who_replaces_torch_compile_stays_and_torchrelay_goes(
    calls: Calls, another_first: bool
) -> None:
    patch = CompilePatch()
    if another_first:
        another = replace_as_another()
    patch.enable()
    if not another_first:
        another = replace_as_another()
    torch.compile(abs)
    patch.enable()
    torch.compile(abs)
    patch.disable()
    assert torch.compile is another
    torch.compile(abs, backend="inductor")
    patch.enable()
    torch.compile(abs)
    assert backends(calls) == ["torchrelay", "torchrelay", "inductor", "torchrelay"]


def test_another_who_restores_what_was_there_brings_back_nothing(calls: Calls) -> None:
    patch = CompilePatch()
    patch.enable()
    saved = torch.compile
    replace_as_another()
    patch.disable()
    torch.compile = saved
    torch.compile(abs, backend="inductor")
    patch.disable()
    torch.compile(abs, backend="inductor")
    patch.enable()
    torch.compile(abs)
    assert backends(calls) == ["inductor", "inductor", "torchrelay"]


def test_accelerates_enum_takes_the_name_while_enabled() -> None:
    program = """if True:
        import copy, pickle
        import torchrelay
        torchrelay.enable()
        from accelerate.utils import DynamoBackend, TorchDynamoPlugin
        def refused(name):
            try: DynamoBackend(name)
            except ValueError: return True
        assert refused("TORCHRELAY"), "it was imported later"
        torchrelay.enable(); torchrelay.enable()
        named = DynamoBackend("TORCHRELAY")
        assert named is DynamoBackend("TORCHRELAY") is copy.deepcopy(named) is pickle.loads(pickle.dumps(named))
        assert TorchDynamoPlugin(backend="torchrelay").to_dict()["backend"] == "torchrelay"
        assert refused("NO_SUCH")
        torchrelay.disable(); torchrelay.disable()
        assert refused("TORCHRELAY")
    """
    subprocess.run([sys.executable, "-c", program], check=True)
