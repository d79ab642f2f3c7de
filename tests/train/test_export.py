"""A trained model leaves Python: compiled and scripted files agree with eager, in C++ too, or are not made."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchrelay.clients.exporting.export import export
from torchrelay.clients.exporting.options import ExportManifest, ExportOptions, read_dynamic
from torchrelay.clients.training.checkpointing.checkpoints import Checkpoints
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import ExportFailed, SettingsError
from torchrelay.compiler.graph.toolchain import local_target
from torchrelay.compiler.torch_internals.inductor import aot_inductor, config

HERE = Path(__file__).parent / "parts"
CPP = Path(__file__).resolve().parents[2] / "examples" / "cpp_inference"

import exporting  # noqa: E402

pytestmark = pytest.mark.skipif("avx2" not in local_target("cpu").cpu, reason="needs AVX2")


def trained() -> exporting.Net:
    """Other weights than the function's own."""
    torch.manual_seed(1)
    return exporting.Net().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the command makes of `net`, with the weights of a file."""
    place = tmp_path_factory.mktemp("export")
    torch.save({"model": trained().state_dict(), "step": 3}, place / "weights.pt")
    command = [sys.executable, "-m", "torchrelay.clients.cli", "export", "exporting:net", "--local"]
    command += ["--target", "cpu-avx2", "--format", "both", "--dynamic", "batch=1:64", "-o", "out"]
    shutil.copy(HERE / "exporting.py", place)
    done = subprocess.run(
        [*command, "--checkpoint", "weights.pt"], cwd=place, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2 files in out"
    yield place / "out"


def meta(folder: Path) -> ExportManifest:
    return decoding.from_json((folder / "export.json").read_bytes(), type=ExportManifest)


def test_every_file_is_told_of_with_its_digest_and_what_it_was_held_against(folder: Path) -> None:
    told = meta(folder)
    assert told.weights == "weights.pt" and told.torch == torch.__version__
    assert told.sizes == {"batch": (1, 64)}
    assert told.inputs[0].shape == ["batch", 8] and told.outputs[0].shape == ["batch", 3]
    assert [(file.format, file.how) for file in told.files] == [("aoti", ""), ("torchscript", "scripted")]
    assert {file.name for file in told.files} | {"export.json", "example.pt"} == {
        path.name for path in folder.iterdir()
    }
    for file in told.files:
        data = (folder / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.bytes, file.digest)
        assert {check.shapes[0][0] for check in file.checks} == {1, 4, 32, 64}
        assert {check.inputs for check in file.checks} == {"example", "random"}
        assert all(check.difference <= check.tolerance for check in file.checks)


def test_the_files_compute_what_the_trained_model_does(folder: Path) -> None:
    rows = torch.randn(7, 8)
    with torch.no_grad():
        wanted = trained()(rows)
        package = aot_inductor.load_package(folder / "model-cpu-avx2.pt2")(rows)
        script = torch.jit.load(folder / "model-cpu.torchscript.pt")(rows)
    torch.testing.assert_close(package, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(script, wanted)


def test_a_package_that_kills_whoever_loads_it_is_not_handed_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a package whose C++ library is not torch's."""
    assert aot_inductor.signal_on_load(folder / "model-cpu-avx2.pt2") == 0
    source = "#include <csignal>\n__attribute__((constructor)) static void die() { raise(SIGSEGV); }\n"
    (tmp_path / "die.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", "-o", "die.so", "die.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)

    def deadly(program: object, file: Path, options: object) -> None:
        with zipfile.ZipFile(folder / "model-cpu-avx2.pt2") as good, zipfile.ZipFile(file, "w") as bad:
            for name in good.namelist():
                code = (tmp_path / "die.so").read_bytes() if name.endswith(".so") else good.read(name)
                bad.writestr(name.replace("model-cpu-avx2", file.stem), code)

    monkeypatch.setattr(aot_inductor, "build_package", deadly)
    (out := tmp_path / "out").mkdir()
    with pytest.raises(ExportFailed, match=r"cannot load .* for cpu-avx2: .* ends with SIGSEGV"):
        export(ExportOptions(function="exporting:net", targets=["cpu-avx2"]), out, say=print)
    assert list(out.iterdir()) == []


def test_code_for_avx2_has_no_wider_instruction(folder: Path, tmp_path: Path) -> None:
    assert "avx512f" not in meta(folder).files[0].instructions
    with zipfile.ZipFile(folder / "model-cpu-avx2.pt2") as package:
        (library,) = (name for name in package.namelist() if name.endswith(".so"))
        (tmp_path / "model.so").write_bytes(package.read(library))
    printed = subprocess.run(
        ["objdump", "-d", str(tmp_path / "model.so")], capture_output=True, text=True, check=True
    ).stdout
    assert "%ymm" in printed and "%zmm" not in printed


def test_a_cpp_program_loads_both_and_finds_eagers_outputs(folder: Path, tmp_path: Path) -> None:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=beside)
    assert cmake is not None, "[dev] brings it"
    build = tmp_path / "build"
    commands: tuple[list[str | Path], ...] = (
        [cmake, "-S", CPP, "-B", build, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"],
        [cmake, "--build", build],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if torch.version.cuda and "PyTorch: CUDA cannot be found" in done.stderr:
            pytest.skip("the CMake files of a wheel that is built for CUDA want a CUDA toolkit")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def infer(*arguments: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command: list[str | Path] = [build / "infer", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    for model in ("model-cpu-avx2.pt2", "model-cpu.torchscript.pt"):
        done = infer(folder / model, folder / "example.pt")
        assert done.returncode == 0 and "agrees with eager" in done.stdout, done.stdout + done.stderr
        for wrong in (0.5, float("nan")):
            example = torch.load(folder / "example.pt")
            example["outputs"][0] += wrong
            torch.save(example, tmp_path / "other.pt")
            done = infer(folder / model, tmp_path / "other.pt")
            assert done.returncode == 1 and "DIFFERS" in done.stdout, done.stdout + done.stderr
    assert infer(folder / "absent.pt2", folder / "example.pt").returncode == 1
    assert infer().returncode == 2


def scripted(function: str, folder: Path, **more: object) -> ExportManifest:
    """Without AOTInductor: quick."""
    options = {"function": f"exporting:{function}", "format": "torchscript", **more}
    return export(ExportOptions(**options), folder, say=print)  # type: ignore[arg-type]


def test_the_newest_whole_checkpoint_of_a_training_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, out = tmp_path / "checkpoints", tmp_path / "out"
    out.mkdir()
    with Checkpoints(checkpoints) as kept:
        for step in (2, 10, 11):
            torch.manual_seed(step)
            kept.save(step, exporting.Net(), wait=True)
    (checkpoints / "step-12.partial").mkdir()  # of a write that was killed
    (damaged,) = (checkpoints / "step-11").glob("*.distcp")
    damaged.write_bytes(damaged.read_bytes()[:-7])
    assert scripted("net", out, checkpoint=str(checkpoints)).weights == "step-10"
    assert "step-11 is damaged" in capsys.readouterr().out
    torch.manual_seed(10)
    model, rows = exporting.Net().eval(), torch.randn(4, 8)
    torch.testing.assert_close(torch.jit.load(out / "model-cpu.torchscript.pt")(rows), model(rows))
    assert scripted("net", out, checkpoint=str(checkpoints / "step-2")).weights == "step-2"


def test_what_no_checkpoint_can_be_is_refused(tmp_path: Path) -> None:
    torch.save(exporting.TwoInputs, tmp_path / "class.pt")
    torch.save({"model": {"rise.weight": torch.zeros(16, 8)}}, tmp_path / "part.pt")
    (tmp_path / "empty").mkdir()
    reasons = {
        "class.pt": "more than tensors",
        "part.pt": "of another model",
        "empty": "no complete checkpoint",
        "absent": "no complete checkpoint",
    }
    for name, reason in reasons.items():
        with pytest.raises(ExportFailed, match=reason):
            scripted("net", tmp_path, checkpoint=str(tmp_path / name))


def test_a_trace_that_is_wrong_at_other_sizes_is_not_handed_out(tmp_path: Path) -> None:
    with pytest.raises(ExportFailed, match=r"cannot be scripted.*traced.*differs from eager"):
        scripted("baked", tmp_path, dynamic=read_dynamic(["batch=1:64"]))
    assert list(tmp_path.iterdir()) == []
    assert scripted("baked", tmp_path).files[0].how == "traced"  # at the example's sizes it is right


def test_a_package_that_differs_from_eager_is_not_handed_out(tmp_path: Path) -> None:
    before = config.config_entries("torch._inductor.config")
    with pytest.raises(ExportFailed, match=r"model-cpu-avx2.pt2.*output 0 differs from eager"):
        export(ExportOptions(function="exporting:worse", targets=["cpu-avx2"]), tmp_path, say=print)
    assert list(tmp_path.iterdir()) == []
    assert (
        config.config_entries("torch._inductor.config") == before
    )  # upstream leaves the target in Inductor's configuration


def test_a_size_stands_where_it_is_said_to(tmp_path: Path) -> None:
    told = scripted(
        "two_inputs", tmp_path, dynamic=read_dynamic(["batch=2:8", "length@tokens.1,mask.1=2:16"])
    )
    assert [tensor.shape for tensor in told.inputs] == [["batch", "length"], ["batch", "length"]]
    assert told.sizes == {"batch": (2, 8), "length": (2, 16)}
    assert [tensor.shape for tensor in told.outputs] == [["batch"], ["batch", "length"]]
    example = torch.load(tmp_path / "example.pt")
    assert [list(tensor.shape) for tensor in example["outputs"]] == [[4], [4, 6]]
    sizes = [check.shapes[1] for check in told.files[0].checks if check.inputs == "random"]
    assert sizes[:4] == [[4, 6], [2, 2], [8, 16], [5, 9]] and sorted(sizes[4:]) == [[2, 16], [8, 2]]


def test_the_example_exports_with_the_sizes_that_its_function_names(tmp_path: Path) -> None:
    function = "torchrelay.examples.export.char_gpt:char_gpt"
    told = export(ExportOptions(function=function, format="torchscript"), tmp_path, say=print)
    assert told.sizes == {"batch": (1, 64), "length": (2, 64)}
    assert told.inputs[0].shape == ["batch", "length"] and told.outputs[0].shape == ["batch", 128]


@pytest.mark.parametrize(
    ("function", "more", "reason"),
    [
        ("one_row", {"dynamic": read_dynamic(["batch=1:8"])}, r"rows.0, and the example's rows has shape \[1, 8\]"),
        ("net", {"dynamic": read_dynamic(["wide@rows.1=2:8"])}, "torch.export refuses"),
        ("net", {"dynamic": read_dynamic(["batch@columns.0=2:8"])}, "there is no input columns"),
        ("no_model", {}, "returned no model"),
        ("absent", {}, "there is no exporting:absent"),
        ("net", {"targets": ["cuda"]}, "there is no GPU here"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_says_why(
    tmp_path: Path, function: str, more: dict[str, object], reason: str
) -> None:
    if more.get("targets") == ["cuda"] and torch.cuda.is_available():
        pytest.skip("here is a GPU")
    with pytest.raises(ExportFailed, match=reason):
        scripted(function, tmp_path, **more)


@pytest.mark.parametrize(
    "text", ["batch", "batch=4:2", "batch=1:99999999999", "a@b=1:2", "a@b.x=1:2", "=1:2"]
)
def test_a_dynamic_size_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--dynamic"):
        read_dynamic([text])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["exporting:net", "--target", "gpu"], "Targets are cpu, cpu-avx2"),
        (["exporting:net", "--format", "onnx"], "formats aoti, torchscript"),
        (["exporting.net"], "a function is `module:function`"),
        (["exporting:net", "--dynamic", "batch"], "--dynamic is 'batch'"),
    ],
)
def test_options_that_cannot_be_are_wrong_use(flags: list[str], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchrelay.clients.cli", "export", *flags, "--local"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []
