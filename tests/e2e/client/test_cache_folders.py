"""A cache folder that takes no files, or from which no code runs: hits are hits, and leave no file elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_commands import train
from torchrelay.examples.harness.private_service import PrivateService

MOUNTS = {"read-only": "ro", "noexec": "noexec", "full": "size=16k"}


def mounted(folder: Path, options: str) -> list[str]:
    """A command that runs its arguments where an empty file system with `options` is mounted on `folder`."""
    script = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    return ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c", script, str(folder)]


@pytest.fixture(scope="module")
def compiled(service: PrivateService, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The salt of a graph that the service has compiled."""
    assert train(service, tmp_path_factory.mktemp("first"), 1.4375)["misses"] == 1
    return 1.4375


@pytest.mark.parametrize("name", MOUNTS)
def test_a_hit_needs_no_file_there(
    service: PrivateService, tmp_path: Path, compiled: float, name: str
) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    cache.mkdir()
    temporary.mkdir()
    within = mounted(cache, MOUNTS[name])
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system in a user namespace")
    variables = {"TORCHRELAY_MODE": "require", "TMPDIR": str(temporary)}
    found = train(service, cache, compiled, within=within, **variables)
    assert (found["error"], found["told"], found["hits"]) == ("", [], 1)
    assert not list(temporary.glob("torchrelay*"))


def test_a_file_where_the_folder_should_be(service: PrivateService, tmp_path: Path, compiled: float) -> None:
    cache = tmp_path / "cache"
    cache.touch()
    found = train(service, cache, compiled, TORCHRELAY_MODE="require", TMPDIR=str(tmp_path))
    assert (found["error"], found["told"], found["hits"]) == ("", [], 1)
    assert not list(tmp_path.glob("torchrelay*"))
