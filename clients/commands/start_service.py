"""`torchrelay up`, the roles of the service, and `torchrelay demo`: replace this process, with the same arguments.

There is only one process: Ctrl-C and SIGTERM reach it directly, and its exit status is the command's.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from ...compiler import install_hint
from ...compiler.errors import ClientError

_SERVER = ("fastapi", "uvicorn", "ray", "redis")
_SIGNER = ("starlette", "uvicorn", "pydantic_settings", "structlog")
_EXAMPLES = ("numpy", "sklearn", "matplotlib")


def up(context: typer.Context) -> None:
    """Start the service on this machine. `torchrelay up --help` lists its options."""
    _replace_process("torchrelay.service", "up", *context.args, needs=_SERVER, extra="server")


def gateway(context: typer.Context) -> None:
    """Answer clients, as one of several gateways. `torchrelay gateway --help` lists its options."""
    _replace_process("torchrelay.service", "gateway", *context.args, needs=_SERVER, extra="server")


def dispatcher(context: typer.Context) -> None:
    """Give compiles and jobs to the workers of a Ray cluster. `torchrelay dispatcher --help` lists its options."""
    _replace_process("torchrelay.service", "dispatcher", *context.args, needs=_SERVER, extra="server")


def worker(context: typer.Context) -> None:
    """Offer this machine to a Ray cluster. `torchrelay worker --help` lists its options."""
    _replace_process("torchrelay.service", "worker", *context.args, needs=_SERVER, extra="server")


def signer(context: typer.Context) -> None:
    """Hold the service's signing keys in a process of its own. `torchrelay signer --help` lists its options."""
    _replace_process("torchrelay.service", "signer", *context.args, needs=_SIGNER, extra="server")


def demo(context: typer.Context) -> None:
    """Train two small models locally, through the service, and as a teammate without a compiler."""
    _replace_process(
        "torchrelay.examples.demo", *context.args, needs=_SERVER + _EXAMPLES, extra="server,cli,examples"
    )


def _replace_process(module: str, *arguments: str, needs: tuple[str, ...], extra: str) -> None:
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise ClientError(f"this command needs {', '.join(missing)}", hint=install_hint(extra))
    # -P: a file in the current folder must not stand in for a library.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
