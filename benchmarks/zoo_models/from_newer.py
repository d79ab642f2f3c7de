"""Architectures that are newer than PyTorch 2.0's zoo: transformers' and diffusers', and three that it lacked.

Real: the default configuration's width, with a few layers, so that the largest fits one GPU. Some take one to three
fields beside the generic small configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from zoo_models.entry import Built, ZooModel, mean_of_outputs, own_loss, without_dropout
from zoo_models.from_transformers import OFF, SMALL, quiet

_LAYERS, _BATCH, _LENGTH = 4, 2, 512
_SHORT = {"jamba": 64, "falcon_mamba": 64}
"""Without mamba-ssm, each token is an iteration, and a part of the graph."""
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
_MORE = {
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "intermediate_size_mlp": 128,
    "n_group": 1,
    "topk_group": 1,
    "n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 64,
    "time_step_rank": 8,
    "state_size": 8,
    "mamba_expand": 2,
    "mamba_dt_rank": 8,
    "sliding_window": 16,
    "scale_emb": 1.0,
    "dim_model_base": 32,
}

# family: what the small one changes; what both change
_CAUSAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        name: ({}, {})
        for name in ("smollm3", "apertus", "cohere2", "exaone4", "nanochat", "diffllama", "bitnet")
    },
    "modernbert-decoder": ({}, {}),
    "vaultgemma": ({}, {}),
    **{name: (_EXPERTS, {}) for name in ("glm4_moe", "ernie4_5_moe", "phimoe", "flex_olmo")},
    # In float64, and beside their gradients, all experts are too many for a GPU.
    "llama4_text": (_EXPERTS, {"num_local_experts": 4, "num_hidden_layers": 2}),
    "minimax_m2": (_EXPERTS, {"num_local_experts": 32}),
    "dots1": (_EXPERTS, {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan_v1_moe": ({**_EXPERTS, "head_dim": 16}, {"head_dim": 128}),
    # Grouped products take rows of whole 16 bytes; the default width of an expert, 1407, is none.
    "deepseek_v2": (
        {**_EXPERTS, "num_key_value_heads": 4},
        {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    ),
    "minicpm3": ({"num_key_value_heads": 4}, {}),
    # Without its kernels, each of 64 positions of a chunk is a part of the graph: one layer of either kind.
    "qwen3_next": (
        _EXPERTS,
        {"num_experts": 64, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "olmo_hybrid": ({}, {}),
    # Without mamba-ssm, whole chunks are in memory for each head and state.
    "bamba": ({}, {"mamba_chunk_size": 64}),
    "granitemoehybrid": (_EXPERTS, {"mamba_chunk_size": 64}),
    "jamba": (_EXPERTS, {}),
    "falcon_mamba": ({}, {}),
    "qwen3_moe": (_EXPERTS, {}),
    "olmoe": (_EXPERTS, {}),
}


def causal(small: bool, family: str, changes: dict[str, Any], both: dict[str, Any]) -> Built:
    plain = transformers.AutoConfig.for_model(family)
    known = {name: value for name, value in OFF.items() if hasattr(plain, name)}
    layers = {name: _LAYERS for name in ("num_hidden_layers",) if getattr(plain, name, 0) > _LAYERS}
    wanted = {**known, **layers, **both}
    if small:
        sizes = {name: value for name, value in {**SMALL, **_MORE}.items() if hasattr(plain, name)}
        wanted |= sizes | {name: value for name, value in changes.items() if hasattr(plain, name)} | _SPECIAL
    config = transformers.AutoConfig.for_model(family, **wanted)
    model = quiet(transformers.AutoModelForCausalLM.from_config(config))
    text = torch.randint(5, config.vocab_size, (2, 32) if small else (_BATCH, _SHORT.get(family, _LENGTH)))
    return Built(
        model=model, kwargs={"input_ids": text, "labels": text.clone(), "use_cache": False}, loss=own_loss
    )


def vision(small: bool, class_name: str, config_name: str, sizes: dict[str, Any]) -> Built:
    """An image classifier, or a backbone without a head, whose loss is the mean of its outputs."""
    config = getattr(transformers, config_name)(**(sizes if small else {}))
    model = quiet(getattr(transformers, class_name)(config))
    side, batch = (64, 2) if small else (224, 32)
    kwargs: dict[str, Any] = {"pixel_values": torch.randn(batch, 3, side, side)}
    if class_name.endswith("Classification"):
        kwargs["labels"] = torch.randint(config.num_labels, (batch,))
        return Built(model=model, kwargs=kwargs, loss=own_loss)
    return Built(model=model, kwargs=kwargs, loss=mean_of_outputs)


_VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dinov3_vit": (
        *("DINOv3ViTModel", "DINOv3ViTConfig"),
        {"image_size": 64, **{name: SMALL[name] for name in ("hidden_size", "intermediate_size")}}
        | {"num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "dinov3_convnext": (
        *("DINOv3ConvNextModel", "DINOv3ConvNextConfig"),
        {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]},
    ),
    "hiera": (
        *("HieraForImageClassification", "HieraConfig"),
        {
            "image_size": [64, 64],
            "embed_dim": 16,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 2, 2],
            "num_labels": 10,
        },
    ),
    "segformer": (
        *("SegformerForImageClassification", "SegformerConfig"),
        {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "num_labels": 10},
    ),
}


def detector(small: bool) -> Built:
    backbone: dict[str, Any] = {
        "model_type": "rt_detr_resnet",
        "out_features": ["stage2", "stage3", "stage4"],
    }
    sizes: dict[str, Any] = {}
    if small:
        backbone |= {
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
        }
        sizes = {
            "encoder_hidden_dim": 32,
            "encoder_in_channels": [16, 24, 32],
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 32,
            "decoder_layers": 1,
            "num_queries": 10,
            "decoder_in_channels": [32, 32, 32],
            "num_denoising": 0,
        }
    config = transformers.RTDetrV2Config(
        backbone_config=transformers.RTDetrResNetConfig(
            **{k: v for k, v in backbone.items() if k != "model_type"}
        ),
        **sizes,
    )
    model = quiet(transformers.RTDetrV2Model(config))
    images = torch.randn(1 if small else 8, 3, *((64, 64) if small else (640, 640)))
    return Built(model=model, kwargs={"pixel_values": images}, loss=mean_of_outputs)


def moonshine(small: bool) -> Built:
    sizes = {
        **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2),
        **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    config = transformers.MoonshineConfig(use_cache=False, pad_token_id=0, **(sizes if small else {}))
    model = quiet(transformers.MoonshineForConditionalGeneration(config))
    batch, samples = (2, 4000) if small else (16, 160_000)
    kwargs = {"input_values": torch.randn(batch, samples), "labels": torch.randint(5, 500, (batch, 16))}
    return Built(model=model, kwargs=kwargs, loss=own_loss)


def siglip2(small: bool) -> Built:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**shape, "vocab_size": 512, "max_position_embeddings": 32, "projection_size": 64, **_SPECIAL}
    image = {**shape, "num_patches": 16, "patch_size": 8}
    config = (
        transformers.Siglip2Config(text_config=text, vision_config=image)
        if small
        else transformers.Siglip2Config()
    )
    model = quiet(transformers.Siglip2Model(config))
    batch, patches = (2, 16) if small else (32, 256)
    side = 4 if small else 16
    kwargs = {
        "input_ids": torch.randint(5, 500, (batch, 16)),
        "pixel_values": torch.randn(batch, patches, 3 * config.vision_config.patch_size**2),
        "pixel_attention_mask": torch.ones(batch, patches, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * batch, device="cpu"),
        "return_loss": True,
    }
    return Built(model=model, kwargs=kwargs, loss=own_loss)


def timesfm(small: bool) -> Built:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes = {**shape, "context_length": 64, "horizon_length": 32}
    config = transformers.TimesFmConfig(**(sizes if small else {}))
    model = quiet(transformers.TimesFmModelForPrediction(config))
    batch, length = (2, 64) if small else (32, 512)
    kwargs: dict[str, Any] = {
        "past_values": [torch.randn(length) for _ in range(batch)],
        "freq": [0] * batch,
        "future_values": torch.randn(batch, config.horizon_length),
    }
    return Built(model=model, kwargs=kwargs, loss=own_loss)


def diffusion(
    small: bool, name: str, factory: Callable[[bool, Any], tuple[nn.Module, dict[str, Any]]]
) -> Built:
    import diffusers

    model, kwargs = factory(small, getattr(diffusers, name))
    return Built(
        model=without_dropout(model).train(), kwargs={**kwargs, "return_dict": False}, loss=mean_of_outputs
    )


def flux(small: bool, model: Any) -> tuple[nn.Module, dict[str, Any]]:
    heads, dim, axes, joint, pooled = (
        (2, 16, (4, 4, 8), 32, 32) if small else (24, 128, (16, 56, 56), 4096, 768)
    )
    patches, words, batch = (16, 8, 1) if small else (1024, 512, 1)
    network = model(
        in_channels=16 if small else 64,
        num_layers=1 if small else 2,
        num_single_layers=1 if small else 4,
        attention_head_dim=dim,
        num_attention_heads=heads,
        joint_attention_dim=joint,
        pooled_projection_dim=pooled,
        guidance_embeds=False,
        axes_dims_rope=axes,
    )
    return network, {
        "hidden_states": torch.randn(batch, patches, 16 if small else 64),
        "encoder_hidden_states": torch.randn(batch, words, joint),
        "pooled_projections": torch.randn(batch, pooled),
        "timestep": torch.rand(batch),
        "img_ids": torch.zeros(patches, 3),
        "txt_ids": torch.zeros(words, 3),
    }


def sd3(small: bool, model: Any) -> tuple[nn.Module, dict[str, Any]]:
    side, batch, words = (16, 1, 8) if small else (64, 4, 154)
    shape = {
        "sample_size": 16,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 16,
    }
    network = model(**shape) if small else model(num_layers=8, sample_size=64)
    config = network.config
    return network, {
        "hidden_states": torch.randn(batch, config.in_channels, side, side),
        "encoder_hidden_states": torch.randn(batch, words, config.joint_attention_dim),
        "pooled_projections": torch.randn(batch, config.pooled_projection_dim),
        "timestep": torch.rand(batch),
    }


def unet(small: bool, model: Any) -> tuple[nn.Module, dict[str, Any]]:
    shape = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    network = model(**shape) if small else model(cross_attention_dim=768)
    batch, side = (1, 16) if small else (4, 64)
    return network, {
        "sample": torch.randn(batch, 4, side, side),
        "timestep": torch.tensor([10] * batch),
        "encoder_hidden_states": torch.randn(batch, 8 if small else 77, network.config.cross_attention_dim),
    }


def autoencoder(small: bool, model: Any) -> tuple[nn.Module, dict[str, Any]]:
    channels = (32, 64) if small else (128, 256, 512, 512)
    network = model(
        block_out_channels=channels,
        layers_per_block=1 if small else 2,
        norm_num_groups=32,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
    )
    return network, {"sample": torch.randn(*((1, 3, 32, 32) if small else (4, 3, 256, 256)))}


_DIFFUSION: dict[str, tuple[str, Callable[[bool, Any], tuple[nn.Module, dict[str, Any]]]]] = {
    "flux": ("FluxTransformer2DModel", flux),
    "sd3": ("SD3Transformer2DModel", sd3),
    "unet2d_condition": ("UNet2DConditionModel", unet),
    "autoencoder_kl": ("AutoencoderKL", autoencoder),
}
_BUILDS: dict[str, Callable[[bool], Built]] = {
    **{
        name: functools.partial(causal, family=name, changes=changes, both=both)
        for name, (changes, both) in _CAUSAL.items()
    },
    **{
        name: functools.partial(vision, class_name=class_name, config_name=config_name, sizes=sizes)
        for name, (class_name, config_name, sizes) in _VISION.items()
    },
    "rt_detr_v2": detector,
    "moonshine": moonshine,
    "siglip2": siglip2,
    "timesfm": timesfm,
    **{
        name: functools.partial(diffusion, name=class_name, factory=factory)
        for name, (class_name, factory) in _DIFFUSION.items()
    },
}
MODELS = [ZooModel(name=name, suite="newer", build=build) for name, build in _BUILDS.items()]
