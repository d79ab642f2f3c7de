"""The wheel: everything the package needs, under `torchrelay` and nowhere else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import torchrelay

ROOT = Path(torchrelay.__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Made of the source archive, and that of a copy, so that the checkout gets no build folder. Without warnings."""
    source = tmp_path_factory.mktemp("source") / "torchrelay"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with this wheel; its requirements are those of the environment that we run in."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel.filename)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path alone: .pth files there, an editable torchrelay's too, are not read.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def said(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={"HOME": str(cwd)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_runs_where_nothing_else_has_its_name(installed: Path, tmp_path: Path) -> None:
    version = said(installed / "bin" / "torchrelay", "--version", cwd=tmp_path)
    assert version.split()[-1] == torchrelay.__version__
    program = (
        "import torch, torchrelay, torchrelay.service.gateway.app\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "print(lookup_backend('torchrelay').__module__, torchrelay.__file__)"
    )
    module, file = said(installed / "bin" / "python", "-c", program, cwd=tmp_path).split()
    assert module == "torchrelay.clients.backend"
    assert Path(file).is_relative_to(installed)


HINT = "from torchrelay.compiler import install_hint; print(install_hint('server'))"
ORIGINS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "git": (
        {"url": "https://code.test/t.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
        "Run `pip install 'torchrelay[server] @ git+https://code.test/t.git@0a1b'`",
    ),
    "address": (
        {"url": "https://code.test/t.whl", "archive_info": {}},
        "Run `pip install 'torchrelay[server] @ https://code.test/t.whl'`",
    ),
    "editable": ({"dir_info": {"editable": True}}, "Run `pip install -e '{folder}[server]'`"),
    "gone": (
        {"url": "file:///no/such/t.whl"},
        "Run `pip install '.[server]'` in the folder of torchrelay's source",
    ),
    "index": (None, "Run `pip install '.[server]'` in the folder of torchrelay's source"),
}


def test_hints_name_the_file_that_it_was_installed_from(
    installed: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    hint = said(installed / "bin" / "python", "-c", HINT, cwd=tmp_path)
    assert hint == f"Run `pip install '{wheel.filename}[server]'`\n"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--dry-run",
        "--no-deps",
        "--no-index",
        "--report",
        "-",
    ]
    report = json.loads(said(*pip, hint.split("'")[1], cwd=tmp_path))
    assert report["install"][0]["requested_extras"] == ["server"]


@pytest.mark.parametrize("origin", ORIGINS)
def test_hints_name_an_address_or_a_folder_too(installed: Path, tmp_path: Path, origin: str) -> None:
    """A directory before the environment's own has the note of where the package came from."""
    content, expected = ORIGINS[origin]
    note = tmp_path / "torchrelay-0.1.0.dist-info"
    note.mkdir()
    (note / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrelay\nVersion: 0.1.0\n")
    if content is not None:
        (note / "direct_url.json").write_text(json.dumps({"url": tmp_path.as_uri(), **content}))
    hint = said(installed / "bin" / "python", "-c", HINT, cwd=tmp_path)
    assert hint == expected.format(folder=tmp_path) + "\n"


def test_nothing_reaches_site_packages_but_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"torchrelay", f"torchrelay-{torchrelay.__version__}.dist-info"}


def test_every_module_of_the_package_is_inside(wheel: zipfile.ZipFile) -> None:
    for top in ("clients", "compiler", "service", "workers", "examples"):
        for path in (ROOT / top).rglob("*.py"):
            assert f"torchrelay/{path.relative_to(ROOT).as_posix()}" in wheel.namelist()


def test_operator_table_scripts_and_typing_marker_are_inside(wheel: zipfile.ZipFile) -> None:
    data = [
        p
        for kind in (
            "compiler/request/operator_table/*.json",
            "service/storage/redis/lua/*/*.lua",
            "clients/reports/templates/*",
            "compiler/api/html/*.html",
            "compiler/api/html/*.css",
            "service/gateway/pages/templates/*.*",
            "service/gateway/pages/templates/*/*",
            "clients/commands/autoload/*/*",
            "service/gateway/pages/vendor/*",
            "py.typed",
        )
        for p in ROOT.glob(kind)
    ]
    kinds = {p.suffix or p.name for p in data}
    assert kinds == {".json", ".lua", ".typed", ".html", ".css", ".txt", ".js", "METADATA"}
    for path in data:
        assert wheel.read(f"torchrelay/{path.relative_to(ROOT).as_posix()}") == path.read_bytes()


def test_tests_docs_and_benchmarks_stay_outside(wheel: zipfile.ZipFile) -> None:
    outside = ("tests", "docs", "benchmarks", "deploy")
    assert not [
        name for name in wheel.namelist() if name.startswith(tuple(f"torchrelay/{top}/" for top in outside))
    ]


def test_the_base_install_is_the_thin_client(wheel: zipfile.ZipFile) -> None:
    metadata = message_from_bytes(wheel.read(f"torchrelay-{torchrelay.__version__}.dist-info/METADATA"))
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = [re.split(r"[<>=!~; ]", line)[0] for line in base]
    assert sorted(names) == ["backports.zstd", "cryptography", "httpx2", "msgspec", "torch"]
    assert metadata["License-Expression"] == "Apache-2.0"
    licenses = f"torchrelay-{torchrelay.__version__}.dist-info/licenses/LICENSE"
    assert b"Version 2.0, January 2004" in wheel.read(licenses)
