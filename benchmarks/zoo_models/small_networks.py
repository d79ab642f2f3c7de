"""TorchBench's models that no package has: compact networks of the published architectures, of our own.

Each class names its paper. Small ones are narrower; real ones have the published widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, norm: type[nn.Module] | None = nn.BatchNorm2d,
         activation: type[nn.Module] | None = nn.ReLU) -> nn.Sequential:  # fmt: skip
    """Convolution, norm and activation."""
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=norm is None)]
    layers += [norm(outputs)] if norm is not None else []
    layers += [activation()] if activation is not None else []
    return nn.Sequential(*layers)


def mlp(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU, *, last: bool = False) -> nn.Sequential:
    """Linear layers with activations between them; `last`: and after them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*(layers if last else layers[:-1]))


class AlexNet(nn.Sequential):
    """Krizhevsky 2014, as torchvision has it."""

    def __init__(self) -> None:
        pool = nn.MaxPool2d(3, 2)
        super().__init__(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), pool, nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), pool),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), pool, nn.AdaptiveAvgPool2d(6), nn.Flatten()),
            mlp([256 * 36, 4096, 4096, 1000]),
        )


class VGG16(nn.Sequential):
    """Simonyan and Zisserman 2014, as torchvision has it."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        head = mlp([512 * 49, 4096, 4096, 1000])
        super().__init__(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), head)


class Fire(nn.Module):
    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1, self.expand3 = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1(x).relu(), self.expand3(x).relu()], 1)


class SqueezeNet(nn.Sequential):
    """Iandola et al. 2016, version 1.1, as torchvision has it."""

    def __init__(self) -> None:
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        super().__init__(
            *(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool, Fire(64, 16, 64), Fire(128, 16, 64), pool),
            *(Fire(128, 32, 128), Fire(256, 32, 128), pool, Fire(256, 48, 192), Fire(384, 48, 192)),
            *(Fire(384, 64, 256), Fire(512, 64, 256), nn.Conv2d(512, 1000, 1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )


class ShuffleUnit(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.stride = stride
        entering = inputs if stride == 2 else half

        def depthwise(channels: int) -> list[nn.Module]:
            grouped = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
            return [grouped, nn.BatchNorm2d(channels)]

        self.left = nn.Sequential(*depthwise(inputs), conv(inputs, half, 1)) if stride == 2 else nn.Identity()
        self.right = nn.Sequential(conv(entering, half, 1), *depthwise(half), conv(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x, x) if self.stride == 2 else x.chunk(2, 1)
        out = torch.cat([self.left(left), self.right(right)], 1)
        batch, channels, height, width = out.shape
        return out.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(out.shape)


class ShuffleNet(nn.Sequential):
    """Ma et al. 2018, version 2, width 1.0."""

    def __init__(self) -> None:
        stages: list[nn.Module] = []
        inputs = 24
        for outputs, repeats in ((116, 4), (232, 8), (464, 4)):
            stages += [
                ShuffleUnit(inputs if i == 0 else outputs, outputs, 2 if i == 0 else 1)
                for i in range(repeats)
            ]
            inputs = outputs
        head = [conv(464, 1024, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
        super().__init__(conv(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1), *stages, *head)


class UNet(nn.Module):
    """Ronneberger et al. 2015, bilinear; also the flow networks of Super SloMo (Jiang et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, width: int, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)] + [width * 2 ** (depth - 1)]
        double = [
            nn.Sequential(conv(a, b), conv(b, b)) for a, b in zip([inputs, *widths], widths, strict=False)
        ]
        self.down = nn.ModuleList(double)
        ups = [(2 * widths[level], widths[max(level - 1, 0)]) for level in reversed(range(depth))]
        self.up = nn.ModuleList(nn.Sequential(conv(a, b), conv(b, b)) for a, b in ups)
        self.head = nn.Conv2d(ups[-1][1], outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else functional.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True)
            x = block(torch.cat([kept.pop(), x], 1))
        out: Tensor = self.head(x)
        return out


class SuperSloMo(nn.Module):
    """Jiang et al. 2018: flows of two frames, and the frame between them from warped ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.flows, self.between = UNet(6, 4, width), UNet(16, 5, width)

    @staticmethod
    def warp(image: Tensor, flow: Tensor) -> Tensor:
        _, _, height, width = image.shape
        y, x = torch.meshgrid(
            torch.arange(height, device=image.device), torch.arange(width, device=image.device), indexing="ij"
        )
        across = 2 * ((x + flow[:, 0]) / (width - 1) - 0.5)
        down = 2 * ((y + flow[:, 1]) / (height - 1) - 0.5)
        return functional.grid_sample(
            image, torch.stack([across, down], 3).to(image.dtype), align_corners=True
        )

    def forward(self, first: Tensor, last: Tensor) -> Tensor:
        flow = self.flows(torch.cat([first, last], 1))
        ahead, back = flow[:, :2], flow[:, 2:]
        to_first, to_last = -0.25 * ahead + 0.25 * back, 0.25 * ahead - 0.25 * back
        warped = self.warp(first, to_first), self.warp(last, to_last)
        seen = self.between(torch.cat([first, last, ahead, back, *warped], 1))
        near = seen[:, 4:5].sigmoid()
        from_first = near * self.warp(first, to_first + seen[:, :2])
        from_last = (1 - near) * self.warp(last, to_last + seen[:, 2:4])
        return 0.5 * (from_first + from_last)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(channels, channels, norm=norm), conv(channels, channels, norm=norm, activation=None)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


class ImageGenerator(nn.Sequential):
    """Johnson et al. 2016, in CycleGAN (Zhu et al. 2017), StarGAN (Choi et al. 2018) and Background Matting."""

    def __init__(
        self, inputs: int, width: int, blocks: int, outputs: int = 3, norm: Any = nn.InstanceNorm2d
    ) -> None:
        ups = [
            nn.Sequential(nn.ConvTranspose2d(a, a // 2, 4, 2, 1), norm(a // 2), nn.ReLU())
            for a in (4 * width, 2 * width)
        ]
        super().__init__(
            *(conv(inputs, width, 7, norm=norm), conv(width, 2 * width, 3, 2, norm=norm)),
            conv(2 * width, 4 * width, 3, 2, norm=norm),
            *(ResidualBlock(4 * width, norm) for _ in range(blocks)),
            *(*ups, nn.Conv2d(width, outputs, 7, padding=3), nn.Tanh()),
        )


class BackgroundMatting(nn.Module):
    """Sengupta et al. 2020: encoders of image, background and segmentation, and decoders of alpha and foreground."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def encoder(inputs: int) -> nn.Sequential:
            return nn.Sequential(
                conv(inputs, width, 7), conv(width, 2 * width, 3, 2), conv(2 * width, 4 * width, 3, 2)
            )

        def decoder(outputs: int) -> nn.Sequential:
            up = nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=True)
            return nn.Sequential(
                *(up, conv(4 * width, 2 * width), up, conv(2 * width, width)),
                *(nn.Conv2d(width, outputs, 7, padding=3), nn.Tanh()),
            )

        self.encoders = nn.ModuleList(encoder(channels) for channels in (3, 3, 1))
        self.mixers = nn.ModuleList(conv(8 * width, width, 1) for _ in range(2))
        trunk = [ResidualBlock(4 * width, nn.BatchNorm2d) for _ in range(7)]
        self.trunk = nn.Sequential(conv(6 * width, 4 * width, 1), *trunk)
        self.alpha, self.foreground = decoder(1), decoder(3)

    def forward(self, image: Tensor, background: Tensor, segmentation: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            encode(x) for encode, x in zip(self.encoders, (image, background, segmentation), strict=True)
        ]
        mixed = [
            mix(torch.cat([parts[0], other], 1)) for mix, other in zip(self.mixers, parts[1:], strict=True)
        ]
        x = self.trunk(torch.cat([parts[0], *mixed], 1))
        return self.alpha(x), self.foreground(x)


class Discriminator(nn.Sequential):
    """Radford et al. 2015 (DCGAN): an image's score by strided convolutions."""

    def __init__(self, side: int, width: int, inputs: int = 3) -> None:
        layers: list[nn.Module] = []
        channels, reached = inputs, width
        while side > 4:
            layers.append(conv(channels, reached, 4, 2, activation=nn.LeakyReLU))
            channels, reached, side = reached, min(reached * 2, 8 * width), (side + 2 * 2 - 4) // 2 + 1
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1), nn.Sigmoid())


class DLRM(nn.Module):
    """Naumov et al. 2019: embeddings, their products with each other, and two perceptrons."""

    def __init__(self, tables: int, rows: int, width: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = mlp([dense, hidden, width], last=True)
        self.top = mlp([width + (tables + 1) * tables // 2, hidden, hidden, 1])
        self.pairs = tables + 1

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        x = self.bottom(dense)
        seen = [bag(indices[i], offsets[i]) for i, bag in enumerate(self.bags)]
        stacked = torch.stack([x, *seen], 1)
        products = stacked @ stacked.transpose(1, 2)
        row, column = torch.tril_indices(self.pairs, self.pairs, -1, device=x.device)
        return self.top(torch.cat([x, products[:, row, column]], 1)).sigmoid()


class SoftActorCritic(nn.Module):
    """Haarnoja et al. 2018: a tanh-normal policy and two critics."""

    def __init__(self, state: int, action: int, hidden: int) -> None:
        super().__init__()
        self.actor = mlp([state, hidden, hidden, 2 * action])
        self.critics = nn.ModuleList(mlp([state + action, hidden, hidden, 1]) for _ in range(2))

    def forward(self, state: Tensor, noise: Tensor) -> Tensor:
        mean, spread = self.actor(state).chunk(2, -1)
        spread = (-5 + 3.5 * (spread.tanh() + 1)).exp()
        raw = mean + spread * noise
        likely = (-0.5 * noise**2 - spread.log() - 2 * (0.6931 - raw - functional.softplus(-2 * raw))).sum(
            -1, True
        )
        values = [critic(torch.cat([state, raw.tanh()], -1)) for critic in self.critics]
        return 0.1 * likely - torch.minimum(*values)


class DrQ(nn.Module):
    """Yarats et al. 2020: pixels, shifted by chance, encoded for an actor and a critic."""

    def __init__(self, channels: int, action: int, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(channels, width, 3, 2), *(nn.Conv2d(width, width, 3) for _ in range(3))]
        self.encoder = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(50), nn.LayerNorm(50), nn.Tanh())
        self.rest = SoftActorCritic(50, action, 1024 if width > 16 else 32)

    def forward(self, image: Tensor, shift: Tensor, noise: Tensor) -> Tensor:
        side = image.shape[-1]
        padded = functional.pad(image, (4, 4, 4, 4), mode="replicate")
        rows = shift[:, :1] + torch.arange(side, device=image.device)
        columns = shift[:, 1:] + torch.arange(side, device=image.device)
        batch = torch.arange(len(image), device=image.device)[:, None, None]
        moved = padded[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        out: Tensor = self.rest(self.head(self.encoder(moved)), noise)
        return out


class DarkNet(nn.Module):
    """Redmon and Farhadi 2018 (YOLOv3): Darknet-53 and detection at three scales."""

    def __init__(self, width: int, repeats: Sequence[int], outputs: int = 255) -> None:
        super().__init__()

        class Residual(nn.Module):
            def __init__(self, channels: int) -> None:
                super().__init__()
                self.body = nn.Sequential(leaky(channels, channels // 2, 1), leaky(channels // 2, channels))

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = x + self.body(x)
                return out

        def leaky(a: int, b: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
            return conv(a, b, kernel, stride, activation=nn.LeakyReLU)

        self.stem = leaky(3, width)
        widths = [width * 2**level for level in range(6)]
        self.stages = nn.ModuleList(
            nn.Sequential(leaky(a, b, 3, 2), *(Residual(b) for _ in range(count)))
            for a, b, count in zip(widths, widths[1:], repeats, strict=False)
        )
        entering = [widths[5], widths[4] + widths[3], widths[3] + widths[2]]
        self.necks = nn.ModuleList(
            nn.Sequential(leaky(a, b, 1), leaky(b, 2 * b), leaky(2 * b, b, 1))
            for a, b in zip(entering, (widths[4], widths[3], widths[2]), strict=True)
        )
        self.heads = nn.ModuleList(
            nn.Sequential(leaky(b, 2 * b), nn.Conv2d(2 * b, outputs, 1))
            for b in (widths[4], widths[3], widths[2])
        )
        self.lateral = nn.ModuleList(leaky(b, b // 2, 1) for b in (widths[4], widths[3]))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, seen = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        found = []
        for index, (neck, head) in enumerate(zip(self.necks, self.heads, strict=True)):
            if index:
                x = functional.interpolate(self.lateral[index - 1](x), scale_factor=2.0)
                x = torch.cat([x, seen[-1 - index]], 1)
            x = neck(x)
            found.append(head(x))
        return found


class SpeakerEncoder(nn.Module):
    """Wan et al. 2018 (tts_angular): an LSTM with projections, normalized at the last step."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, width, layers, batch_first=True, proj_size=width // 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        return functional.normalize(out[:, -1], dim=1)


class Demucs(nn.Module):
    """Défossez et al. 2019: a U-Net of one-dimensional convolutions with an LSTM in its middle."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [2, *(width * 2**level for level in range(depth))]
        pairs = list(pairwise(widths))
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 8, 4), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(1))
            for a, b in pairs
        )
        self.lstm = nn.LSTM(widths[-1], widths[-1], 2, bidirectional=True)
        self.mix = nn.Linear(2 * widths[-1], widths[-1])
        self.decoder = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(b, 2 * b, 3, padding=1), nn.GLU(1), nn.ConvTranspose1d(b, a if a > 2 else 8, 8, 4)
            )
            for a, b in reversed(pairs)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.encoder:
            x = layer(x)
            kept.append(x)
        x = self.mix(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for index, layer in enumerate(self.decoder):
            skip = kept.pop()
            length = min(x.shape[-1], skip.shape[-1])
            x = layer((x if index == 0 else x.relu())[..., :length] + skip[..., :length])
        return x


class Transformer(nn.Module):
    """Vaswani et al. 2017, by PyTorch's own layers."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, 8, layers, layers, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        return self.head(self.body(self.source(source), self.target(target), tgt_mask=mask))


class MoCo(nn.Module):
    """He et al. 2019, on one process: a query against its key and a queue; the key's encoder follows slowly."""

    def __init__(self, query: nn.Module, key: nn.Module, width: int, queue: int) -> None:
        super().__init__()
        self.query, self.key = query, key
        for own, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
            other.data.copy_(own.data)
            other.requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(width, queue), dim=0))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        query = functional.normalize(self.query(first), dim=1)
        with torch.no_grad():
            for own, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.mul_(0.999).add_(own, alpha=0.001)
            key = functional.normalize(self.key(second), dim=1)
        near = (query * key).sum(1, keepdim=True)
        logits = torch.cat([near, query @ self.queue.clone()], 1) / 0.07
        return functional.cross_entropy(
            logits, torch.zeros(len(query), dtype=torch.long, device=query.device)
        )


class LinearChain(nn.Module):
    """A linear-chain conditional random field over an LSTM (Rush 2020, torch-struct): its log partition function."""

    def __init__(self, vocabulary: int, width: int, tags: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, batch_first=True)
        self.emit, self.move = nn.Linear(width, tags), nn.Parameter(torch.randn(tags, tags) / tags)

    def forward(self, text: Tensor) -> Tensor:
        scores = self.emit(self.lstm(self.embed(text))[0])
        total = scores[:, 0]
        for step in range(1, text.shape[1]):
            total = (total[:, :, None] + self.move).logsumexp(1) + scores[:, step]
        return total.logsumexp(1)
