"""Twenty small models with random weights and inputs: of torch.nn, and tiny ones of transformers' families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.SiLU()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(8, 8), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + nn.functional.gelu(self.channels(x))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 10)
        for step in range(4):
            state = self.cell(x[:, step], state)
        return state


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _pixels() -> tuple[torch.Tensor]:
    return (torch.randn(2, 3, 8, 8),)


def _rows(*shape: int) -> tuple[torch.Tensor]:
    return (torch.randn(*shape),)


def _perceptron() -> Example:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4), nn.LogSoftmax(-1)), _rows(5, 12)


def _convolutions() -> Example:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(128, 4)), _pixels()


def _depthwise() -> Example:
    layers = (nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, stride=2, groups=6), nn.GroupNorm(3, 6), nn.Hardswish())
    return nn.Sequential(*layers, nn.AvgPool2d(3)), _pixels()


def _transposed() -> Example:
    layers = (nn.Conv2d(3, 4, 2, stride=2), nn.Tanh(), nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Sigmoid())
    return nn.Sequential(*layers), _pixels()


def _signal() -> Example:
    return nn.Sequential(nn.Conv1d(4, 6, 3, dilation=2), nn.ELU(), nn.Conv1d(6, 2, 1)), _rows(2, 4, 12)


def _encoder() -> Example:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, bias=False), _rows(2, 5, 16)


def _embedding() -> Example:
    return nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Softplus()), (torch.randint(0, 20, (3, 4)),)


def _family(config: str, model: str, **settings: Any) -> Callable[[], Example]:
    def build() -> Example:
        import transformers

        sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        made = getattr(transformers, config)(**(sizes | settings))
        made._attn_implementation = "eager"
        return getattr(transformers, model)(made), (torch.randint(3, 40, (2, 6)),)

    return build


def _vision() -> Example:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
    )
    return transformers.ViTModel(config), _pixels()


_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "use_cache": False}
_LLAMA = {"intermediate_size": 32, "num_key_value_heads": 1, "use_cache": False}

MODELS: dict[str, Callable[[], Example]] = {
    "perceptron": _perceptron,
    "residual": lambda: (_Residual(), _rows(3, 16)),
    "mixer": lambda: (_Mixer(), _rows(2, 8, 16)),
    "recurrent": lambda: (_Recurrent(), _rows(3, 4, 6)),
    "attention": lambda: (_Attention(), _rows(2, 5, 16)),
    "convolutions": _convolutions,
    "depthwise": _depthwise,
    "transposed": _transposed,
    "signal": _signal,
    "encoder": _encoder,
    "embedding": _embedding,
    "bert": _family("BertConfig", "BertModel", intermediate_size=32),
    "roberta": _family("RobertaConfig", "RobertaModel", intermediate_size=32, max_position_embeddings=34),
    "electra": _family("ElectraConfig", "ElectraModel", intermediate_size=32, embedding_size=16),
    "distilbert": _family(
        "DistilBertConfig", "DistilBertModel", dim=16, n_layers=1, n_heads=2, hidden_dim=32
    ),
    "gpt2": _family("GPT2Config", "GPT2Model", **_GPT2),
    "llama": _family("LlamaConfig", "LlamaForCausalLM", **_LLAMA),
    "mistral": _family("MistralConfig", "MistralModel", **_LLAMA),
    "qwen2": _family("Qwen2Config", "Qwen2Model", **_LLAMA),
    "vit": _vision,
}


def build(name: str) -> Example:
    """The model in evaluation mode, and its inputs; the same at each call."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval(), inputs
