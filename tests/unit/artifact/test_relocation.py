"""Code that was compiled for GPU 0, on another one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torchrelay.compiler.torch_internals.loading.bundle import move_to_device

WRAPPER = """
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
kernel = async_compile.triton('kernel', "meta = DeviceProperties(type='cuda', index=0, cc=90)", device_str='cuda')

def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buffer = empty_strided_cuda((4, 0), (1, 1), torch.float32)
        stream0 = get_raw_stream(0)
        kernel.run(args, 0, stream=stream0)
        other = rand_strided((4, ), (1, ), device='cuda:0', dtype=torch.float32)
"""


def moved(source: str) -> str:
    graph = SimpleNamespace(
        source_code=source, device_idxs={0}, cache_key="key", _triton_bundle=None, fx_kwargs={}
    )
    move_to_device(graph, 3)
    assert (graph.device_idxs, graph.cache_key) == ({3}, "key_3")
    return str(graph.source_code)


def test_each_place_that_names_gpu_0_names_the_other_one() -> None:
    text = moved(WRAPPER)
    for each in (
        "_DeviceGuard(3)",
        "set_device(3)",
        "get_raw_stream(3)",
        "index=3, cc=90",
        "device='cuda:3'",
        "run(args, 0,",
    ):
        assert each in text


@pytest.mark.parametrize(
    "call", ["torch.cuda.stream_of(0)", "torch.cuda.Stream(device=0)", "NewDeviceGuard(0, True)"]
)
def test_code_that_names_gpu_0_in_another_way_is_not_loaded(call: str) -> None:
    with pytest.raises(ValueError, match="names GPU 0"):
        moved(f"{WRAPPER}        {call}\n")
