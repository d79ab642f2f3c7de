"""The tables of a block mask (FlexAttention): which blocks of the scores a mask touches, by its mask_mod.

ATen takes the mask from mask_mod alone; compiled code skips the blocks that the tables leave out. So the two agree only
where the tables say what mask_mod says, as torch.nn.attention.flex_attention.create_block_mask makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from msgspec import Struct

from ...request.allowed_names import words
from ...torch_internals.dynamo.operators import all_nodes


class BlockMask(Struct, frozen=True):
    """The block mask of one call of flex_attention. tables: by their place in it, for rows of queries and for rows of
    keys: how many blocks of a row there are, and which; first of those that mask_mod(b, h, q, kv) decides on, then of
    full ones. lengths, block: of queries and of keys."""

    tables: dict[int, torch.Tensor]
    mask_mod: Callable[..., Any]
    lengths: tuple[int, int]
    block: tuple[int, int]

    def has_tables_of_mask_mod(self) -> bool:
        """Whether the blocks that the tables leave out are empty, and those that they call full are."""
        wanted = self._blocks()
        for first, blocks in ((_KV, wanted), (_Q, tuple(each.transpose(-1, -2) for each in wanted))):
            partial, full = self._dense(first), self._dense(first + 2)
            if partial is None:
                continue
            some, all_of_it = blocks
            if partial.shape != some.shape or (full is not None and bool((full & ~all_of_it).any())):
                return False
            if bool((some & ~(partial if full is None else partial | full)).any()):
                return False
        return True

    def tables_of_mask_mod(self) -> dict[int, torch.Tensor] | None:
        """What the tables must hold, by place; None where they have too few entries for it."""
        some, full = self._blocks()
        found: dict[int, torch.Tensor] = {}
        for first in (_KV, _Q):
            if first not in self.tables:
                continue
            separate = first + 2 in self.tables
            kinds = {first: some & ~full if separate else some} | ({first + 2: full} if separate else {})
            for place, blocks in kinds.items():
                dense = (blocks if first == _KV else blocks.transpose(-1, -2)).int()
                counts, indices = self.tables[place], self.tables[place + 1]
                order = dense.argsort(dim=-1, descending=True, stable=True)
                if order.shape[:-1] != indices.shape[:-1] or int(dense.sum(-1).max()) > indices.shape[-1]:
                    return None
                found[place] = dense.sum(-1).to(counts.dtype)
                width = min(order.shape[-1], indices.shape[-1])
                found[place + 1] = torch.zeros_like(indices)
                found[place + 1][..., :width] = order[..., :width].to(indices.dtype)
        return found

    def _blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each block, whether mask_mod allows any of its scores, and whether all."""
        from torch.nn.attention.flex_attention import create_mask

        counts = self.tables[_KV]
        mask = create_mask(self.mask_mod, counts.shape[0], counts.shape[1], *self.lengths, counts.device)
        padding = [-length % block for length, block in zip(self.lengths, self.block, strict=True)]
        mask = torch.nn.functional.pad(mask, (0, padding[1], 0, padding[0]))
        rows, columns = (size // block for size, block in zip(mask.shape[-2:], self.block, strict=True))
        parts = mask.view(*mask.shape[:2], rows, self.block[0], columns, self.block[1])
        return parts.any(5).any(3), parts.all(5).all(3)

    def _dense(self, table: int) -> torch.Tensor | None:
        """The blocks that a table names; None without such a table, or where it names what there is not."""
        if table not in self.tables:
            return None
        counts, indices = self.tables[table], self.tables[table + 1]
        columns = -(-self.lengths[1 if table < _Q else 0] // self.block[1 if table < _Q else 0])
        named = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
        inside = torch.where(named & (indices >= 0) & (indices < columns), indices, columns).long()
        dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
        return dense.scatter_(-1, inside, True)[..., :columns]


_KV, _Q = 2, 6
"""The places of the first tables; then come their indices, and the two of full blocks."""


def is_flex_attention(operator: Any) -> bool:
    return (
        getattr(operator, "__name__", "") == "flex_attention"
        and getattr(operator, "namespace", "") == "higher_order"
    )


def is_called(gm: torch.fx.GraphModule) -> bool:
    return any(is_flex_attention(node.target) for node in gm.graph.nodes)


def is_hidden(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph inside the graph calls flex_attention, as under torch.utils.checkpoint."""
    return any(is_flex_attention(node.target) and node.graph is not gm.graph for node in all_nodes(gm))


def block_mask_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockMask:
    """The block mask in the arguments of a call of the operator flex_attention."""
    named = dict(zip(_PARAMETERS, args, strict=False)) | dict(kwargs)
    given = named["block_mask"]
    buffers = tuple(named.get("mask_mod_other_buffers") or ())
    tables = {place: given[place] for place in range(_KV, 10) if isinstance(given[place], torch.Tensor)}
    graph = given[-1]
    return BlockMask(
        tables,
        lambda b, h, q, kv: graph(b, h, q, kv, *buffers),
        (int(given[0]), int(given[1])),
        (int(given[-3]), int(given[-2])),
    )


_PARAMETERS = words(
    "query key value score_mod block_mask scale kernel_options score_mod_other_buffers mask_mod_other_buffers"
)
