"""Inputs that belong together are drawn together: the tables of a block mask, sorted boundaries, offsets of bags.

Eager takes the mask of FlexAttention from mask_mod alone; compiled code skips the blocks that its tables leave out.
`skipping` does so here, without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_requests import eager_of, request_of
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from torchrelay.compiler.errors import VerifyFailed
from torchrelay.compiler.pipeline.verification.block_masks import block_mask_of, is_flex_attention
from torchrelay.compiler.pipeline.verification.verify import verify
from torchrelay.compiler.request import schema

Graph = Callable[..., Any]


def skipping(request: schema.GraphRequest) -> Graph:
    """The graph as compiled code runs it: scores in blocks that the tables leave out count for nothing, those in full
    blocks are not masked."""
    gm = eager_of(request)

    class ByTables(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if not is_flex_attention(target):
                return super().call_function(target, args, kwargs)
            mask = block_mask_of(args, kwargs)
            partial, full = mask._dense(2), mask._dense(4)
            assert partial is not None
            full = torch.zeros_like(partial) if full is None else full

            def by_tables(b: Any, h: Any, q: Any, kv: Any, *buffers: Any) -> Any:
                at: Any = (b.clamp(max=partial.shape[0] - 1), h.clamp(max=partial.shape[1] - 1))
                at = (*at, q // mask.block[0], kv // mask.block[1])
                return full[at] | (partial[at] & args[4][-1](b, h, q, kv, *buffers))

            score: Any = (*args[4][:-1], by_tables)
            return super().call_function(target, (*args[:4], score, *args[5:]), kwargs)

    return lambda *inputs: ByTables(gm).run(*inputs)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


LENGTHS = torch.tensor([200, 129])
DOCUMENTS = torch.arange(256) // 100
BIAS = torch.randn(4, 256)


def padded(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv < LENGTHS[b]


def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return DOCUMENTS[q] == DOCUMENTS[kv]


def by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() < 64 * (h + 1)


def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + BIAS[h, kv]


def qkv() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 256, 16) for _ in range(3)]


MASKS: dict[str, BlockMask] = {
    "causal": create_block_mask(causal, None, None, 256, 256, device="cpu"),
    "causal, small blocks": create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=32),
    "lengths": create_block_mask(padded, 2, None, 256, 256, device="cpu", BLOCK_SIZE=64),
    "documents": create_block_mask(same_document, None, None, 256, 256, device="cpu", BLOCK_SIZE=32),
    "heads": create_block_mask(by_head, None, 4, 256, 256, device="cpu", BLOCK_SIZE=(64, 32)),
    "longer than a block": create_block_mask(causal, None, None, 250, 256, device="cpu", BLOCK_SIZE=64),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("how", ["argument", "closure"])
def test_code_that_skips_the_blocks_of_a_mask_made_outside_is_right(name: str, how: str) -> None:
    mask, (q, k, v) = MASKS[name], qkv()
    q = q[:, :, : mask.seq_lengths[0]].contiguous()
    request = (
        request_of(lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), q, k, v, mask)
        if how == "argument"
        else request_of(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), q, k, v)
    )
    found = verify(request, skipping(request))
    assert (found.status, found.reason) == ("passed", "")


def test_a_bias_that_score_mod_captures_is_compared() -> None:
    mask = MASKS["documents"]
    request = request_of(lambda q, k, v: flex_attention(q, k, v, score_mod=biased, block_mask=mask), *qkv())
    run = skipping(request)
    assert verify(request, run).status == "passed"
    with pytest.raises(VerifyFailed, match="output 0 differs"):
        verify(request, lambda *inputs: run(*(x * 0 if x.dim() == 2 else x for x in inputs)))


def test_code_that_skips_a_block_too_many_is_wrong() -> None:
    mask = MASKS["causal, small blocks"]
    request = request_of(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), *qkv())
    run = skipping(request)

    def drops_one(*inputs: Any) -> Any:
        counts = next(x for x in inputs if x.dtype == torch.int32 and x.dim() == 3)
        changed = [(x - 1).clamp(min=0) if x is counts else x for x in inputs]
        return run(*changed)

    with pytest.raises(VerifyFailed, match="output 0 differs"):
        verify(request, drops_one)


def test_a_mask_whose_tables_say_more_than_its_mask_mod_is_not_refused() -> None:
    """Eager does not know what the tables leave out: nothing can be said of the code."""
    tables = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(*tables, seq_lengths=(256, 256))
    request = request_of(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), *qkv())
    found = verify(request, skipping(request))
    assert found.status == "skipped" and "no room for what its mask_mod says" in found.reason


def test_a_mask_in_a_checkpoint_is_not_refused() -> None:
    mask = MASKS["causal, small blocks"]

    def program(q: Any, k: Any, v: Any) -> Any:
        return checkpoint(lambda q: flex_attention(q, k, v, block_mask=mask), q, use_reentrant=False)

    request = request_of(program, *qkv())
    eager = eager_of(request)
    wrong = verify(request, lambda *inputs: [y * 1.5 for y in eager(*inputs)])
    assert wrong.status == "skipped" and "block mask" in wrong.reason
    assert verify(request, eager).status == "passed"


def test_boundaries_are_sorted_and_the_offsets_of_bags_rise() -> None:
    def program(x: Any, edges: Any, table: Any, items: Any, offsets: Any) -> Any:
        rows = torch.bucketize(x, edges)
        return table[rows], F.embedding_bag(items, table, offsets), torch.searchsorted(edges, x)

    request = request_of(
        program,
        torch.randn(8),
        torch.linspace(-1, 1, 6),
        torch.randn(20, 4),
        torch.randint(20, (10,)),
        torch.tensor([0, 3, 3, 7]),
    )
    eager, seen = eager_of(request), []

    def compiled(*inputs: Any) -> Any:
        seen.append([x.clone() for x in inputs])
        return eager(*inputs)

    found = verify(request, compiled)
    assert (found.status, found.reason) == ("passed", "")
    _, edges, _, items, offsets = seen[0]
    assert bool((edges.diff() >= 0).all()) and offsets.tolist() == [0, 2, 5, 7]
    assert items.max() > 5
