"""`torchrelay up`, the roles of the service, and `torchrelay demo`: replace this process, with the same arguments.

There is only one process: Ctrl-C and SIGTERM reach it directly, and its exit status is the command's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable

import typer

from ...compiler import install_hint
from ...compiler.errors import ClientError

_SERVER = ("fastapi", "uvicorn", "ray", "redis")
_SIGNER = ("starlette", "uvicorn", "pydantic_settings", "structlog")
_EXAMPLES = ("numpy", "sklearn", "matplotlib")


ROLES = {
    "up": "Start the service on this machine.",
    "gateway": "Answer clients, as one of several gateways.",
    "dispatcher": "Give compiles and jobs to the workers of a Ray cluster.",
    "worker": "Offer this machine to a Ray cluster.",
    "signer": "Hold the service's signing keys in a process of its own.",
}
"""What each command of `python -m torchrelay.service` does."""


def role(name: str) -> Callable[[typer.Context], None]:
    """The command that starts the role `name`."""

    def start(context: typer.Context) -> None:
        needs = _SIGNER if name == "signer" else _SERVER
        replace_process("torchrelay.service", name, *context.args, needs=needs, extra="server")

    start.__doc__ = f"{ROLES[name]} `torchrelay {name} --help` lists its options."
    return start


def demo(context: typer.Context) -> None:
    """Train two small models locally, through the service, and as a teammate without a compiler."""
    replace_process(
        "torchrelay.examples.demo", *context.args, needs=_SERVER + _EXAMPLES, extra="server,cli,examples"
    )


def replace_process(module: str, *arguments: str, needs: tuple[str, ...], extra: str) -> None:
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise ClientError(f"this command needs {', '.join(missing)}", hint=install_hint(extra))
    # -P: a file in the current folder must not stand in for a library.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
