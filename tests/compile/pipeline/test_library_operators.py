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
import torch
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import codec, schema, validate

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
