"""Settings: where each value may come from, which source wins, and what is refused."""

from __future__ import annotations

import base64
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from torchrelay.clients import settings as module
from torchrelay.clients.settings import (
    ClientSettings,
    CredentialsWarning,
    UnknownSettingWarning,
    load_launcher_info,
    load_settings,
)
from torchrelay.compiler.errors import SettingsError

KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("TORCHRELAY_")]:
        monkeypatch.delenv(name)
    for name, folder in (("XDG_CONFIG_HOME", "config"), ("XDG_CACHE_HOME", "cache")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    return tmp_path


def write(home: Path, name: str, content: Any, mode: int = 0o600) -> Path:
    path = home / "config" / "torchrelay" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return path


def test_without_any_source_nothing_is_contacted_and_the_mode_is_remote(empty_home: Path) -> None:
    found = load_settings()
    assert (found.url, found.token, found.public_keys, found.mode) == ("", "", (), "remote")
    assert found.cache_dir == empty_home / "cache" / "torchrelay"
    assert (found.deadline, found.connect_timeout, found.idle_timeout) == (900, 3, 20)


def test_a_user_without_a_home_leaves_no_record_and_is_served_all_the_same(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(empty_home / "state"))
    assert load_settings().state_dir == empty_home / "state" / "torchrelay"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert load_settings().state_dir is None


def test_argument_beats_environment_beats_config_beats_credentials(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(empty_home, "credentials.json", {"url": "http://127.0.0.1:1", "token": "t", "public_keys": [KEY]})
    assert load_settings().url == "http://127.0.0.1:1"
    write(empty_home, "config.json", {"url": "http://127.0.0.1:2", "mode": "cache"})
    assert load_settings().url == "http://127.0.0.1:2"
    monkeypatch.setenv("TORCHRELAY_URL", "http://127.0.0.1:3")
    assert load_settings().url == "http://127.0.0.1:3"
    assert load_settings(url="http://127.0.0.1:4").url == "http://127.0.0.1:4"
    assert load_settings(url=None, mode=None).mode == "cache"


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TORCHRELAY_URL", "https://relay.example/", "url", "https://relay.example"),
        ("TORCHRELAY_TOKEN", " secret ", "token", "secret"),
        ("TORCHRELAY_TOKEN_FILE", "/var/run/token", "token_file", Path("/var/run/token")),
        ("TORCHRELAY_PUBLIC_KEYS", f"{KEY}, {KEY}", "public_keys", (KEY, KEY)),
        ("TORCHRELAY_MODE", "require", "mode", "require"),
        ("TORCHRELAY_TARGET", "aarch64", "target", "aarch64"),
        ("TORCHRELAY_CACHE_DIR", "/x/y", "cache_dir", Path("/x/y")),
        ("TORCHRELAY_PREFETCH", "0", "prefetch", False),
        ("TORCHRELAY_PROGRAMS", "1", "programs", "own"),
        ("TORCHRELAY_PROGRAMS_CHECK", "0", "programs_check", 0),
        ("TORCHRELAY_TUNING_LOCK", "/x/team.lock", "tuning_lock", Path("/x/team.lock")),
        ("TORCHRELAY_TUNING_LOCK_MODE", "loose", "tuning_lock_mode", "loose"),
        ("TORCHRELAY_DEADLINE", "1.5", "deadline", 1.5),
        ("TORCHRELAY_CONNECT_TIMEOUT", "7", "connect_timeout", 7.0),
        ("TORCHRELAY_IDLE_TIMEOUT", "8", "idle_timeout", 8.0),
        ("TORCHRELAY_DISK_CACHE_BYTES", "0", "disk_cache_bytes", 0),
        ("TORCHRELAY_CHECK", "20", "check", 20),
        ("TORCHRELAY_MAX_RESPONSE_BYTES", "1000", "max_response_bytes", 1000),
        ("TORCHRELAY_STATE_DIR", "/x/s", "state_dir", Path("/x/s")),
        ("TORCHRELAY_REPORT", "/x/{pid}.json", "report", Path("/x/{pid}.json")),
        ("TORCHRELAY_TRACE", "/x/trace.json", "trace", Path("/x/trace.json")),
    ],
)
def test_every_setting_has_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(load_settings(), field) == value


def test_every_field_can_be_set_and_every_setting_is_a_field() -> None:
    assert set(module.PARSERS) == set(ClientSettings.__struct_fields__)


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("TORCHRELAY_MODE", "on", "off, cache, remote, require"),
        ("TORCHRELAY_TUNING_LOCK_MODE", "on", "strict, loose"),
        ("TORCHRELAY_URL", "relay:8000", "http://HOST"),
        ("TORCHRELAY_URL", "ftp://relay", "http://HOST"),
        ("TORCHRELAY_URL", "http://user:secret@relay", "without user"),
        ("TORCHRELAY_URL", "http://relay:99999", "http://HOST"),
        ("TORCHRELAY_DEADLINE", "soon", "seconds above 0"),
        ("TORCHRELAY_DEADLINE", "0", "seconds above 0"),
        ("TORCHRELAY_DEADLINE", "inf", "seconds above 0"),
        ("TORCHRELAY_DEADLINE", "nan", "seconds above 0"),
        ("TORCHRELAY_DISK_CACHE_BYTES", "-1", "0 or more"),
        ("TORCHRELAY_PROGRAMS_CHECK", "seldom", "whole number N"),
        ("TORCHRELAY_DISK_CACHE_BYTES", "1.5", "whole number"),
        ("TORCHRELAY_CHECK", "-1", "one in N is checked"),
        ("TORCHRELAY_PUBLIC_KEYS", "abcd", "32 bytes each"),
        ("TORCHRELAY_TOKEN", "two words", "without spaces"),
    ],
)
def test_a_bad_value_names_its_variable_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, allowed: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert variable in caught.value.message
    assert allowed in caught.value.advice
    assert caught.value.code == "bad_setting"


def test_a_bad_token_is_not_repeated_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_TOKEN", "s3cret word")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert "s3cret" not in str(caught.value)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(SettingsError, match="unknown setting 'urll'"):
        load_settings(urll="http://127.0.0.1:1")


def test_a_variable_set_to_nothing_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_MODE", "")
    assert load_settings().mode == "remote"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_credentials_open_to_others_are_ignored_with_a_warning(empty_home: Path, mode: int) -> None:
    path = write(empty_home, "credentials.json", {"url": "http://127.0.0.1:1", "token": "t"}, mode)
    with pytest.warns(CredentialsWarning, match=f"chmod 600 {path}"):
        assert load_settings().token == ""


def test_the_credentials_token_goes_to_the_credentials_gateway_alone(empty_home: Path) -> None:
    write(empty_home, "credentials.json", {"url": "http://127.0.0.1:1", "token": "t", "public_keys": [KEY]})
    assert load_settings().token == "t"
    assert load_settings(url="http://localhost:1/").token == "t"
    assert load_settings(url="http://127.0.0.1:2").token == ""
    assert load_settings(url="https://elsewhere.example").token == ""
    assert load_settings(url="https://elsewhere.example", token="own").token == "own"
    assert load_settings(url="https://elsewhere.example").public_keys == (KEY,)


def test_one_token_is_used_that_of_the_first_source_that_has_one(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:1"
    write(empty_home, "credentials.json", {"url": url, "token": "t", "public_keys": [KEY], "namespace": "n"})

    def used(**arguments: object) -> tuple[str, Path | None, str]:
        found = load_settings(**arguments)
        return found.token, found.token_file, found.namespace

    assert used() == ("t", None, "n")
    write(empty_home, "config.json", {"token_file": "/config"})
    assert used() == ("", Path("/config"), "")
    monkeypatch.setenv("TORCHRELAY_TOKEN_FILE", "/variable")
    assert used() == ("", Path("/variable"), "")
    assert used(token="argument") == ("argument", None, "")
    monkeypatch.setenv("TORCHRELAY_TOKEN", "variable")
    assert used() == ("variable", None, "")
    assert used(token_file="/argument") == ("", Path("/argument"), "")


def test_a_sign_ins_token_is_read_from_its_file_and_goes_to_its_gateway_alone(empty_home: Path) -> None:
    fields = {
        "url": "http://127.0.0.1:1",
        "token": "t",
        "public_keys": [KEY],
        "namespace": "n",
        "sign_in": {},
    }
    path = write(empty_home, "credentials.json", fields)
    found = load_settings()
    assert (found.token, found.token_file, found.namespace) == ("", path, "n")
    other = load_settings(url="http://127.0.0.1:2")
    assert (other.token, other.token_file, other.namespace) == ("", None, "")
    given = load_settings(token="mine")
    assert (given.token, given.token_file, given.namespace) == ("mine", None, "")


def test_fields_of_a_later_version_in_the_credentials_are_left_alone(empty_home: Path) -> None:
    write(empty_home, "credentials.json", {"url": "http://127.0.0.1:1", "token": "t", "expires": 5})
    assert load_settings().url == "http://127.0.0.1:1"


@pytest.mark.parametrize("content", ["{", "[]", '"text"', '{"url": 5}'])
def test_damaged_credentials_are_a_typed_error_that_names_the_file(empty_home: Path, content: str) -> None:
    path = write(empty_home, "credentials.json", content)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(path) in caught.value.message


@pytest.mark.parametrize("name", ["token", "urll"])
def test_the_config_file_holds_no_token_and_nothing_unknown(empty_home: Path, name: str) -> None:
    write(empty_home, "config.json", {name: "x"})
    with pytest.raises(SettingsError, match=name):
        load_settings()


def profile(home: Path, name: str, url: str, token: str) -> Path:
    content = {"url": url, "token": token, "public_keys": [KEY], "namespace": name}
    file = f"credentials/{name}.json" if name else "credentials.json"
    return write(home, file, content)


def test_credentials_of_several_gateways_are_told_apart_by_name_and_by_url(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(empty_home, "", "https://relay.example.org", "company's")
    profile(empty_home, "local", "http://127.0.0.1:8642", "own")
    profile(empty_home, "other", "http://127.0.0.1:9000", "other's")
    assert load_settings().token == "company's"
    monkeypatch.setenv("TORCHRELAY_PROFILE", "local")
    assert (load_settings().url, load_settings().token) == ("http://127.0.0.1:8642", "own")
    assert load_settings(profile="").token == "company's"
    monkeypatch.delenv("TORCHRELAY_PROFILE")
    monkeypatch.setenv("TORCHRELAY_URL", "http://localhost:9000")
    assert (load_settings().token, load_settings().namespace) == ("other's", "other")
    monkeypatch.setenv("TORCHRELAY_URL", "http://localhost:1")
    assert load_settings().token == ""
    write(empty_home, "config.json", {"profile": "other"})
    assert load_settings(url="http://127.0.0.1:9000").token == "other's"


@pytest.mark.parametrize("name", ["none", "../credentials", "a/b", ".hidden"])
def test_a_profile_that_does_not_exist_is_refused(empty_home: Path, name: str) -> None:
    profile(empty_home, "", "https://relay.example.org", "t")
    profile(empty_home, "local", "http://127.0.0.1:8642", "t")
    with pytest.raises(SettingsError) as error:
        load_settings(profile=name)
    assert error.value.advice == "Profiles: local" or "letters, digits" in error.value.advice


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["credentials.json", "config.json"])
def test_another_users_file_is_ignored_with_a_warning(empty_home: Path, name: str) -> None:
    path = write(empty_home, name, {"url": "https://relay.example.org", "public_keys": [KEY]})
    os.chown(path, 65534, 65534)
    with pytest.warns(CredentialsWarning, match=r"belongs to another user \(uid 65534\).* `chown 0 "):
        found = load_settings()
    assert (found.url, found.public_keys) == ("", ())


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("TOKN", "TOKEN"), ("PREFECH", "PREFETCH"), ("cache-dir", "CACHE_DIR"), ("ZZZZZZZ", "")],
)
def test_a_mistyped_variable_is_a_warning_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, name: str, nearest: str
) -> None:
    monkeypatch.setenv(f"TORCHRELAY_{name}", "x")
    with pytest.warns(UnknownSettingWarning, match=f"TORCHRELAY_{name} is no setting") as caught:
        load_settings()
    (warning,) = caught
    assert (f"did you mean TORCHRELAY_{nearest}?" in str(warning.message)) == bool(nearest)


def test_what_others_read_is_no_mistyped_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service, training jobs, docker-compose.yml, and what Kubernetes sets for a service of this name."""
    compose = (Path(module.__file__).parents[1] / "docker-compose.yml").read_text()
    links = ("TORCHRELAY_PORT", "TORCHRELAY_GATEWAY_SERVICE_HOST", "TORCHRELAY_GATEWAY_PORT_8642_TCP_ADDR")
    others = ("TORCHRELAY_SERVICE_ISOLATION", "TORCHRELAY_TRAIN_JOB", "TORCHRELAY_SLOT")
    for name in {*re.findall(r"\$\{(TORCHRELAY_[A-Z_]+)", compose), *links, *others}:
        monkeypatch.setenv(name, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_settings()


def test_a_relative_xdg_folder_is_ignored(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(empty_home))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert load_settings().cache_dir == empty_home / ".cache" / "torchrelay"


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:1", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:5", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example", False),
        ("", False),
    ],
)
def test_loopback_is_known_by_name_and_by_address(url: str, here: bool) -> None:
    assert module.is_loopback(url) is here


TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "17",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_rank_of_torchrun_knows_its_job_and_the_agents_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert load_launcher_info() is None
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    first = load_launcher_info()
    assert first is not None
    assert (first.rank, first.local_rank, first.world_size) == (3, 1, 4)
    assert first.store == ("127.0.0.1", 29500)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = load_launcher_info()
    assert again is not None and again.run != first.run
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    without = load_launcher_info()
    assert without is not None and without.store is None
    monkeypatch.setenv("WORLD_SIZE", "four")
    assert load_launcher_info() is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, True),
        ({"programs": "off"}, False),
        ({"mode": "off"}, False),
        ({"mode": "cache"}, True),
        ({"target": "aarch64"}, False),
        ({"disk_cache_bytes": 0}, False),
        ({"disk_cache_bytes": 0, "programs": "team"}, True),
        ({"url": ""}, False),
        ({"url": "", "public_keys": ("a",)}, True),
    ],
)
def test_functions_start_from_records_where_there_can_be_artifacts_and_a_place_for_them(
    given: dict[str, Any], kept: bool
) -> None:
    given = {"programs": "own", "url": "http://gateway:8000", **given}
    assert ClientSettings(cache_dir=Path("/x"), **given).keeps_programs is kept
