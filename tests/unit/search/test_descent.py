"""Where a coordinate descent has ended, as a text that later compiles begin with."""

import types

import pytest
from torchrelay.compiler.torch_internals.triton import kernels


def configuration(warps=4, stages=2, **kwargs):
    """In the place of a triton.Config."""
    return types.SimpleNamespace(kwargs=kwargs, num_warps=warps, num_stages=stages)


BEGIN = configuration(XBLOCK=128, R0_BLOCK=64)


def test_the_text_leads_back_to_where_it_ended():
    end = configuration(8, 1, XBLOCK=256, R0_BLOCK=32)
    assert kernels.decode_configuration(BEGIN, kernels.encode_configuration(end)) == end
    assert configuration(XBLOCK=128, R0_BLOCK=64) == BEGIN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '{"XBLOCK": 1}',
        '[{"XBLOCK": 1}, 2, 3]',
        '[{"XBLOCK": 1, "R0_BLOCK": 2, "EVIL": 3}, 2, 3]',
        '[{"XBLOCK": "__import__(1)", "R0_BLOCK": 2}, 2, 3]',
        '[{"XBLOCK": 1, "R0_BLOCK": 2}, "4", 3]',
        "[[1], 2, 3]",
    ],
)
def test_what_is_no_place_of_this_kernels_is_not_gone_to(text):
    assert kernels.decode_configuration(BEGIN, text) is None
