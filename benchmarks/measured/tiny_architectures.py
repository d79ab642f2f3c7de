"""Small architectures of transformers (two layers) and of timm: in: a name, out: a model and one batch with labels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS, CLASSES = 2, 32, 512, 64, 4, 2, 10

Inputs = dict[str, Tensor]
Loss = Callable[[Callable[..., Any]], Tensor]
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


_PLAIN: dict[str, Any] = {**_TEXT_SHAPE, "use_cache": False}
_CODERS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "use_cache": False,
}
_STAGES: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}


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


def _classes() -> Inputs:
    text = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": text, "labels": torch.randint(2, (BATCH,))}


def _speech() -> Inputs:
    return {"input_features": torch.randn(BATCH, 16, 2 * LENGTH), "labels": _text()["labels"]}


def _pairs() -> Inputs:
    return {"input_ids": _text()["input_ids"], "pixel_values": _image()["pixel_values"]}


def _text_classifier(config: Any) -> nn.Module:
    return transformers.AutoModelForSequenceClassification.from_config(config)


def _clip() -> Any:
    text = {**_TEXT_SHAPE, "max_position_embeddings": LENGTH, **_SPECIAL}
    return transformers.CLIPConfig(text_config=text, vision_config=_IMAGE_SHAPE, projection_dim=32)


def _whisper() -> Any:
    sizes = {"num_mel_bins": 16, "max_source_positions": LENGTH, "max_target_positions": LENGTH}
    return transformers.WhisperConfig(**_CODERS, **sizes, **_SPECIAL, decoder_start_token_id=1)


def _deberta() -> Any:
    kinds = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    return transformers.DebertaV2Config(**_TEXT_SHAPE, **kinds)


def _distilbert() -> Any:
    return transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, hidden_dim=2 * WIDTH, n_layers=LAYERS, n_heads=HEADS
    )


def _gptj() -> Any:
    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": 8, "n_positions": LENGTH}
    return transformers.GPTJConfig(vocab_size=VOCABULARY, **shape, use_cache=False)


def _bigcode() -> Any:
    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    return transformers.GPTBigCodeConfig(vocab_size=VOCABULARY, **shape, use_cache=False)


def _bloom() -> Any:
    return transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False
    )


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
MORE: dict[str, tuple[Callable[[Any], nn.Module], Callable[[], Any], Callable[[], Inputs]]] = {
    "gptj": (_causal, _gptj, _text),
    "gpt_bigcode": (_causal, _bigcode, _text),
    "bloom": (_causal, _bloom, _masked_text),
    "falcon": (_causal, lambda: transformers.FalconConfig(**_PLAIN), _text),
    "qwen3": (_causal, lambda: transformers.Qwen3Config(**_GROUPED, head_dim=16), _masked_text),
    "gemma2": (_causal, lambda: transformers.Gemma2Config(**_GROUPED, head_dim=16, sliding_window=16), _text),
    "phi3": (_causal, lambda: transformers.Phi3Config(**_GROUPED, **_SPECIAL), _text),
    "olmo2": (_causal, lambda: transformers.Olmo2Config(**_GROUPED), _text),
    "stablelm": (_causal, lambda: transformers.StableLmConfig(**_GROUPED), _text),
    "starcoder2": (_causal, lambda: transformers.Starcoder2Config(**_GROUPED), _text),
    "granite": (_causal, lambda: transformers.GraniteConfig(**_GROUPED), _text),
    "mamba": (
        _causal,
        lambda: transformers.MambaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, use_cache=False
        ),
        _text,
    ),
    "distilbert": (_masked_lm, _distilbert, _masked_text),
    "albert": (_masked_lm, lambda: transformers.AlbertConfig(**_TEXT_SHAPE, embedding_size=32), _text),
    "deberta_v2": (_text_classifier, _deberta, _classes),
    "mpnet": (_masked_lm, lambda: transformers.MPNetConfig(**_TEXT_SHAPE), _text),
    "xlm_roberta": (_text_classifier, lambda: transformers.XLMRobertaConfig(**_TEXT_SHAPE), _classes),
    "pegasus": (_seq2seq, lambda: transformers.PegasusConfig(**_CODERS), _text),
    "mbart": (_seq2seq, lambda: transformers.MBartConfig(**_CODERS), _text),
    "whisper": (lambda shape: transformers.WhisperForConditionalGeneration(shape), _whisper, _speech),
    "clip": (lambda shape: transformers.CLIPModel(shape), _clip, _pairs),
    "deit": (
        lambda shape: transformers.DeiTForImageClassification(shape),
        lambda: transformers.DeiTConfig(**_IMAGE_SHAPE),
        _image,
    ),
    "beit": (_image_classifier, lambda: transformers.BeitConfig(**_IMAGE_SHAPE), _image),
    "resnet": (
        _image_classifier,
        lambda: transformers.ResNetConfig(**_STAGES, embedding_size=16),
        _image,
    ),
    "mobilenet_v2": (_image_classifier, lambda: transformers.MobileNetV2Config(num_labels=CLASSES), _image),
}
"""Name: (model from config, config, inputs)."""
TIMM = {
    f"timm/{name}": (name, arguments)
    for name, arguments in {
        "resnet18": {},
        "efficientnet_b0": {},
        "mobilenetv3_small_100": {},
        "regnetx_002": {},
        "densenet121": {},
        "convnext_atto": {},
        "vit_tiny_patch16_224": {"img_size": 64},
        "deit_tiny_patch16_224": {"img_size": 64},
        "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 1, 1, 1)},
        "mixer_s32_224": {"img_size": 64},
    }.items()
}
"""Name: (timm's name, arguments that make it small)."""
FAMILIES = [*ARCHITECTURES, *MORE, *TIMM]


def build(name: str, device: torch.device, seed: int = 0, layers: int = LAYERS) -> tuple[nn.Module, Inputs]:
    """A model in training mode (its dropout on) and its batch; `layers` where the configuration counts them."""
    torch.manual_seed(seed)
    from_config, config, inputs = (ARCHITECTURES | MORE)[name]
    shape = config()
    if layers != LAYERS:
        shape.num_hidden_layers = layers
    model = from_config(shape).to(device).train()
    return model, {key: value.to(device) for key, value in inputs().items()}


def build_family(name: str, seed: int = 0) -> tuple[nn.Module, Loss]:
    """One of FAMILIES on the CPU, and its loss on its batch."""
    if name in TIMM:
        return _timm(name, seed)
    model, inputs = build(name, torch.device("cpu"), seed)
    more = {"return_loss": True} if name == "clip" else {}
    return model, lambda f: f(**inputs, **more).loss


def _timm(name: str, seed: int) -> tuple[nn.Module, Loss]:
    import timm

    torch.manual_seed(seed)
    kind, arguments = TIMM[name]
    model = timm.create_model(kind, num_classes=CLASSES, **arguments).train()
    side = arguments.get("img_size", 64)
    images, labels = torch.randn(BATCH, 3, side, side), torch.randint(CLASSES, (BATCH,))
    return model, lambda f: nn.functional.cross_entropy(f(images), labels)


def _import_torchvision() -> None:
    """timm imports it, and so does transformers where it is installed. A build for CUDA beside a PyTorch without CUDA
    has no operators, and describes them all the same."""
    with contextlib.suppress(ImportError):
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            for name in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


_import_torchvision()
