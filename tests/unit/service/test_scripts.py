"""Lua scripts are named by their files: every one that is called is there, and every one that is there is called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from redis.asyncio import Redis
from torchrelay.service.storage.redis import scripts

SERVICE = Path(scripts.__file__).parents[2]


def test_the_scripts_that_are_called_are_those_that_are_there() -> None:
    folder = SERVICE / "storage" / "redis" / "lua"
    files = [path for path in folder.rglob("*.lua") if path.parent.name != "shared"]
    names = {path.stem for path in files}
    assert len(names) == len(files) > 20
    called = {
        name
        for path in SERVICE.rglob("*.py")
        for name in re.findall(r"\b_?scripts\.(\w+)\(", path.read_text())
    }
    assert called == names


def test_a_script_is_an_attribute_and_an_unknown_one_is_an_error() -> None:
    found = scripts.Scripts(Redis())
    assert "redis.call" in found.publish.args[-1].script
    with pytest.raises(AttributeError, match=r"nothing\.lua"):
        found.nothing  # noqa: B018
