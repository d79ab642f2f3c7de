"""An image classifier on scikit-learn's handwritten digits (8 by 8), as a training job: one process, DDP or FSDP2.

python examples/train/digits.py --checkpoint-every 0
torchrun --nproc-per-node 2 examples/train/digits.py --way ddp --checkpoints /tmp/digits
torchrelay train examples/train/digits.py --workers 2 -- --way fsdp
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchrelay import train
from torchrelay.examples.digits_cnn import digits
from torchrelay.examples.harness.stopwatch import write_json

# Absolute: this file is also run by its path, where a relative import has no parent.
from torchrelay.examples.train import ranks


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    """Normalized by groups of channels, because batch norm would use only each rank's share of the batch."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.GroupNorm(8, channels_out),
        nn.ReLU(),
    )


class Classifier(nn.Module):
    """Images (B, 1, 8, 8) to logits (B, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            convolution(1, width),
            convolution(width, width),
            nn.MaxPool2d(2),
            convolution(width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ranks.add_options(parser)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=60, help="of all ranks together")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument(
        "--float64", action="store_true", help="so that ways can be compared by each step's loss"
    )
    args = parser.parse_args()

    device, way = ranks.begin(args.device, args.way)
    torch.manual_seed(args.seed)  # all ranks begin with the same weights
    (images, labels), (test_images, test_labels) = digits(held_out=297)
    dtype = torch.float64 if args.float64 else torch.float32
    images, test_images = images.to(dtype), test_images.to(dtype)
    whole = Classifier(args.width).to(device, dtype)
    model = ranks.spread(whole, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = train.batches(TensorDataset(images, labels), args.batch, seed=args.seed, epochs=args.epochs)

    checkpoints = train.Checkpoints(args.checkpoints) if args.checkpoint_every else None
    state = {"model": model, "optimizer": optimizer, "loader": batches}
    start = (checkpoints.restore(**state) if checkpoints else None) or 0
    net = ranks.compiled(model, args.backend)
    losses: list[Tensor] = []
    for step, (batch, targets) in enumerate(batches, start):
        with train.autocast(device.type):
            loss = F.cross_entropy(net(batch.to(device)), targets.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        train.report(step=step, loss=losses[-1], samples=len(batch))
        stop = train.should_stop()
        if checkpoints and (stop or (step + 1) % args.checkpoint_every == 0):
            checkpoints.save(step + 1, **state)
        if stop:
            break
    if checkpoints:
        checkpoints.wait()
    means = ranks.mean_over_ranks(losses)

    with torch.no_grad():  # all ranks: FSDP2 gathers the weights for it
        correct = (model(test_images.to(device)).argmax(1) == test_labels.to(device)).float().mean().item()
    if ranks.first_rank():
        print(f"{correct:.1%} of {len(test_labels)} held-out digits read correctly")
        write_json(args.json, {"start": start, "losses": means, "accuracy": correct})
    ranks.end()


if __name__ == "__main__":
    main()
