"""Targets other than the worker's own machine: what a package adds, and a client on another kind of processor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.manifest import Manifest
from torchrelay.compiler.request import cpu_isa
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

ROOT = Path(__file__).parents[3]
AARCH64 = cpu_isa.AARCH64.torch_folder.parent
"""`make test-aarch64` puts a machine of that kind there (.ci/aarch64.py)."""
TOOLS = AARCH64 / "tools" / "usr"
LINKED = {"LD_LIBRARY_PATH": f"{TOOLS}/lib/x86_64-linux-gnu"}

SCRIPT = """
import json, os, platform, re, shutil
import torch, torchrelay

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
rows = torch.randn(16, 24)

def gradients(module):
    model.zero_grad()
    loss = module(rows).exp().sin().square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

for ours, eager in zip(gradients(torch.compile(model, backend="torchrelay")), gradients(model), strict=True):
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
for path in set(re.findall(r"/\\S*torchrelay-loaded-\\S*\\.so", open("/proc/self/maps").read())):
    shutil.copy(path, os.environ["LOADED"])
run = torchrelay.report()
print(json.dumps({"hits": run.hits, "misses": run.misses, "machine": platform.machine()}))
"""
PLUG_IN = """
from torchrelay.compiler.request.cpu_isa import CpuTarget
plain = CpuTarget(name="plain", machine="x86_64", base=("march=x86-64", "fno-ivopts", "frecord-gcc-switches"))
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    """Its workers' environment has a package with a target."""
    packages = tmp_path_factory.mktemp("packages")
    (packages / "made_up.py").write_text(PLUG_IN)
    (stated := packages / "made_up-1.dist-info").mkdir()
    (stated / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    (stated / "entry_points.txt").write_text(f"[{cpu_isa.ENTRY_POINTS}]\nplain = made_up:plain\n")
    environment = {
        "PYTHONPATH": str(packages),
        "PATH": f"{TOOLS}/bin{os.pathsep}{os.environ['PATH']}",
        **LINKED,
    }
    with PrivateService(
        tmp_path_factory.mktemp("service"), arguments=("--cpu-slots", "1"), environment=environment
    ) as running:
        yield running


def run(
    service: PrivateService, folder: Path, *command: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The script, on a new machine without a compiler; it raises where the service does not answer."""
    machine = FreshMachine(folder / "machine", compiler=False)
    (packages := machine.root / "package").mkdir()
    (packages / "torchrelay").symlink_to(ROOT)
    (folder / "loaded").mkdir()
    paths = os.pathsep.join([variables.pop("PYTHONPATH", ""), str(packages)]).strip(os.pathsep)
    environment = machine.environment(
        **service.environment,
        TORCHRELAY_MODE="require",
        TORCHRELAY_CACHE_DIR=str(folder / "artifacts"),
        TORCHRELAY_PREFETCH="0",  # what the script used for other targets is not to be there
        LOADED=str(folder / "loaded"),
        PYTHONPATH=paths,
        **variables,
    )
    return subprocess.run(
        [*command, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def answer(done: subprocess.CompletedProcess[str], service: PrivateService) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr + service.log_tail()
    return dict(json.loads(done.stdout.splitlines()[-1]))


def kernels(folder: Path, *command: str) -> str:
    """What a tool says of the libraries that the script has loaded."""
    libraries = sorted((folder / "loaded").iterdir())
    assert libraries
    environment = os.environ | LINKED
    done = subprocess.run([*command, *libraries], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def manifest(folder: Path) -> Manifest:
    (artifact,) = (
        path for path in (folder / "artifacts").rglob("*") if path.is_file() and path.stat().st_size > 1000
    )
    return container.read_manifest(artifact.read_bytes())


@pytest.mark.slow
@pytest.mark.skipif(not cpu_isa.X86_64.is_native, reason="the made-up target is for x86-64")
def test_a_target_of_a_package_is_compiled_and_verified_for_the_client_that_names_it(
    service: PrivateService, tmp_path: Path
) -> None:
    first = answer(run(service, tmp_path / "plain", sys.executable, TORCHRELAY_TARGET="plain"), service)
    assert first["misses"] == 1
    code = kernels(tmp_path / "plain", "objdump", "-d")
    assert "%xmm" in code and "%ymm" not in code
    assert "-fno-ivopts" in kernels(tmp_path / "plain", "readelf", "-p", ".GCC.command.line")
    made = manifest(tmp_path / "plain")
    assert (made.target.name, made.verification.status) == ("plain", "passed")
    again = answer(run(service, tmp_path / "again", sys.executable, TORCHRELAY_TARGET="plain"), service)
    assert (again["hits"], again["misses"]) == (1, 0)
    own = answer(run(service, tmp_path / "own", sys.executable), service)
    assert (own["hits"], own["misses"]) == (0, 1), "a target's artifact went to a client of another"


@pytest.mark.slow
def test_a_target_that_no_worker_has_is_refused_by_name(service: PrivateService, tmp_path: Path) -> None:
    done = run(service, tmp_path, sys.executable, TORCHRELAY_TARGET="riscv64")
    assert done.returncode != 0 and "no worker for CPU riscv64" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not (AARCH64 / "stubs").is_dir(), reason="`make test-aarch64` has put no such machine there"
)
def test_a_client_on_aarch64_gets_kernels_for_its_processor_and_agrees_with_eager(
    service: PrivateService, tmp_path: Path
) -> None:
    libraries = (AARCH64 / "torch/lib", AARCH64 / "stubs", AARCH64 / "root/usr/lib/aarch64-linux-gnu")
    # the last: what has no machine code
    packages = AARCH64 / "site", AARCH64, sysconfig.get_path("purelib")
    environment = {
        "QEMU_CPU": "neoverse-n1",
        "QEMU_LD_PREFIX": str(AARCH64 / "root"),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "OMP_NUM_THREADS": "1",
    }
    (interpreter,) = (AARCH64 / "root" / "usr" / "bin").glob("python3.*")
    python = f"{TOOLS}/bin/qemu-aarch64-static", str(interpreter)
    first = answer(run(service, tmp_path / "first", *python, **environment), service)
    assert first == {"hits": 0, "misses": 1, "machine": "aarch64"}
    code = kernels(tmp_path / "first", f"{TOOLS}/bin/aarch64-linux-gnu-objdump", "-d")
    assert re.search(r"\bfadd\s+v\d+\.4s", code), "no kernel uses NEON"
    made = manifest(tmp_path / "first")
    assert (made.target.name, made.toolchain.platform) == ("aarch64", "linux-aarch64")
    assert made.verification.status == "skipped" and "is not aarch64" in made.verification.reason
    again = answer(run(service, tmp_path / "again", *python, **environment), service)
    assert (again["hits"], again["misses"]) == (1, 0)
