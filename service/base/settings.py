"""Every setting of the service, read from the environment `TORCHRELAY_SERVICE_*` into one frozen object.

Times are in seconds and sizes in bytes, as the names say. Nothing else in service/ reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from ...compiler.api.training.jobs import PACKAGE_BYTES
from ...compiler.errors import SettingsError
from ...compiler.process.variables import unknown_variables
from ...compiler.request import codec

Seconds = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(gt=0)]
_PREFIX = "TORCHRELAY_SERVICE_"
MIN_TOKEN = 32
"""Characters of a token that an operator chooses, at least."""


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/torchrelay`; a relative XDG_STATE_HOME is ignored, as the XDG specification asks."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def default_credentials_file() -> Path:
    """Where the client of this user looks (clients/settings.py): `$XDG_CONFIG_HOME/torchrelay`."""
    return _xdg("XDG_CONFIG_HOME", ".config") / "credentials.json"


def _xdg(variable: str, fallback: str) -> Path:
    root = Path(os.environ.get(variable, ""))
    return (root if root.is_absolute() else Path.home() / fallback) / "torchrelay"


def _absolute_paths(value: str) -> str:
    for path in filter(None, value.split(",")):
        if not Path(path).is_absolute():
            raise ValueError(f"{path!r} is not the absolute path of a Python")
    return value


def check_environment(environ: Iterable[str]) -> None:
    """Raises SettingsError for a variable that would be a setting if it had another name."""
    known = (f"{_PREFIX}{name.upper()}" for name in ServiceSettings.model_fields)
    for name, nearest in unknown_variables(environ, _PREFIX, known):
        hint = f"Did you mean {nearest}? Else unset it" if nearest else "Unset it"
        raise SettingsError(f"{name} is no setting of the service", hint=hint)


class ServiceSettings(BaseSettings):
    """What `create_app` needs. Every field can be set as `TORCHRELAY_SERVICE_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    # where
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8642
    """The port to listen on; 0: a free one."""
    tls_cert_file: Path | None = None
    """Certificate chain, PEM: with it and its key the gateway speaks https:// itself, without a proxy before it."""
    tls_key_file: Path | None = None
    """The certificate's private key, PEM."""
    tls_key_password: SecretStr | None = None
    """The private key's password, if its file is encrypted."""
    forwarded_allow_ips: str = Field(default_factory=lambda: os.environ.get("FORWARDED_ALLOW_IPS", ""))
    """Addresses and networks of the proxies whose X-Forwarded-For and -Proto are believed, with commas between; '':
    nobody's. Default: FORWARDED_ALLOW_IPS, as uvicorn reads it."""
    public_url: str = ""
    """How clients reach the gateway, for the credentials file of `up`; default the address that it listens on."""
    state_dir: Path = Field(default_factory=default_state_dir)
    """Keys, token, and what has no place of its own; default `$XDG_STATE_HOME/torchrelay`."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """`redis://`, `rediss://` (with `?ssl_ca_certs=FILE` for a CA of your own) or `unix:///path?db=0`. One that fails
    over: `redis+sentinel://host,host/name/0`, `redis+cluster://host,host`, or rediss (storage/redis/primary.py)."""
    redis_prefix: str = "torchrelay:"
    """Stands before every Redis key, so that one Redis can serve several installations. On a Redis Cluster it has a
    hash tag, as in `{torchrelay}:`."""
    blob_url: str = ""
    """Store of large artifacts: '' is a folder under state_dir, else `file:///`, `s3://`, `gs://`, `az://`.

    Gateways that share a Redis share it too. Installations must not: what the index does not offer is swept.
    """
    blob_timeout_seconds: Seconds = 20
    """A remote blob store that is silent for this long counts as unreachable."""
    blob_allow_http: bool = False
    """Allow a store at http://, such as one of your own in the gateway's network."""
    keys_dir: Path | None = None
    """The signing keys' folder (service/signing/keyring.py), made on the first start; default `state_dir/keys`.
    Gateways of one installation share it."""
    signer_url: str = ""
    """Where the signer listens, which then has the keys in place of this process: `http://`, `https://` or
    `unix:///path`. '' has the keys here."""
    signer_ca_file: Path | None = None
    """Certificate authorities for a signer at https://, PEM; default the system's."""

    pkcs11_module: Path | None = None
    """New signing keys are made in a device, an HSM say, and never leave it: the library of its PKCS #11 module."""
    pkcs11_token: str = ""
    """Label of the device's token."""
    pkcs11_pin: SecretStr | None = None
    """The device's PIN."""

    train_dir: Path | None = None
    """Folder of training jobs: their drivers' files, and checkpoints of jobs that name no other place. All nodes must
    see it under this path. Default `state_dir/trains`."""
    train_url: str = ""
    """How the ranks of training jobs reach the gateway; default public_url, or the address that it listens on."""

    # who
    token: SecretStr | None = Field(default=None, min_length=MIN_TOKEN)
    """A token with every role. Other tokens are records in Redis (service/access/tokens.py)."""
    token_allow_source: bool | None = None
    """Whether that token may send source that runs at compile time. Default: only where `up` starts the whole service,
    whose compiles then run as the user who has the token."""
    token_allow_programs: bool | None = None
    """Whether that token may give programs (bytecode) to the clients that accept them. Default: as for source."""
    sign_in_file: Path | None = None
    """A file that says whose JWTs are accepted beside tokens, and what each holder may do: OpenID Connect providers and
    Kubernetes clusters, TOML (service/access/oidc/sign_in_file.py). Read at the start."""

    training: bool | None = None
    """Whether training jobs run, which are their holders' code on the nodes. Default: only where `up` starts the whole
    service, whose jobs then run as the user who started it."""

    trusted_public_keys: str = ""
    """Other sites' signing keys, base64, separated by commas: their artifacts may be imported here. With a signer, it
    is a setting of the signer."""
    signer_token: SecretStr | None = Field(default=None, min_length=MIN_TOKEN)
    """The token of those who may have artifacts signed there, and read which keys there are; the signer's too."""
    signer_admin_token: SecretStr | None = Field(default=None, min_length=MIN_TOKEN)
    """The token of those who may also change its keys, which are gateways; the signer's too."""

    # how much
    body_bytes: Bytes = codec.Limits().body_bytes
    """Compressed request."""
    request_bytes: Bytes = codec.Limits().request_bytes
    """Decompressed request."""
    request_nodes: Annotated[int, Field(gt=0)] = codec.Limits().nodes
    """Operators of one graph, those of its subgraphs too."""
    request_depth: Annotated[int, Field(gt=0)] = codec.Limits().depth
    """How deep lists and expressions lie in one another."""
    request_constant_bytes: Bytes = codec.Limits().constant_bytes
    """All constants of one graph."""
    request_inputs: Annotated[int, Field(gt=0)] = codec.Limits().inputs
    """Inputs of one graph, parameters included."""
    request_kernels: Annotated[int, Field(gt=0)] = codec.Limits().kernels
    """User-written Triton kernels of one graph."""
    request_source_bytes: Bytes = codec.Limits().source_bytes
    """Their sources together."""
    connections: Annotated[int, Field(gt=0)] = 8192
    """Open at one server of a process, and fewer where its limit of descriptors is low. Past it those that send nothing
    are closed, and then new ones are answered 503."""
    bodies_bytes: Bytes = 256 << 20
    """All bodies that are in the memory of one process; one namespace's, and one token's, at most what is free for
    anybody. Past it 429."""
    uploads_bytes: Bytes = 16 << 30
    """The same for bodies on its disk: packages, files and imported artifacts on their way."""
    token_streams: Annotated[int, Field(gt=0)] = 512
    """Event streams of one token at one process; past it 429, and its clients poll."""
    checks_at_once: Annotated[int, Field(gt=0)] = 3
    """Large requests that are checked at once, pages of logs that are read, misses that are explained; for one
    namespace one fewer. Namespaces take turns by the time that theirs take."""
    log_lines_per_second: Annotated[int, Field(gt=0)] = 500
    """Past it, lines of a process' log are dropped and counted."""
    max_queued: Annotated[int, Field(gt=0)] = 256
    """Distinct compiles that run or wait, over all gateways; past it a request gets 429."""
    queued_bytes: Bytes = 1 << 30
    """Their requests together, which are in Redis until they have ended; past it a request gets 429."""
    namespace_compiles: Annotated[int, Field(ge=0)] = 0
    """How many of these are one namespace's; 0: only its share of what is free. An administrator may give it
    another quota, of this and of the next two."""
    namespace_compile_seconds: Annotated[float, Field(ge=0)] = 0
    """What one namespace's compiles may take of workers in a period; 0: no limit."""
    namespace_bytes: Annotated[int, Field(ge=0)] = 0
    """One namespace's artifacts; past it, its least recently used go. 0: no limit but the whole cache's."""
    quota_period_seconds: Seconds = 86400
    """The period of a namespace's compile seconds."""
    token_requests_per_second: Annotated[float, Field(ge=0)] = 500
    """One token's, unless it was issued with another rate; past it a request gets 429. 0: no limit."""
    token_burst_seconds: Seconds = 10
    """After this long without requests, as many seconds' worth may come at once: a thousand ranks start together."""
    blob_inline_bytes: Annotated[int, Field(ge=0)] = 256 << 10
    """Artifacts up to this size live in Redis, larger ones in the blob store."""
    redis_blob_limit_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """All artifacts that live in Redis together; past it, small ones go to the blob store too."""
    cache_limit_bytes: Bytes = 20 << 30
    """All artifacts together; past it the least recently used go, of the namespace that holds the most."""
    memory_cache_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """Artifacts that one gateway holds in memory: each is read once, however many clients ask for it. One that finds no
    room is read from Redis, or streamed from the store, for each client instead."""
    explain_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """What the keys of the latest artifacts were made of, in Redis, for `torchrelay explain`: about 2 KB each."""
    import_bytes: Bytes = 1 << 30
    """One imported artifact."""
    tunings_limit: Annotated[int, Field(gt=0)] = 100_000
    """Entries of one namespace's tuning database, a KiB each as a rule; past it the least recently used go. As many
    winners of Triton's and Helion's own autotuners are stored."""
    train_open_jobs: Annotated[int, Field(gt=0)] = 32
    """Training jobs of one namespace that have not ended; more are refused."""
    train_keep_jobs: Annotated[int, Field(gt=0)] = 200
    """Training jobs of one namespace that are stored; past it the oldest that have ended are forgotten, and with them
    their metrics, logs and files (exported models too), but not their folders."""
    train_package_bytes: Annotated[int, Field(gt=0, le=PACKAGE_BYTES)] = PACKAGE_BYTES
    """One packed working directory."""
    train_file_bytes: Bytes = 1 << 30
    """One file that a training job puts."""
    train_files_bytes: Bytes = 8 << 30
    """All files of one training job together."""
    train_keep_bytes: Annotated[int, Field(ge=0)] = 0
    """All folders of training jobs together; past it those of jobs that are done go, the oldest first. 0: none does."""
    signer_memory_bytes: Bytes = 2 << 30
    """All artifacts together that are at the signer at one time, each of 1 GiB at most. While one arrives, it takes
    twice its size."""
    audit_entries: Annotated[int, Field(gt=0)] = 1_000_000
    """About so many entries of the audit log are stored; the oldest go, of the namespaces that have most."""

    # how long
    body_timeout_seconds: Seconds = 60
    """A request's head must have arrived after this, and then its body."""
    compile_deadline_seconds: Seconds = 840
    """One compile may take so long on a worker."""
    train_capture_seconds: Seconds = 1800
    """A training job's script has so long for its first step, once a worker has room; then ranks start cold."""
    train_keep_seconds: Annotated[float, Field(ge=0)] = 90 * 86400
    """A training job's folder goes so long after it was last written to, unless the job runs or can be resumed, and
    with it what lies there alone, such as the weights. 0: it does not."""
    lease_seconds: Seconds = 10
    """A compile's holder renews every third of this; a dead one is replaced within two periods."""
    abandon_seconds: Seconds = 10
    """A graph's compile for a job is cancelled when nobody has waited for it for this long."""
    publish_retry_seconds: Seconds = 180
    """How long a finished artifact waits for the signer, and then for Redis or the blob store, to come back."""
    keepalive_seconds: Seconds = 5
    """Silence on an event stream after which a comment is sent."""
    progress_ttl_seconds: Seconds = 3600
    """How long a compile's events, and the request of a compile in progress, are stored."""
    negative_ttl_seconds: Annotated[float, Field(ge=0)] = 60
    """How long a failure that would happen again is remembered; 0 forgets at once."""
    retry_after_seconds: Annotated[int, Field(gt=0)] = 5
    """The Retry-After of a 429 or 503."""
    redis_timeout_seconds: Seconds = 5
    """A Redis that is silent for this long counts as unreachable."""

    # workers (workers/pool.py)
    ray_address: str | None = None
    """None starts a local Ray with the gateway."""
    ray_token: SecretStr | None = None
    """The token of the Ray cluster, where it asks for one (RAY_AUTH_MODE=token)."""
    cpu_slots: Annotated[int, Field(ge=0)] = 1
    """Compiles at once for CPU targets, on the local Ray."""
    gpu_slots: Annotated[int, Field(ge=0)] = 1
    """Compiles at once for GPU targets, on all GPUs of the local Ray; each GPU has at least one."""
    gpu_slots_per_gpu: Annotated[int, Field(ge=0)] = 8
    """Compiles at once for each GPU at most, on any node; they measure and verify in turn. 0 leaves GPUs alone."""
    toolchains: Annotated[str, AfterValidator(_absolute_paths)] = ""
    """For clients of other Python and PyTorch versions: Pythons of other environments, as absolute paths on the worker
    nodes, separated by commas. Each needs torchrelay's base install and a torch; each slot of a node is there once more
    for each of them."""
    autoscale_idle_seconds: Annotated[float, Field(ge=0)] = 0
    """Where Ray's autoscaler adds and removes nodes: compiles that wait ask it for nodes, and a node without work gives
    its workers back after so long, so that it can be removed. 0: there is no autoscaler."""
    autoscale_cpu_slots: Annotated[int, Field(ge=0)] = 0
    """CPU slots of the whole cluster with all nodes that the autoscaler may add. It is never asked for more, because it
    would do nothing then."""
    autoscale_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs, as well."""
    worker_memory_limit_bytes: Bytes = 16 << 30
    """Memory of one compile, all its processes together."""
    isolation: Literal["auto", "required", "off"] = "auto"
    """How compiles are confined: by the strongest form that each worker's machine offers; `required`: a worker that can
    confine neither files nor network does not start; `off`: limits on memory, processes and time alone."""
    kernels_dir: Path | None = None
    """A folder on each worker node where built C++ libraries are stored for later compiles; default
    `state_dir/kernels` with a local Ray, and none on a cluster, whose nodes may have no such path."""
    kernels_limit_bytes: Bytes = 2 << 30
    """All of a node's stored libraries together; past it the least recently used go."""
    equal_layers: Literal["off", "cpu", "all"] = "cpu"
    """For which targets a graph's equal layers are lowered once and called for each: CPUs, also GPUs, or none."""
    ray_temp_dir: str | None = None
    """Session folder of the local Ray; its path must be short, for sockets lie in it."""

    # logs
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below it are not written."""
    log_format: Literal["console", "json"] = "console"
    """console: for people. json: one object a line."""

    @property
    def limits(self) -> codec.Limits:
        return codec.Limits(
            body_bytes=self.body_bytes,
            request_bytes=self.request_bytes,
            nodes=self.request_nodes,
            depth=self.request_depth,
            constant_bytes=self.request_constant_bytes,
            inputs=self.request_inputs,
            kernels=self.request_kernels,
            source_bytes=self.request_source_bytes,
        )

    @property
    def exports_traces(self) -> bool:
        """Whether OpenTelemetry's own variables name a collector; its exporter reads them."""
        read = os.environ.get
        off = read("OTEL_SDK_DISABLED", "").lower() == "true" or read("OTEL_TRACES_EXPORTER") == "none"
        ends = read("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or read("OTEL_EXPORTER_OTLP_ENDPOINT")
        return bool(ends) and not off

    @property
    def toolchain_pythons(self) -> tuple[str, ...]:
        return tuple(filter(None, self.toolchains.split(",")))

    @property
    def keys_location(self) -> Path:
        return self.keys_dir or self.state_dir / "keys"

    @property
    def train_location(self) -> str:
        return str((self.train_dir or self.state_dir / "trains").absolute())

    def train_folder(self, namespace: str) -> str:
        """The folder that has those of a namespace's jobs; no job's id is like it."""
        return self.train_location if namespace == "default" else f"{self.train_location}/of-{namespace}"

    @property
    def rank_url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        scheme = "http" if self.tls_cert_file is None else "https"
        listens = f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
        return self.train_url or self.public_url or listens

    @property
    def kernels_location(self) -> str | None:
        if self.kernels_dir is not None:
            return str(self.kernels_dir.absolute())
        return str((self.state_dir / "kernels").absolute()) if self.ray_address is None else None

    @property
    def blob_location(self) -> str:
        return self.blob_url or (self.state_dir / "blobs").absolute().as_uri()
