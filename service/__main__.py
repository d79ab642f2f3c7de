"""`python -m torchrelay.service`: the whole service on one machine, or one of its roles.

Exit status: 0 stopped when told to, 1 it could not run, 2 wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..compiler.errors import RelayError, SettingsError
from ..compiler.process import own_files

if TYPE_CHECKING:
    from .base.settings import ServiceSettings

_DISPATCHER_PORT = 8644


def main() -> None:
    # Imports take a second. Until something runs that must be stopped in order, a signal just ends this.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    arguments = _parse()
    if arguments.role is _signer:  # starts no processes, and imports nothing of Ray
        _run(arguments)
        return
    from .local.supervisor import run_supervised

    # Ray ends a process whose cluster is lost, or comes back as another one
    pauses: dict[Callable[[argparse.Namespace], None], float] = {_dispatcher: 1.0, _worker: 60.0}
    longest_pause = pauses.get(arguments.role, 0.0)
    sys.exit(run_supervised(lambda: _run(arguments), longest_pause=longest_pause))


def _leave(*_: object) -> NoReturn:
    """A second signal must not end what the first one has begun: its exit status would be another."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def _run(arguments: argparse.Namespace) -> None:
    role: Callable[[argparse.Namespace], None] = arguments.role
    try:
        role(arguments)
    except RelayError as error:
        print(f"torchrelay: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, SettingsError) else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrelay",
        description="The torchrelay service. Settings not given here: TORCHRELAY_SERVICE_*.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    up = commands.add_parser(
        "up",
        help="start the whole service on this machine and stay with it until Ctrl-C",
        description="Start redis-server, Ray with workers, and a gateway with a dispatcher.",
    )
    up.set_defaults(role=_up)
    _listens(up, "default 8642 or a free one")
    _has_clients(up)
    _has_slots(up)

    gateway = commands.add_parser(
        "gateway",
        help="answer clients; dispatchers compile what is missing",
        description="Answer clients. Any number of gateways share one Redis; dispatchers compile what is missing.",
    )
    gateway.set_defaults(role=_gateway)
    _listens(gateway, "default 8642 or a free one")
    _has_clients(gateway)
    _has_redis(gateway)
    gateway.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default 1)")

    dispatcher = commands.add_parser(
        "dispatcher",
        help="give queued compiles and jobs to the workers of a Ray cluster",
        description="Give queued compiles, searches and jobs to the workers of a Ray cluster. Any number of "
        "dispatchers share one Redis.",
    )
    dispatcher.set_defaults(role=_dispatcher)
    _listens(dispatcher, f"for /livez, /readyz and /metrics; default {_DISPATCHER_PORT}")
    _has_redis(dispatcher)
    _has_ray(dispatcher)

    signer = commands.add_parser(
        "signer",
        help="hold the signing keys, and sign for gateways and dispatchers",
        description="Hold the signing keys (TORCHRELAY_SERVICE_KEYS_DIR) in a process of their own, and sign for those "
        "who have TORCHRELAY_SERVICE_SIGNER_TOKEN.",
    )
    signer.set_defaults(role=_signer)
    signer.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    signer.add_argument("--port", type=int, default=8643, help="port to listen on (default 8643)")
    signer.add_argument(
        "--uds", type=Path, metavar="PATH", help="listen on a Unix socket, mode 0660, instead"
    )

    worker = commands.add_parser(
        "worker",
        help="offer this machine to a Ray cluster",
        description="Offer this machine's cores and GPUs to the dispatchers of a Ray cluster.",
    )
    worker.set_defaults(role=_worker)
    _has_ray(worker)
    _has_slots(worker)
    worker.add_argument("--no-train", action="store_true", help="run no ranks of training jobs here")

    return parser.parse_args()


def _listens(parser: argparse.ArgumentParser, port: str) -> None:
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help=f"port to listen on; 0 finds a free one ({port})")
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="keys, token and cache ($XDG_STATE_HOME/torchrelay)"
    )


def _has_clients(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--credentials",
        type=Path,
        metavar="FILE",
        help="where to write URL, token and public key ($XDG_CONFIG_HOME/torchrelay/credentials.json)",
    )
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM: serve https://"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's private key, PEM")
    parser.add_argument("--public-url", metavar="URL", help="how clients reach it, for the credentials file")


def _has_slots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu-slots", type=int, metavar="N", help="compiles at once for CPUs (by cores and memory)"
    )
    parser.add_argument(
        "--gpu-slots", type=int, metavar="N", help="compiles at once for all GPUs (by cores and memory)"
    )
    parser.add_argument("--no-gpu", action="store_true", help="leave this machine's GPUs alone")


def _has_redis(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis", metavar="URL", help="redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
    )


def _has_ray(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ray", metavar="ADDRESS", help="host:port of the cluster's head")


def _settings(arguments: argparse.Namespace) -> ServiceSettings:
    """The settings of the environment, changed by arguments. Raises SettingsError."""
    from pydantic import ValidationError

    from .base.settings import ServiceSettings, check_environment

    check_environment(os.environ)
    options = vars(arguments)
    state = options.get("state")
    given: dict[str, Any] = {
        "host": options.get("host"),
        "port": options.get("port"),
        "state_dir": state.absolute() if state else None,
        "cpu_slots": options.get("cpu_slots"),
        "gpu_slots": options.get("gpu_slots"),
        "gpu_slots_per_gpu": 0 if options.get("no_gpu") else None,
        "tls_cert_file": options.get("tls_cert"),
        "tls_key_file": options.get("tls_key"),
        "public_url": options.get("public_url"),
        "redis_url": options.get("redis"),
        "ray_address": options.get("ray"),
    }
    try:
        return ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"setting {where}: {first['msg']}") from None


def _need(settings: ServiceSettings, role: str, **needed: str) -> None:
    """Raises SettingsError for a setting that is not given. needed: what to give, by setting."""
    for name, hint in needed.items():
        if name not in settings.model_fields_set:
            raise SettingsError(
                f"`torchrelay {role}` needs {hint}", hint=f"Set TORCHRELAY_SERVICE_{name.upper()}"
            )


def _up(arguments: argparse.Namespace) -> None:
    from ..workers.pool import PrestartedServer

    # it imports torch for seconds: before this process imports the gateway and starts Ray
    with PrestartedServer() as early:
        from .local import slot_counts, up

        settings = _settings(arguments)
        update: dict[str, Any] = {"ray_address": None, "ray_token": None}
        if "cpu_slots" not in settings.model_fields_set:
            update["cpu_slots"] = slot_counts.default_cpu_slots()
        if "gpu_slots" not in settings.model_fields_set and settings.gpu_slots_per_gpu:
            update["gpu_slots"] = slot_counts.default_gpu_slots()
        settings = settings.model_copy(update=update)
        if not settings.cpu_slots:
            early.close()  # nobody will adopt it
        up.serve_all(settings, credentials=_credentials(arguments), early_server=early.early_server)


def _gateway(arguments: argparse.Namespace) -> None:
    settings = _settings(arguments)
    _need(settings, "gateway", redis_url="a Redis: give --redis")
    with contextlib.ExitStack() as at_end:
        if arguments.workers > 1:  # prometheus_client reads it when it is imported
            folder, _ = own_files.new_folder(Path(tempfile.gettempdir()), "torchrelay-metrics-")
            at_end.callback(shutil.rmtree, folder, ignore_errors=True)
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        from .local import gateway

        gateway.serve(settings, credentials=_credentials(arguments), processes=arguments.workers)


def _dispatcher(arguments: argparse.Namespace) -> None:
    from .local import dispatcher

    settings = _settings(arguments)
    _need(
        settings, "dispatcher", redis_url="a Redis: give --redis", ray_address="a Ray: give --ray host:port"
    )
    if "port" not in settings.model_fields_set:
        settings = settings.model_copy(update={"port": _DISPATCHER_PORT})
    dispatcher.serve(settings)


def _signer(arguments: argparse.Namespace) -> None:
    from .local import signer

    settings = _settings(argparse.Namespace())
    signer.run(settings, host=arguments.host, port=arguments.port, uds=arguments.uds)


def _credentials(arguments: argparse.Namespace) -> Path:
    from .base.settings import default_credentials_file

    return arguments.credentials or default_credentials_file()


def _worker(arguments: argparse.Namespace) -> None:
    """Run `ray start --block` for a node that offers slots; dispatchers' pools find it and fill them."""
    from ..workers.pool import node_directory, node_resources, ray_environment
    from .local import slot_counts, worker

    settings = _settings(arguments)
    _need(settings, "worker", ray_address="a Ray: give --ray host:port")
    cpu_slots, gpu_slots = arguments.cpu_slots, arguments.gpu_slots
    if cpu_slots is None:
        cpu_slots = slot_counts.default_cpu_slots()
    if gpu_slots is None:
        gpu_slots = 0 if arguments.no_gpu else slot_counts.default_gpu_slots()
    token = settings.ray_token.get_secret_value() if settings.ray_token else None
    folder, lock = node_directory()
    os.set_inheritable(lock, True)  # held by the program that this process starts, too
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *(f"--address={settings.ray_address}", f"--temp-dir={folder}"),
        f"--resources={json.dumps(node_resources(cpu_slots, gpu_slots))}",
        *(["--num-gpus=0"] if arguments.no_gpu else []),
        # slots take none of Ray's CPUs, and each rank some
        *(["--num-cpus=0"] if arguments.no_train else []),
    ]
    os.environ.update(ray_environment(token, settings.ray_address))
    worker.run(command)


if __name__ == "__main__":
    main()
