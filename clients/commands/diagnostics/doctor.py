"""`torchrelay doctor`: checks everything between a training script and a compiled graph, in that order.

Each line says `pass`, or `FAIL` and what to do; a check that needs a failed one is skipped. The exit status is 1 unless
every check passes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import typer
from msgspec import Struct, field
from rich.console import Console
from rich.text import Text

from ....compiler import VERSION, decoding, errors, install_hint
from ....compiler.api import compiles
from ....compiler.artifact.signing import key_text
from ....compiler.request import schema
from ....compiler.request.operator_table.table import VERSIONS as TESTED
from ...artifacts.verification import FILE, TrustStore
from ...gateway.compile_client import GatewayClient
from ...jobfiles import tuning_lock
from ...settings import ClientSettings, child_environment, credentials_path, load_settings
from .. import output
from ..output import Json

_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


class CheckResult(Struct, frozen=True, kw_only=True):
    """One line of the doctor."""

    name: str
    status: Literal["pass", "fail", "skip"]
    finding: str = field(name="found")
    advice: str = ""


class _Check(Struct, frozen=True):
    """A check, and the names of the checks that must pass before it."""

    name: str
    needs: tuple[str, ...]
    look: Callable[[GatewayClient, ClientSettings], str]


class _RoundTrip(Struct):
    """What round_trip.py prints."""

    outcome: str = ""
    checked: int = 0
    seconds: float = 0.0
    error: compiles.ErrorBody | None = None


def doctor(
    json: Json = False,
) -> None:
    """Check versions, gateway, Redis, workers, signature and a round trip."""
    console = Console(highlight=False)
    results: list[CheckResult] = []
    for result in run_checks():
        results.append(result)
        if not json:
            console.print(_line(result), soft_wrap=True)
    ok = all(result.status == "pass" for result in results)
    if json:
        output.print_json({"ok": ok, "checks": results})
    if not ok:
        raise typer.Exit(1)


def _line(result: CheckResult) -> Text:
    status = result.status if result.status != "fail" else "FAIL"
    line = Text.assemble((f"{status:<5}", _STYLES[result.status]), f"{result.name:<12}{result.finding}")
    if result.advice:
        line.append(f". {result.advice}")
    return line


def run_checks() -> Iterator[CheckResult]:
    """Runs the checks in order."""
    try:
        settings = load_settings()
    except errors.SettingsError as error:
        yield CheckResult(name="settings", status="fail", finding=error.message, advice=error.advice)
        return
    failed: set[str] = set()
    with GatewayClient(settings) as gateway:
        for check in CHECKS:
            blocker = next((name for name in check.needs if name in failed), None)
            if blocker is None:
                result = _result(check, gateway, settings)
            else:
                advice = f"First fix {blocker!r}"
                result = CheckResult(name=check.name, status="skip", finding="not checked", advice=advice)
            if result.status != "pass":
                failed.add(check.name)
            yield result


def _result(check: _Check, gateway: GatewayClient, settings: ClientSettings) -> CheckResult:
    try:
        return CheckResult(name=check.name, status="pass", finding=check.look(gateway, settings))
    except errors.RelayError as error:
        return CheckResult(name=check.name, status="fail", finding=error.message, advice=error.advice)


# --- the checks, in the order in which a compile needs them ----------------------------------------------


def _versions(gateway: GatewayClient, settings: ClientSettings) -> str:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise errors.ClientError("torch is not installed", hint="Run `pip install torch`") from None
    version, oldest, newest = (
        tuple(int(part) for part in text.split(".")[:2]) for text in (torch, TESTED[0], TESTED[-1])
    )
    if version < oldest:
        raise errors.ClientError(f"torch {torch} is not supported", hint=f"Install torch >= {TESTED[0]}")
    untested = f" (newer than {TESTED[-1]}, the newest tested)" if version > newest else ""
    return f"torchrelay {VERSION}, torch {torch}{untested}, Python {platform.python_version()}"


def _backend(gateway: GatewayClient, settings: ClientSettings) -> str:
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="torchrelay"):
        raise errors.ClientError(
            "torch.compile does not find the backend",
            hint=f"{install_hint()}; a folder on PYTHONPATH has no entry points",
        )
    return 'torch.compile(..., backend="torchrelay") is registered'


def _settings(gateway: GatewayClient, settings: ClientSettings) -> str:
    if settings.mode == "off":
        raise errors.SettingsError("mode is 'off': nothing is sent", hint="Set TORCHRELAY_MODE=remote")
    found = f"mode {settings.mode}, deadline {settings.deadline:g} s, cache {settings.cache_dir}"
    if settings.tuning_lock is None:
        return found
    return f"{found}, {settings.tuning_lock_mode} tuning lock of {len(tuning_lock.load(settings.tuning_lock))} winners"


def _gateway(gateway: GatewayClient, settings: ClientSettings) -> str:
    if not settings.url:
        raise errors.GatewayUnreachable("no gateway is known")
    info = gateway.info()
    if info.get("schema") != schema.SCHEMA:
        raise errors.SchemaMismatch(
            f"the gateway speaks schema {info.get('schema')}, this client {schema.SCHEMA}"
        )
    if (theirs := info.get("pipeline", 1)) != schema.PIPELINE:
        raise errors.SchemaMismatch(
            f"the gateway's keys have revision {theirs} of the pipeline, this client's {schema.PIPELINE}"
        )
    return f"{settings.url}, version {info.get('version')}, schema {schema.SCHEMA}, token accepted"


def _redis(gateway: GatewayClient, settings: ClientSettings) -> str:
    return _part(gateway, "redis", "Start Redis again, or see the gateway's log")


def _workers(gateway: GatewayClient, settings: ClientSettings) -> str:
    _part(gateway, "workers", "Wait a moment, or start one: `torchrelay worker`")
    states = Counter(worker.state for worker in gateway.workers())
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


_CONFINING = {"namespaces", "landlock", "off"}
"""Forms of isolation that deny files and network; `off` is the administrator's choice."""


def _isolation(gateway: GatewayClient, settings: ClientSettings) -> str:
    known = [worker for worker in gateway.workers() if worker.isolation and worker.state != "dead"]
    unconfined = [worker for worker in known if not _CONFINING & set(worker.isolation)]
    if unconfined:
        raise errors.IsolationUnavailable(
            f"compiles on {', '.join(worker.host or worker.id for worker in unconfined)} see the worker's files "
            f"(isolation: {', '.join(unconfined[0].isolation)})",
            hint="Allow user namespaces or Landlock there (docs/isolation.md)",
        )
    forms = Counter(", ".join(worker.isolation) for worker in known)
    return "; ".join(f"{count} by {form}" for form, count in sorted(forms.items())) or "no worker says"


def _part(gateway: GatewayClient, name: str, advice: str) -> str:
    """A part's state in the answer of /readyz."""
    state = gateway.parts().get(name, "the gateway does not say")
    if state != "ok":
        raise errors.Unavailable(f"{name}: {state}", hint=advice)
    return state


def _toolchain(gateway: GatewayClient, settings: ClientSettings) -> str:
    # These import torch, which takes seconds: only here, after everything that is quick.
    import torch

    from ....compiler.graph.toolchain import local_target, local_toolchain

    own = local_toolchain()
    workers = [worker for worker in gateway.workers() if worker.state != "dead"]
    targets = [
        local_target("cpu", name=settings.target),
        *([local_target("cuda")] if torch.cuda.is_available() else []),
    ]
    for target in targets:
        if not any(schema.builds_for(w.toolchain, w.target, w.others, own, target) for w in workers):
            known = [worker for worker in workers if worker.toolchain.torch]  # others still start
            offered = "; ".join(sorted({_described(w.toolchain, w.target) for w in known})) or "none"
            raise errors.NoWorker(f"no worker for {_described(own, target)} (workers: {offered})")
    return ", ".join(_described(own, target) for target in targets)


def check_signature(gateway: GatewayClient, settings: ClientSettings) -> str:
    if not settings.public_keys:
        raise errors.SignatureError(
            "no public key is trusted",
            hint=f"Set TORCHRELAY_PUBLIC_KEYS, or store it in {credentials_path()}",
        )
    info = gateway.info()
    served = info.get("public_keys", [])
    store = TrustStore(settings)
    store.refresh_if_newer(gateway.trust_serial, gateway.trust_document)
    trust = store.trust()
    trusted = {key_text(key) for name, key in trust.keys.items() if name not in trust.revoked}
    if not served or not trusted.issuperset(served):
        raise errors.SignatureError(
            "the gateway serves artifacts signed with a key that is not trusted here",
            hint="Compare its public keys with its administrator, then set TORCHRELAY_PUBLIC_KEYS, or run "
            "`torchrelay login`",
        )
    return f"key {', '.join(info.get('key_ids', []))} is trusted"


def _round_trip(gateway: GatewayClient, settings: ClientSettings) -> str:
    with tempfile.TemporaryDirectory(prefix="torchrelay-doctor-") as folder:
        if settings.state_dir is not None:  # its own folder for the record, with the user's trust document
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(settings.state_dir / FILE, folder)
        environment = child_environment(
            TORCHRELAY_MODE="require",
            TORCHRELAY_CACHE_DIR=folder,
            TORCHRELAY_STATE_DIR=folder,
            TORCHRELAY_CHECK="1",
        )
        command = [sys.executable, "-P", "-m", "torchrelay.clients.commands.diagnostics.round_trip"]
        limit = settings.deadline + 120
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise errors.CompileTimeout(f"one small graph took more than {limit:g} s") from None
    try:
        answer = decoding.from_json(done.stdout, type=_RoundTrip)
    except msgspec.MsgspecError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise errors.CompileFailed(
            f"the round trip's process failed: {last[0]}", hint=f"Run {' '.join(command)}"
        ) from None
    if answer.error is not None:
        raise errors.from_code(answer.error.code, answer.error.message, answer.error.hint)
    if answer.checked != 1:
        raise errors.CompileFailed(
            "one small graph could not be compared with eager", hint="Please report this"
        )
    return f"{answer.outcome}, {answer.seconds:.1f} s, equal to eager up to rounding"


CHECKS = (
    _Check("versions", (), _versions),
    _Check("backend", (), _backend),
    _Check("settings", (), _settings),
    _Check("gateway", (), _gateway),
    _Check("redis", ("gateway",), _redis),
    _Check("workers", ("gateway",), _workers),
    _Check("isolation", ("gateway", "workers"), _isolation),
    _Check("toolchain", ("versions", "gateway", "workers"), _toolchain),
    _Check("signature", ("gateway",), check_signature),
    _Check("round trip", ("backend", "settings", "redis", "toolchain", "signature"), _round_trip),
)


def _described(toolchain: schema.Toolchain, target: schema.Target) -> str:
    return f"{toolchain.python} torch {toolchain.torch} on {target.name or target.kind}"
