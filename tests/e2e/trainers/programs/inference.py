"""`generate` of transformers with a CompileConfig, and `compile_repeated_blocks` of diffusers, on tiny models with
random weights: with Inductor, then with torchrelay in each spelling."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torchrelay


def generated(backend: str) -> list[int]:
    from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config).eval()
    told = CompileConfig(backend=backend, mode="default")
    told._compile_all_devices = True  # generate compiles on accelerators alone
    given: dict[str, Any] = {"do_sample": False, "cache_implementation": "static", "max_new_tokens": 4}
    tokens = model.generate(torch.tensor([[1, 2, 3]]), compile_config=told, pad_token_id=0, **given)
    return tokens[0].tolist()


def denoised(**arguments: str) -> list[float]:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=0,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    model.compile_repeated_blocks(**arguments)
    with torch.no_grad():
        (out,) = model(
            hidden_states=torch.randn(1, 4, 4),
            encoder_hidden_states=torch.randn(1, 3, 8),
            pooled_projections=torch.randn(1, 8),
            timestep=torch.tensor([0.5]),
            img_ids=torch.zeros(4, 3),
            txt_ids=torch.zeros(3, 3),
            return_dict=False,
        )
    return out.flatten().tolist()


if __name__ == "__main__":
    found: dict[str, Any] = {}
    if sys.argv[1] == "generate":
        found["inductor"] = generated("inductor")
        torch.compiler.reset()
        found["named"] = generated("torchrelay")
        torch.compiler.reset()
        torchrelay.enable()
        found["enabled"] = generated("inductor")
    else:
        found["inductor"] = denoised(fullgraph=True)
        torch.compiler.reset()
        torchrelay.enable()
        found["enabled"] = denoised(fullgraph=True)
        torch.compiler.reset()
        found["named"] = denoised(backend="torchrelay", fullgraph=True)
    report = torchrelay.report()
    found["served"] = [report.misses, report.hits + report.disk_hits]
    print(json.dumps(found))
