"""The 61 models of timm that PyTorch 2.0 was judged by: upstream's names, batches and image sizes.

Upstream: pytorch/benchmarks/dynamo/timm_models.py, with pretrained weights; here they are random.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from support.timm_import import import_timm
from torch import Tensor, nn

from zoo_models.entry import Built, ZooModel, without_dropout, without_repeats

SMALL_SIDE = 64

# name, or name@size, or name@size/batch: 224 and 128 unless noted
_NAMES = """
adv_inception_v3@299 beit_base_patch16_224 botnet26t_256@256 cait_m36_384@384/8 coat_lite_mini convit_base
convmixer_768_32@224/64 convnext_base crossvit_9_240@240 cspdarknet53@256 deit_base_distilled_patch16_224 dla102
dm_nfnet_f0@192 dpn107@224/64 eca_botnext26ts_256@256 eca_halonext26ts@256 ese_vovnet19b_dw fbnetc_100 fbnetv3_b
gernet_l@256 ghostnet_100 gluon_inception_v3@299 gluon_xception65@299/64 gmixer_24_224 gmlp_s16_224 hrnet_w18
inception_v3@299 jx_nest_base lcnet_050 mixer_b16_224 mixnet_l mnasnet_100 mobilenetv2_100 mobilenetv3_large_100
mobilevit_s@256 nfnet_l0 pit_b_224 pnasnet5large@331/32 poolformer_m36 regnety_002 repvgg_a2 res2net101_26w_4s
res2net50_14w_8s res2next50 resmlp_12_224 resnest101e@256 rexnet_100 sebotnet33ts_256@256 selecsls42b spnasnet_100
swin_base_patch4_window7_224 swsl_resnext101_32x16d@224/64 tf_efficientnet_b0 tf_mixnet_l tinynet_a@192
tnt_s_patch16_224 twins_pcpvt_base visformer_small vit_base_patch16_224 volo_d1_224 xcit_large_24_p8_224@224/23
"""
_IN_TIMM = {
    "adv_inception_v3": "inception_v3.tf_adv_in1k",
    "gluon_inception_v3": "inception_v3.gluon_in1k",
    "gluon_xception65": "xception65",
    "jx_nest_base": "nest_base_jx",
    "swsl_resnext101_32x16d": "resnext101_32x16d",
}
_TOLERANCES = {
    "beit_base_patch16_224": 16e-2,
    "deit_base_distilled_patch16_224": 8e-2,
    "inception_v3": 4e-2,
    "mobilenetv3_large_100": 4e-2,
}
_SMALL: dict[str, dict[str, Any]] = {
    "swin_base_patch4_window7_224": {"img_size": 56},
    "crossvit_9_240": {"img_size": 240},
}
"""What a small one is created with, where SMALL_SIDE does not fit."""
_SMALL_SIDES = {
    "adv_inception_v3": 96,
    "gluon_inception_v3": 96,
    "inception_v3": 96,
    "pnasnet5large": 96,
    "eca_halonext26ts": 256,
}


def classifier(small: bool, name: str, batch: int, side: int) -> Built:
    """A timm model with images and labels. Small: fewer equal blocks, two small images."""
    timm = import_timm()
    known = _IN_TIMM.get(name, name)
    arguments: dict[str, Any] = {}
    if small:
        batch, side = 2, _SMALL_SIDES.get(name, SMALL_SIDE)
        arguments = _SMALL.get(name, {"img_size": side})
        side = arguments.get("img_size", side)
    try:
        model = timm.create_model(known, pretrained=False, **arguments)
    except TypeError:  # convolutions take images of any size
        model = timm.create_model(known, pretrained=False)
    images = torch.randn(batch, 3, side, side)
    if small and runs(trimmed := without_repeats(copy.deepcopy(model)), images):
        model = trimmed
    model = without_dropout(model).train()
    labels = torch.randint(1000, (batch,))
    return Built(model=model, args=(images,), loss=functools.partial(cross_entropy, labels=labels))


def runs(model: nn.Module, images: Tensor) -> bool:
    """Whether it still fits together, found without computing anything."""
    try:
        with torch.no_grad():
            copy.deepcopy(model).to("meta")(images.to("meta"))
    except (RuntimeError, AssertionError, IndexError, ValueError):
        return False
    return True


def cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """Of a classifier, or of one with a second head for distillation or for tokens."""
    heads = outputs if isinstance(outputs, tuple | list) else (outputs,)
    first: Tensor = heads[0]
    return nn.functional.cross_entropy(first, labels) + sum(
        (head.float().square().mean() for head in heads[1:] if isinstance(head, Tensor)), first.new_zeros(())
    )


def _model(text: str) -> ZooModel:
    name, _, sizes = text.partition("@")
    side, _, batch = sizes.partition("/")
    notes = {"swsl_resnext101_32x16d": "timm's resnext101_32x16d", "gluon_xception65": "timm's xception65"}
    return ZooModel(
        name=name,
        suite="timm",
        build=functools.partial(classifier, name=name, batch=int(batch or 128), side=int(side or 224)),
        tolerance=_TOLERANCES.get(name, 1e-2),
        note=notes.get(name, ""),
    )


MODELS = [_model(text) for text in _NAMES.split()]
