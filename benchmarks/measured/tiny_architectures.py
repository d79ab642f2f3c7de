"""Three architectures of transformers with two small layers and their dropout: in: a name, out: a model and one batch.

The zoo (zoo_models) has all the others, without dropout.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS, CLASSES = 2, 32, 512, 64, 2, 10
ARCHITECTURES = ("bert", "llama", "vit")

Inputs = dict[str, Tensor]
_SHAPE: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}


def build(name: str, device: torch.device, seed: int = 0, layers: int = LAYERS) -> tuple[nn.Module, Inputs]:
    """A model in training mode and its batch."""
    torch.manual_seed(seed)
    shape = {**_SHAPE, "num_hidden_layers": layers}
    model, inputs = (_image_classifier if name == "vit" else _text_model)(name, shape)
    return model.to(device).train(), {key: value.to(device) for key, value in inputs.items()}


def _text_model(name: str, shape: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    """With padding at the end of the second text."""
    text = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, LENGTH // 2 :] = 0
    inputs = {"input_ids": text, "labels": text.clone(), "attention_mask": mask}
    shape["vocab_size"] = VOCABULARY
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**shape)), inputs
    config = transformers.LlamaConfig(**shape, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config), inputs


def _image_classifier(name: str, shape: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    config = transformers.ViTConfig(**shape, image_size=32, patch_size=8, num_labels=CLASSES)
    inputs = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(CLASSES, (BATCH,))}
    return transformers.ViTForImageClassification(config), inputs
