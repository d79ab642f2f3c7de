"""A private symbol of PyTorch's that has gone, or takes other parameters, is one refusal that names it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchrelay
from torchrelay.clients import backend
from torchrelay.clients.reports.run_report import RunReport
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.errors import Unsupported
from torchrelay.compiler.torch_internals import compatibility
from torchrelay.compiler.torch_internals.loading import bundle
from torchrelay.workers.fork_server import compile_engine

AREAS = tuple(compatibility.TABLE)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    compatibility.missing.cache_clear()
    yield
    compatibility.missing.cache_clear()


@pytest.mark.parametrize("area", AREAS)
def test_this_machines_torch_has_every_symbol(area: compatibility.Area) -> None:
    assert compatibility.missing(area) == ()
    assert compatibility.refusal(area) == ""


@pytest.mark.parametrize("area", AREAS)
def test_each_symbol_that_is_misspelt_is_named(
    area: compatibility.Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    compatibility.missing(area)  # imports what it needs
    listed = [(home, entry) for home, entry in compatibility.entries(compatibility.TABLE[area]) if entry]
    assert listed
    for home, entry in listed:
        if " since " in entry or " until " in entry:
            continue  # of other versions of torch, maybe
        names = re.match(r"[\w.]+(?: \| [\w.]+)*", entry)
        assert names is not None
        misspelt = " | ".join(f"{name}_gone" for name in names[0].split(" | "))
        changed = f"{home}: {misspelt}{entry[names.end() :]}"
        monkeypatch.setitem(compatibility.TABLE, area, changed)
        compatibility.missing.cache_clear()
        first = misspelt.partition(" ")[0]
        with pytest.raises(Unsupported, match=re.escape(f"{home}.{first} is missing")):
            compatibility.check(area)


def test_a_module_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compatibility.TABLE, "load", "torch._inductor.gone: BoxedBool (value)")
    with pytest.raises(Unsupported, match=r"torch\._inductor\.gone cannot be imported"):
        compatibility.check("load")


def changed(self: object, other: int, cfg: object) -> None: ...


def wants_more(self: object, cfg: object, required: int) -> None: ...


def test_a_function_that_takes_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    monkeypatch.setattr(CachingAutotuner, "_precompile_config", changed)
    with pytest.raises(
        Unsupported, match=r"CachingAutotuner\._precompile_config has the parameters \(other, cfg\)"
    ):
        compatibility.check("compile")


def test_a_function_that_came_to_require_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import PyCodeCache

    def load(cls: object, source_code: str, required: int) -> None: ...

    monkeypatch.setattr(PyCodeCache, "load", load)
    with pytest.raises(Unsupported, match=r"PyCodeCache\.load has the parameters .*, and requires required"):
        compatibility.check("compile")


def test_a_parameter_that_callers_pass_further_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 did to _precompile_config."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    monkeypatch.setattr(CachingAutotuner, "_precompile_config", wants_more)
    compatibility.check("compile")


def test_a_client_falls_back_with_one_warning_that_names_the_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compatibility.TABLE, "capture", "torch._ops: OpOverload._gone")
    report = RunReport()
    relay = backend.RelayBackend(load_settings(), report)
    monkeypatch.setattr(backend, "process_backend", lambda: relay)
    torch.compiler.reset()

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    x = torch.randn(4)
    with pytest.warns(
        torchrelay.FallbackWarning, match=r"torch\._ops\.OpOverload\._gone is missing"
    ) as caught:
        found = torch.compile(program, backend="torchrelay")(x)
    assert len([w for w in caught if w.category is torchrelay.FallbackWarning]) == 1
    torch.testing.assert_close(found, program(x))
    assert report.snapshot().fallbacks == {"unsupported": 2}


def test_an_artifact_is_not_unpickled_where_loading_it_lacks_a_symbol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(compatibility.TABLE, "load", "torch._inductor.utils: BoxedBool._gone")
    with pytest.raises(Unsupported, match=r"BoxedBool\._gone is missing"):
        bundle.deserialize(b"no pickle", {}, {}, [], Path(), cudagraphs=False)


def test_a_worker_is_not_ready_and_says_which_symbol_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compatibility.TABLE, "compile", "torch._inductor.graph: GraphLowering._gone")
    compile_engine.preload()  # does not fail half way
    assert "torch._inductor.graph.GraphLowering._gone is missing" in compile_engine.missing("cpu")
