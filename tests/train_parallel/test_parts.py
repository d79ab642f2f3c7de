"""A DTensor's part for compiled code: the values and gradients that PyTorch's own `to_local` gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchrelay.clients.training.graph_capture.script_graphs import GraphRecorder
from torchrelay.compiler.request import codec
from torchrelay.compiler.torch_internals.distributed import dtensor, fake_process_group


@pytest.fixture
def mesh() -> Iterator[Any]:
    fake_process_group.init_fake_process_group(0, 2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("turned", [False, True])
def test_parts_and_their_gradients_are_those_of_to_local(mesh: Any, placement: Any, turned: bool) -> None:
    value = torch.arange(12.0).reshape(3, 4)
    gradient = torch.arange(12.0, 24.0).reshape(4, 3).t() if turned else torch.ones(3, 4)
    found = []
    for take in (lambda tensors: [each.to_local() for each in tensors], dtensor.local_shards):
        whole, bystander = (
            torch.nn.Parameter(DTensor.from_local(value.clone(), mesh, [placement], run_check=False))
            for _ in range(2)
        )
        part, _ = take([whole, bystander])
        assert type(part) is torch.Tensor and torch.equal(part, value)
        (given,) = torch.autograd.grad([part], [whole], [gradient])
        assert isinstance(given, DTensor)
        found.append(
            (
                given.to_local().tolist(),
                given.to_local().stride(),
                given.placements,
                given.shape,
                given.stride(),
            )
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(("rows", "places"), [(8, [[0], [1]]), (7, [[0]])])
def test_a_capture_asks_for_all_places_where_parts_are_alike(
    mesh: Any, rows: int, places: list[list[int]]
) -> None:
    """Of seven rows, another rank has three: what is compiled for it cannot be told from here."""
    whole = DTensor.from_local(
        torch.ones(4, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 3)), stride=(3, 1)
    )
    torch.compiler.reset()
    recorder = GraphRecorder("")
    torch.compile(lambda x: (x * 2 + 1).to_local(), backend=recorder)(whole)
    assert not recorder.skipped
    requests = [codec.unpack_request(body) for body in recorder.found.values()]
    assert [request.meshes[0].coordinate for request in requests] == places


def test_a_part_shares_its_memory_with_the_whole_and_nothing_is_nothing(mesh: Any) -> None:
    whole = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False)
    dtensor.local_shards([whole])[0].fill_(2)
    assert whole.to_local().tolist() == [2, 2, 2]
    assert dtensor.local_shards([]) == []


def test_a_collective_that_is_compared_is_one_that_this_torch_pretends(mesh: Any) -> None:
    group, collectives = mesh.get_group(0).group_name, torch.ops._c10d_functional
    ones = torch.ones(4)
    found = {
        "all_reduce": collectives.all_reduce(ones, "sum", group),
        "all_gather_into_tensor": collectives.all_gather_into_tensor(ones, 2, group),
        "reduce_scatter_tensor": collectives.reduce_scatter_tensor(ones, "sum", 2, group),
        "all_to_all_single": collectives.all_to_all_single(ones, [2, 2], [2, 2], group),
    }
    for name, value in found.items():
        filled = bool((collectives.wait_tensor(value) == 1).all())
        assert filled == (not fake_process_group.unfilled_collective(f"x = {name}(y)".encode())), name
