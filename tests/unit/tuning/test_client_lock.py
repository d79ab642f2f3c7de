"""The client's tuning lock: which graphs take it along, what of it, and what a bad file does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torchrelay.clients.backend import RelayBackend, process_backend
from torchrelay.clients.jobfiles import tuning_lock
from torchrelay.clients.jobfiles.tuning_lock import LockedTunings
from torchrelay.clients.reports.run_report import process_report
from torchrelay.compiler.errors import TuningLockError
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.graph.configuration import Mode
from torchrelay.compiler.graph.toolchain import local_target, local_toolchain
from torchrelay.compiler.request import codec, cpu_isa, key, schema, validate
from torchrelay.compiler.tuning import records

MATRIX = records.Operand("float32", (4, 4), (4, 1))
HERE = records.DeviceEnvironment(
    device="a CPU of the team's",
    capability=cpu_isa.capability(local_target("cpu").cpu),
    driver="",
    torch=local_toolchain().torch,
    triton=local_toolchain().triton,
    cuda=local_toolchain().cuda,
    threads=torch.get_num_threads(),
)


def entry(op: str, winner: str = "aten", place: records.DeviceEnvironment = HERE) -> records.TuningEntry:
    return records.TuningEntry(
        problem=records.Problem(op, (MATRIX, MATRIX), MATRIX),
        place=place,
        winner=records.Timing(winner, 1.0, 0.9, 1.1, 9),
        candidates=2,
    )


ELSEWHERE = [
    entry("mm", "no", replace(HERE, **{field: "another"}))
    for field in ("capability", "torch", "triton", "cuda")
] + [entry("mm", "no", replace(HERE, threads=1000))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "team.lock"
    path.write_text(tuning_lock.write([entry("mm"), entry("bmm"), *ELSEWHERE]))
    return path


def captured(lock: LockedTunings | None, mode: Mode = "max-autotune", **options: Any) -> schema.GraphRequest:
    found: list[schema.GraphRequest] = []

    def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        request = capture(gm, examples, mode=mode, options=options).request
        found.append(request if lock is None else lock.pin(request))
        return gm.forward

    torch.compiler.reset()
    torch.compile(torch.sin, backend=backend)(torch.ones(4))
    (request,) = found
    validate.check_request(request, codec.Limits())
    return request


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("max-autotune", {}),
        ("max-autotune-no-cudagraphs", {}),
        ("default", {"max_autotune": True}),
        ("reduce-overhead", {"max_autotune_gemm": True}),
    ],
)
def test_a_graph_that_tunes_takes_what_may_apply_to_it(
    mode: Mode, options: dict[str, Any], strict: bool, file: Path
) -> None:
    request = captured(LockedTunings(file, strict=strict), mode, **options)
    assert request.tuning_lock == schema.TuningLock(strict, [entry("bmm"), entry("mm")])
    assert replace(request, tuning_lock=None) == captured(None, mode, **options)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("default", {}), ("reduce-overhead", {}), ("max-autotune", {"max_autotune": False})],
)
def test_another_graph_stays_as_it_is_and_the_file_is_not_read(
    mode: Mode, options: dict[str, Any], tmp_path: Path
) -> None:
    missing = LockedTunings(tmp_path / "none", strict=True)
    assert captured(missing, mode, **options) == captured(None, mode, **options)


def test_equal_locks_make_equal_keys_whatever_else_the_file_holds(file: Path, tmp_path: Path) -> None:
    first = key.key_of(captured(LockedTunings(file, strict=True)))
    again = tmp_path / "again.lock"
    again.write_text("# reviewed\n" + tuning_lock.write([entry("bmm"), entry("mm")]))
    assert key.key_of(captured(LockedTunings(again, strict=True))) == first
    assert key.key_of(captured(LockedTunings(again, strict=False))) != first
    again.write_text(tuning_lock.write([entry("bmm", "cpp_gemm"), entry("mm")]))
    assert key.key_of(captured(LockedTunings(again, strict=True))) != first


def test_a_lock_of_other_places_alone_is_none_unless_it_is_strict(tmp_path: Path) -> None:
    file = tmp_path / "team.lock"
    file.write_text(tuning_lock.write(ELSEWHERE))
    assert captured(LockedTunings(file, strict=False)) == captured(None)
    assert captured(LockedTunings(file, strict=True)).tuning_lock == schema.TuningLock(True, [])


def test_the_file_is_read_once(file: Path) -> None:
    lock = LockedTunings(file, strict=True)
    first = captured(lock)
    file.unlink()
    assert captured(lock) == first


# --- a file that cannot be used --------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process a client without a gateway; nothing gets as far as one."""

    def connect(file: Path, **variables: str) -> RelayBackend:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        monkeypatch.setenv("TORCHRELAY_TUNING_LOCK", str(file))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        process_backend.cache_clear()
        process_report.cache_clear()
        torch.compiler.reset()
        return process_backend()

    yield connect
    process_backend.cache_clear()
    process_report.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize("mode", ["strict", "loose"])
def test_require_raises_what_is_wrong_with_the_file(client: Any, file: Path, mode: str) -> None:
    file.write_text(file.read_text().replace("median = 1.0", "median = 0", 1))
    client(file, TORCHRELAY_MODE="require", TORCHRELAY_TUNING_LOCK_MODE=mode)
    compiled = torch.compile(torch.sin, backend="torchrelay", mode="max-autotune-no-cudagraphs")
    with pytest.raises(TuningLockError, match=r"team\.lock, line \d+: winner_ms\.median: Expected .* export"):
        compiled(torch.ones(4))
