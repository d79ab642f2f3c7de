"""A command that is used wrongly ends with 2, says so in a line and names what is allowed; no service is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import torchrelay, user


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["token", "create", "bob", "--role", "boss"], "read, compile, tune, train, admin"),
        (["token", "create", "bob", "--expires", "soon"], "45m, 12h, 30d, never"),
        (["stats", "--namespace", "A_B"], "a to z, 0 to 9"),
        (["export", "a:b", "--format", "zip"], "format is 'zip'. Targets are"),
        (["export", "a:b", "--target", "abacus"], "targets is 'abacus'. Targets are cpu, cpu-avx2"),
        (["lower", "x.py", "--level", "zzz"], "captured, joint, forward"),
        (["lower", "x.py", "--format", "zip"], "text, json, folder"),
        (["capture", "x.py", "--mode", "zzz"], "default, reduce-overhead"),
        (["train", "run", "x.py", "--device", "tpu"], "cpu, cuda"),
        (["train", "run", "x.py", "--precision", "fp7"], "fp32, tf32, bf16, fp16"),
        (["cache", "show", "zz"], "64 hex digits"),
        (["open", "zz"], "16 hexadecimal digits"),
    ],
)
def test_what_is_allowed_is_named(words: list[str], allowed: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("raise SystemExit('it ran')\n")
    environment = user(tmp_path, "http://127.0.0.1:9", "a-token")
    done = torchrelay(*words, environment=environment, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert allowed in " ".join(done.stderr.replace("│", " ").split()) and "it ran" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["stats", "top", "whoami", "train ls", "tune ls", "cache ls", "open"])
def test_without_a_service_a_command_fails_with_1_and_says_what_to_do(command: str, tmp_path: Path) -> None:
    environment = user(tmp_path, "http://127.0.0.1:9", "a-token")
    done = torchrelay(*command.split(), environment=environment, status=1)
    assert len(done.stderr.splitlines()) == 1 and "torchrelay up" in done.stderr
