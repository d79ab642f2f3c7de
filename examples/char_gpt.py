"""A character-level GPT that learns to write Python, from the standard library's own sources.

python examples/char_gpt.py --backend inductor     # local torch.compile
python examples/char_gpt.py --backend torchrelay   # the one word that changes
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

# Absolute: this file is also run by its path, where a relative import has no parent.
from torchrelay.examples.harness.stopwatch import Stopwatch, pick_device, write_json

VOCABULARY = 128
"""ASCII; anything else becomes a question mark."""


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a normalized residual stream (B, T, C)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(
            self.projection(y.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training
        )
        return x + self.feed_forward(x)


class CharGPT(nn.Module):
    """Logits (B, T, V) of the next character, and the loss when targets are given."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.characters.weight  # tied
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.characters(text) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def write(self, prompt: str, characters: int) -> str:
        """Continue `prompt`, one sampled character at a time."""
        text = _encode(prompt.encode()).to(self.characters.weight.device)[None]
        for _ in range(characters):
            logits, _ = self(text[:, -self.context :])
            text = torch.cat([text, torch.multinomial(logits[:, -1].softmax(-1), 1)], dim=1)
        return "".join(map(chr, text[0].tolist()))


def _encode(source: bytes) -> Tensor:
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    return text.masked_fill(text >= VOCABULARY, ord("?")).long()


def standard_library(limit: int) -> Tensor:
    """The first `limit` characters of this Python's library sources, in the order of their names."""
    parts, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= limit:
            break
    return _encode(b"\n".join(parts)[:limit])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="torchrelay", help="torchrelay, inductor or eager")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--sample", type=int, default=0, help="characters to write at the end")
    parser.add_argument("--json", type=Path, help="write times and losses here")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = pick_device(args.device)
    # Threads that add up an embedding's gradient in whatever order they come would show in the losses' last digits.
    torch.use_deterministic_algorithms(device.type == "cpu")
    text = standard_library(limit=1_000_000)
    order = torch.Generator().manual_seed(args.seed)
    model = CharGPT(
        layers=args.layers, width=args.width, heads=args.heads, context=args.context, dropout=args.dropout
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    watch = Stopwatch()
    compiled = torch.compile(model, backend=args.backend)
    losses: list[float] = []
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.context - 1, (args.batch,), generator=order)
        windows = torch.stack([text[s : s + args.context + 1] for s in starts.tolist()]).to(device)
        with watch.step():
            _, loss = compiled(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.5f}", flush=True)
    print(watch.summary())
    if args.sample:
        print(model.eval().write("def ", args.sample))
    write_json(args.json, watch.record(args.backend, losses))


if __name__ == "__main__":
    main()
