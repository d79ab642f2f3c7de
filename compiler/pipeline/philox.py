"""Random values as compiled kernels draw them: Philox-4x32-10 at (seed, position), worked out with tensors.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; ATen/core/PhiloxRNGEngine.h,
triton/language/random.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57


_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


_MASK = 0xFFFFFFFF


_PIECE = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Positions worked out at once: on a CPU what stays in its cache, on a GPU what leaves its memory to others."""


RngVariant = Literal["cpu", "triton", "triton4x"]
"""How a kernel turns (seed, position) into a number: C++; tl.rand, whose key has the whole seed; and
triton_helpers.rand4x (torch 2.13), where four positions share a counter and take a word each."""


class CannotReplay(Exception):
    """ATen itself refused the graph on these inputs; nothing can be said of the compiled form."""


def uniform(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant = "cpu") -> torch.Tensor:
    """float32 in [0, 1) of shape `size`: what a kernel draws for `prims.inductor_random(size, seed, "rand")`."""
    words = _words(size, seed, spelled, 1)
    return _to_float(words[0], spelled).reshape(tuple(size))


def normal(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant = "cpu") -> torch.Tensor:
    """float32 standard normal of shape `size`, by Box-Muller, as kernels do it."""
    first, second = (_to_float(word, spelled).double() for word in _words(size, seed, spelled, 2))
    if spelled == "cpu":
        first, second = 1 - first, 1 - second
    else:
        first = first.clamp_(min=1e-7)
    angle = second.mul_(2.0 * math.pi)
    if spelled == "triton4x":  # a pair of words makes a pair of values
        odd = torch.arange(len(angle), device=angle.device) % 2 == 1
        direction = torch.where(odd, torch.sin(angle), torch.cos(angle))
    else:
        direction = torch.cos(angle)
    return torch.sqrt(-2.0 * torch.log(first)).mul(direction).float().reshape(tuple(size))


def _to_float(word: torch.Tensor, spelled: RngVariant) -> torch.Tensor:
    if spelled == "cpu":
        return (word & 0x7FFFFFFF).float() * 4.6566127342e-10
    negative = word > 0x7FFFFFFF  # as a signed word x, of which Triton takes -x - 1
    return torch.where(negative, _MASK - word, word).float() * 4.6566127342e-10


def _words(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant, count: int) -> list[torch.Tensor]:
    """For each position the 32-bit words (as int64, flat) that make its number: `count` of them."""
    total = math.prod(size)
    if spelled != "triton4x":
        return _philox(total, seed, spelled, count)
    if 1 < total < 4:  # the block may be too small for four at once
        raise CannotReplay(f"a kernel may draw {total} random values in either of two ways")
    four = _philox((total + 3) // 4, seed, spelled, 4)
    if count == 1:
        return [torch.stack(four, dim=1).reshape(-1)[:total]]
    a, b, c, d = four
    return [torch.stack(pair, dim=1).reshape(-1)[:total] for pair in ((a, a, c, c), (b, b, d, d))]


def _philox(total: int, seed: torch.Tensor, spelled: RngVariant, count: int) -> list[torch.Tensor]:
    """The first `count` 32-bit words (in int64) for each counter below `total`: Philox-4x32-10 of counter
    (position, 0, 0, 0) and key (seed, 0), Triton's with the seed's upper half in it. In pieces, or memory would be
    what takes the time."""
    whole = int(seed)
    key = (whole & _MASK, 0 if spelled == "cpu" else (whole >> 32) & _MASK)
    words = [torch.empty(total, dtype=torch.int64, device=seed.device) for _ in range(count)]
    piece = _PIECE[seed.device.type]
    for start in range(0, total, piece):
        positions = torch.arange(
            start, min(start + piece, total), dtype=torch.int64, device=seed.device
        ).bitwise_and_(_MASK)
        for word, value in zip(words, _rounds(positions, key), strict=False):
            word[start : start + piece] = value
    return words


def _rounds(positions: torch.Tensor, keys: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Philox' ten rounds. A 64-bit product keeps its bits in int64, whose sign then stands for the highest."""
    a, b, c, d = positions, *(torch.zeros_like(positions) for _ in range(3))
    for _ in range(10):
        left, right = a.mul_(_ROUND_A), c.mul_(_ROUND_B)
        low_left, low_right = left & _MASK, right & _MASK
        a = right.bitwise_right_shift_(32).bitwise_and_(_MASK).bitwise_xor_(b).bitwise_xor_(keys[0])
        c = left.bitwise_right_shift_(32).bitwise_and_(_MASK).bitwise_xor_(d).bitwise_xor_(keys[1])
        b, d = low_right, low_left
        keys = ((keys[0] + _KEY_A) & _MASK, (keys[1] + _KEY_B) & _MASK)
    return a, b, c, d
