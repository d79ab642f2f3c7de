"""What fails at the service never breaks training: one warning, local code, the same result; `require` raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torchrelay
from service_parts import TOKEN, Running, compiled, free_port, graph
from torchrelay.clients.backend import process_backend
from torchrelay.clients.gateway.credentials import SignIn, write_credentials
from torchrelay.clients.reports.run_report import process_report
from torchrelay.compiler import errors
from waiting import wait_until

FAILURES: list[tuple[Exception, type[errors.RelayError]]] = [
    (errors.NoWorker("no worker for this toolchain"), errors.NoWorker),
    (errors.CompileFailed("g++ ended with 1"), errors.CompileFailed),
    (errors.VerifyFailed("output 0 differs"), errors.VerifyFailed),
    (errors.CompileTimeout("too slow"), errors.CompileTimeout),
    (errors.CompileKilled("out of memory"), errors.CompileKilled),
    (ZeroDivisionError("a defect of the service"), errors.ServiceError),
]
IDS = [kind.__name__ for _, kind in FAILURES]


@pytest.fixture
def client(gateway: Running, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Make this process a client of the test's gateway in the given mode."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TORCHRELAY_")]:
            patch.delenv(name)
        patch.setenv("TORCHRELAY_URL", gateway.url)
        patch.setenv("TORCHRELAY_TOKEN", TOKEN)
        with gateway.http() as http:
            patch.setenv("TORCHRELAY_PUBLIC_KEYS", http.get("/v1/info").json()["public_keys"][0])
        patch.setenv("TORCHRELAY_CACHE_DIR", str(tmp_path / "client"))

        def connect(mode: str) -> None:
            patch.setenv("TORCHRELAY_MODE", mode)
            process_backend.cache_clear()
            process_report.cache_clear()
            torch.compiler.reset()

        yield connect
        process_backend.cache_clear()
        process_report.cache_clear()
        torch.compiler.reset()


def loss(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.square().sum()


@pytest.mark.parametrize(("failure", "kind"), FAILURES, ids=IDS)
def test_training_goes_on_with_one_warning(
    gateway: Running, client: Callable[[str], None], failure: Exception, kind: type[errors.RelayError]
) -> None:
    client("remote")
    gateway.pool.errors += [failure] * 20
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(loss, backend="torchrelay")(x).backward()
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))
    told = [str(w.message) for w in caught if w.category is torchrelay.FallbackWarning]
    assert len(told) == 1 and told[0].startswith("torchrelay: compiled locally: ")
    assert told[0].endswith(f" ({gateway.url}/errors#{kind.code})")
    assert torchrelay.report().fallbacks == {kind.code: 2}


def inner(x: torch.Tensor) -> torch.Tensor:
    return x.sin().square().sum()


def outer(x: torch.Tensor) -> torch.Tensor:
    return inner(x * 1)


def test_a_graph_that_data_decide_is_broken_as_by_inductor(
    gateway: Running, client: Callable[[str], None]
) -> None:
    """The frame runs as it is, and what it calls is asked for: here the second error answers that."""
    client("remote")
    gateway.pool.errors += [errors.DataDependent("Eq(u0, 0)"), errors.CompileFailed("the inner graph")]
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with pytest.warns(torchrelay.FallbackWarning, match="the inner graph") as told:
        torch.compile(outer, backend="torchrelay")(x).backward()
    assert len([w for w in told if w.category is torchrelay.FallbackWarning]) == 1
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))
    assert gateway.pool.errors == []
    assert torchrelay.report().fallbacks == {"compile_failed": 1}


def test_a_graph_that_must_be_whole_is_not_broken(gateway: Running, client: Callable[[str], None]) -> None:
    client("remote")
    gateway.pool.errors += [errors.DataDependent("Eq(u0, 0)")]
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with pytest.warns(torchrelay.FallbackWarning, match="Eq"):
        torch.compile(outer, backend="torchrelay", fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))
    assert torchrelay.report().fallbacks == {"data_dependent": 1}


def test_training_goes_on_when_a_sign_in_has_ended(
    client: Callable[[str], None], gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client("remote")
    monkeypatch.delenv("TORCHRELAY_TOKEN")
    monkeypatch.setenv("TORCHRELAY_TOKEN_FILE", str(tmp_path / "credentials.json"))
    away = f"http://127.0.0.1:{free_port()}"
    ended = SignIn(
        issuer=away, client_id="x", bearer="id_token", refresh_token="x", renew=1.0, expires=time.time() - 1
    )
    write_credentials(
        tmp_path / "credentials.json", url=gateway.url, token="old", public_keys=[], sign_in=ended
    )
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(loss, backend="torchrelay")(x).backward()
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))
    (told,) = [str(w.message) for w in caught if w.category is torchrelay.FallbackWarning]
    assert "the sign-in has expired and cannot be renewed" in told
    assert torchrelay.report().fallbacks == {"unauthenticated": 2}


def test_w_error_makes_no_fallback_an_error(
    gateway: Running, client: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is for the warnings of the user's own code; who names FallbackWarning gets it."""
    client("remote")
    gateway.pool.errors += [errors.CompileFailed("g++ ended with 1")] * 20
    x = torch.linspace(-1, 1, 8).requires_grad_()
    compiled = torch.compile(lambda x: x.sin().square().sum(), backend="torchrelay")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled(x).backward()
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))
    assert torchrelay.report().fallbacks == {"compile_failed": 1}
    assert "compiled locally: g++ ended with 1" in caplog.text
    client("remote")
    with warnings.catch_warnings():
        warnings.simplefilter("error", torchrelay.FallbackWarning)
        with pytest.raises(Exception, match="FallbackWarning: torchrelay: compiled locally: g"):
            compiled(x)


@pytest.mark.parametrize("content", [b'{"url": "\xff"}', b'{"url"', b"\x00"])
def test_a_settings_file_that_cannot_be_read_warns_once(
    gateway: Running,
    client: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "torchrelay").mkdir()
    (tmp_path / "torchrelay" / "config.json").write_bytes(content)
    client("remote")
    with pytest.warns(torchrelay.FallbackWarning, match=r"config\.json") as told:
        assert torch.compile(loss, backend="torchrelay")(torch.zeros(8)) == 0
    found = [warning.category for warning in told]  # PyTorch's own first compile warns too
    assert found.count(torchrelay.FallbackWarning) == 1
    assert torchrelay.report().fallbacks == {"bad_setting": 2}
    client("require")
    with pytest.raises(errors.SettingsError):
        torch.compile(loss, backend="torchrelay")(torch.zeros(8))


@pytest.mark.parametrize(("failure", "kind"), FAILURES, ids=IDS)
def test_require_raises_the_error_that_the_service_told(
    gateway: Running, client: Callable[[str], None], failure: Exception, kind: type[errors.RelayError]
) -> None:
    client("require")
    gateway.pool.errors += [failure] * 20
    with pytest.raises(kind) as caught:
        torch.compile(loss, backend="torchrelay")(torch.ones(8))
    assert caught.value.code == kind.code


def test_a_client_over_quota_compiles_locally_at_once(
    gateway: Running, client: Callable[[str], None]
) -> None:
    """Its Retry-After is a day away: nobody waits for that."""
    with gateway.http() as http:
        assert http.patch("/v1/namespaces/default", json={"compile_seconds": 0.001}).status_code == 200
        gateway.pool.seconds = 0.05
        compiled(http, graph())
        wait_until(lambda: http.get("/v1/stats").json()["seconds_spent"] > 0.001, seconds=30)
    client("remote")
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(loss, backend="torchrelay")(x).backward()
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))
    (told,) = [str(w.message) for w in caught if w.category is torchrelay.FallbackWarning]
    assert "spent its quota" in told and "next period" in told
    assert torchrelay.report().fallbacks == {"over_quota": 2}
    assert len(gateway.pool.calls) == 1
    with gateway.http() as http:
        wait_until(lambda: "over_quota" in http.get("/v1/stats").json()["fallbacks"], seconds=30)


def test_an_artifact_that_cannot_be_loaded_is_not_kept(
    gateway: Running, client: Callable[[str], None], tmp_path: Path
) -> None:
    """The gateway signs what its pool gives; this one's artifacts hold no code."""
    client("require")
    with pytest.raises(errors.ArtifactError):
        torch.compile(loss, backend="torchrelay")(torch.ones(8))
    kept = [path for path in (tmp_path / "client" / "artifacts").rglob("*") if path.is_file()]
    assert [path.name for path in kept if path.name != ".lock"] == []


def test_a_lock_that_cannot_be_read_warns_once_and_asks_for_nothing(
    gateway: Running, client: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRELAY_TUNING_LOCK", str(tmp_path / "missing.lock"))
    client("remote")
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(loss, backend="torchrelay", options={"max_autotune": True})(x).backward()
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))
    (told,) = [str(w.message) for w in caught if w.category is torchrelay.FallbackWarning]
    assert "missing.lock cannot be read" in told and "torchrelay tune export" in told
    assert torchrelay.report().fallbacks == {"bad_tuning_lock": 2}
    assert gateway.pool.calls == []
    with gateway.http() as http:
        wait_until(lambda: "bad_tuning_lock" in http.get("/v1/stats").json()["fallbacks"], seconds=30)


ELSEWHERE = """
import importlib.abc, json, os, sys, warnings
import torch
import torch._inductor.compile_fx

unix = ("fcntl", "grp", "pwd", "resource", "termios")

class NotHere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in unix:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in unix:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, NotHere())
del os.register_at_fork, os.fchmod
sys.platform = "other"

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step = torch.compile(lambda x: x.sin().square().sum(), backend="torchrelay")
    found = step(torch.ones(4)).item()
    torch.compiler.reset()
    step(torch.ones(5))
import torchrelay
assert torchrelay.report().fallbacks == {"unsupported": 2}, torchrelay.report().fallbacks
print(json.dumps([found, [str(w.message) for w in caught if w.category is torchrelay.FallbackWarning]]))
"""
"""A process where Python has none of what only Unix has, as on Windows, and where `sys.platform` is no system's that
PyTorch knows; for torchrelay alone: PyTorch is there already."""


@pytest.mark.parametrize("mode", ["remote", "require"])
def test_elsewhere_than_on_linux_graphs_compile_locally_with_one_warning(
    gateway: Running, tmp_path: Path, mode: str
) -> None:
    names = {
        "URL": gateway.url,
        "MODE": mode,
        "CACHE_DIR": str(tmp_path),
        "STATE_DIR": str(tmp_path / "state"),
    }
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env={**os.environ, **{f"TORCHRELAY_{name}": value for name, value in names.items()}},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if mode == "require":
        assert done.returncode == 1 and "Unsupported" in done.stderr and "for Linux" in done.stderr, (
            done.stderr
        )
        return
    assert done.returncode == 0, done.stderr
    found, told = json.loads(done.stdout)
    assert found == pytest.approx(torch.ones(4).sin().square().sum().item())
    assert len(told) == 1 and "the service compiles for Linux, and this is other" in told[0]
    assert done.stderr == "" and (tmp_path / "state").exists()
