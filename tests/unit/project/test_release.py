"""What a release is made of: locked requirements, a bill of materials, workflows that call what is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torchrelay
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(torchrelay.__file__).parent
LOCKS = sorted((ROOT / "deploy" / "locks").glob("server-*.txt"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def pinned(lock: Path) -> Iterator[tuple[Requirement, list[str]]]:
    for entry in lock.read_text().replace("\\\n", " ").splitlines():
        name, *hashes = entry.split()
        yield Requirement(name), hashes


def needed(lock: Path) -> list[Requirement]:
    command = [sys.executable, "deploy/requirements.py", "server"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    place = {"python_version": lock.stem.removeprefix("server-"), "sys_platform": "linux"}
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate(place)]


def test_each_supported_python_has_a_lock() -> None:
    supported = re.search(r"^PYTHONS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert supported is not None
    assert [lock.stem for lock in LOCKS] == [f"server-{each}" for each in supported[1].split()]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_locks_have_what_the_service_needs_with_hashes_and_name_no_index(lock: Path) -> None:
    versions = {}
    for requirement, hashes in pinned(lock):
        assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
        (only,) = requirement.specifier
        assert only.operator == "=="
        versions[canonicalize_name(requirement.name)] = only.version
    lacking = [
        str(each)
        for each in needed(lock)
        if not each.specifier.contains(versions.get(canonicalize_name(each.name), "none"))
    ]
    assert lacking == [], "`make locks` makes them anew"
    assert "torch" not in versions
    assert "://" not in lock.read_text() and "--index" not in lock.read_text()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_the_workers_torch_is_locked_too_and_goes_with_the_service(lock: Path) -> None:
    of_service = {requirement.name: str(requirement) for requirement, _ in pinned(lock)}
    path = lock.with_stem(lock.stem.replace("server", "torch"))
    of_torch = {requirement.name: str(requirement) for requirement, hashes in pinned(path) if hashes}
    assert len(of_torch) == len([*pinned(path)])
    assert [
        of_torch[name] for name in of_torch.keys() & of_service.keys() if of_torch[name] != of_service[name]
    ] == []
    (default,) = re.findall(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert of_torch["torch"] == default, "`make locks` makes them anew"
    assert f"${{TORCH:-{default}}}" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert "://" not in path.read_text() and "--index" not in path.read_text()


def test_the_images_install_from_the_locks() -> None:
    installs = re.findall(r"pip install (.+)", (ROOT / "deploy" / "Dockerfile").read_text())
    for kind, images in (("server", 3), ("torch", 2)):
        locked = f"--require-hashes -r deploy/locks/{kind}-${{PYTHON}}.txt"
        assert len([each for each in installs if locked in each]) == images
    assert not [each for each in installs if "[server]" in each]


def test_making_images_says_where_nothing_can_build_them(tmp_path: Path) -> None:
    """The docker command is often installed where no engine runs."""
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 1\n")
    docker.chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    command, place = [make, "-s", "images"], {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no docker, podman or buildah can build here: no image was made\n"


def test_the_bill_of_materials_has_each_package_and_the_pages_javascript(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py", reason="needs cyclonedx-bom: make .venv/.release")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    locks = [LOCKS[1], LOCKS[1].with_stem(LOCKS[1].stem.replace("server", "torch"))]
    command = [sys.executable, "deploy/sbom.py", *map(str, locks)]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = [each["name"] for each in json.loads(text)["components"]]
    names = {requirement.name for lock in locks for requirement, _ in pinned(lock)}
    assert sorted(each for each in components if each in names) == sorted(names)
    assert {"htmx.min.js", "dagre.min.js"} <= set(components)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_valid_and_call_what_is_there(path: Path) -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in jobs.values():
        for step in job["steps"]:
            words = step.get("run", ".ci/run").split()
            assert words[1] in targets if words[0] == "make" else (ROOT / words[0]).exists(), words


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=str)
def test_issue_forms_are_valid(path: Path) -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.github-issue-forms", str(path)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
