"""CPU targets: only flags of a table reach a compiler, and only a worker that offers a target compiles for it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from torchrelay.compiler.errors import Unsupported
from torchrelay.compiler.graph import toolchain as toolchains
from torchrelay.compiler.request import cpu_isa, schema

TOOLCHAIN = schema.Toolchain("cp311", "2.13.0+cpu", triton="", cuda="", platform="linux-x86_64")
ARM = msgspec.structs.replace(TOOLCHAIN, torch="2.13.0+cu130", cuda="13.0", platform="linux-aarch64")
OTHERS = [schema.OtherTarget("aarch64", ARM), schema.OtherTarget("plain", TOOLCHAIN)]


def cpu(name: str = "", *sets: str) -> schema.Target:
    return schema.Target(kind="cpu", name=name, capability="", units=0, cpu=list(sets))


def gpu(name: str, capability: str) -> schema.Target:
    return schema.Target(kind="cuda", name=name, capability=capability, units=132, cpu=[])


def test_an_instruction_set_adds_a_flag_or_an_extension_and_what_the_table_lacks_adds_nothing() -> None:
    wide = cpu_isa.X86_64.compiler_flags(["fma", "avx2", "-fplugin=x.so", "asimd"])
    assert wide == ["march=x86-64", "mtune=generic", "mavx2", "mfma"]
    graviton = cpu_isa.AARCH64.compiler_flags(["bf16", "asimd", "+nosimd", "sve", "avx2"])
    assert graviton == ["march=armv8-a+simd+bf16"]


def test_vectors_are_used_where_the_target_has_all_that_they_need() -> None:
    sets = ["asimd", "avx2", "f16c", "fma"]
    assert cpu_isa.X86_64.vector_sets(sets) == ["avx2"] and cpu_isa.AARCH64.vector_sets(sets) == ["asimd"]
    plain = cpu_isa.CpuTarget(name="plain", machine="x86_64", base=("march=x86-64",))
    assert plain.vector_sets(sets) == [] and plain.compiler_flags(sets) == ["march=x86-64"]


def test_a_target_that_this_environment_does_not_know_is_unsupported() -> None:
    assert cpu_isa.target_of(cpu("aarch64")) is cpu_isa.AARCH64
    assert cpu_isa.target_of(gpu("NVIDIA H200", "9.0")) is cpu_isa.NATIVE
    with pytest.raises(Unsupported, match="'riscv64'"):
        cpu_isa.target_of(cpu("riscv64"))


@pytest.mark.parametrize(
    ("toolchain", "target", "built"),
    [
        (TOOLCHAIN, cpu("", "avx2"), True),
        (msgspec.structs.replace(TOOLCHAIN, torch="2.12.0+cpu"), cpu(), False),
        (TOOLCHAIN, cpu("plain"), True),
        (ARM, cpu("plain"), False),
        (ARM, cpu("aarch64", "asimd"), True),
        (msgspec.structs.replace(ARM, triton="3.7.1"), cpu("aarch64"), True),
        (msgspec.structs.replace(ARM, torch="2.13.0+cpu", cuda=""), cpu("aarch64"), False),
        (TOOLCHAIN, cpu("aarch64"), False),
        (ARM, cpu(), False),
        (TOOLCHAIN, cpu("riscv64"), False),
        (TOOLCHAIN, gpu("NVIDIA H200", "9.0"), False),
    ],
)  # fmt: skip
def test_a_cpu_worker_compiles_for_its_own_toolchain_and_for_the_targets_that_it_names(
    toolchain: schema.Toolchain, target: schema.Target, built: bool
) -> None:
    assert schema.builds_for(TOOLCHAIN, cpu("", "avx2"), OTHERS, toolchain, target) is built


def test_a_gpu_worker_compiles_for_its_own_model() -> None:
    own = gpu("NVIDIA H200", "9.0")
    assert schema.builds_for(TOOLCHAIN, own, [], TOOLCHAIN, msgspec.structs.replace(own, units=1))
    assert not schema.builds_for(TOOLCHAIN, own, [], TOOLCHAIN, gpu("NVIDIA H100", "9.0"))
    assert not schema.builds_for(TOOLCHAIN, own, OTHERS, TOOLCHAIN, cpu("plain"))


@pytest.mark.skipif(not cpu_isa.X86_64.is_native, reason="aarch64 is this machine's own")
def test_another_machines_target_is_offered_with_its_compiler_and_with_its_torch_of_this_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = toolchains.local_toolchain()
    release = own.torch.partition("+")[0]
    (torch := tmp_path / "targets/aarch64/torch").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    def offered(version: str) -> list[schema.OtherTarget]:
        text = f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = '13.0'\nhip = None\n"
        (torch / "version.py").write_text(text)
        return [each for each in toolchains.other_targets() if each.name == "aarch64"]

    assert offered(f"{release}+cu130") == []  # there is no compiler
    (compiler := tmp_path / cpu_isa.AARCH64.compiler).write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert offered("1.2.3+cu130") == []
    (found,) = offered(f"{release}+cu130")
    arm = msgspec.structs.replace(
        own, torch=f"{release}+cu130", cuda="13.0", triton="", platform="linux-aarch64"
    )
    assert found.toolchain == arm
