"""service/local/slot_counts.py: how many compiles a machine runs at once by default."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrelay.service.local import slot_counts

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def of(cores: int, memory: int, gpu_memory: int = 0) -> tuple[int, int]:
        """Its slots for CPUs, and for GPUs. Memory in GiB."""
        monkeypatch.setattr(slot_counts.os, "sched_getaffinity", lambda process: set(range(cores)))
        monkeypatch.setattr(slot_counts, "memory_bytes", lambda: memory * GIB)
        monkeypatch.setattr(slot_counts, "gpu_memory_bytes", lambda: gpu_memory * GIB)
        return slot_counts.default_cpu_slots(), slot_counts.default_gpu_slots()

    return of


def test_cores_and_memory_and_the_gpus_memory_limit_slots(machine) -> None:
    assert machine(cores=16, memory=128, gpu_memory=140) == (8, 8)
    assert machine(cores=192, memory=2048, gpu_memory=8 * 140) == (8, 96)
    assert machine(cores=16, memory=128, gpu_memory=8) == (8, 4)
    assert machine(cores=16, memory=16) == (4, 2)
    assert machine(cores=8, memory=1024) == (4, 4)
    assert machine(cores=1, memory=1) == (1, 1)


def test_a_control_groups_limit_counts_as_the_machines_memory(tmp_path: Path) -> None:
    everything = slot_counts.memory_bytes(limits=())
    assert everything > GIB // 4
    limit, unlimited = tmp_path / "memory.max", tmp_path / "max"
    limit.write_text("104857600\n")
    unlimited.write_text("max\n")
    assert slot_counts.memory_bytes(limits=(str(unlimited), str(tmp_path / "none"))) == everything
    assert slot_counts.memory_bytes(limits=(str(unlimited), str(limit))) == 100 << 20


@pytest.mark.parametrize(
    ("output", "total"),
    [("143771\n143771\n", 2 * 143771 << 20), ("No devices were found\n", 0), ("[N/A]\n", 0)],
)
def test_the_memory_of_all_gpus_is_what_the_driver_says(tmp_path: Path, output: str, total: int) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{output}'\n")
    tool.chmod(0o755)
    assert slot_counts.gpu_memory_bytes(str(tool)) == total
    assert slot_counts.gpu_memory_bytes(str(tmp_path / "none")) == 0
