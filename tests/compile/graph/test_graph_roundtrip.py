"""Graphs that Dynamo really makes: each one travels and comes back the same, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
import torch.utils.checkpoint as checkpointing
from torch import nn
from torchrelay.compiler.errors import Unsupported
from torchrelay.compiler.graph import decode, encode
from torchrelay.compiler.request import schema

Program = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def captured(program: Program, *args: Any, **options: Any) -> list[torch.fx.GraphModule]:
    """The graphs Dynamo hands to a backend while `program` runs on `args`."""
    found: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch.compile(program, backend=backend, **options)(*args)
    assert found
    return found


def targets(encoded: schema.Graph) -> set[str]:
    below = [targets(child) for child in encoded.subgraphs]
    return {node.target for node in encoded.nodes}.union(*below)


def travels(program: Program, *args: Any, **options: Any) -> set[str]:
    """Assert that every graph of `program` travels; the names of the operators in them."""
    found: set[str] = set()
    for gm in captured(program, *args, **options):
        encoded, constants, *_ = encode.encode_graph(gm)
        back = decode.decode_graph(encoded, constants, device_index={}, symbols={})
        assert encode.encode_graph(back)[:2] == (encoded, constants)
        found |= targets(encoded)
    return found


# --- transformers ------------------------------------------------------------------------------------------

IDS = torch.arange(32).reshape(2, 16) % 90
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "model", "fields"),
    [
        ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 100}),
        ("LlamaConfig", "LlamaForCausalLM", GROUPED),
        ("BertConfig", "BertForMaskedLM", SMALL),
        (
            "DebertaV2Config",
            "DebertaV2ForMaskedLM",
            {**SMALL, "relative_attention": True, "pos_att_type": ["c2p"]},
        ),
        ("MambaConfig", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100}),
        (
            "BloomConfig",
            "BloomForCausalLM",
            {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 100},
        ),
    ],
)
def test_language_models_travel(config: str, model: str, fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, model)(getattr(transformers, config)(**fields)).train()
    travels(lambda ids: made(input_ids=ids, labels=ids).loss, IDS)


@pytest.mark.parametrize(
    ("config", "model", "fields"),
    [
        ("ViTConfig", "ViTModel", {"hidden_size": 32, "num_attention_heads": 4, "patch_size": 8}),
        ("SwinConfig", "SwinModel", {"embed_dim": 16, "depths": [2], "num_heads": [2], "patch_size": 2}),
        ("ConvNextConfig", "ConvNextModel", {"hidden_sizes": [16], "depths": [1], "num_stages": 1}),
    ],
)
def test_vision_models_travel(config: str, model: str, fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "window_size": 4}
    made = getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **fields})).train()
    travels(lambda x: made(pixel_values=x)[0], torch.randn(2, 3, 32, 32))


# --- modules and functions ---------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 32).reshape(4, 8)
W = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad * w.sin(), grad * x * w.cos()


def convolutions(x: torch.Tensor) -> torch.Tensor:
    y = F.max_pool2d(F.relu(torch.conv2d(x, X.reshape(2, 1, 4, 4)), inplace=True), 2)
    y = F.interpolate(F.batch_norm(y, None, None, training=True), scale_factor=2.0, mode="bilinear")
    return F.dropout(F.pad(y, (1, 1, 1, 1), mode="reflect"), 0.2).to(memory_format=torch.channels_last)


def autocast(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ W
    with torch.no_grad():
        z = y.float() * 2
    return y, z


def attention_kernel(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def loops(x: torch.Tensor) -> Any:
    from torch._higher_order_ops import scan, while_loop

    y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    _, z = while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 2), (torch.tensor(0), y))
    return scan(lambda carry, t: (carry + t, carry * t), torch.zeros(8), z)


def flex(x: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + (i - j), block_mask=mask)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpointing.checkpoint(lambda y: (y @ W).relu(), x, use_reentrant=False)  # type: ignore[no-any-return]


def transforms(x: torch.Tensor) -> Any:
    gradient = torch.func.grad(lambda t: (t**2).sum())(x)
    jacobian = torch.func.jacfwd(lambda t: t.sin())(x[0])
    return gradient, jacobian, torch.vmap(lambda row: row.sin() * X[0])(x)


def shapes(x: torch.Tensor) -> Any:
    rows = x.shape[0]
    return (
        x.view(rows * 2, -1),
        torch.zeros(rows, rows // 2),
        torch.arange(rows)[: rows - 1],
        x[: rows // 2].sum() / rows,
        max(rows, 3) * x,
        rows**0.5 * x,
        x.split([1, rows - 1]),
    )


def assorted(x: torch.Tensor) -> Any:
    y = x.clone()
    y[0], y[:, 1] = 1, 2
    return (
        torch.einsum("ij,jk->ik", y, W),
        torch.fft.rfft(y).abs(),
        torch.rand(3) + torch.randn(3) + torch.bernoulli(torch.full((3,), 0.5)),
        y.topk(2).values,
        y[..., None].mT,
        y.masked_fill(y > 0, float("-inf")),
        torch.where(y > 0, y, 0.0),
        y[y.argmax(-1) % 4],
        torch.linalg.norm(y),
        F.cross_entropy(y, torch.tensor([1, 2, 3, 4])),
        y.nonzero(),
        y.sum().item(),
        y.data + 1,
        torch.ops.aten.mm.default(y, W),
        torch.tensor([[1.0, 2.0]]),
        torch._foreach_add([y, y], 1),
    )


@pytest.mark.parametrize(
    ("program", "args", "expected"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), (X,), "torch._C._nn.gelu"),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (X[None],), "torch._C._nn.linear"),
        (convolutions, (torch.ones(2, 1, 16, 16),), "torch.conv2d"),
        (functools.partial(Scaled.apply, X), (W[:4],), "torch.ops.higher_order.autograd_function_apply"),
        (checkpointed, (X.clone().requires_grad_(),), "torch.ops.higher_order.tag_activation_checkpoint"),
        (autocast, (X,), "torch.amp.autocast_mode._enter_autocast"),
        (attention_kernel, (torch.ones(1, 2, 8, 8),), "torch.nn.attention._sdpa_kernel"),
        (flex, (torch.ones(1, 2, 128, 16),), "torch.ops.higher_order.flex_attention"),
        (loops, (X,), "torch.ops.higher_order.while_loop"),
        (transforms, (X,), "torch._functorch.predispatch._add_batch_dim"),
        (assorted, (X,), "torch.einsum"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_programs_travel(program: Program, args: tuple[Any, ...], expected: str) -> None:
    assert expected in travels(program, *args)


def test_dynamic_shapes_travel() -> None:
    assert "_operator.floordiv" in travels(shapes, X, dynamic=True)


def test_a_decoded_graph_computes_what_dynamos_did() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8))

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        back = decode.decode_graph(*encode.encode_graph(gm)[:2], device_index={}, symbols={})
        copies = [[value.detach().clone() for value in inputs] for _ in range(2)]
        for left, right in zip(gm(*copies[0]), back(*copies[1]), strict=True):
            assert torch.equal(left, right)
        # Batch norm's running statistics are inputs, changed in place.
        for left, right in zip(*copies, strict=True):
            assert torch.equal(left, right)
        return gm.forward

    torch.compile(model, backend=backend)(X)


# --- what does not travel ----------------------------------------------------------------------------------


def test_an_operator_of_another_library_does_not_travel() -> None:
    @torch.library.custom_op("torchrelay_roundtrip::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    (gm,) = captured(lambda x: twice(x), X)
    with pytest.raises(Unsupported, match=r"torchrelay_roundtrip\.twice"):
        encode.encode_graph(gm)


def test_selective_checkpointing_does_not_travel() -> None:
    """Its policy is Python code that would run on the worker."""
    policy = functools.partial(
        checkpointing.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
    )

    def program(x: torch.Tensor) -> Any:
        return checkpointing.checkpoint(lambda y: (y @ W).relu(), x, use_reentrant=False, context_fn=policy)

    (gm,) = captured(program, X.clone().requires_grad_())
    with pytest.raises(Unsupported, match="context_fn"):
        encode.encode_graph(gm)
