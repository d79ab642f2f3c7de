"""A job has a copy of itself lower the backward meanwhile: the same code, whatever becomes of the copy."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import codec, schema

COMPILE = """
    import json, os, pathlib, pickle, sys
    from torchrelay.compiler.artifact import container
    from torchrelay.compiler.process.forked_copy import ForkedCopy
    from torchrelay.compiler.pipeline import pipeline
    from torchrelay.compiler.request import codec
    from torchrelay.compiler.torch_internals.inductor import forked_backward, naming
    from torchrelay.compiler.torch_internals.triton import winners

    folder = pathlib.Path(sys.argv[1])
    request = codec.unpack_request((folder / "request").read_bytes())
    bundles, answers = [], []
    fix_winners, result = winners.fix_winners, ForkedCopy.result
    inputs = forked_backward._lowering_inputs
    winners.fix_winners = lambda bundle, triton: bundles.append(bundle) or fix_winners(bundle, triton)
    ForkedCopy.result = lambda self: answers.append(result(self)) or answers[-1]

    def compiled(name, threads):
        (work := folder / name).mkdir()
        answers.clear()
        with naming.restoring_graph_counters():
            made = pipeline.compile_request(
                request, key="k", worker="w", workdir=work, progress=lambda stage, detail: None,
                settings=pipeline.PipelineSettings(threads=threads),
            )
        entry, _, _ = pickle.loads(bundles[-1])
        return {
            "forward": entry.compiled_fw.result.source_code,
            "backward": entry.compiled_bw.result.source_code,
            "status": container.read_manifest(made).verification.status,
        }, [answer is not None for answer in answers]

    found = {"alone": compiled("alone", 1), "ahead": compiled("ahead", 2)}
    forked_backward._lowering_inputs = lambda *given: [*inputs(*given), str(os.getpid())]
    found["another task"] = compiled("another", 2)
    forked_backward._lowering_inputs = inputs
    largest, forked_backward.MAX_FORKED_BYTES = forked_backward.MAX_FORKED_BYTES, 0
    found["too large"] = compiled("large", 2)
    forked_backward.MAX_FORKED_BYTES = largest
    ForkedCopy.finish = lambda self, data: os._exit(9)
    found["no answer"] = compiled("none", 2)
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    requests: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        requests.append(capture(gm, examples, mode="default", options={}).request)
        return gm.forward

    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(), nn.LayerNorm(32)).train()
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.randn(4, 32))
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "request").write_bytes(codec.pack_request(requests[0]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILE), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_copys_backward_is_what_this_process_makes(found: dict[str, Any]) -> None:
    alone, none = found["alone"]
    ahead, answers = found["ahead"]
    assert (none, answers) == ([], [True])
    assert ahead == alone
    assert ahead["status"] == "passed"


@pytest.mark.parametrize(
    ("how", "answers"), [("another task", [True]), ("no answer", [False]), ("too large", [])]
)
def test_a_copy_that_is_of_no_use_costs_nothing_but_time(
    found: dict[str, Any], how: str, answers: list[bool]
) -> None:
    assert found[how] == [found["alone"][0], answers]
