"""What reaches the log cannot forge it, and what is written privately is on the disk."""

from __future__ import annotations

import io
import logging
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from torchrelay.service.base import logs
from torchrelay.service.base.budgets import Rate
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.storage.private_files import write_private


@pytest.mark.parametrize("form", ["console", "json"])
def test_an_exceptions_text_forges_no_entry_and_controls_no_terminal(
    form: Any, monkeypatch: pytest.MonkeyPatch
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
def test_a_line_is_one_write(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_flood_is_dropped_and_counted_whoever_logs_it(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    before, last = structlog.get_config(), logging.lastResort
    now = [0.0]
    monkeypatch.setattr(logs, "Rate", lambda most: Rate(most, lambda: now[0]))
    try:
        logs.configure(ServiceSettings(log_format=form, log_lines_per_second=100))
        for n in range(1000):
            structlog.get_logger().info("published", key=str(n))
            record = logging.LogRecord(
                "asyncio", logging.ERROR, "", 0, "no descriptor\nTraceback", None, None
            )
            assert logging.lastResort is not None
            logging.lastResort.handle(record)
        flood = told.getvalue()
        now[0] += 1
        structlog.get_logger().info("calm")
    finally:
        structlog.configure(**before)
        logging.lastResort = last
    assert 90 <= flood.count("\n") <= 110
    assert "no descriptor" in flood and "published" in flood
    dropped, calm = told.getvalue().removeprefix(flood).splitlines()
    assert "log_entries_dropped" in dropped and "calm" in calm
    (count,) = (int(word) for word in re.findall(r"[0-9]+", dropped))
    assert count == 2000 - flood.count("published") - flood.count("no descriptor")


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
