"""`python -m torchrelay.service up`: the whole service, its gateway alone, or one worker node; `signer`: the signer.

Exit status: 0 stopped when told to, 1 it could not run, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ..compiler.errors import RelayError, SettingsError


def main() -> None:
    # Imports take a second. Until something runs that must be stopped in order, a signal just ends this.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    arguments = _parse()
    if arguments.command == "signer":  # starts no processes, and imports nothing of Ray
        _report_errors(lambda: _sign(arguments))
        return
    from .local.supervisor import run_supervised

    sys.exit(run_supervised(lambda: _report_errors(lambda: _up(arguments))))


def _up(arguments: argparse.Namespace) -> None:
    if arguments.worker_only:
        _become_worker(arguments)
    _serve(arguments)


def _report_errors(run: Callable[[], None]) -> None:
    try:
        run()
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
        help="start the service and stay with it until Ctrl-C",
        description="Start redis-server, Ray with workers, and the gateway; or one of the parts.",
    )
    up.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    up.add_argument(
        "--port", type=int, help="port to listen on; 0 finds a free one (default 8642 or a free one)"
    )
    up.add_argument(
        "--state", type=Path, metavar="DIR", help="keys, token and cache ($XDG_STATE_HOME/torchrelay)"
    )
    up.add_argument(
        "--credentials",
        type=Path,
        metavar="FILE",
        help="where to write URL, token and public key ($XDG_CONFIG_HOME/torchrelay/credentials.json)",
    )
    up.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM: serve https://")
    up.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's private key, PEM")
    up.add_argument("--public-url", metavar="URL", help="how clients reach it, for the credentials file")
    up.add_argument("--cpu-slots", type=int, metavar="N", help="compiles at once for CPUs (half the cores)")
    up.add_argument("--no-gpu", action="store_true", help="leave this machine's GPUs alone")
    part = up.add_mutually_exclusive_group()
    part.add_argument("--gateway-only", action="store_true", help="needs --redis and --ray")
    part.add_argument(
        "--worker-only", action="store_true", help="offer this machine to a Ray cluster; needs --ray"
    )
    up.add_argument("--redis", metavar="URL", help="redis://, rediss:// or unix://")
    up.add_argument("--ray", metavar="ADDRESS", help="host:port of the cluster's head")
    _add_signer(commands)
    arguments = parser.parse_args()
    if arguments.command == "signer":
        return arguments
    apart = arguments.gateway_only or arguments.worker_only
    if (arguments.redis and not arguments.gateway_only) or (arguments.ray and not apart):
        up.error("--redis and --ray go with --gateway-only or --worker-only")
    return arguments


def _add_signer(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    signer = commands.add_parser(
        "signer",
        help="hold the signing keys, and sign for gateways elsewhere",
        description="Hold the signing keys (TORCHRELAY_SERVICE_KEYS_DIR) in a process of their own, and sign for those "
        "who have TORCHRELAY_SERVICE_SIGNER_TOKEN.",
    )
    signer.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    signer.add_argument("--port", type=int, default=8643, help="port to listen on (default 8643)")
    signer.add_argument(
        "--uds", type=Path, metavar="PATH", help="listen on a Unix socket, mode 0660, instead"
    )


def _sign(arguments: argparse.Namespace) -> None:
    from pydantic import ValidationError

    from .local import signer
    from .settings import ServiceSettings

    try:
        settings = ServiceSettings()
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None
    signer.run(settings, host=arguments.host, port=arguments.port, uds=arguments.uds)


def _serve(arguments: argparse.Namespace) -> None:
    import asyncio

    from pydantic import ValidationError

    from .gateway.http import tls
    from .local import up as local_up
    from .settings import ServiceSettings, default_credentials_file

    given = {
        "host": arguments.host,
        "port": arguments.port,
        "state_dir": arguments.state.absolute() if arguments.state else None,
        "cpu_slots": arguments.cpu_slots,
        "gpu_slots_per_gpu": 0 if arguments.no_gpu else None,
        "tls_cert_file": arguments.tls_cert,
        "tls_key_file": arguments.tls_key,
        "public_url": arguments.public_url,
        "redis_url": arguments.redis,
        "ray_address": arguments.ray,
    }
    try:
        settings = ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None
    if "cpu_slots" not in settings.model_fields_set:
        settings = settings.model_copy(update={"cpu_slots": local_up.default_cpu_slots()})
    if arguments.gateway_only:
        missing = {"redis_url", "ray_address"} - settings.model_fields_set
        if missing:
            raise SettingsError("--gateway-only needs a Redis and a Ray", hint="Give --redis and --ray")
    else:
        settings = settings.model_copy(update={"ray_address": None, "ray_token": None})
    tls.check(settings)
    listener = local_up.listen(
        settings.host, settings.port, any_port_will_do="port" not in settings.model_fields_set
    )
    with listener:
        asyncio.run(
            local_up.run(
                settings,
                listener=listener,
                credentials=arguments.credentials or default_credentials_file(),
                embedded=not arguments.gateway_only,
            )
        )


def _become_worker(arguments: argparse.Namespace) -> NoReturn:
    """Become `ray start --block` for a node that offers slots; the gateways' pools find it and fill them."""
    from ..workers.pool import node_directory, node_resources, ray_environment
    from .local import up as local_up
    from .settings import ServiceSettings

    settings = ServiceSettings(**({"ray_address": arguments.ray} if arguments.ray else {}))
    if settings.ray_address is None:
        raise SettingsError("--worker-only needs a Ray", hint="Give --ray host:port")
    slots = arguments.cpu_slots if arguments.cpu_slots is not None else local_up.default_cpu_slots()
    token = settings.ray_token.get_secret_value() if settings.ray_token else None
    folder, lock = node_directory()
    os.set_inheritable(lock, True)  # held by the program that this process becomes
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *(f"--address={settings.ray_address}", f"--temp-dir={folder}"),
        f"--resources={json.dumps(node_resources(slots))}",
        *(["--num-gpus=0"] if arguments.no_gpu else []),
    ]
    os.environ.update(ray_environment(token, settings.ray_address))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.execv(sys.executable, command)


def _explain(error: Exception) -> str:
    from pydantic import ValidationError

    assert isinstance(error, ValidationError)
    first = error.errors(include_input=False)[0]
    return f"setting {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


if __name__ == "__main__":
    main()
