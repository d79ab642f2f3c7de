"""A character-level GPT on the standard library's sources, as a training job: one process, DDP or FSDP2.

python examples/train/char_gpt.py
torchrun --nproc-per-node 2 examples/train/char_gpt.py --way fsdp --checkpoints /tmp/char_gpt
torchrelay train examples/train/char_gpt.py --workers 2 -- --way ddp
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchrelay import train
from torchrelay.examples.char_gpt import CharGPT, standard_library
from torchrelay.examples.harness.stopwatch import write_json

# Absolute: this file is also run by its path, where a relative import has no parent.
from torchrelay.examples.train import ranks


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text in windows (T,), each with the characters that follow its own."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1]
        return window[:-1], window[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ranks.add_options(parser)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="of all ranks together")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0, help="above 0 each rank drops its own")
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    args = parser.parse_args()

    device, way = ranks.begin(args.device, args.way)
    torch.manual_seed(args.seed)  # all ranks begin with the same weights
    # Threads that add up an embedding's gradient in whatever order they come would show in the losses' last digits.
    torch.use_deterministic_algorithms(device.type == "cpu")
    model = CharGPT(
        layers=args.layers, width=args.width, heads=args.heads, context=args.context, dropout=args.dropout
    ).to(device)
    model = ranks.spread(model, way, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    batches = train.batches(
        Windows(standard_library(limit=1_000_000), args.context), args.batch, seed=args.seed
    )

    checkpoints = train.Checkpoints(args.checkpoints) if args.checkpoint_every else None
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": batches}
    start = (checkpoints.restore(**state) if checkpoints else None) or 0
    net = ranks.compiled(model, args.backend)
    losses: list[Tensor] = []
    for step, (text, targets) in enumerate(batches, start):
        if step >= args.steps:
            break
        with train.autocast(device.type):
            _, loss = net(text.to(device), targets.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        train.report(step=step, loss=losses[-1], tokens=text.numel())
        if step % 20 == 0 and ranks.first_rank():
            print(f"step {step:4d}  loss {loss.item():.5f}", flush=True)
        stop = train.should_stop()
        if checkpoints and (stop or (step + 1) % args.checkpoint_every == 0):
            checkpoints.save(step + 1, **state)
        if stop:
            break
    if checkpoints:
        checkpoints.wait()
    means = ranks.mean_over_ranks(losses)
    if ranks.first_rank():
        write_json(args.json, {"start": start, "losses": means})
    ranks.end()


if __name__ == "__main__":
    main()
