"""What is generated of the site: a page's line `<!-- generated: NAME -->` stands for what the function NAME returns."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import http_reference
import msgspec
import torchrelay
import typer.main
from pydantic import SecretStr
from torchrelay import integrations, train
from torchrelay.clients.commands import application, start_service
from torchrelay.clients.settings import PARSERS, ClientSettings
from torchrelay.compiler import errors
from torchrelay.service.base.settings import ServiceSettings

DOCS = Path(__file__).parent
UNITS = {30: "GiB", 20: "MiB", 10: "KiB", 0: "bytes"}
_MARK = re.compile(r"<!-- generated: (\w+) -->")
_STATUS = re.compile(r"^Status: (\w[\w ]*?)(?: by \[.*\))?\. Date: (\d{4}-\d\d-\d\d)\.$", re.MULTILINE)


def filled(page: str) -> str:
    """A page's Markdown with what is generated in it."""
    return _MARK.sub(lambda mark: GENERATED[mark[1]](), page)


def cell(text: str) -> str:
    """A text in a table."""
    return " ".join(text.split()).replace("|", "\\|")


class Setting(NamedTuple):
    name: str
    section: str
    meaning: str


def settings(owner: type) -> Iterator[Setting]:
    """The fields of a class: each with the comment line above it that begins a section, and its docstring."""
    source = textwrap.dedent(inspect.getsource(owner))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    heads = {
        number: line[6:] for number, line in enumerate(source.splitlines(), 1) if line.startswith("    # ")
    }
    for field, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above = [text for number, text in heads.items() if number < field.lineno]
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            meaning = inspect.cleandoc(str(following.value.value)) if documented else ""  # type: ignore[union-attr]
            yield Setting(field.target.id, above[-1] if above else "", meaning)


def kind(annotation: Any, name: str) -> str:
    """What a setting may be, in words."""
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        return kind(annotation.__origin__, name)
    inner = [each for each in get_args(annotation) if each is not type(None)]
    if inner:
        return kind(inner[0], name)
    if annotation in (int, float) and name.endswith("bytes"):
        return "bytes"
    if annotation is float:
        return "a number" if name.endswith("second") else "seconds"
    words = {
        bool: "`1` or `0`",
        int: "a whole number",
        str: "text",
        Path: "a path",
        SecretStr: "text, a secret",
    }
    return words[annotation]


def default(value: Any, name: str) -> str:
    if value in (None, "", ()):
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int) and name.endswith("bytes") and value:
        power, unit = next(each for each in UNITS.items() if value % (1 << each[0]) == 0)
        return f"{value >> power} {unit}"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def python() -> str:
    """Directives of autodoc for the public names of each module that users import."""
    lines = []
    for module in (torchrelay, train):
        lines += ["", f"## {module.__name__}", "", "```{eval-rst}"]
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                lines += [f".. autoclass:: {module.__name__}.{name}", "   :members:", ""]
            elif callable(value):
                lines += [f".. autofunction:: {module.__name__}.{name}", ""]
        lines += ["```"]
    lines += ["", "## torchrelay.integrations"]
    for name, place in integrations._MODULES.items():  # their libraries may be missing: read, not imported
        text = (DOCS.parent / "clients" / f"{place.replace('.', '/')}.py").read_text(encoding="utf-8")
        (found,) = (
            each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == name
        )
        lines += ["", f"`torchrelay.integrations.{name}`", "", ast.get_docstring(found) or ""]
    return "\n".join(lines)


def client_settings() -> str:
    values = {field.name: field.default for field in msgspec.structs.fields(ClientSettings)}
    lines = []
    for name, _, meaning in settings(ClientSettings):
        value = None if values[name] is msgspec.NODEFAULT else written(name, values[name])
        lines += entry(f"## TORCHRELAY_{name.upper()}", allowed(name), default(value, name), meaning)
    return "\n".join(lines)


def entry(heading: str, value: str, default: str, meaning: str) -> list[str]:
    shown = f" Default: {default}." if default else ""
    return ["", heading, "", meaning, "", f"Value: {value}.{shown}"]


def allowed(name: str) -> str:
    """What a setting of the client may be, as the error says that a wrong value raises."""
    for wrong in ("wrong value", ""):
        try:
            PARSERS[name](wrong)
        except ValueError as error:
            return str(error)
    return "text"


def written(name: str, value: Any) -> Any:
    """What stands in a variable for a setting's value."""
    for text in ("1", "0"):
        try:
            if PARSERS[name](text) == value and not isinstance(value, float):
                return int(text)
        except ValueError:
            pass
    return value


def service_settings() -> str:
    lines: list[str] = []
    last = ""
    for name, section, meaning in settings(ServiceSettings):
        if name not in ServiceSettings.model_fields:
            continue
        if section != last:
            title = re.sub(r" \(.*", "", section).capitalize()
            lines += ["", f"## {title}"]
        last = section
        field = ServiceSettings.model_fields[name]
        value = "" if field.default_factory else default(field.default, name)
        words = kind(field.annotation, name)
        for limit in field.metadata:
            words += f", above {limit.gt}" if hasattr(limit, "gt") else ""
            words += f", at least {limit.ge}" if hasattr(limit, "ge") else ""
            words += f", at most {limit.le}" if hasattr(limit, "le") else ""
        lines += entry(f"### TORCHRELAY_SERVICE_{name.upper()}", words, value, meaning)
    return "\n".join(lines)


def error_codes() -> str:
    lines = []
    meanings = errors.meanings()
    for each, meaning in meanings.items():
        local = issubclass(each, errors.ClientError)
        status = "Raised in the user's process only" if local else f"HTTP status {each.status}"
        lines += ["", f"## {each.code}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        lines += [
            f"{status}; `torchrelay.errors.{each.__name__}`.{f' Hint: {each.hint}.' if each.hint else ''}"
        ]
    lacking = [each.__name__ for each in errors.BY_CODE.values() if each not in meanings]
    assert not lacking, f"not in the tree of compiler/errors.py: {', '.join(lacking)}"
    return "\n".join(lines)


def commands() -> str:
    root = typer.main.get_command(application())
    return "\n".join(_command(root, ["torchrelay"]))


def _command(command: Any, path: list[str]) -> Iterator[str]:
    inside = getattr(command, "commands", None)
    title = " ".join(path)
    yield from ("", f"{'##' if len(path) < 3 else '###'} {title}", "", command.help or "", "")
    if len(path) == 2 and path[1] in (*start_service.ROLES, "demo"):
        yield from ("```text", _help(path[1]), "```")
        return
    if not inside:
        names = [
            each.metavar or each.name.upper() for each in command.params if each.param_type_name == "argument"
        ]
        options = ["[OPTIONS]"] if len(names) < len(command.params) else []
        yield from ("```text", " ".join([title, *options, *names]), "```", "")
    shown = [each for each in command.params if "completion" not in each.name]
    if shown:
        yield from ("| argument or option | default | meaning |", "|---|---|---|")
    for each in shown:
        if each.param_type_name == "argument":
            names, value = [each.metavar or each.name.upper()], "required" if each.required else ""
        else:
            names = [*each.opts, *each.secondary_opts]
            value = "" if each.is_flag and not each.secondary_opts else default(each.default, each.name)
        yield f"| {', '.join(f'`{name}`' for name in names)} | {value} | {cell(each.help or '')} |"
    for name, each in (inside or {}).items():
        yield from _command(each, [*path, name])


def _help(name: str) -> str:
    """What a command prints that is a program of its own."""
    module = ["torchrelay.examples.demo"] if name == "demo" else ["torchrelay.service", name]
    program = [sys.executable, "-m", *module, "--help"]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()


def decisions() -> str:
    rows = ["| | decision | status | date |", "|---|---|---|---|"]
    for path in sorted((DOCS / "decisions").glob("0*.md")):
        text = path.read_text(encoding="utf-8")
        number, _, title = text.partition("\n")[0].removeprefix("# ").partition(". ")
        found = _STATUS.search(text)
        assert found, f"{path.name} has no line such as `Status: accepted. Date: 2026-11-20.`"
        rows.append(f"| {number} | [{title}]({path.name}) | {found[1]} | {found[2]} |")
    return "\n".join(rows)


GENERATED: dict[str, Callable[[], str]] = {
    "python": python,
    "client_settings": client_settings,
    "service_settings": service_settings,
    "error_codes": error_codes,
    "commands": commands,
    "operations": http_reference.operations,
    "decisions": decisions,
}
