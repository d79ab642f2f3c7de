"""A simulated world: one process builds what each of N ranks builds, and nothing of it is left behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torchrelay.clients.training.graph_capture.main import fake_process_groups


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl", None])
def test_any_back_end_makes_this_process_one_of_many(backend: str | None) -> None:
    with fake_process_groups(1, 4):
        assert not dist.is_initialized()
        dist.init_process_group(backend, init_method="env://")
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group(backend)
    assert not dist.is_initialized()


def test_a_script_that_asks_for_the_back_end_hears_of_the_one_it_named() -> None:
    """Scripts choose their device by it."""
    with fake_process_groups(0, 2):
        dist.init_process_group("gloo")
        assert dist.get_backend() is dist.Backend.GLOO
        assert dist.get_backend(dist.new_group([0])) == dist.get_backend(
            dist.new_group([0, 1], backend="GLOO")
        )
    for backend, told in (("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"), (None, "undefined")):
        with fake_process_groups(0, 2):
            dist.init_process_group(backend)
            assert dist.get_backend() == told  # as of a real one


def test_what_a_script_says_of_its_rank_counts() -> None:
    with fake_process_groups(0, 2):
        dist.init_process_group("gloo", rank=3, world_size=8)
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)


def test_collectives_end_at_once_and_groups_and_meshes_are_as_large_as_the_real_ones() -> None:
    with fake_process_groups(1, 4):
        dist.init_process_group("gloo")
        told = [None] * 4
        dist.all_gather_object(told, {"a": 1})
        assert told == [{"a": 1}] * 4
        ones = torch.ones(3)
        assert dist.all_reduce(ones, async_op=True).wait()
        dist.barrier()
        dist.monitored_barrier()
        group = dist.new_group([0, 1], backend="gloo")
        assert (dist.get_world_size(group), dist.get_rank(group)) == (2, 1)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        assert (list(mesh.get_coordinate()), mesh["tensor"].size()) == ([0, 1], 2)


def test_a_mesh_starts_the_world_as_init_process_group_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_process_groups(0, 2):
        assert init_device_mesh("cpu", (2,)).size() == 2
        assert dist.get_world_size() == 2


def test_ddp_trains_alone_and_a_hook_is_taken_and_not_called() -> None:
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        raise AssertionError

    with fake_process_groups(0, 2):
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(4, 2))
        model.register_comm_hook(None, hook)
        model(torch.ones(3, 4)).sum().backward()
        gradient = model.module.weight.grad
        assert gradient is not None and torch.equal(gradient, torch.full((2, 4), 3.0))


def test_all_is_as_before_also_after_an_error() -> None:
    def held() -> tuple[object, ...]:
        ddp = DistributedDataParallel
        functions = (
            dist.init_process_group,
            dist.new_group,
            dist.monitored_barrier,
            dist.rpc.init_rpc,
            dist.get_backend,
        )
        return (*functions, ddp.__init__, ddp.register_comm_hook, dist.device_mesh.init_process_group)

    import torch.distributed.rpc  # noqa: F401

    before = held()
    with pytest.raises(ZeroDivisionError), fake_process_groups(0, 2):
        assert held() != before
        dist.init_process_group()
        raise ZeroDivisionError
    assert held() == before
    assert not dist.is_initialized()
