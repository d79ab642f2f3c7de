"""One artifact serves every program with its graph; another program never gets it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrelay
from torch import nn
from torchrelay.clients.backend import RelayBackend


def step(model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Compiled loss and gradients beside eager's; asserts that they agree."""
    loss = torch.compile(model, backend="torchrelay", **options)(x).square().mean()
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained)
    expected = torch.autograd.grad(model(x).square().mean(), trained)
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have, want)
    return found


def counts() -> tuple[int, int, int]:
    run = torchrelay.report()
    assert run.fallbacks == {}
    return run.hits, run.disk_hits, run.misses


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def test_a_second_model_of_the_same_structure_is_served_from_disk_with_its_own_parameters(
    remote: RelayBackend,
) -> None:
    x = torch.randn(4, 8)
    first, second = model(17), model(17)
    gradients = step(first, x)
    assert counts() == (0, 0, 1)
    torch.compiler.reset()
    assert not torch.equal(step(second, x)[0], gradients[0])
    assert counts() == (0, 1, 1)
    # After a reset of Dynamo the first one is asked for again.
    torch.compiler.reset()
    assert torch.equal(step(first, x)[0], gradients[0])
    assert counts() == (0, 2, 1)


def test_another_client_is_served_by_the_service(connect: Callable[..., RelayBackend], tmp_path: Any) -> None:
    x = torch.randn(4, 8)
    connect(TORCHRELAY_MODE="require", TORCHRELAY_CACHE_DIR=str(tmp_path / "a"))
    step(model(18), x)
    assert counts() == (0, 0, 1)
    torch.compiler.reset()
    connect(TORCHRELAY_MODE="require", TORCHRELAY_CACHE_DIR=str(tmp_path / "b"))
    step(model(18), x)
    assert counts() == (1, 0, 0)


def test_freezing_a_parameter_makes_another_graph(remote: RelayBackend) -> None:
    trained, x = model(19), torch.randn(4, 8)
    assert len(step(trained, x)) == 4
    trained[0].requires_grad_(False)
    assert len(step(trained, x)) == 2
    asked = 1 if torch.__version__.startswith("2.11.") else 2  # 2.11's Dynamo does not guard on it
    assert counts() == (0, 0, asked)


def test_a_copy_of_a_compiled_module_trains_by_itself(remote: RelayBackend) -> None:
    x = torch.randn(4, 8)
    compiled = torch.compile(model(20), backend="torchrelay")
    compiled(x).sum().backward()
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        copied._orig_mod[0].weight.zero_()
        copied._orig_mod[0].bias.zero_()
        torch.testing.assert_close(copied(x), copied._orig_mod[2].bias.expand(4, 4))
        assert not torch.equal(compiled(x), copied(x))


def test_compiling_in_threads(remote: RelayBackend) -> None:
    x = torch.randn(4, 8)
    models = [model(21), model(21)]
    failed: list[BaseException] = []

    def work(mine: nn.Module) -> None:
        try:
            step(mine, x)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(counts()) >= 1


def test_the_functions_own_name_compiles_too(remote: RelayBackend) -> None:
    x = torch.randn(4, 8)
    double = torchrelay.compile(lambda x: x.sin() * 22, mode="max-autotune-no-cudagraphs", fullgraph=True)
    torch.testing.assert_close(double(x), x.sin() * 22)
    assert counts() == (0, 0, 1)


def test_enabled_for_the_process_it_needs_no_name_and_takes_inductors(remote: RelayBackend) -> None:
    class Softsign(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (1 + x.abs())

    x, module = torch.randn(4, 8), Softsign()
    torchrelay.enable()
    try:
        torch.testing.assert_close(torch.compile(lambda x: x.sin() * 23)(x), x.sin() * 23)
        module.compile(backend="inductor")
        torch.testing.assert_close(module(x), torch.nn.functional.softsign(x))
    finally:
        torchrelay.disable()
    assert counts() == (0, 0, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"no_such_option": 1}, "no_such_option"), ({"max_autotune": "yes"}, "max_autotune")],
)
def test_wrong_options_are_refused_in_inductors_words(
    remote: RelayBackend, options: dict[str, Any], words: str
) -> None:
    def message(backend: str) -> str:
        torch.compiler.reset()
        with pytest.raises(RuntimeError) as caught:
            torch.compile(lambda x: x + 1, backend=backend, options=options)(torch.ones(3))
        return str(caught.value)

    assert words in message("inductor")
    assert message("inductor").splitlines()[0] in message("torchrelay")
    with pytest.raises(RuntimeError, match=words):
        torchrelay.compile(lambda x: x + 1, options=options)
