"""A convolutional network with batch norm and dropout on scikit-learn's handwritten digits (8 by 8).

python examples/digits_cnn.py --backend inductor     # local torch.compile
python examples/digits_cnn.py --backend torchrelay   # the one word that changes
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from sklearn.datasets import load_digits
from torch import Tensor, nn

# Absolute: this file is also run by its path, where a relative import has no parent.
from torchrelay.examples.harness.stopwatch import Stopwatch, pick_device, write_json


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class DigitsCNN(nn.Module):
    """Images (B, 1, 8, 8) to logits (B, 10)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            convolution(1, width),
            convolution(width, width),
            nn.MaxPool2d(2),
            convolution(width, 2 * width),
            convolution(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def digits(held_out: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((images, labels) to train on, (images, labels) held out); pixels from 0 to 1."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target, dtype=torch.long)
    return (images[:-held_out], labels[:-held_out]), (images[-held_out:], labels[-held_out:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="torchrelay", help="torchrelay, inductor or eager")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--json", type=Path, help="write times and losses here")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = pick_device(args.device)
    (images, labels), (test_images, test_labels) = digits(held_out=297)
    order = torch.Generator().manual_seed(args.seed)
    model = DigitsCNN(args.width, args.dropout).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    watch = Stopwatch()
    compiled = torch.compile(model, backend=args.backend)
    losses: list[float] = []
    for step in range(args.steps):
        chosen = torch.randint(len(images), (args.batch,), generator=order)
        batch, targets = images[chosen].to(device), labels[chosen].to(device)
        with watch.step():
            loss = F.cross_entropy(compiled(batch), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.5f}", flush=True)
    print(watch.summary())

    model.eval()  # the module itself shares its weights with the compiled one
    with torch.no_grad():
        correct = (model(test_images.to(device)).argmax(1) == test_labels.to(device)).float().mean().item()
    print(f"{correct:.1%} of {len(test_labels)} held-out digits read correctly")
    write_json(args.json, watch.record(args.backend, losses, accuracy=correct))


if __name__ == "__main__":
    main()
