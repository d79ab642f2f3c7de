"""Random values as compiled kernels draw them: Philox-4x32-10 at (seed, position), computed with tensors.

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
"""Positions computed at once: so many that they fit into a CPU's cache, or take little of a GPU's memory."""

RngVariant = Literal["cpu", "triton", "triton4x"]
"""How a kernel makes a number from (seed, position). cpu: C++. triton: tl.rand, whose key has the whole seed.
triton4x: triton_helpers.rand4x (torch 2.13), where four positions share a counter and take one word each."""


class CannotReplay(Exception):
    """The graph cannot be run with ATen as compiled code runs it, so the two cannot be compared."""


def uniform(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant = "cpu") -> torch.Tensor:
    """What a kernel draws for `prims.inductor_random(size, seed, "rand")`: float32 in [0, 1) of shape `size`."""
    words = _words(size, seed, spelled, 1)
    return _to_float(words[0], spelled).reshape(tuple(size))


def normal(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant = "cpu") -> torch.Tensor:
    """What a kernel draws for "randn": float32 of shape `size`, standard normal, by the Box-Muller transform."""
    first, second = (_to_float(word, spelled).double() for word in _words(size, seed, spelled, 2))
    if spelled == "cpu":
        first, second = 1 - first, 1 - second
    else:
        first = first.clamp_(min=1e-7)
    angle = second.mul_(2.0 * math.pi)
    if spelled == "triton4x":  # two words make two values
        odd = torch.arange(len(angle), device=angle.device) % 2 == 1
        direction = torch.where(odd, torch.sin(angle), torch.cos(angle))
    else:
        direction = torch.cos(angle)
    return torch.sqrt(-2.0 * torch.log(first)).mul(direction).float().reshape(tuple(size))


def _to_float(word: torch.Tensor, spelled: RngVariant) -> torch.Tensor:
    if spelled == "cpu":
        return (word & 0x7FFFFFFF).float() * 4.6566127342e-10
    negative = word > 0x7FFFFFFF  # the sign bit of a 32-bit word x; Triton then takes -x - 1
    return torch.where(negative, _MASK - word, word).float() * 4.6566127342e-10


def _words(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant, count: int) -> list[torch.Tensor]:
    """The `count` 32-bit words from which each position's number is made: flat tensors of int64."""
    total = math.prod(size)
    if spelled != "triton4x":
        return _philox(total, seed, spelled, count)
    if 1 < total < 4:  # a small block may not draw four at once
        raise CannotReplay(f"a kernel may draw {total} random values in either of two ways")
    four = _philox((total + 3) // 4, seed, spelled, 4)
    if count == 1:
        return [torch.stack(four, dim=1).reshape(-1)[:total]]
    a, b, c, d = four
    return [torch.stack(pair, dim=1).reshape(-1)[:total] for pair in ((a, a, c, c), (b, b, d, d))]


def _philox(total: int, seed: torch.Tensor, spelled: RngVariant, count: int) -> list[torch.Tensor]:
    """The first `count` 32-bit words (as int64) of Philox-4x32-10 for each position below `total`.

    The counter is (position, 0, 0, 0). The key is the seed's lower and upper half; C++ has 0 as the upper one.
    Computed in pieces, because memory bandwidth would limit larger tensors.
    """
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
    """Philox' ten rounds. int64 holds the 64 bits of an unsigned product; its sign is the highest bit."""
    a, b, c, d = positions, *(torch.zeros_like(positions) for _ in range(3))
    for _ in range(10):
        left, right = a.mul_(_ROUND_A), c.mul_(_ROUND_B)
        low_left, low_right = left & _MASK, right & _MASK
        a = right.bitwise_right_shift_(32).bitwise_and_(_MASK).bitwise_xor_(b).bitwise_xor_(keys[0])
        c = left.bitwise_right_shift_(32).bitwise_and_(_MASK).bitwise_xor_(d).bitwise_xor_(keys[1])
        b, d = low_right, low_left
        keys = ((keys[0] + _KEY_A) & _MASK, (keys[1] + _KEY_B) & _MASK)
    return a, b, c, d
