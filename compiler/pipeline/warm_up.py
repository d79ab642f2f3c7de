"""A small compile in a fork server before it forks, so that its children need not repeat what a first compile does.

A process' first compile imports two hundred modules and fills the tables of patterns, of dispatch, and sympy's caches.
Nothing is built or run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from ..graph import ambient
from ..graph.toolchain import local_target, local_toolchain
from ..request import schema
from ..torch_internals import cpp, devices, patching
from ..torch_internals.dynamo import symbolic_shapes, tracing
from ..torch_internals.dynamo.tensors import fake_tensors
from ..torch_internals.inductor import naming
from . import inductor, rebuilt_graph


@devices.without_fake_gpus()
def warm_up(folder: Path) -> None:
    """Generate the code of a small training step for this machine's processor, with temporary files in `folder`.

    Does nothing on a machine with a GPU: autograd would start a thread for it, and a process with threads or with a
    GPU in use cannot fork.
    """
    if torch.cuda.device_count():
        return
    fake_mode = fake_tensors.new_fake_mode(symbolic_shapes.new_shape_env())
    with fake_mode:
        inputs = [
            torch.randint(16, (2, 8)),
            *(
                torch.nn.Parameter(torch.empty(size))
                for size in ((16, 32), (32,), (32,), (96, 32), (96,), (16, 32))
            ),
        ]
    gm = torch.fx.symbolic_trace(_step)
    placeholders = gm.graph.find_nodes(op="placeholder")
    tracing.attach_dynamo_metadata(gm, list(zip(placeholders, inputs, [""] * 7, strict=True)))
    rebuilt = rebuilt_graph.RebuiltGraph(gm, inputs, fake_mode, {}, {})
    with (
        tempfile.TemporaryDirectory(prefix="relay-", dir=folder) as caches,
        patching.patched_environment(TORCHINDUCTOR_CACHE_DIR=caches),
        cpp.without_cpp_builds(),
        naming.restoring_graph_counters(),
        torch.random.fork_rng(devices=[]),
    ):
        inductor.compile_rebuilt(rebuilt, _request(), threads=1, progress=lambda stage, detail: None)


def _step(tokens: Any, table: Any, scale: Any, shift: Any, weight: Any, bias: Any, head: Any) -> Any:
    x = F.embedding(tokens, table)
    x = F.layer_norm(x, (32,), scale, shift)
    parts = F.linear(x, weight, bias).chunk(3, dim=2)
    q, k, v = (parts[i].view(2, 8, 4, 8).transpose(1, 2) for i in range(3))
    attention = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
    x = F.dropout(F.gelu(attention.transpose(1, 2).reshape(2, 8, 32)), 0.1) + x
    logits = F.linear(x, head)
    return F.cross_entropy(logits.view(-1, 16), tokens.view(-1)), logits.softmax(-1)


def _request() -> schema.GraphRequest:
    """What compile_rebuilt reads of a request besides its graph: this machine's target, and defaults."""
    return schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=schema.Graph(nodes=[]),
        inputs=[],
        symbols=[],
        relations=[],
        constants=[],
        ambient=schema.usual_ambient(
            grad=True, threads=torch.get_num_threads(), flags=ambient.current_flags()
        ),
        mode="default",
        options=[],
        aot_options=[],
        toolchain=local_toolchain(),
        target=local_target("cpu"),
    )
