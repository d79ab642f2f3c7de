"""The disk cache: whole files or none, shared by processes, least recently used out, never an exception."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrelay.clients.artifacts.disk_cache import DiskCache


def key(n: int) -> str:
    return f"{n:02x}" * 32


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != ".lock")


def test_what_was_put_is_found_by_another_instance(tmp_path: Path) -> None:
    assert DiskCache(tmp_path / "c", 1000).put(key(1), b"artifact")
    assert DiskCache(tmp_path / "c", 1000).get(key(1)) == b"artifact"
    assert DiskCache(tmp_path / "c", 1000).get(key(2)) is None


def test_put_replaces_and_remove_forgets(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    cache.put(key(1), b"old")
    cache.put(key(1), b"new")
    assert cache.get(key(1)) == b"new"
    cache.remove(key(1))
    cache.remove(key(1))
    assert cache.get(key(1)) is None


def test_its_folders_are_private_and_its_files_whole(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", 1000)
    cache.put(key(1), b"x")
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.relative_to(tmp_path / "c" / "artifacts") == Path(key(1)[:2]) / key(1)


@given(
    st.text(max_size=80).filter(lambda text: not (len(text) >= 8 and set(text) <= set("0123456789abcdef")))
)
def test_a_key_that_is_not_hex_is_refused(text: str) -> None:
    cache = DiskCache(Path("/nonexistent"), 1000)
    for call in (cache.get, cache.remove, lambda k: cache.put(k, b"")):
        with pytest.raises(ValueError, match="not a cache key"):
            call(text)


def test_trimming_removes_the_least_recently_used_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    for n in range(1, 5):
        cache.put(key(n), b"x" * 25)
        os.utime(tmp_path / "artifacts" / key(n)[:2] / key(n), (n, n))
    assert cache.get(key(1)) is not None  # now the most recently used
    cache.put(key(5), b"x" * 25)
    cache.trim()
    assert [n for n in range(1, 6) if cache.get(key(n)) is not None] == [1, 4, 5]


def test_an_instance_trims_on_its_first_put(tmp_path: Path) -> None:
    big = DiskCache(tmp_path, 1000)
    for n in range(1, 5):
        big.put(key(n), b"x" * 100)
    DiskCache(tmp_path, 250).put(key(9), b"x" * 100)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 250


def test_trimming_is_left_to_the_process_that_already_trims(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100, trim_every=1)
    (tmp_path / "artifacts").mkdir()
    with (tmp_path / "artifacts" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for n in range(1, 8):
            assert cache.put(key(n), b"x" * 30)
        assert len(files(tmp_path)) == 7
    cache.trim()
    assert len(files(tmp_path)) == 3


def test_temporary_files_of_dead_processes_go_and_fresh_ones_stay(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    cache.put(key(1), b"x")
    stale, fresh = (tmp_path / "artifacts" / key(1)[:2] / name for name in (".tmp-stale", ".tmp-fresh"))
    stale.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(stale, (1, 1))
    cache.trim()
    assert not stale.exists()
    assert fresh.exists()


def test_an_artifact_over_the_limit_is_not_kept(tmp_path: Path) -> None:
    assert not DiskCache(tmp_path, 10).put(key(1), b"x" * 11)
    assert files(tmp_path) == []


def test_a_limit_of_zero_keeps_and_finds_nothing(tmp_path: Path) -> None:
    DiskCache(tmp_path, 100).put(key(1), b"x")
    cache = DiskCache(tmp_path, 0)
    assert not cache.put(key(2), b"x")
    assert cache.get(key(1)) is None


def test_a_full_disk_is_logged_once_and_never_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **kwargs: object) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = DiskCache(tmp_path, 1000)
    monkeypatch.setattr(os, "fdopen", full)
    with caplog.at_level(logging.WARNING):
        assert not cache.put(key(1), b"x")
        assert not cache.put(key(2), b"x")
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert files(tmp_path) == []


def test_a_root_that_cannot_be_a_folder_costs_entries_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "c", 1000)
    assert not cache.put(key(1), b"x")
    assert cache.get(key(1)) is None
    cache.remove(key(1))


def test_an_entry_replaced_by_a_folder_is_absent_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "artifacts" / key(1)[:2] / key(1)).mkdir(parents=True)
    cache = DiskCache(tmp_path, 1000)
    assert cache.get(key(1)) is None
    assert not cache.put(key(1), b"x")


def test_readers_see_whole_files_while_others_write_and_trim(tmp_path: Path) -> None:
    written = {key(n): bytes([n]) * 5000 for n in range(8)}
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        cache = DiskCache(tmp_path, 20_000)
        while not done.is_set():
            wrong.extend(k for k, data in written.items() if cache.get(k) not in (None, data))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    program = (
        "import sys, pathlib; from torchrelay.clients.artifacts.disk_cache import DiskCache\n"
        "cache = DiskCache(pathlib.Path(sys.argv[1]), 20_000, trim_every=3)\n"
        "for _ in range(40):\n"
        "    for n in range(8): assert cache.put(f'{n:02x}' * 32, bytes([n]) * 5000)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    DiskCache(tmp_path, 20_000).trim()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 20_000
    assert not [path for path in files(tmp_path) if path.name.startswith(".tmp-")]
