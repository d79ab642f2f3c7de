"""Triton binaries and winners between compiles: what one job built and measured, another one finds.

Triton compiles without a GPU; only running needs one (tests/gpu/compile/test_kernel_reuse.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from torchrelay.compiler.kernel_store import triton_cache
from torchrelay.compiler.kernel_store.libraries import KernelExchange, KernelStore
from torchrelay.compiler.kernel_store.triton_cache import TritonWinner
from torchrelay.compiler.request import codec
from torchrelay.compiler.torch_internals.triton import kernels as triton_kernels

KERNEL = """
import triton, triton.language as tl


@triton.jit
def doubled(source, target, SIZE: tl.constexpr):
    offset = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + offset, tl.load(source + offset) * 2)
"""


class Job:
    """A job's own folders over the store of a namespace."""

    def __init__(self, root: Path, name: str) -> None:
        self.store = KernelStore(root / "store").of("team")
        self.work = root / name
        self.offers = self.work / "offers"
        self.offers.mkdir(parents=True)
        self.exchange = KernelExchange(self.store.folder, self.offers)

    def end(self) -> int:
        return self.store.collect(self.offers)


def compiled(job: Job, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile the kernel for an H100 as `job` would; the folder of Triton's cache that holds it."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(job.work / "triton"))
    (module := job.work / "kernel.py").write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("kernel", module)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    source = ASTSource(
        loaded.doubled, {"source": "*fp32", "target": "*fp32", "SIZE": "constexpr"}, {(2,): 128}
    )
    with triton_cache.sharing_binaries(job.exchange):
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    (folder,) = [path for path in (job.work / "triton").iterdir() if (path / "doubled.cubin").exists()]
    return folder


def test_a_second_job_does_not_compile_what_the_first_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Job(tmp_path, "first"), Job(tmp_path, "second")
    built = compiled(first, monkeypatch)
    assert not triton_cache.was_reused(built)
    assert first.end() == 1
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/bin/false")
    found = compiled(second, monkeypatch)
    assert triton_cache.was_reused(found)
    assert (found / "doubled.cubin").read_bytes() == (built / "doubled.cubin").read_bytes()
    assert second.end() == 0


def test_triton_is_as_it_was_afterwards(tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton").knobs
    with triton_cache.sharing_binaries(Job(tmp_path, "one").exchange):
        assert knobs.cache.manager_class is not None
    assert knobs.cache.manager_class is None


KEY = triton_cache.winner_key("a" * 64, [1024], ["XBLOCK: 64", "XBLOCK: 128"], ["H100", "2.13", "3.7"])


def test_a_winner_is_found_by_kernel_sizes_candidates_and_versions(tmp_path: Path) -> None:
    first, second = Job(tmp_path, "first"), Job(tmp_path, "second")
    winner = TritonWinner("XBLOCK: 128", 0.25, 2)
    assert triton_cache.find_winner(first.exchange, KEY) is None
    triton_cache.offer_winner(first.exchange, KEY, winner)
    first.end()
    assert triton_cache.find_winner(second.exchange, KEY) == winner
    same = triton_cache.winner_key("a" * 64, [1024], ["XBLOCK: 128", "XBLOCK: 64"], ["H100", "2.13", "3.7"])
    assert same == KEY
    for other in (
        triton_cache.winner_key("b" * 64, [1024], ["XBLOCK: 64", "XBLOCK: 128"], ["H100", "2.13", "3.7"]),
        triton_cache.winner_key("a" * 64, [2048], ["XBLOCK: 64", "XBLOCK: 128"], ["H100", "2.13", "3.7"]),
        triton_cache.winner_key("a" * 64, [1024], ["XBLOCK: 64"], ["H100", "2.13", "3.7"]),
        triton_cache.winner_key("a" * 64, [1024], ["XBLOCK: 64", "XBLOCK: 128"], ["H200", "2.13", "3.7"]),
    ):
        assert triton_cache.find_winner(second.exchange, other) is None


@pytest.mark.parametrize("junk", [b"", b"{}", b"[]", b'{"configuration": 1}', b"\xff"])
def test_what_is_no_winner_is_none(tmp_path: Path, junk: bytes) -> None:
    job = Job(tmp_path, "one")
    job.exchange.offer_bytes(triton_cache.winner_name(KEY), junk)
    job.end()
    assert triton_cache.find_winner(job.exchange, KEY) is None


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x28\xb5\x2f\xfd"])
def test_what_is_no_pack_of_binaries_holds_none(junk: bytes) -> None:
    assert triton_cache.unpacked(junk) == {}


def test_binaries_do_not_leave_their_folder() -> None:
    data = codec.compress(msgspec.msgpack.encode({"../outside": b"", "inside": b""}))
    assert triton_cache.unpacked(data) == {}


def test_without_a_store_nothing_is_kept() -> None:
    triton_cache.offer_winner(None, KEY, TritonWinner("XBLOCK: 128", 0.25, 2))
    assert triton_cache.find_winner(None, KEY) is None
    with triton_cache.sharing_binaries(None):
        pass


def test_what_names_tritons_version_is_worked_out_before_jobs_are_forked() -> None:
    pytest.importorskip("triton")
    from torchrelay.compiler.torch_internals.loading import preload
    from triton.runtime.cache import triton_key

    preload.preload_compiler()
    assert triton_key.cache_info().currsize == 1


def test_a_kernel_whose_candidates_all_spill_has_no_measurement() -> None:
    """Inductor gives such a candidate an infinite time; a manifest that held it could not be read."""
    kernels = triton_kernels.TritonKernels()
    for name, milliseconds in (("fits", 0.25), ("spills", float("inf"))):
        live = SimpleNamespace(inductor_meta={"kernel_name": name})
        kernels.live[name] = live
        kernels.timings[id(live)] = TritonWinner("XBLOCK: 8", milliseconds, 2)
    assert [(each.problem, each.milliseconds) for each in triton_kernels.measurements(kernels)] == [
        ("fits", 0.25)
    ]
