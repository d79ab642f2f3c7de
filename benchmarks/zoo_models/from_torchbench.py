"""The 56 models of TorchBench by name: exact from transformers or timm, or of our own in small_networks.py.

Where timm or transformers has the same network under another name, `note` says so, and where it only is near.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo_models import from_timm, from_transformers, small_networks
from zoo_models.entry import Built, ZooModel, mean_of_outputs, own_loss, without_dropout
from zoo_models.small_networks import conv, mlp

Build = Callable[[bool], Built]


def timm(name: str, batch: int, side: int = 224) -> Build:
    return functools.partial(from_timm.classifier, name=name, batch=batch, side=side)


def text(
    class_name: str,
    kind: str,
    batch: int,
    length: int = 512,
    small: dict[str, Any] | None = None,
    **arguments: Any,
) -> Build:
    return functools.partial(
        from_transformers._build,
        class_name=class_name,
        kind=kind,
        arguments=arguments,
        batch=batch,
        length=length,
        changes=small or {},
    )


def own(factory: Callable[[bool], tuple[nn.Module, tuple[Tensor, ...]]]) -> Build:
    """A network with random inputs, whose loss is the mean of its outputs."""

    def build(small: bool) -> Built:
        model, inputs = factory(small)
        return Built(model=without_dropout(model).train(), args=inputs, loss=mean_of_outputs)

    return build


def images(batch: int, side: int, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, side, side)


def classifier(network: type[nn.Module], batch: int) -> Build:
    return own(lambda small: (network(), (images(2 if small else batch, 64 if small else 224),)))


def matting(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    side, batch = (32, 1) if small else (512, 4)
    inputs = images(batch, side), images(batch, side), images(batch, side, 1)
    return small_networks.BackgroundMatting(8 if small else 64), inputs


class Painter(nn.Module):
    """Huang et al. 2019 (LearningToPaint): an actor, a critic, and a renderer of strokes."""

    def __init__(self, actor: nn.Module, critic: nn.Module, width: int) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.renderer = mlp([10, 32 * width, 64 * width, 256], last=True)
        layers = [conv(16, 2 * width, norm=None), nn.Conv2d(2 * width, 64, 3, padding=1), nn.PixelShuffle(2)]
        self.draw = nn.Sequential(*layers, conv(16, width, norm=None), nn.Conv2d(width, 4, 3, padding=1))

    def forward(self, canvas: Tensor) -> Tensor:
        strokes = self.actor(canvas).sigmoid().view(len(canvas), 5, 13)
        for index in range(5):
            drawn = self.renderer(strokes[:, index, :10]).view(len(canvas), 16, 4, 4)
            alpha = nn.functional.interpolate(
                self.draw(drawn).sigmoid().mean(1, True), size=canvas.shape[-2:]
            )
            colour = strokes[:, index, 10:, None, None]
            painted = canvas[:, :3] * (1 - alpha) + alpha * colour
            canvas = torch.cat([painted, canvas[:, 3:]], 1)
        out: Tensor = self.critic(canvas)
        return out


def painter(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    create = from_timm.import_timm().create_model
    actor, critic = (create("resnet18", in_chans=9, num_classes=count) for count in (65, 1))
    if small:
        actor, critic = (create("resnet10t", in_chans=9, num_classes=count) for count in (65, 1))
    return Painter(actor, critic, 4 if small else 16), (images(2 if small else 96, 64 if small else 128, 9),)


def slomo(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    size = (2, 3, 32, 32) if small else (6, 3, 352, 352)
    return small_networks.SuperSloMo(4 if small else 32), (torch.randn(size), torch.randn(size))


def dlrm(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tables, rows, width, batch = (3, 50, 8, 4) if small else (8, 1_000_000, 64, 1024)
    model = small_networks.DLRM(tables, rows, width, 16 if small else 512, 16 if small else 512)
    indices = torch.randint(rows, (tables, 4 * batch))
    offsets = (4 * torch.arange(batch)).repeat(tables, 1)
    return model, (torch.randn(batch, 16 if small else 512), indices, offsets)


def drq(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    side, width = (32, 8) if small else (84, 32)
    model, batch = small_networks.DrQ(9, 6, width), 2 if small else 1
    inputs = (images(batch, side, 9), torch.randint(9, (batch, 2)), torch.randn(batch, 6))
    model.head[1] = nn.Linear(width * ((side - 3) // 2 + 1 - 6) ** 2, 50)
    return model, inputs


def sac(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    batch = 4 if small else 256
    return small_networks.SoftActorCritic(3, 1, 16 if small else 1024), (
        torch.randn(batch, 3),
        torch.randn(batch, 1),
    )


def moco(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    create = from_timm.import_timm().create_model
    name = "resnet10t" if small else "resnet50"
    query, key = create(name, num_classes=128), create(name, num_classes=128)
    model = small_networks.MoCo(query, key, 128, 64 if small else 32000)
    batch, side = (2, 64) if small else (32, 224)
    return model, (images(batch, side), images(batch, side))


def recommender(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    items, hidden = (128, [16, 16, 32]) if small else (197951, [512, 512, 1024])
    return mlp([items, *hidden, *hidden[-2::-1], items], nn.SELU, last=True), (
        torch.rand(4 if small else 256, items),
    )


class PerSampleGradients(nn.Module):
    """Gradients of each sample by `torch.func`: differentially private training."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weights = {name: value.detach() for name, value in self.network.named_parameters()}

        def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self.network, weights, (image[None],))
            return nn.functional.cross_entropy(outputs, label[None])

        gradients: dict[str, Tensor] = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
            weights, inputs, labels
        )
        return gradients


def private(small: bool) -> Built:
    create = from_timm.import_timm().create_model
    network = create("resnet10t" if small else "resnet18", num_classes=10)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(4, child.num_features))
    batch = 2 if small else 64
    return Built(
        model=PerSampleGradients(network).train(),
        args=(images(batch, 32), torch.randint(10, (batch,))),
        loss=None,
    )


class InnerSteps(nn.Module):
    """Finn et al. 2017 (MAML): the loss on a query after gradient steps on a support, through these steps."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        layers = [conv(1 if i == 0 else width, width, norm=None) for i in range(3)]
        pooled = [part for layer in layers for part in (layer, nn.GroupNorm(1, width), nn.MaxPool2d(2))]
        self.network = nn.Sequential(*pooled, nn.Flatten(), nn.Linear(width * 9, 5))
        self.steps = steps

    def forward(self, support: Tensor, answers: Tensor, query: Tensor, wanted: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self.network, weights, (inputs,))
            return nn.functional.cross_entropy(outputs, labels)

        def adapted(inputs: Tensor, labels: Tensor, others: Tensor, others_labels: Tensor) -> Tensor:
            weights = dict(self.network.named_parameters())
            for _ in range(self.steps):
                gradients = torch.func.grad(loss)(weights, inputs, labels)
                weights = {name: value - 0.1 * gradients[name] for name, value in weights.items()}
            return loss(weights, others, others_labels)

        return torch.func.vmap(adapted)(support, answers, query, wanted).mean()


def maml(small: bool, tasks: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tasks = 2 if small else tasks
    labels = [torch.randint(5, (tasks, count)) for count in (5, 15)]
    inputs = [torch.randn(tasks, count, 1, 28, 28) for count in (5, 15)]
    return InnerSteps(4 if small else 64, 1 if small else 5), (inputs[0], labels[0], inputs[1], labels[1])


class Jacobians(nn.Module):
    """A potential's energies and forces by `torch.func`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = mlp([1, *[width] * 5, 1], nn.Tanh)

    def forward(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        energies = torch.func.vmap(self.network)(distances)
        return energies, -torch.func.vmap(torch.func.jacrev(self.network))(distances)


def lennard_jones(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Jacobians(16), (torch.rand(8 if small else 1000, 1) + 0.5,)


def bert_heads(small: bool) -> Built:
    """Two losses: words and next sentence."""
    built = text("BertForPreTraining", "Bert", 16, 128)(small)
    built.kwargs["next_sentence_label"] = torch.randint(2, (len(built.kwargs["input_ids"]),))
    return built


def speech(small: bool) -> Built:
    import transformers

    config = from_transformers.configuration(
        "Speech2Text", {}, {"input_feat_per_channel": 16} if small else None
    )
    model = from_transformers.quiet(transformers.Speech2TextForConditionalGeneration(config))
    batch, frames, length = (2, 64, 16) if small else (32, 600, 60)
    features = torch.randn(batch, frames, config.input_feat_per_channel)
    labels = torch.randint(5, config.vocab_size, (batch, length))
    return Built(model=model, kwargs={"input_features": features, "labels": labels}, loss=own_loss)


_ALBERT = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12),
    "d_model": 768,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
_LARGE_T5 = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "decoder_start_token_id": 0}
_REFORMER = {
    "num_buckets": 4,
    "axial_pos_shape": (4, 8),
    "axial_pos_embds_dim": (32, 32),
    "attn_layers": ["local", "lsh"],
    "local_attn_chunk_length": 8,
    "lsh_attn_chunk_length": 8,
    "num_hidden_layers": 2,
    "feed_forward_size": 128,
}
_AS_TORCHVISION = "timm's; the same network as torchvision's"

# name, batch-bound build, note
_ROWS: list[tuple[str, Build | None, str]] = [
    ("BERT_pytorch", bert_heads, "near: transformers' BertForPreTraining"),
    ("Background_Matting", own(matting), "our own"),
    ("LearningToPaint", own(painter), "our own"),
    ("Super_SloMo", own(slomo), "our own"),
    ("alexnet", classifier(small_networks.AlexNet, 128), "our own, as torchvision's"),
    (
        "attention_is_all_you_need_pytorch",
        own(
            lambda small: (
                small_networks.Transformer(512 if small else 9521, 64 if small else 512, 1 if small else 6),
                tuple(torch.randint(512, (2 if small else 256, 16 if small else 32)) for _ in range(2)),
            )
        ),
        "near: torch.nn.Transformer",
    ),
    (
        "dcgan",
        own(
            lambda small: (
                small_networks.Discriminator(64, 8 if small else 64),
                (images(2 if small else 32, 64),),
            )
        ),
        "our own",
    ),
    (
        "demucs",
        own(
            lambda small: (
                small_networks.Demucs(8 if small else 64, 2 if small else 6),
                (torch.randn(1 if small else 4, 2, 1024 if small else 44100 * 5),),
            )
        ),
        "our own",
    ),
    ("densenet121", timm("densenet121", 4), _AS_TORCHVISION),
    ("dlrm", own(dlrm), "our own"),
    ("drq", own(drq), "our own"),
    (
        "fastNLP_Bert",
        text("BertForQuestionAnswering", "Bert", 6),
        "near: transformers' BertForQuestionAnswering",
    ),
    ("functorch_dp_cifar10", private, "timm's resnet18 with GroupNorm"),
    ("functorch_maml_omniglot", own(functools.partial(maml, tasks=1)), "our own"),
    ("hf_Albert", text("AlbertForMaskedLM", "Albert", 8, small=from_transformers._ALBERT, **_ALBERT), ""),
    ("hf_Bart", text("BartForConditionalGeneration", "Bart", 4, **_BART), ""),
    ("hf_Bert", text("BertForMaskedLM", "Bert", 4), ""),
    (
        "hf_BigBird",
        text(
            *("BigBirdForMaskedLM", "BigBird", 2, 1024),
            small={"block_size": 2, "num_random_blocks": 1},
            attention_type="block_sparse",
        ),
        "",
    ),
    ("hf_DistilBert", text("DistilBertForMaskedLM", "DistilBert", 8), ""),
    ("hf_GPT2", text("GPT2LMHeadModel", "GPT2", 4), ""),
    ("hf_GPT2_large", text("GPT2LMHeadModel", "GPT2", 4, n_embd=1280, n_layer=36, n_head=20), ""),
    (
        "hf_Longformer",
        text(
            *("LongformerForMaskedLM", "Longformer", 2, 1024),
            small={"attention_window": 16},
            **from_transformers._LONGFORMER,
        ),
        "",
    ),
    (
        "hf_Reformer",
        text("ReformerForMaskedLM", "Reformer", 4, 4096, small=_REFORMER, num_buckets=128, is_decoder=False),
        "",
    ),
    ("hf_T5", text("T5ForConditionalGeneration", "T5", 8, decoder_start_token_id=0), ""),
    ("hf_T5_large", text("T5ForConditionalGeneration", "T5", 2, **_LARGE_T5), ""),
    ("lennard_jones", own(lennard_jones), "our own"),
    ("maml_omniglot", own(functools.partial(maml, tasks=5)), "our own, by torch.func"),
    ("mnasnet1_0", timm("mnasnet_100", 32), "timm's; near torchvision's"),
    ("mobilenet_v2", timm("mobilenetv2_100", 96), _AS_TORCHVISION),
    ("mobilenet_v3_large", timm("mobilenetv3_large_100", 32), "timm's; near torchvision's"),
    ("moco", own(moco), "our own, without a process group"),
    ("nvidia_deeprecommender", own(recommender), "our own"),
    (
        "pytorch_CycleGAN_and_pix2pix",
        own(
            lambda small: (
                small_networks.ImageGenerator(3, 8 if small else 64, 2 if small else 9),
                (images(1, 32 if small else 256),),
            )
        ),
        "our own",
    ),
    (
        "pytorch_stargan",
        own(
            lambda small: (
                small_networks.ImageGenerator(8, 8 if small else 64, 2 if small else 6),
                (images(1 if small else 16, 32 if small else 128, 8),),
            )
        ),
        "our own: the generator",
    ),
    (
        "pytorch_struct",
        own(
            lambda small: (
                small_networks.LinearChain(100, 16 if small else 512, 4 if small else 32),
                (torch.randint(100, (2 if small else 200, 8 if small else 24)),),
            )
        ),
        "our own: a linear chain",
    ),
    (
        "pytorch_unet",
        own(
            lambda small: (
                small_networks.UNet(3, 2, 4 if small else 64),
                (torch.randn(1, 3, *((32, 48) if small else (640, 960))),),
            )
        ),
        "our own",
    ),
    ("resnet152", timm("resnet152", 32), _AS_TORCHVISION),
    ("resnet18", timm("resnet18", 16), _AS_TORCHVISION),
    ("resnet50", timm("resnet50", 32), _AS_TORCHVISION),
    ("resnext50_32x4d", timm("resnext50_32x4d", 8), _AS_TORCHVISION),
    ("shufflenet_v2_x1_0", classifier(small_networks.ShuffleNet, 128), "our own, as torchvision's"),
    ("soft_actor_critic", own(sac), "our own"),
    ("speech_transformer", speech, "near: transformers' Speech2Text"),
    ("squeezenet1_1", classifier(small_networks.SqueezeNet, 32), "our own, as torchvision's"),
    ("timm_efficientdet", None, "needs effdet, which neither transformers nor timm contains"),
    ("timm_efficientnet", timm("efficientnet_b0", 32), ""),
    ("timm_nfnet", timm("dm_nfnet_f0", 128, 192), ""),
    ("timm_regnet", timm("regnety_120", 32), ""),
    ("timm_resnest", timm("resnest14d", 32), ""),
    ("timm_vision_transformer", timm("vit_small_patch16_224", 32), ""),
    ("timm_vision_transformer_large", timm("vit_giant_patch14_224", 32), ""),
    ("timm_vovnet", timm("vovnet39a", 32), ""),
    (
        "tts_angular",
        own(
            lambda small: (
                small_networks.SpeakerEncoder(24 if small else 768, 1 if small else 3),
                (torch.randn(2 if small else 64, 8 if small else 50, 40),),
            )
        ),
        "our own",
    ),
    ("vgg16", classifier(small_networks.VGG16, 64), "our own, as torchvision's"),
    ("vision_maskrcnn", None, "needs torchvision with its compiled operators"),
    (
        "yolov3",
        own(
            lambda small: (
                small_networks.DarkNet(4 if small else 32, (1, 1, 1, 1, 1) if small else (1, 2, 8, 8, 4)),
                (images(1 if small else 8, 64 if small else 384),),
            )
        ),
        "our own",
    ),
]
MODELS = [
    ZooModel(
        name=name,
        suite="torchbench",
        build=build,
        tolerance=8e-2
        if name in ("soft_actor_critic", "yolov3", "squeezenet1_1", "shufflenet_v2_x1_0")
        else 1e-3,
        note=note if build is not None else "",
        missing="" if build is not None else note,
    )
    for name, build, note in _ROWS
]
