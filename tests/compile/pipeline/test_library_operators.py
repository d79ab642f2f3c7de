"""A graph that calls an operator which `transformers` registers compiles in a process that had not imported it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torchrelay.compiler.errors import DataDependent
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.pipeline import pipeline
from torchrelay.compiler.request import codec, schema, validate
from torchrelay.compiler.request.operator_table import table

COMPILE = """
    import json, sys, pathlib
    from torchrelay.compiler.artifact import container
    from torchrelay.compiler.errors import LibraryMismatch
    from torchrelay.compiler.pipeline import pipeline
    from torchrelay.compiler.request import codec

    assert "transformers" not in sys.modules
    folder = pathlib.Path(sys.argv[1])
    results = []
    for name in ("right", "other"):
        (folder / "work" / name).mkdir(parents=True)
        try:
            made = pipeline.compile_request(
                codec.unpack_request((folder / name).read_bytes()),
                key="k", worker="w", workdir=folder / "work" / name, progress=lambda stage, detail: None,
            )
            results.append(container.read_manifest(made).verification.status)
        except LibraryMismatch as error:
            results.append(error.message)
    print(json.dumps(results))
"""


def test_the_same_version_compiles_and_is_verified_and_another_is_refused(tmp_path: Path) -> None:
    importlib.import_module("transformers.integrations.moe")  # registers the operator, here alone
    found: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        found.append(capture(gm, examples, mode="default", options={}).request)
        return gm.forward

    def program(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(x.relu(), weight, ends)
        return product.sin()

    inputs = torch.randn(8, 4, requires_grad=True), torch.randn(2, 4, 4, requires_grad=True)
    torch.compile(program, backend=backend)(*inputs, torch.tensor([3, 8]))
    (request,) = found
    (library,) = request.libraries
    validate.check_request(request, codec.Limits())
    other = msgspec.structs.replace(request, libraries=[msgspec.structs.replace(library, version="1.0")])
    for name, each in (("right", request), ("other", other)):
        (tmp_path / name).write_bytes(codec.pack_request(each))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILE), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    right, refused = json.loads(done.stdout.splitlines()[-1])
    assert right == "passed"
    assert f"the worker has transformers {library.version}" in refused and "the client 1.0" in refused


@torch.library.custom_op("torchrelay_tests::by_rows", mutates_args=())
def by_rows(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x * 1


@by_rows.register_fake
def _(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _save_ends(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.ends = inputs[1]


def _backward_by_rows(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    start, parts = 0, []
    for end in ctx.ends.tolist():
        if start != end:
            parts.append(gradient[start:end])
        start = end
    return torch.cat(parts), None


by_rows.register_autograd(_backward_by_rows, setup_context=_save_ends)


def test_an_operator_whose_backward_asks_for_data_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor has Dynamo break such a graph; the client must know that it is one."""
    operator = "torch.ops.torchrelay_tests.by_rows"
    monkeypatch.setitem(table.LIBRARIES, "torchrelay", table.KnownLibrary(__name__, frozenset({operator})))
    monkeypatch.setitem(table.LIBRARY_OF, operator, "torchrelay")
    sent: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        sent.append(capture(gm, examples, mode="default", options={}).request)
        return gm.forward

    def program(x: torch.Tensor, ends: torch.Tensor) -> Any:
        return torch.ops.torchrelay_tests.by_rows(x.relu(), ends)

    x = torch.randn(8, 4, requires_grad=True)
    torch.compile(program, backend=backend)(x, torch.tensor([3, 3, 8]))
    with pytest.raises(DataDependent):
        pipeline.compile_request(
            sent[0], key="k", worker="w", workdir=tmp_path, progress=lambda stage, detail: None
        )
