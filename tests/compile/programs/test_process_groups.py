"""What a program takes from its process groups has no guard: another rank, or another group, finds no record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from program_changes import Change
from program_starts import Recorded, Start, from_records
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the back end

ASKS = Change(
    text="import torch.distributed as dist\n\n\ndef inputs():\n    return [(torch.ones(3),)]\n\n\ndef program(x):\n"
    "    if not dist.is_initialized():\n        return x * 7\n"
    "    return x * (8 + dist.get_rank()) / dist.get_world_size()\n"
).before()
PIECES = Change(
    text="class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        torch.manual_seed(0)\n        self.first, self.second = nn.Linear(2, 300_000), nn.Linear(300_000, 2)\n\n"
    "    def forward(self, x):\n        return self.second(self.first(x)), x.sum()\n\n\n"
    "net = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=CAP)\n\n\n"
    "def inputs():\n    return [(torch.ones(3, 2),)]\n\n\ndef program(x):\n    return net(x)\n"
).before()


@contextlib.contextmanager
def rank(number: int, ranks: int, kind: str = "fake") -> Iterator[None]:
    dist.init_process_group(kind, store=dist.HashStore(), rank=number, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_each_rank_of_each_number_of_ranks_has_records_of_its_own(tmp_path: Path) -> None:
    programs, file = Recorded(), tmp_path / "program.py"

    def start(number: int, ranks: int) -> Start:
        with rank(number, ranks):
            return from_records(programs, file, ASKS)

    first = start(0, 2)
    others = [start(1, 2), start(1, 4), from_records(programs, file, ASKS)]
    assert [each.how for each in (first, *others)] == ["traced"] * 4
    assert len({repr(each.results) for each in (first, *others)}) == 4
    again = start(0, 2)
    assert (again.how, again.results) == ("used", first.results)


def test_another_group_is_another_program(tmp_path: Path) -> None:
    """Names of groups are constants of a graph, and each group's name depends on those before."""
    programs, file = Recorded(), tmp_path / "program.py"
    with rank(0, 4):
        assert from_records(programs, file, ASKS).how == "traced"
        dist.new_group([0, 1])
        assert from_records(programs, file, ASKS).how == "traced"
        assert from_records(programs, file, ASKS).how == "used"


def test_pieces_of_a_graph_are_called_as_ddp_has_split_it(tmp_path: Path) -> None:
    programs, file = Recorded(), tmp_path / "program.py"
    with rank(0, 1, "gloo"):
        first, again, third = (from_records(programs, file, PIECES.replace("CAP", "1")) for _ in range(3))
        other_pieces = from_records(programs, file, PIECES.replace("CAP", "100"))
    assert first.graphs > 1
    assert again.graphs == 0  # functions of contextlib, without graphs, may be traced once more
    assert (third.graphs, third.how) == (0, "used")
    assert other_pieces.graphs > 0
    assert third.results == again.results == first.results == other_pieces.results


def test_ranks_that_wait_for_each_other_while_they_trace_all_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, file = Recorded(), tmp_path / "program.py"
    monkeypatch.setattr(
        torch._dynamo.convert_frame, "get_compile_pg", lambda: None
    )  # its CPU's are broken in 2.13
    with rank(0, 2), torch._dynamo.config.patch(enable_compiler_collectives=True):
        starts = [from_records(programs, file, ASKS) for _ in range(2)]
    assert [each.how for each in starts] == ["traced", "traced"]
    assert starts[1].reasons == (
        "program: Dynamo's ranks trace together, because of enable_compiler_collectives",
    )
