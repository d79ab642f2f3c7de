"""The working directory that a job takes along: what is in it, that it comes back whole, and nothing but inside."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import time
from pathlib import Path

import pytest
from torchrelay.clients.jobfiles.working_directory import pack_directory
from torchrelay.compiler.api.training import working_directory
from torchrelay.compiler.errors import LimitExceeded, MalformedRequest, SettingsError
from torchrelay.compiler.request import codec


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def unpacked(data: bytes, folder: Path) -> list[str]:
    folder.mkdir()
    working_directory.unpack(data, folder)
    return names(folder)


def test_a_folder_comes_back_as_it_was_and_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a", train_dot_py="print(1)", data__deep__x_dot_txt="x" * 70_000, run="#!/bin/sh"
    )
    (source / "run").chmod(0o755)
    (source / "empty").mkdir()
    (source / "data" / "link").symlink_to("../train.py")
    (source / "data" / "whole").symlink_to(source / "train.py")
    other = write(
        tmp_path / "b", run="#!/bin/sh", data__deep__x_dot_txt="x" * 70_000, train_dot_py="print(1)"
    )
    (other / "run").chmod(0o700)
    (other / "empty").mkdir()
    (other / "data" / "link").symlink_to("../train.py")
    (other / "data" / "whole").symlink_to("../train.py")
    os.utime(other / "train.py", (1, 1))
    package = pack_directory(source)
    assert package.data == pack_directory(other).data
    assert unpacked(package.data, tmp_path / "out") == names(source)
    out = tmp_path / "out"
    assert (out / "data/deep/x.txt").read_text() == "x" * 70_000
    assert os.access(out / "run", os.X_OK) and not os.access(out / "train.py", os.X_OK)
    assert (out / "data/whole").readlink() == Path("../train.py")
    assert (out / "data/link").read_text() == "print(1)"


def test_what_came_along_is_older_than_what_a_script_writes_at_once(tmp_path: Path) -> None:
    data = pack_directory(write(tmp_path / "a", train_dot_py="print(1)", data__x="x")).data
    assert unpacked(data, tmp_path / "out") == ["data", "data/x", "train.py"]
    for name in ("train.py", "data/x"):
        assert (tmp_path / "out" / name).stat().st_mtime < time.time() - 10


def test_what_the_ignore_file_names_and_caches_and_environments_stay_here(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "a", train_dot_py="", keep__a_dot_bin="", keep__b_dot_bin="", out__big="", x_dot_pyc=""
    )
    write(folder, _dot_git__config="", src__lib_dot_py="", env__bin__python="", env__pyvenv_dot_cfg="")
    (folder / "src" / "__pycache__").mkdir()
    (folder / ".torchrelayignore").write_text("# not these\n*.bin\n!keep/b.bin\n/out/\n")
    assert unpacked(pack_directory(folder).data, tmp_path / "out") == [
        ".torchrelayignore",
        "keep",
        "keep/b.bin",
        "src",
        "src/lib.py",
        "train.py",
    ]


def test_a_folder_that_is_too_large_names_its_largest_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", train_dot_py="1")
    (folder / "weights.pt").write_bytes(os.urandom(3 << 20))
    with pytest.raises(LimitExceeded, match=r"weights\.pt \(3\.0 MiB\).*torchrelayignore"):
        pack_directory(folder, limit=1 << 20)
    (folder / ".torchrelayignore").write_text("*.pt\n")
    assert pack_directory(folder, limit=1 << 20).names == [".torchrelayignore", "train.py"]


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside"])
def test_a_link_that_leads_out_is_named(tmp_path: Path, target: str) -> None:
    folder = write(tmp_path / "a", sub__x="")
    (folder / "link").symlink_to(target)
    with pytest.raises(SettingsError, match=r"link is a link to .*outside.*torchrelayignore"):
        pack_directory(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="no sockets in folders")
def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", x="")
    os.mkfifo(folder / "pipe")
    with pytest.raises(SettingsError, match="pipe is not a file"):
        pack_directory(folder)


def made(*members: tuple[str, bytes, bytes, str]) -> bytes:
    """A package by hand: (name, type, data, link)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, data, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), link
            tar.addfile(info, io.BytesIO(data))
    return codec.compress(out.getvalue())


@pytest.mark.parametrize(
    "members",
    [
        [("../x", tarfile.REGTYPE, b"1", "")],
        [("/x", tarfile.REGTYPE, b"1", "")],
        [("a/./x", tarfile.REGTYPE, b"1", "")],
        [("a", tarfile.SYMTYPE, b"", "/etc")],
        [("d/a", tarfile.SYMTYPE, b"", "../..")],
        [("a", tarfile.SYMTYPE, b"", "d/../..")],
        [("a", tarfile.SYMTYPE, b"", "d"), ("a/x", tarfile.REGTYPE, b"1", "")],
        [("a", tarfile.LNKTYPE, b"", "/etc/passwd")],
        [("a", tarfile.CHRTYPE, b"", "")],
        [("a", tarfile.REGTYPE, b"1", ""), ("a", tarfile.REGTYPE, b"2", "")],
        [("a", tarfile.REGTYPE, b"1", ""), ("a/b", tarfile.REGTYPE, b"2", "")],
    ],
)
def test_a_forged_package_touches_nothing_outside(
    tmp_path: Path, members: list[tuple[str, bytes, bytes, str]]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(MalformedRequest):
        unpacked(made(*members), out)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_links_over_links_stay_inside(tmp_path: Path) -> None:
    """`up` is the folder itself; a way that goes through it and upwards would leave."""
    way = [("d/up", tarfile.SYMTYPE, b"", ".."), ("y", tarfile.SYMTYPE, b"", "d/up/../../etc")]
    with pytest.raises(MalformedRequest, match="leads out"):
        unpacked(made(*way), tmp_path / "out")


def test_garbage_bombs_and_cut_packages_are_refused(tmp_path: Path) -> None:
    package = pack_directory(write(tmp_path / "a", x="1" * 5000)).data
    for number, data in enumerate([b"", b"nothing", package[:-8], package[: len(package) // 2]]):
        with pytest.raises(MalformedRequest):
            unpacked(data, tmp_path / f"out{number}")
    bomb = made(("x", tarfile.REGTYPE, bytes(8 << 20), ""))
    (tmp_path / "bomb").mkdir()
    with pytest.raises(LimitExceeded):
        working_directory.unpack(bomb, tmp_path / "bomb", limit=1 << 20)
