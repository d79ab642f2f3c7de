"""The wheel: everything the package needs, under `torchrelay` and nowhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

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
