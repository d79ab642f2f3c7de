"""What reaches the log cannot forge it, and what is written privately is on the disk."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path

import pytest
import structlog
from torchrelay.service.base import logs
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.storage.private_files import write_private


@pytest.mark.parametrize("form", ["console", "json"])
def test_an_exceptions_text_forges_no_entry_and_controls_no_terminal(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    before = structlog.get_config()
    try:
        logs.configure(ServiceSettings(log_format=form))
        try:
            raise ValueError("no\n2026-01-01 [info] published\x1b[2J")
        except ValueError:
            structlog.get_logger().exception("it_failed")
    finally:
        structlog.configure(**before)
    assert "\x1b" not in told.getvalue()
    assert "published" in told.getvalue()
    assert not [line for line in told.getvalue().splitlines() if line.startswith("2026-01-01")]


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_line_is_one_write(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes share standard error, which PYTHONUNBUFFERED makes write what it is given at once."""
    written: list[str] = []
    told = io.StringIO()
    monkeypatch.setattr(told, "write", written.append)
    monkeypatch.setattr(sys, "stderr", told)
    before = structlog.get_config()
    try:
        logs.configure(ServiceSettings(log_format=form))
        for event in ("published", "fetched"):
            structlog.get_logger().info(event, key="k")
    finally:
        structlog.configure(**before)
    assert len(written) == 2
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in written)


def test_a_private_file_and_its_name_are_on_the_disk_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        fsync(descriptor)
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((folder, (tmp_path / "ring.json").exists()))

    monkeypatch.setattr(os, "fsync", seen)
    write_private(tmp_path / "ring.json", b"{}")
    assert synced == [(False, False), (True, True)]
