"""What a summary says of traces of a CUDA training, as Kineto writes them, and of intervals. No torch."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto import ADD, ALL_REDUCE, GEMM, SGEMM, Trace
from torchrelay.clients.reports.profiling import kineto_trace, tensor_cores
from torchrelay.clients.reports.profiling.memory_timeline import TensorSnapshot
from torchrelay.clients.reports.profiling.summary import ProfileContext, ProfileSummary, summarize
from torchrelay.clients.reports.profiling.tensor_cores import TensorCoreUse
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import ClientError

FACTS = ProfileContext(
    rank=0, world_size=2, first=10, device="cuda", device_name="NVIDIA H200", capability=[9, 0]
)


def summary_of(built: Trace, tmp_path: Path, facts: ProfileContext = FACTS) -> ProfileSummary:
    return summarize(kineto_trace.read_trace(built.write(tmp_path / "t.json")), facts)


# --- intervals ---------------------------------------------------------------------------------------------

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=8,
)


def points(cover: kineto_trace.Cover) -> set[int]:
    return {point for start, end in cover for point in range(int(start), int(end))}


@given(intervals, intervals)
def test_covers_are_sets_of_moments(
    one: list[kineto_trace.Interval], other: list[kineto_trace.Interval]
) -> None:
    a, b = kineto_trace.cover(one), kineto_trace.cover(other)
    assert points(a) == points(one)
    assert points(kineto_trace.common(a, b)) == points(a) & points(b)
    assert points(kineto_trace.without(a, b)) == points(a) - points(b)
    assert kineto_trace.length(a) == len(points(a))


# --- reading -----------------------------------------------------------------------------------------------


def test_a_compressed_trace_and_one_with_kinetos_infinities_are_read(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 100)
    text = built.text().replace('"dur": 100', '"dur": 100, "blocks per SM": inf, "x": [nan, -inf]')
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert [event.name for event in kineto_trace.read_trace(path).events] == ["ProfilerStep#1"]


@pytest.mark.parametrize("data", [b"", b"{}", b"\x1f\x8bnothing", b'{"traceEvents": 3}'])
def test_another_file_is_an_error_that_names_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(data)
    with pytest.raises(ClientError, match=r"other\.json"):
        kineto_trace.read_trace(path)


def test_a_trace_without_a_step_is_an_error(tmp_path: Path) -> None:
    built = Trace()
    built.kernel(ADD, 10, 5)
    with pytest.raises(ClientError, match="no step"):
        summary_of(built, tmp_path)


# --- time --------------------------------------------------------------------------------------------------


def test_communication_is_exposed_where_nothing_is_computed(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 100, 400)  # to 500
    built.kernel(ALL_REDUCE, 400, 300, stream=20)  # 100 of it hidden
    built.add("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 80)
    found = summary_of(built, tmp_path)
    (step,) = found.steps
    assert (step.number, step.duration) == (10, 1000)
    assert (step.computation, step.communication, step.exposed) == (400, 300, 200)
    assert (step.loader, step.idle) == (80, 1000 - 600 - 80)
    assert found.overlap == 100
    assert [(each.name, each.calls, each.time) for each in found.collectives] == [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1, 300)
    ]


def test_a_gpus_steps_are_where_its_kernels_ran_though_the_host_was_ahead(tmp_path: Path) -> None:
    built = Trace()
    for number in range(2):
        built.step(number + 1, 100.0 * number, 90)  # the host is through in 200
        begin = 500 + 1000.0 * number
        for stream, start, end in ((7, begin, begin + 900), (20, begin + 400, begin + 990)):
            built.add("gpu_user_annotation", f"ProfilerStep#{number + 1}", start, end - start, stream=stream)
        built.kernel(GEMM, begin, 800)
        built.kernel(ALL_REDUCE, begin + 400, 590, stream=20)
    steps = summary_of(built, tmp_path).steps
    assert [(step.at, step.duration) for step in steps] == [(0, 1000), (1000, 990)]
    assert [(step.computation, step.communication, step.exposed) for step in steps] == [(800, 590, 190)] * 2
    assert [step.idle for step in steps] == [10, 0]


def test_a_loader_that_is_waited_for_while_the_gpu_works_costs_nothing(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 0, 900)
    built.add("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 800, 150)
    (step,) = summary_of(built, tmp_path).steps
    assert (step.loader, step.idle) == (50, 50)


def test_a_step_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    built = Trace()
    for number in range(3):
        built.step(number, 100.0 * number, 90)
    steps = summary_of(built, tmp_path, msgspec.structs.replace(FACTS, steps=2)).steps
    assert [step.number for step in steps] == [10, 11]


def test_kernels_tell_their_launch_and_what_launched_them(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 100, 300, op="aten::mm", grid=(64, 2, 1), block=(384, 1, 1))
    built.kernel(GEMM, 500, 100, op="aten::mm", grid=(8, 1, 1), block=(384, 1, 1))
    built.kernel(ADD, 700, 100, op="aten::add")
    first, second = summary_of(built, tmp_path).kernels
    assert (first.name, first.calls, first.time, first.op) == (GEMM, 2, 400, "aten::mm")
    assert (first.grid, first.block, first.shapes) == ([64, 2, 1], [384, 1, 1], 1)
    assert (first.registers, first.shared, first.occupancy) == (168, 213_000, 12)
    assert (second.name, second.share) == (ADD, 0.2)


def test_an_occupancy_of_nothing_is_one_that_is_not_known(tmp_path: Path) -> None:
    """Kineto wrote 0 for cuBLAS's kernels on an H200."""
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 100, 300, op="aten::mm", occupancy=0)
    (kernel,) = summary_of(built, tmp_path).kernels
    assert kernel.occupancy is None


def test_an_operators_own_time_leaves_out_what_it_calls(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.add("cpu_op", "aten::linear", 100, 100, **{"Input Dims": [[4, 8], [16, 8], []]})
    built.add("cpu_op", "aten::addmm", 120, 70)
    found = {each.name: each for each in summary_of(built, tmp_path).operators}
    assert (found["aten::linear"].own, found["aten::linear"].total) == (30, 100)
    assert found["aten::linear"].dims == "4\N{MULTIPLICATION SIGN}8, 16\N{MULTIPLICATION SIGN}8"
    assert found["aten::addmm"].own == 70


# --- Tensor Cores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (GEMM, "yes"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "yes"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "yes"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(Params)", "yes"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)", "yes"),
        (SGEMM, "no"),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4",
            "no",
        ),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_tn_align1>(Params)", "no"),
        (ADD, "no"),
        ("triton_poi_fused_add_3", "no"),
        ("triton_red_fused_native_layer_norm_0", "no"),
        ("triton_tem_fused_addmm_7", "unknown"),
        ("void cudnn::convolve_common_engine_float_NHWC<float>(int)", "unknown"),
    ],
)
def test_kernels_names_say_whether_they_run_on_tensor_cores(name: str, answer: str) -> None:
    assert tensor_cores.of_kernel(name).answer == answer


def test_triton_kernels_are_looked_up_in_their_ptx(tmp_path: Path) -> None:
    for number, (name, line) in enumerate(
        [
            ("triton_tem_fused_mm_0", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};"),
            ("triton_tem_fused_mm_1", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1};"),
            ("triton_tem_fused_mm_2", "fma.rn.f32 %f1, %f2, %f3, %f4;"),
            ("triton_tem_fused_mm_9", "mma.sync.aligned.m16n8k16;"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / f"{name}.ptx").write_text(f".visible .entry {name}\n{line}\n")
    names = {f"triton_tem_fused_mm_{number}" for number in range(4)}
    found = tensor_cores.of_triton(names, [tmp_path])
    assert {name[-1]: (each.answer, each.how) for name, each in found.items()} == {
        "0": ("yes", "ptx"),
        "1": ("yes", "ptx"),
        "2": ("no", "ptx"),
    }
    assert tensor_cores.of_kernel("triton_tem_fused_mm_0", found).answer == "yes"


def test_without_ptx_the_binary_is_disassembled(tmp_path: Path) -> None:
    """By a program that prints what nvdisasm prints."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "triton_tem_fused_mm_0.cubin").write_bytes(b"\x7fELF")
    disassembler = tmp_path / "nvdisasm"
    disassembler.write_text("#!/bin/sh\necho '/*0a10*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;'\n")
    disassembler.chmod(0o755)
    name = "triton_tem_fused_mm_0"
    found = tensor_cores.of_triton([name], iter([tmp_path]), nvdisasm=disassembler)
    assert found == {name: TensorCoreUse("yes", "sass")}
    assert tensor_cores.of_triton([name], [tmp_path]) == {}
    assert tensor_cores.of_triton([name], [tmp_path], nvdisasm=tmp_path / "none") == {}


def test_the_share_of_tensor_cores_is_of_products_alone(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 100, 300)
    built.kernel(SGEMM, 400, 100)
    built.kernel("triton_tem_fused_mm_0", 500, 50)
    built.kernel(ADD, 600, 200)
    found = summary_of(built, tmp_path)
    assert (found.kernel_time, found.product_time) == (650, 450)
    assert (found.tensor_yes, found.tensor_unknown) == (300, 50)


# --- memory ------------------------------------------------------------------------------------------------


def test_memory_is_told_by_category(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.memory(100, 300, 0x50, 1300)  # an activation: there when the backward pass begins
    built.memory(150, 40, 0x60, 1340)  # gone before
    built.memory(200, -40, 0x60, 1300)
    built.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 400, 50)
    built.memory(450, 100, 0x70, 1400)  # a gradient: its address is one at the step's end
    built.memory(500, -300, 0x50, 1100)
    built.memory(600, 200, 0x80, 1300)  # the optimizer's state
    snapshots = [
        TensorSnapshot(parameters=[(0x10, 100)]),
        TensorSnapshot(parameters=[(0x10, 100)], gradients=[(0x70, 100)], optimizer=[(0x80, 200)]),
    ]
    facts = msgspec.structs.replace(FACTS, snapshots={"cuda:0": snapshots}, memory={"cuda:0": 2800})
    (found,) = summary_of(built, tmp_path, facts).memory
    assert (found.device, found.limit, found.peak, found.peak_at) == ("cuda:0", 2800, 1400, 450)
    assert found.at_peak == {"parameters": 100, "gradients": 100, "activations": 300, "before": 900}
    assert dict(zip(("p", "o", "g", "a", "t", "b"), found.points[-1].bytes, strict=True)) == {
        "p": 100, "o": 200, "g": 100, "a": 0, "t": 0, "b": 900
    }  # fmt: skip
    assert dict(zip(("p", "o", "g", "a", "t", "b"), found.points[2].bytes, strict=True))["t"] == 40


def test_thinning_keeps_the_peak(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 100_000)
    for number in range(3000):
        size = 1_000_000 if number == 1717 else 10
        built.memory(10.0 * number + 1, size, number * 2 + 1, 0)
        built.memory(10.0 * number + 2, -size, number * 2 + 1, 0)
    (found,) = summary_of(built, tmp_path).memory
    assert found.peak == max(sum(point.bytes) for point in found.points) == 1_000_000
    assert len(found.points) <= 600


# --- as a process ------------------------------------------------------------------------------------------


def test_the_summary_is_made_without_torch(tmp_path: Path) -> None:
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 100, 300)
    source, facts, target = (
        built.write(tmp_path / "t.json"),
        tmp_path / "facts.json",
        tmp_path / "summary.json",
    )
    facts.write_bytes(msgspec.json.encode(FACTS))
    program = (
        "import sys\n"
        "from torchrelay.clients.reports.profiling.summary import main\n"
        "main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(source), str(facts), str(target)], check=True)
    assert decoding.from_json(target.read_bytes(), type=ProfileSummary).kernels[0].name == GEMM
