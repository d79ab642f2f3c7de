"""The command line as a user runs it: exit statuses, one-line errors, JSON, the doctor's verdicts."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import command_line
import msgspec
import pytest
import torchrelay
from torchrelay.clients import cli
from torchrelay.clients.artifacts.disk_cache import DiskCache
from torchrelay.clients.commands.diagnostics import doctor
from torchrelay.clients.reports.run_report import RUN_FILE
from torchrelay.compiler.api import compiles
from torchrelay.compiler.api.runs import GraphRecord, RunRecord
from torchrelay.compiler.request import codec, schema

KEY = base64.b64encode(bytes(range(32))).decode()
STATS: dict[str, Any] = {"requests": 5, "hits": 3, "misses": 1, "compiles": 1, "coalesced": 1, "failures": 0}
STATS |= {"seconds_saved": 1234.5, "fallbacks": {"no_worker": 2}}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folders = {name: str(tmp_path / name) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}
    return command_line.user(tmp_path / "XDG_CONFIG_HOME", **folders)


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line.torchrelay(*arguments, environment=environment)


@pytest.fixture
def gateway(environment: dict[str, str]) -> Iterator[dict[str, tuple[int, Any]]]:
    """GET path -> status and JSON, served on loopback; `environment` points at it."""
    answers: dict[str, tuple[int, Any]] = {
        "/v1/stats": (200, STATS),
        "/v1/info": (
            200,
            {"version": "0.1.0", "schema": schema.SCHEMA, "key_ids": ["k1"], "public_keys": [KEY]},
        ),
        "/v1/workers": (200, []),
        "/readyz": (200, {"ready": True, "parts": {"redis": "ok", "workers": "ok"}}),
    }

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answers.get(self.path, (404, {}))
            if self.path.startswith("/v1") and self.headers["Authorization"] != "Bearer secret":
                status = 401
                content = {"error": {"code": "unauthenticated", "message": "no token", "hint": "Set one"}}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    environment["TORCHRELAY_URL"] = f"http://127.0.0.1:{server.server_port}"
    environment["TORCHRELAY_TOKEN"] = "secret"
    environment["TORCHRELAY_PUBLIC_KEYS"] = KEY
    yield answers
    server.shutdown()
    server.server_close()
    thread.join()


def test_explain_says_how_often_a_graph_ran_eagerly(
    environment: dict[str, str], gateway: dict[str, tuple[int, Any]]
) -> None:
    served = GraphRecord(key="a" * 64, outcome="miss", seconds=9.0, nodes=3, eager_calls=1200)
    waits = msgspec.structs.replace(served, outcome="background")
    folder = Path(environment["XDG_STATE_HOME"]) / "torchrelay"
    folder.mkdir(parents=True)
    record = RunRecord(program="train.py", pid=7, ended=1.0, graphs=(served, waits))
    (folder / RUN_FILE).write_bytes(msgspec.json.encode(record))
    told = run(environment, "explain")
    assert told.returncode == 0, told.stderr
    for line in ("miss; 1,200 calls eagerly ", "miss, ran eagerly to the end; 1,200 calls eagerly "):
        assert line in told.stdout, told.stdout


def test_the_version_is_printed(environment: dict[str, str]) -> None:
    assert run(environment, "--version").stdout == f"torchrelay {torchrelay.__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(environment: dict[str, str], flag: str) -> None:
    listed = run(environment, flag).stdout
    assert all(f" {name} " in listed for name in ("up", "demo", "doctor", "stats", "explain", "whoami"))


@pytest.mark.parametrize("command", [["stats"], ["cache", "local", "ls"], ["up"]])
def test_each_command_has_the_short_flag(environment: dict[str, str], command: list[str]) -> None:
    assert "usage" in run(environment, *command, "-h").stdout.lower()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(environment: dict[str, str], shell: str) -> None:
    """The script that a shell evaluates asks the command itself, by these variables."""
    script = run({**environment, "_TORCHRELAY_COMPLETE": f"source_{shell}"}).stdout
    assert "_TORCHRELAY_COMPLETE" in script
    asked = {
        "bash": ("torchrelay cache l", "2"),
        "zsh": ("torchrelay cache l", ""),
        "fish": ("torchrelay cache l", ""),
    }
    words, position = asked[shell]
    given = {
        "COMP_WORDS": words,
        "COMP_CWORD": position,
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TORCHRELAY_COMPLETE": f"complete_{shell}",
    }
    found = run({**environment, **given}).stdout
    assert "ls" in found and "local" in found and "stats" not in found


def test_the_settings_are_shown_with_where_they_come_from(environment: dict[str, str]) -> None:
    folder = Path(environment["XDG_CONFIG_HOME"]) / "torchrelay"
    folder.mkdir(parents=True)
    config, credentials = folder / "config.json", folder / "credentials.json"
    config.write_text(json.dumps({"mode": "cache", "deadline": 30}))
    credentials.write_text(
        json.dumps({"url": "http://127.0.0.1:9", "token": "secret", "namespace": "vision"})
    )
    credentials.chmod(0o600)
    given = {**environment, "TORCHRELAY_DEADLINE": "40"}
    shown = {name: (row["value"], row["from"]) for name, row in config_shown(given).items()}
    assert shown["deadline"] == (40, "TORCHRELAY_DEADLINE")
    assert shown["mode"] == ("cache", str(config))
    assert shown["url"] == ("http://127.0.0.1:9", str(credentials))
    assert shown["token"] == ("(hidden)", str(credentials))
    assert shown["idle_timeout"] == (20, "default")
    elsewhere = config_shown({**given, "TORCHRELAY_URL": "http://127.0.0.1:8"})
    assert (elsewhere["token"], elsewhere["namespace"]["value"]) == ({"value": "", "from": "default"}, "")
    table = run(given, "config", "show").stdout
    assert "secret" not in table
    assert ["deadline", "40", "s", "TORCHRELAY_DEADLINE"] in [line.split() for line in table.splitlines()]


def config_shown(environment: dict[str, str]) -> dict[str, Any]:
    done = run(environment, "config", "show", "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_what_this_machine_keeps_is_listed_and_removed(environment: dict[str, str]) -> None:
    folder = Path(environment["XDG_CACHE_HOME"]) / "torchrelay"
    cache = DiskCache(folder, 1 << 30)
    keys = ["ab" * 32, "ac" * 32]
    for size, key in enumerate(keys, 1):
        assert cache.put(key, b"x" * 1024 * size)
    program = folder / "programs" / "ff" / "program"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"x" * 512)
    (folder / "artifacts" / "ab" / "abnormal").write_bytes(b"of no use")
    table = run(environment, "cache", "local", "ls").stdout
    assert all(key[:16] in table for key in keys)
    assert f"2 artifacts and 1 files of programs: 3.50 KiB of 8.00 GiB in {folder}" in table
    listed = json.loads(run(environment, "cache", "local", "ls", "--json").stdout)
    kept = {("artifact", 1024), ("artifact", 2048), ("program", 512)}
    assert {(each["kind"], each["bytes"]) for each in listed} == kept
    for wrong in (["a"], ["ee"], [], ["ab", "--all"]):
        assert run(environment, "cache", "local", "rm", *wrong).returncode == 2
    assert run(environment, "cache", "local", "rm", "ab").stdout == "removed 1.00 KiB\n"
    assert [file.path.name for file in cache.files() if not file.is_program] == [keys[1]]
    assert run(environment, "cache", "local", "rm", "--all").stdout == "removed 2.50 KiB\n"
    assert cache.files() == []


@pytest.mark.parametrize("arguments", [["nosuch"], ["stats", "--nosuch"]])
def test_wrong_use_exits_with_2(environment: dict[str, str], arguments: list[str]) -> None:
    assert run(environment, *arguments).returncode == 2


def test_without_a_gateway_the_error_is_one_line_with_a_hint(environment: dict[str, str]) -> None:
    done = run(environment, "stats")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "torchrelay: no gateway is known. Start one with `torchrelay up`, or set TORCHRELAY_URL\n"
    )


def test_a_bad_setting_exits_with_2_and_names_the_variable(environment: dict[str, str]) -> None:
    done = run({**environment, "TORCHRELAY_MODE": "bogus"}, "stats")
    assert done.returncode == 2
    assert done.stderr == ("torchrelay: TORCHRELAY_MODE is 'bogus'. Allowed: off, cache, remote, require\n")


def test_stats_as_json_are_the_gateways(environment: dict[str, str], gateway: dict[str, Any]) -> None:
    done = run(environment, "stats", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, STATS)


def test_stats_for_people_name_every_counter(environment: dict[str, str], gateway: dict[str, Any]) -> None:
    lines = [line.split() for line in run(environment, "stats").stdout.splitlines()]
    assert lines[1] == ["hit", "rate", "60.0%"]
    assert ["requests", "5"] in lines
    assert ["seconds", "saved", "1,234.5"] in lines
    assert ["fallbacks:", "no_worker", "2"] in lines


def test_a_refused_token_is_one_line(environment: dict[str, str], gateway: dict[str, Any]) -> None:
    done = run({**environment, "TORCHRELAY_TOKEN": "wrong"}, "stats")
    assert (done.returncode, done.stderr) == (1, "torchrelay: no token. Set one\n")


# --- doctor ----------------------------------------------------------------------------------------------


def diagnosis(environment: dict[str, str]) -> dict[str, tuple[str, str, str]]:
    """What `torchrelay doctor` finds, without a process of its own."""
    with mock.patch.dict(os.environ, environment, clear=True):
        return {check.name: (check.status, check.finding, check.advice) for check in doctor.run_checks()}


def test_the_doctor_answers_in_json_and_exits_with_1_if_anything_fails(environment: dict[str, str]) -> None:
    done = run(environment, "doctor", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (1, False)
    told = {check["name"]: (check["status"], check["found"], check["advice"]) for check in found["checks"]}
    assert told == diagnosis(environment)


def test_the_doctor_without_a_gateway_says_what_to_do_and_skips_the_rest(environment: dict[str, str]) -> None:
    done = run(environment, "doctor")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("pass versions")
    assert any(line.startswith("FAIL gateway") and "torchrelay up" in line for line in lines)
    assert any(line.startswith("skip round trip") for line in lines)


def test_the_doctor_reads_the_tuning_lock(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "team.lock"
    environment["TORCHRELAY_TUNING_LOCK"] = str(file)
    found = diagnosis(environment)
    assert found["settings"][0] == "fail" and "team.lock cannot be read" in found["settings"][1]
    file.write_text("version = 1\n")
    found = diagnosis(environment)
    assert found["settings"][0] == "pass" and "strict tuning lock of 0 winners" in found["settings"][1]


def test_the_doctor_stops_at_settings_that_cannot_be_read(environment: dict[str, str]) -> None:
    found = diagnosis({**environment, "TORCHRELAY_DEADLINE": "soon"})
    assert list(found) == ["settings"]
    assert "TORCHRELAY_DEADLINE" in found["settings"][1]


def test_the_doctor_names_the_toolchain_that_no_worker_has(
    environment: dict[str, str], gateway: dict[str, Any]
) -> None:
    other = schema.Toolchain(python="cp39", torch="1.13", triton="", cuda="", platform="linux-x86_64")
    target = schema.Target(kind="cpu", name="", capability="", units=0, cpu=[])
    worker = compiles.WorkerInfo(id="w", toolchain=other, target=target, state="idle", jobs_done=0)
    gateway["/v1/workers"] = (200, json.loads(codec.to_json([worker])))
    found = diagnosis(environment)
    assert [found[name][0] for name in ("gateway", "redis", "workers", "signature")] == ["pass"] * 4
    assert found["toolchain"][0] == "fail"
    assert "cp39 torch 1.13 on cpu" in found["toolchain"][1]
    assert found["round trip"] == ("skip", "not checked", "First fix 'toolchain'")


@pytest.mark.parametrize(
    ("isolation", "status", "words"),
    [
        (["namespaces", "seccomp"], "pass", "1 by namespaces, seccomp"),
        (["landlock", "seccomp"], "pass", "landlock"),
        (["off"], "pass", "off"),
        (["seccomp"], "fail", "compiles on node-7 see the worker's files"),
        (["none"], "fail", "compiles on node-7 see the worker's files"),
        ([], "pass", "no worker says"),
    ],
)
def test_the_doctor_says_what_shuts_compiles_in(
    isolation: list[str], status: str, words: str, environment: dict[str, str], gateway: dict[str, Any]
) -> None:
    toolchain = schema.Toolchain(python="cp39", torch="1.13", triton="", cuda="", platform="linux-x86_64")
    target = schema.Target(kind="cpu", name="", capability="", units=0, cpu=[])
    worker = compiles.WorkerInfo(
        "w", toolchain, target, state="idle", jobs_done=0, host="node-7", isolation=isolation
    )
    gateway["/v1/workers"] = (200, json.loads(codec.to_json([worker])))
    found = diagnosis(environment)
    assert found["isolation"][0] == status
    assert words in found["isolation"][1]
    assert ("user namespaces" in found["isolation"][2]) == (status == "fail")


def test_the_doctor_tells_redis_from_workers(environment: dict[str, str], gateway: dict[str, Any]) -> None:
    parts = {"redis": "ok", "workers": "no worker is warm yet"}
    gateway["/readyz"] = (503, {"ready": False, "parts": parts})
    found = diagnosis(environment)
    assert found["redis"][0] == "pass"
    assert found["workers"][0] == "fail"
    assert "no worker is warm yet" in found["workers"][1]


def test_the_doctor_refuses_a_signer_that_is_not_trusted(
    environment: dict[str, str], gateway: dict[str, Any]
) -> None:
    other = base64.b64encode(bytes(32)).decode()
    found = diagnosis({**environment, "TORCHRELAY_PUBLIC_KEYS": other})
    assert found["signature"][0] == "fail"
    assert "TORCHRELAY_PUBLIC_KEYS" in found["signature"][2]


def test_the_doctor_wants_every_signer_of_the_gateway_trusted(
    environment: dict[str, str], gateway: dict[str, Any]
) -> None:
    """The second key's artifacts, imported from another site, would be refused one by one."""
    other = base64.b64encode(bytes(32)).decode()
    _, told = gateway["/v1/info"]
    gateway["/v1/info"] = (200, {**told, "public_keys": [KEY, other]})
    found = diagnosis(environment)
    assert found["signature"][0] == "fail"
    assert "torchrelay login" in found["signature"][2]


def test_the_doctor_notices_another_schema_or_pipeline(
    environment: dict[str, str], gateway: dict[str, Any]
) -> None:
    info = gateway["/v1/info"][1]
    gateway["/v1/info"] = (200, {**info, "pipeline": schema.PIPELINE + 1})
    found = diagnosis(environment)
    assert f"revision {schema.PIPELINE + 1} of the pipeline" in found["gateway"][1]
    gateway["/v1/info"] = (200, {"version": "9", "schema": 9, "key_ids": [], "public_keys": []})
    found = diagnosis(environment)
    assert found["gateway"][0] == "fail"
    assert "schema 9" in found["gateway"][1]


# --- up and demo become another program ------------------------------------------------------------------


def test_the_process_becomes_the_program_with_the_same_id_and_arguments(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text("import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(7)")
    program = (
        "from torchrelay.clients.commands.start_service import replace_process\n"
        "replace_process('shown', 'up', '--port', '0', needs=('json',), extra='server')"
    )
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(tmp_path), *filter(None, [environment.get("PYTHONPATH")])]
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        shown, _ = process.communicate(timeout=60)
    assert shown == f"{process.pid} ['up', '--port', '0']\n"
    assert process.returncode == 7


def test_a_missing_extra_is_named_with_the_command_that_installs_it() -> None:
    from torchrelay.clients.commands.start_service import replace_process
    from torchrelay.compiler.errors import ClientError

    with pytest.raises(ClientError, match=r"needs no_such_module\. Run `pip install .*\[server\]'`"):
        replace_process("anything", needs=("json", "no_such_module"), extra="server")


def test_without_the_cli_extra_the_command_says_what_to_install(environment: dict[str, str]) -> None:
    program = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'typer' else real(name, *rest)\n"
        "from torchrelay.clients import cli\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Run `pip install " in done.stderr and "[cli]'`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "ray", "redis"])
def test_up_without_a_part_of_the_server_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    monkeypatch.setattr(sys, "argv", ["torchrelay", "up"])
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it starts a service that cannot run"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert f"this command needs {missing}. Run `pip install " in said and "[server]'`" in said
