"""The application of all commands; each command has a module."""

from __future__ import annotations

from typing import Annotated

import typer

from ...compiler import VERSION
from . import capture, export, login, lower, open_page, run, start_service
from .administration import audit, bake, cache, keys, namespace, stats, token
from .diagnostics import config, doctor, explain, top
from .jobs import train, tune


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"torchrelay {VERSION}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile PyTorch programs once, on a shared service, and give the result to everyone."""


def application() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},  # of all commands below
    )
    app.callback()(_root)
    # Their options are the started program's own, `--help` included.
    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    for name in start_service.ROLES:
        app.command(name, context_settings=passed_on)(start_service.role(name))
    app.command("demo", context_settings=passed_on)(start_service.demo)
    # Options after the program are the program's own.
    ends = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command("run", context_settings=ends)(run.run)
    app.command("capture")(capture.capture)
    app.command("lower")(lower.lower)
    app.command("bake")(bake.bake)
    app.command("doctor")(doctor.doctor)
    app.command("stats")(stats.stats)
    app.command("top")(top.top)
    app.command("explain")(explain.explain)
    app.command("open")(open_page.open_page)
    app.command("export")(export.export)
    app.command("login")(login.login)
    app.command("logout")(login.logout)
    app.command("whoami")(login.whoami)
    app.command("audit")(audit.audit)
    app.add_typer(config.app, name="config")
    app.add_typer(cache.app, name="cache")
    app.add_typer(keys.app, name="keys")
    app.add_typer(namespace.app, name="namespace")
    app.add_typer(token.app, name="token")
    app.add_typer(train.app, name="train")
    app.add_typer(tune.app, name="tune")
    return app
