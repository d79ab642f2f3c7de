"""A run's artifacts in one file: it runs from there without a service and without a compiler, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import json, sys, torch, torchrelay

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, int(sys.argv[1])), torch.nn.Tanh(), torch.nn.Linear(int(sys.argv[1]), 1))
optimizer = torch.optim.Adam(model.parameters())
compiled, step = torch.compile(model, backend="torchrelay"), torch.compile(optimizer.step, backend="torchrelay")
losses = []
for _ in range(3):
    loss = compiled(torch.ones(4, 8)).square().mean()
    loss.backward()
    step()
    losses.append(loss.item())
report = torchrelay.report()
print(json.dumps([losses, report.disk_hits, report.hits, report.misses, report.fallbacks]))
"""
Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bake")
    (made / "train.py").write_text(SCRIPT)
    return made


@pytest.fixture(scope="module")
def own(service: PrivateService, folder: Path) -> dict[str, str]:
    return FreshMachine(folder / "own").environment(**service.environment)


@pytest.fixture(scope="module")
def baked(own: dict[str, str], folder: Path) -> list[Any]:
    """What the run printed that was baked into `file`."""
    ran = start(folder, own, "train.py", "16")
    assert ran.returncode == 0, ran.stderr
    done = start(folder, own, "-m", "torchrelay.clients.cli", "bake", "file", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["program"], len(found["keys"])) == ("train.py", 2)
    printed: list[Any] = json.loads(ran.stdout)
    return printed


def start(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def alone(service: PrivateService, folder: Path, tmp_path: Path) -> dict[str, str]:
    """A machine with the file and the service's keys, and with neither service nor compiler."""
    machine = FreshMachine(tmp_path, compiler=False)
    keys = ",".join(service._credentials["public_keys"])
    return machine.environment(
        TORCHRELAY_BAKED=str(folder / "file"), TORCHRELAY_MODE="require", TORCHRELAY_PUBLIC_KEYS=keys
    )


def test_a_script_runs_from_the_file_alone(
    baked: list[Any], folder: Path, alone: dict[str, str], own: dict[str, str]
) -> None:
    done = start(folder, alone, "train.py", "16")
    assert done.returncode == 0, done.stderr
    losses, disk_hits, hits, misses, fallbacks = json.loads(done.stdout)
    assert losses == baked[0]
    assert (disk_hits, hits, misses, fallbacks) == (2, 0, 0, {})
    again = (folder / "file").read_bytes()
    assert start(folder, own, "-m", "torchrelay.clients.cli", "bake", "file").returncode == 0
    assert (folder / "file").read_bytes() == again


def test_what_the_file_lacks_is_said(baked: list[Any], folder: Path, alone: dict[str, str]) -> None:
    done = start(folder, alone, "train.py", "24")
    assert done.returncode == 1
    assert "does not have graph" in done.stderr and "torchrelay bake" in done.stderr


def test_only_what_a_trusted_key_signed_is_used(
    baked: list[Any], folder: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    other = "A" * 43 + "="
    done = start(folder, alone | {"TORCHRELAY_PUBLIC_KEYS": other}, "train.py", "16")
    assert done.returncode == 1 and "SignatureError" in done.stderr

    with zipfile.ZipFile(folder / "file") as archive:
        names = archive.namelist()
        members = {name: bytearray(archive.read(name)) for name in names}
    members[names[0]][-20] ^= 1
    changed = tmp_path / "changed"
    with zipfile.ZipFile(changed, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, bytes(data))
    done = start(folder, alone | {"TORCHRELAY_BAKED": str(changed)}, "train.py", "16")
    assert done.returncode == 1 and ("ArtifactError" in done.stderr or "SignatureError" in done.stderr)

    exchanged = tmp_path / "exchanged"
    with zipfile.ZipFile(exchanged, "w", zipfile.ZIP_STORED) as archive:
        for name, data in zip(names, reversed([*members.values()]), strict=True):
            archive.writestr(name, bytes(data))
    done = start(folder, alone | {"TORCHRELAY_BAKED": str(exchanged)}, "train.py", "16")
    assert done.returncode == 1 and json.dumps(baked[0]) not in done.stdout


@pytest.mark.parametrize("damage", ["absent", "empty", "cut", "text", "compressed"])
def test_a_file_that_cannot_be_used_is_logged_and_no_reason_to_stop(
    baked: list[Any], folder: Path, own: dict[str, str], tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "file"
    whole = (folder / "file").read_bytes()
    if damage == "compressed":
        with zipfile.ZipFile(folder / "file") as archive, zipfile.ZipFile(file, "w") as other:
            for name in archive.namelist():
                other.writestr(name, archive.read(name), zipfile.ZIP_DEFLATED)
    elif damage != "absent":
        file.write_bytes({"empty": b"", "cut": whole[:-30], "text": b"no archive"}[damage])
    shutil.rmtree(Path(own["XDG_CACHE_HOME"]) / "torchrelay", ignore_errors=True)
    done = start(folder, own | {"TORCHRELAY_BAKED": str(file), "TORCHRELAY_PREFETCH": "0"}, "train.py", "16")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == baked[0]
    assert "cannot be used" in done.stderr


def test_a_run_that_the_service_did_not_serve_is_not_baked(
    service: PrivateService, folder: Path, tmp_path: Path
) -> None:
    environment = FreshMachine(tmp_path).environment(**service.environment)
    bake = ("-m", "torchrelay.clients.cli", "bake", "other")
    done = start(folder, environment, *bake)
    assert done.returncode == 1 and "no run has left a record" in done.stderr
    ran = start(folder, environment | {"TORCHRELAY_URL": "http://127.0.0.1:9"}, "train.py", "40")
    assert ran.returncode == 0, ran.stderr
    done = start(folder, environment, *bake)
    assert done.returncode == 1 and "did not make 2 graphs of train.py" in done.stderr
    assert not (folder / "other").exists()
