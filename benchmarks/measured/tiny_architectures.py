"""Transformers' architectures with two small layers: in: a name, out: a model and one batch with labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS, CLASSES = 2, 32, 512, 64, 4, 2, 10

Inputs = dict[str, Tensor]
_TEXT_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_GROUPED: dict[str, Any] = {**_TEXT_SHAPE, "num_key_value_heads": HEADS // 2, "use_cache": False}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IMAGE_SHAPE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_labels": CLASSES,
}


def _text() -> Inputs:
    text = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": text, "labels": text.clone()}


def _masked_text() -> Inputs:
    """With padding at the end of the second text."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, LENGTH // 2 :] = 0
    return {**_text(), "attention_mask": mask}


def _image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(CLASSES, (BATCH,))}


def _causal(config: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


def _image_classifier(config: Any) -> nn.Module:
    return transformers.AutoModelForImageClassification.from_config(config)


def _masked_lm(config: Any) -> nn.Module:
    return transformers.AutoModelForMaskedLM.from_config(config)


def _seq2seq(config: Any) -> nn.Module:
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def _bart() -> Any:
    return transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=LENGTH,
        use_cache=False,
        **_SPECIAL,
    )


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
        use_cache=False,
    )


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH, use_cache=False
    )


def _opt() -> Any:
    return transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )


def _swin() -> Any:
    shape = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4]}
    return transformers.SwinConfig(image_size=32, patch_size=4, window_size=4, num_labels=CLASSES, **shape)


def _convnext() -> Any:
    return transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=CLASSES)


ARCHITECTURES: dict[str, tuple[Callable[[Any], nn.Module], Callable[[], Any], Callable[[], Inputs]]] = {
    "gpt2": (_causal, _gpt2, _text),
    "opt": (_causal, _opt, _masked_text),
    "gpt_neox": (_causal, lambda: transformers.GPTNeoXConfig(**_TEXT_SHAPE, use_cache=False), _text),
    "llama": (_causal, lambda: transformers.LlamaConfig(**_GROUPED), _masked_text),
    "mistral": (_causal, lambda: transformers.MistralConfig(**_GROUPED, sliding_window=16), _text),
    "mixtral": (_causal, lambda: transformers.MixtralConfig(**_GROUPED, num_local_experts=4), _text),
    "qwen2": (_causal, lambda: transformers.Qwen2Config(**_GROUPED), _text),
    "gemma": (_causal, lambda: transformers.GemmaConfig(**_GROUPED, head_dim=WIDTH // HEADS), _text),
    "phi": (_causal, lambda: transformers.PhiConfig(**_TEXT_SHAPE, use_cache=False), _text),
    "bert": (_masked_lm, lambda: transformers.BertConfig(**_TEXT_SHAPE), _masked_text),
    "roberta": (_masked_lm, lambda: transformers.RobertaConfig(**_TEXT_SHAPE), _masked_text),
    "electra": (_masked_lm, lambda: transformers.ElectraConfig(**_TEXT_SHAPE), _text),
    "bart": (_seq2seq, _bart, _text),
    "t5": (_seq2seq, _t5, _text),
    "vit": (_image_classifier, lambda: transformers.ViTConfig(**_IMAGE_SHAPE), _image),
    "dinov2": (_image_classifier, lambda: transformers.Dinov2Config(**_IMAGE_SHAPE), _image),
    "swin": (_image_classifier, _swin, _image),
    "convnext": (_image_classifier, _convnext, _image),
}
"""Name: (model from config, config, inputs)."""


def build(name: str, device: torch.device, seed: int = 0, layers: int = LAYERS) -> tuple[nn.Module, Inputs]:
    """A model in training mode (its dropout on) and its batch; `layers` where the configuration counts them."""
    torch.manual_seed(seed)
    from_config, config, inputs = ARCHITECTURES[name]
    shape = config()
    if layers != LAYERS:
        shape.num_hidden_layers = layers
    model = from_config(shape).to(device).train()
    return model, {key: value.to(device) for key, value in inputs().items()}
