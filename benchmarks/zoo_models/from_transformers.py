"""The 46 models of `transformers` that PyTorch 2.0 was judged by: upstream's names, configurations and batches.

Upstream: pytorch/benchmarks/dynamo/huggingface.py. Default configurations are the public base sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo_models.entry import Built, ZooModel, own_loss, without_dropout

_LAYERS, _WIDTH, _HEADS, _VOCABULARY, _LENGTH = 2, 64, 4, 512, 32
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), _LAYERS
    ),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), _WIDTH
    ),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "d_inner", "ffn_dim"), 2 * _WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * _WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("d_kv", "head_dim"), _WIDTH // _HEADS),
    "num_key_value_heads": _HEADS // 2,
    "vocab_size": _VOCABULARY,
}
"""What a small configuration sets, of the fields that it has."""
OFF: dict[str, Any] = {
    "use_cache": False,
    **dict.fromkeys(
        (
            *(
                "hidden_dropout_prob",
                "attention_probs_dropout_prob",
                "dropout",
                "attention_dropout",
                "dropout_rate",
            ),
            *(
                "activation_dropout",
                "resid_pdrop",
                "embd_pdrop",
                "attn_pdrop",
                "summary_last_dropout",
                "hidden_dropout",
            ),
            *(
                "classifier_dropout_prob",
                "encoder_layerdrop",
                "decoder_layerdrop",
                "layerdrop",
                "embedding_dropout",
            ),
            *("dropatt", "qa_dropout", "seq_classif_dropout", "drop_path_rate", "mlp_dropout", "ff_dropout"),
        ),
        0.0,
    ),
}
_ALBERT = {"embedding_size": 32}
_LONGFORMER = {
    "attention_window": 512,
    "max_position_embeddings": 4098,
    "vocab_size": 50265,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
_CAMEMBERT = {"vocab_size": 32005, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
_ROBERTA = {"pad_token_id": 0, "max_position_embeddings": 514}
_MOBILE = {
    "embedding_size": 32,
    "intra_bottleneck_size": 32,
    "num_feedforward_networks": 2,
    "num_key_value_heads": _HEADS,
}

# name, class, configuration, its arguments, batch, length, tolerance, what small changes beside SMALL
_ROWS: list[tuple[str, str, str, dict[str, Any], int, int, float, dict[str, Any]]] = [
    ("AlbertForMaskedLM", "AlbertForMaskedLM", "Albert", {}, 8, 512, 1e-2, _ALBERT),
    ("AlbertForQuestionAnswering", "AlbertForQuestionAnswering", "Albert", {}, 8, 512, 1e-2, _ALBERT),
    (
        *("AllenaiLongformerBase", "LongformerForMaskedLM", "Longformer", _LONGFORMER, 8, 1024, 1e-2),
        {"attention_window": 16},
    ),
    ("BartForCausalLM", "BartForCausalLM", "Bart", {}, 8, 1024, 1e-2, {}),
    ("BartForConditionalGeneration", "BartForConditionalGeneration", "Bart", {}, 4, 1024, 1e-2, {}),
    ("BertForMaskedLM", "BertForMaskedLM", "Bert", {}, 32, 512, 2e-2, {}),
    ("BertForQuestionAnswering", "BertForQuestionAnswering", "Bert", {}, 32, 512, 1e-2, {}),
    ("BlenderbotForCausalLM", "BlenderbotForCausalLM", "Blenderbot", {}, 32, 128, 1e-2, {}),
    ("BlenderbotSmallForCausalLM", "BlenderbotSmallForCausalLM", "BlenderbotSmall", {}, 256, 128, 1e-2, {}),
    (
        *("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallForConditionalGeneration"),
        *("BlenderbotSmall", {}, 128, 128, 1e-2, {}),
    ),
    ("CamemBert", "CamembertForMaskedLM", "Camembert", _CAMEMBERT, 32, 512, 1e-2, {}),
    ("DebertaForMaskedLM", "DebertaForMaskedLM", "Deberta", {}, 32, 512, 1e-2, {}),
    ("DebertaForQuestionAnswering", "DebertaForQuestionAnswering", "Deberta", {}, 32, 512, 1e-2, {}),
    ("DebertaV2ForMaskedLM", "DebertaV2ForMaskedLM", "DebertaV2", {}, 8, 512, 1e-2, {}),
    (
        "DebertaV2ForQuestionAnswering",
        "DebertaV2ForQuestionAnswering",
        "DebertaV2",
        {},
        8,
        512,
        1e-2,
        {},
    ),
    ("DistilBertForMaskedLM", "DistilBertForMaskedLM", "DistilBert", {}, 256, 128, 1e-2, {}),
    (
        "DistilBertForQuestionAnswering",
        "DistilBertForQuestionAnswering",
        "DistilBert",
        {},
        512,
        128,
        1e-2,
        {},
    ),
    ("DistillGPT2", "GPT2LMHeadModel", "GPT2", {"n_layer": 6}, 32, 512, 1e-2, {}),
    ("ElectraForCausalLM", "ElectraForCausalLM", "Electra", {"is_decoder": True}, 64, 512, 1e-2, {}),
    ("ElectraForQuestionAnswering", "ElectraForQuestionAnswering", "Electra", {}, 128, 512, 1e-2, {}),
    (
        *("GPT2ForSequenceClassification", "GPT2ForSequenceClassification", "GPT2", {"pad_token_id": 0}),
        *(8, 1024, 1e-2, {}),
    ),
    ("GoogleFnet", "FNetForMaskedLM", "FNet", {}, 32, 512, 1e-2, {}),
    ("LayoutLMForMaskedLM", "LayoutLMForMaskedLM", "LayoutLM", {}, 32, 512, 1e-2, {}),
    (
        "LayoutLMForSequenceClassification",
        "LayoutLMForSequenceClassification",
        "LayoutLM",
        {},
        32,
        512,
        1e-2,
        {},
    ),
    ("M2M100ForConditionalGeneration", "M2M100ForConditionalGeneration", "M2M100", {}, 64, 128, 1e-2, {}),
    ("MBartForCausalLM", "MBartForCausalLM", "MBart", {}, 8, 1024, 1e-2, {}),
    ("MBartForConditionalGeneration", "MBartForConditionalGeneration", "MBart", {}, 4, 1024, 1e-2, {}),
    ("MT5ForConditionalGeneration", "MT5ForConditionalGeneration", "MT5", {}, 32, 128, 2e-2, {}),
    (
        "MegatronBertForCausalLM",
        "MegatronBertForCausalLM",
        "MegatronBert",
        {"is_decoder": True},
        16,
        512,
        1e-2,
        {},
    ),
    (
        "MegatronBertForQuestionAnswering",
        "MegatronBertForQuestionAnswering",
        "MegatronBert",
        {},
        16,
        512,
        1e-2,
        {},
    ),
    ("MobileBertForMaskedLM", "MobileBertForMaskedLM", "MobileBert", {}, 256, 128, 1e-2, _MOBILE),
    (
        "MobileBertForQuestionAnswering",
        "MobileBertForQuestionAnswering",
        "MobileBert",
        {},
        256,
        128,
        1e-2,
        _MOBILE,
    ),
    ("OPTForCausalLM", "OPTForCausalLM", "OPT", {}, 4, 2048, 1e-2, {}),
    ("PLBartForCausalLM", "PLBartForCausalLM", "PLBart", {}, 16, 1024, 1e-2, {}),
    ("PLBartForConditionalGeneration", "PLBartForConditionalGeneration", "PLBart", {}, 8, 1024, 1e-2, {}),
    ("PegasusForCausalLM", "PegasusForCausalLM", "Pegasus", {}, 128, 128, 1e-2, {}),
    ("PegasusForConditionalGeneration", "PegasusForConditionalGeneration", "Pegasus", {}, 64, 128, 1e-2, {}),
    (
        *("RobertaForCausalLM", "RobertaForCausalLM", "Roberta", _ROBERTA | {"is_decoder": True}),
        *(32, 512, 1e-2, {}),
    ),
    (
        "RobertaForQuestionAnswering",
        "RobertaForQuestionAnswering",
        "Roberta",
        _ROBERTA,
        32,
        512,
        1e-2,
        {},
    ),
    (
        "T5ForConditionalGeneration",
        "T5ForConditionalGeneration",
        "T5",
        {"decoder_start_token_id": 0},
        8,
        1024,
        1e-2,
        {},
    ),
    ("T5Small", "T5ForConditionalGeneration", "T5", {"decoder_start_token_id": 0}, 8, 1024, 1e-2, {}),
    ("TrOCRForCausalLM", "TrOCRForCausalLM", "TrOCR", {}, 64, 256, 1e-2, {}),
    ("XGLMForCausalLM", "XGLMForCausalLM", "XGLM", {}, 32, 128, 1e-2, {}),
    ("XLNetLMHeadModel", "XLNetLMHeadModel", "XLNet", {}, 16, 512, 1e-2, {}),
    ("YituTechConvBert", "ConvBertForMaskedLM", "ConvBert", {}, 32, 512, 1e-2, {}),
]
_NOTES = {
    "DistillGPT2": "GPT2 with 6 layers",
    "T5Small": "equal to T5ForConditionalGeneration: the defaults are t5-small",
    "M2M100ForConditionalGeneration": "upstream does not train it",
}


def configuration(kind: str, arguments: dict[str, Any], small: dict[str, Any] | None) -> Any:
    """Without dropout and cache; small: what to change beside SMALL."""
    factory = getattr(transformers, f"{kind}Config")
    plain = factory(**arguments)
    off = {name: value for name, value in OFF.items() if hasattr(plain, name)}
    if small is None:
        return factory(**{**arguments, **off})
    sizes = {name: value for name, value in SMALL.items() if hasattr(plain, name)}
    ids = [
        name
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
        if getattr(plain, name, None)
    ]
    within = {name: 3 + index for index, name in enumerate(ids)}
    return factory(**{**arguments, **off, **sizes, **within, **small})


def text_batch(model: Any, batch: int, length: int) -> dict[str, Tensor]:
    """Random text with the labels that the class wants: upstream's `generate_inputs_for_model`."""
    config = model.config
    vocabulary = config.vocab_size
    text = torch.randint(5, vocabulary, (batch, length))
    kind = type(model).__name__
    inputs = {"input_ids": text}
    if config.is_encoder_decoder and not kind.endswith("ForCausalLM"):
        inputs["decoder_input_ids"] = torch.randint(5, vocabulary, (batch, length))
    if kind.endswith("QuestionAnswering"):
        inputs["start_positions"] = torch.randint(length, (batch,))
        inputs["end_positions"] = torch.randint(length, (batch,))
    elif kind.endswith("SequenceClassification"):
        inputs["labels"] = torch.randint(config.num_labels, (batch,))
    else:
        inputs["labels"] = torch.randint(5, vocabulary, (batch, length))
    return inputs


def quiet(model: nn.Module) -> nn.Module:
    """A model without dropout, whose class's name chooses its loss without a warning, which would break the graph."""
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return without_dropout(model).train()


def _build(
    small: bool,
    class_name: str,
    kind: str,
    arguments: dict[str, Any],
    batch: int,
    length: int,
    changes: dict[str, Any],
) -> Built:
    config = configuration(kind, arguments, changes if small else None)
    model = quiet(getattr(transformers, class_name)(config))
    inputs = text_batch(model, 2 if small else batch, _LENGTH if small else length)
    return Built(model=model, kwargs=inputs, loss=own_loss)


MODELS = [
    ZooModel(
        name=name,
        suite="transformers",
        build=functools.partial(
            _build,
            class_name=class_name,
            kind=kind,
            arguments=arguments,
            batch=batch,
            length=length,
            changes=changes,
        ),
        tolerance=tolerance,
        float32_only=kind == "FNet",
        note=_NOTES.get(name, ""),
    )
    for name, class_name, kind, arguments, batch, length, tolerance, changes in _ROWS
]
MODELS.append(
    ZooModel(
        name="Speech2Text2ForCausalLM",
        suite="transformers",
        build=None,
        missing="not in transformers 5",
    )
)
