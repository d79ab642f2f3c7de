"""Settings of the client. Arguments come before the environment, files, and defaults.

One of two modules under clients/ that read the environment; the other is training/rank_environment.py. Two files under
$XDG_CONFIG_HOME/torchrelay are read if they exist: `config.json` (the user's; any setting but the token, by its field's
name) and, after it, `credentials.json` (written by `torchrelay up` and `login`: url, token, public_keys, namespace, and
after a sign-in how the token is renewed). Credentials for other gateways are profiles, `credentials/NAME.json` beside
it: TORCHRELAY_PROFILE names the one to read in its place, and one for the given URL is found by that. A token is used
only with the URL in its file, so that it cannot leak to another host; the namespace only with that token. Loopback
names (localhost, 127.0.0.1, ::1) count as one host.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from ..compiler import decoding
from ..compiler.errors import SettingsError, Unsupported
from ..compiler.process.own_files import UNREADABLE
from ..compiler.process.variables import unknown_variables

Mode = Literal["off", "cache", "remote", "require"]
MODES: tuple[Mode, ...] = get_args(Mode)
LockMode = Literal["strict", "loose"]
ProgramsFrom = Literal["off", "own", "team"]
CREDENTIALS_FILE = "credentials.json"
CONFIG_FILE = "config.json"
PROFILES_FOLDER = "credentials"
"""service/local/state_folder.py names the same folder."""
_RAW_KEY_BYTES = 32
_NAMESPACE_LENGTH = 128
_PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PREFIX = "TORCHRELAY_"
_OF_OTHERS = (
    "SLOT TEST_FORMS TEST_KILLS TEST_TOOLCHAIN "
    "TRAIN_CAPTURE TRAIN_CHANNEL TRAIN_CHECKPOINTS TRAIN_JOB TRAIN_MEETING TRAIN_SPEC "
    # docker-compose.yml's
    "BIND CPU_SLOTS EDGE_BIND GATEWAY_MEMORY GATEWAY_PROCESSES ISOLATION OWNER_TOKEN PYTHON RAY_TOKEN "
    "REDIS_BACKUP_PASSWORD REDIS_MAXMEMORY REDIS_PASSWORD SIGNER_ADMIN_TOKEN SIGNER_TOKEN TORCH TORCH_INDEX TRAINING"
)
"""Variables that other parts of the project read, without the prefix."""
_TOKENS = frozenset({"token", "token_file"})
"""Settings of which one is used."""


class CredentialsWarning(UserWarning):
    """The credentials file was ignored, or a token travels unencrypted."""


class UnknownSettingWarning(UserWarning):
    """A variable that looks like a setting is none, and does nothing."""


class ClientSettings(Struct, frozen=True, kw_only=True):
    """All settings of the client. Seconds and bytes unless said otherwise."""

    url: str = ""
    """Gateway's base URL; '': none, nothing is contacted."""
    token: str = ""
    """Sent to the gateway of its file only."""
    token_file: Path | None = None
    """A file with the token, in its place, read again when it changes: one line, or the credentials of a sign-in, which
    are then renewed."""
    profile: str = ""
    """Which credentials to use; '': credentials.json, or what is for the given URL."""
    public_keys: tuple[str, ...] = ()
    """Trusted signers: raw Ed25519 public keys in base64."""
    namespace: str = ""
    """Only artifacts signed for it are used; '': those of any namespace."""
    mode: Mode = "remote"
    """remote: use the service. cache: only what it has. require: raise, never fall back. off: Inductor alone."""
    prefetch: bool = True
    """Fetch in the background the artifacts that this script used last time."""
    background: bool = False
    """A graph that is still to be compiled runs eagerly meanwhile; the option "torchrelay.background" comes first."""
    programs: ProgramsFrom = "own"
    """Start functions without tracing that an earlier process has traced. 1: of this user on this machine. team: also
    of others with the service's signature; what this process traces is sent, if its token may. 0: trace."""
    check: int = 0
    """Compare the first call of one graph in so many with eager, on the user's inputs; 1: of each graph, and programs
    with a trace in each start; 0: of none."""
    programs_check: int = 50
    """One start in so many is traced, and its programs are compared with what it has traced; 0: none, 1: each."""
    target: str = ""
    """The CPU target of graphs on the CPU, by its name on the workers; '': this machine's own."""
    cache_dir: Path
    """This machine's artifacts and programs; default `$XDG_CACHE_HOME/torchrelay`."""
    baked: Path | None = None
    """A file of `torchrelay bake`: its artifacts are used before a service is asked, and need none."""
    tuning_lock: Path | None = None
    """A file of `torchrelay tune export`: graphs that tune use its winners."""
    tuning_lock_mode: LockMode = "strict"
    """A problem without a winner in the lock is an error (strict), or is looked up or measured (loose)."""
    deadline: float = 900.0
    """The longest a graph may take from request to artifact."""
    ca_file: Path | None = None
    """PEM file of the authorities for an https:// gateway; default: the system's, or SSL_CERT_FILE's."""
    connect_timeout: float = 3.0
    """The gateway is away if it does not accept a connection within this."""
    idle_timeout: float = 20.0
    """The gateway is dead if no byte arrives for this long (its streams have one every 5 s)."""
    disk_cache_bytes: int = 8 << 30
    """Limit of this machine's artifact cache; 0: no cache on disk."""
    max_response_bytes: int = 1 << 30
    """A larger response of the gateway is refused."""
    report: Path | None = None
    """Where to write the run's report as JSON at exit; `{pid}` becomes the process id."""
    trace: Path | None = None
    """Where to write a Chrome trace of the process's start at exit; `{pid}` becomes the process id."""
    state_dir: Path | None = None
    """Folder for the last run's record, which `torchrelay explain` reads; default `$XDG_STATE_HOME/torchrelay`."""
    summary: bool = True
    """At exit, tell the gateway of the run, and print a line with what was saved and the address of the run's page."""

    @property
    def keeps_programs(self) -> bool:
        """Whether functions start without tracing. Records are for this machine's own targets, lead to artifacts that
        a service has signed, and lie in the cache folder."""
        kept = self.disk_cache_bytes > 0 or self.programs == "team"
        signed = bool(self.url or self.public_keys)
        return self.programs != "off" and self.mode != "off" and not self.target and kept and signed

    @property
    def loopback(self) -> bool:
        """Whether the gateway is on this machine."""
        return is_loopback(self.url)


class LauncherInfo(Struct, frozen=True, kw_only=True):
    """This rank's job, from its launcher (torchrun, Ray Train, a cluster's script).

    run: names this start of the job, as far as the launcher does. store: host and port of the launcher's own c10d
    store, if it has one.
    """

    rank: int
    local_rank: int
    world_size: int
    run: str
    restart: int
    store: tuple[str, int] | None


def is_loopback(url: str) -> bool:
    """Whether the URL's host is this machine, by name or by a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def config_dir() -> Path:
    """$XDG_CONFIG_HOME/torchrelay, or ~/.config/torchrelay."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def credentials_path(profile: str = "") -> Path:
    """The file of a profile, or credentials.json. Raises SettingsError."""
    if not profile:
        return config_dir() / CREDENTIALS_FILE
    return config_dir() / PROFILES_FOLDER / f"{_parse('profile', profile, 'the profile')}.json"


def _profiles() -> list[Path]:
    return sorted((config_dir() / PROFILES_FOLDER).glob("*.json"))


def _credentials_for(profile: str, url: str) -> Path:
    """The credentials to use. Raises SettingsError for a profile that does not exist."""
    path = credentials_path(profile)
    if profile and not path.exists():
        names = ", ".join(each.stem for each in _profiles()) or "none"
        raise SettingsError(f"there are no credentials in {path}", hint=f"Profiles: {names}")
    if profile or not url:
        return path
    return next((each for each in (path, *_profiles()) if same_gateway(url, _url_of(each))), path)


def _url_of(path: Path) -> str:
    """'' for a file that says none."""
    try:
        return _url(_read_object(path).get("url", ""))
    except (SettingsError, ValueError):
        return ""


def load_settings(**overrides: Any) -> ClientSettings:
    """The settings of this process, read now. An override that is None counts as not given.

    Raises SettingsError, which names the argument, variable or file and the values it allows.
    """
    return settings_and_origins(**overrides)[0]


def settings_and_origins(**overrides: Any) -> tuple[ClientSettings, dict[str, str]]:
    """What load_settings gives, and by the setting's name where its value comes from: `argument`, a variable, a file's
    path, or `default`."""
    unknown = sorted(set(overrides) - set(PARSERS))
    if unknown:
        raise SettingsError(f"unknown setting {unknown[0]!r}", hint=f"Settings are {', '.join(PARSERS)}")
    _warn_of_unknown(os.environ)
    layers = [
        _from_arguments(overrides),
        _from_environment(os.environ),
        _from_config(config_dir() / CONFIG_FILE),
    ]
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        if layer.keys() & _TOKENS:
            values = {name: value for name, value in values.items() if name not in _TOKENS}
        values |= layer
    if "token" in values:
        values.pop("token_file", None)
    path = _credentials_for(values.get("profile", ""), values.get("url", ""))
    layers.append(_from_credentials(path))
    values = _with_credentials(values, layers[-1])
    names = ("argument", "", str(config_dir() / CONFIG_FILE), str(path))
    origins = {
        field: next(
            (
                name or f"{_PREFIX}{field.upper()}"
                for name, layer in zip(names, layers, strict=True)
                if field in layer and values.get(field) == layer[field]
            ),
            "default",
        )
        for field in PARSERS
    }
    if "cache_dir" not in values:
        values["cache_dir"] = _xdg("XDG_CACHE_HOME", ".cache")
    if "state_dir" not in values:
        with contextlib.suppress(SettingsError):  # no home: the record is a convenience
            values["state_dir"] = _xdg("XDG_STATE_HOME", ".local/state")
    return ClientSettings(**values), origins


def load_launcher_info() -> LauncherInfo | None:
    """The launcher's job; None for a process without a launcher."""
    found = os.environ.get
    try:
        rank, size = int(found("RANK", "")), int(found("WORLD_SIZE", ""))
        port = int(found("MASTER_PORT") or 0)
        local = int(found("LOCAL_RANK") or 0)
        restart = int(found("TORCHELASTIC_RESTART_COUNT") or 0)
    except ValueError:
        return None
    host, name = found("MASTER_ADDR", ""), found("TORCHELASTIC_RUN_ID", "")
    agent = found("TORCHELASTIC_USE_AGENT_STORE") == "True" and host and port
    parts = (name, str(restart), host, str(port), str(size))
    return LauncherInfo(
        rank=rank,
        local_rank=local,
        world_size=size,
        run="/".join(parts),
        restart=restart,
        store=(host, port) if agent else None,
    )


def check_platform() -> None:
    """Raises Unsupported where the service has no code for this machine: anything but Linux."""
    if sys.platform != "linux":
        raise Unsupported(
            f"the service compiles for Linux, and this is {sys.platform}",
            hint="Graphs compile locally here; TORCHRELAY_MODE=off says nothing of it",
        )


def requires_artifacts() -> bool:
    """Whether the environment asks for mode `require`. Never raises: for a process whose settings cannot be read."""
    return os.environ.get("TORCHRELAY_MODE", "").strip() == "require"


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with `variables` set, for a child process."""
    return {**os.environ, **variables}


def _text(value: Any) -> str:
    if not isinstance(value, str) or any(not c.isprintable() for c in value):
        raise ValueError("one line of text")
    return value.strip()


def _profile(value: Any) -> str:
    text = _text(value)
    if text and not _PROFILE.fullmatch(text):
        raise ValueError("letters, digits, '.', '_' and '-', beginning with a letter or a digit")
    return text


def _url(value: Any) -> str:
    text = _text(value).rstrip("/")
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.username is not None or parts.query or parts.fragment:
        raise ValueError("http://HOST[:PORT] or https://HOST[:PORT], without user, query or fragment")
    return text


def _token(value: Any) -> str:
    text = _text(value)
    if not text.isascii() or " " in text:
        raise ValueError("visible ASCII characters without spaces")
    return text


def _public_keys(value: Any) -> tuple[str, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    try:
        valid = all(len(base64.b64decode(item, validate=True)) == _RAW_KEY_BYTES for item in items)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError("raw Ed25519 public keys (32 bytes each) in base64, separated by commas")
    return tuple(items)


def _namespace(value: Any) -> str:
    text = _text(value)
    if len(text) > _NAMESPACE_LENGTH or " " in text:
        raise ValueError("a namespace's name, without spaces")
    return text


_FALSE = ("0", "false", "no", "off")
_TRUE = ("1", "true", "yes", "on")


def _flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError("1 or 0")
    return text in _TRUE


def _programs(value: Any) -> ProgramsFrom:
    if str(value).lower() == "team":
        return "team"
    try:
        return "own" if _flag(value) else "off"
    except ValueError:
        raise ValueError("1, 0 or team") from None


def _path(value: Any) -> Path:
    if isinstance(value, Path):
        return value.absolute()
    text = _text(value)
    if not text:
        raise ValueError("a path")
    path = Path(text)
    if text.startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError:
            raise ValueError("a path; there is no home directory for '~'") from None
    return path.absolute()


def _converted(type: Any, allowed: str) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        try:
            return decoding.convert(value, type=type, strict=False)
        except msgspec.ValidationError:
            raise ValueError(allowed) from None

    return parse


_seconds = _converted(Annotated[float, Meta(gt=0, le=sys.float_info.max)], "a number of seconds above 0")
_one_in = _converted(
    Annotated[int, Meta(ge=0, le=sys.maxsize)], "a whole number N: one in N is checked; 0: none"
)
_bytes = _converted(Annotated[int, Meta(ge=0)], "a whole number of bytes, 0 or more")
PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "url": _url,
    "token": _token,
    "token_file": _path,
    "profile": _profile,
    "public_keys": _public_keys,
    "namespace": _namespace,
    "mode": _converted(Mode, ", ".join(MODES)),
    "prefetch": _flag,
    "background": _flag,
    "programs": _programs,
    "check": _one_in,
    "programs_check": _one_in,
    "target": _profile,
    "cache_dir": _path,
    "baked": _path,
    "tuning_lock": _path,
    "tuning_lock_mode": _converted(LockMode, ", ".join(get_args(LockMode))),
    "deadline": _seconds,
    "ca_file": _path,
    "connect_timeout": _seconds,
    "idle_timeout": _seconds,
    "disk_cache_bytes": _bytes,
    "max_response_bytes": _bytes,
    "report": _path,
    "trace": _path,
    "state_dir": _path,
    "summary": _flag,
}


def _parse(name: str, value: Any, origin: str) -> Any:
    try:
        return PARSERS[name](value)
    except ValueError as error:
        shown = "(hidden)" if name == "token" else repr(value)[:80]
        raise SettingsError(f"{origin} is {shown}", hint=f"Allowed: {error}") from None


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = {f"{_PREFIX}{name.upper()}" for name in (*PARSERS, *_OF_OTHERS.split())}
    ours = {name for name in environ if name.upper().startswith(_PREFIX)}
    others = {name for name in ours - known if not name.upper().startswith(f"{_PREFIX}SERVICE_")}
    if not others:
        return
    for name, nearest in unknown_variables(others, _PREFIX, known):
        hint = f"; did you mean {nearest}?" if nearest else ""
        warnings.warn(
            f"torchrelay: {name} is no setting and does nothing{hint}", UnknownSettingWarning, stacklevel=3
        )


def _from_arguments(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _parse(k, v, f"argument {k!r}") for k, v in overrides.items() if v is not None}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """TORCHRELAY_<FIELD>; a variable set to nothing counts as not set."""
    found: dict[str, Any] = {}
    for name in PARSERS:
        variable = f"TORCHRELAY_{name.upper()}"
        if text := environ.get(variable, "").strip():
            found[name] = _parse(name, text, variable)
    return found


def _from_config(path: Path) -> dict[str, Any]:
    """Any setting but the token. It may name keys to trust, so others must not be able to write it."""
    if not _is_own(path, stat.S_IWOTH):
        return {}
    found = _read_object(path)
    for name in found:
        if name not in PARSERS or name == "token":
            allowed = ", ".join(n for n in PARSERS if n != "token")
            raise SettingsError(
                f"{path} holds {name!r}, which is no setting of this file", hint=f"Allowed: {allowed}"
            )
    return {name: _parse(name, value, f"{name!r} in {path}") for name, value in found.items()}


def _from_credentials(path: Path) -> dict[str, Any]:
    """url, token, public_keys and namespace; other fields are ignored."""
    if not _is_own(path, UNREADABLE):
        return {}
    found = _read_object(path)
    names = [name for name in ("url", "token", "public_keys", "namespace") if name in found]
    values: dict[str, Any] = {name: _parse(name, found[name], f"{name!r} in {path}") for name in names}
    if "sign_in" in found:
        values.pop("token", None)
        values["token_file"] = path
    return values


def _is_own(path: Path, forbidden: int) -> bool:
    """Whether the file exists and others can have had no hand in it; a warning says what is wrong with it."""
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_mode & forbidden:
        problem = f"is open to other users and was ignored. Run `chmod 600 {path}`"
    elif hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to another user (uid {status.st_uid}) and was ignored. Run `chown {os.geteuid()} {path}`"
    else:
        return True
    warnings.warn(f"torchrelay: {path} {problem}", CredentialsWarning, stacklevel=4)
    return False


def _with_credentials(values: dict[str, Any], credentials: dict[str, Any]) -> dict[str, Any]:
    """`values`, completed by the credentials: the token only with the credentials' URL, the namespace only with that
    token."""
    merged = credentials | values
    if values.keys() & _TOKENS or not same_gateway(merged.get("url", ""), credentials.get("url", "")):
        for name in _TOKENS - values.keys():
            merged.pop(name, None)
    same_token = all(merged.get(name) == credentials.get(name) for name in _TOKENS)
    if "namespace" not in values and not same_token:
        merged.pop("namespace", None)
    return merged


def same_gateway(url: str, other: str) -> bool:
    """Whether both URLs have the same scheme, host and port."""
    return _origin(url) == _origin(other)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    host = "loopback" if is_loopback(url) else parts.hostname or ""
    return parts.scheme, host, parts.port


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return decoding.from_json(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{path} is not a JSON object: {error}") from None


def _xdg(variable: str, fallback: str) -> Path:
    """The XDG base directory's torchrelay folder; a relative value is ignored, as the specification asks."""
    base = os.environ.get(variable, "")
    if Path(base).is_absolute():
        return Path(base) / "torchrelay"
    try:
        return Path.home() / fallback / "torchrelay"
    except RuntimeError:
        raise SettingsError("this user has no home directory", hint=f"Set {variable} or HOME") from None
