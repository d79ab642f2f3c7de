"""Docstrings name what is there and are sentences; names of parameters and attributes say what they hold.

Each name in backticks, and each file, is one of the code's or of a library's.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torchrelay

ROOT = Path(torchrelay.__file__).parent
TOPS = ("clients", "compiler", "workers", "service")
READ = (*TOPS, "tests", "benchmarks", "examples", "docs", "deploy")
FILES = sorted([*(path for top in TOPS for path in (ROOT / top).rglob("*.py")), *ROOT.glob("*.py")])

ELSEWHERE = {
    "ps": "a program",
    "push_chunk": "of CPython",
    "_PyThreadState_PopFrame": "of CPython",
    "decode_responses": "of redis-py",
    "mm_persistent_tma": "a template of Inductor's",
    "script.py": "an example of a user's file",
    "tensor_core.py": "of torch.utils.viz",
    "remote_cache.py": "of torch._inductor",
    "autotuner.py": "of triton.runtime",
    "random.py": "of torch._inductor",
    "pad_mm.py": "of torch._inductor",
    "aot_autograd_result.py": "of torch._functorch",
    "aot_compile.py": "of torch._dynamo",
    "torch.py": "of torch._dynamo.variables",
    "tensor.py": "of torch._dynamo.variables",
    "input_output_analysis.py": "of torch._functorch",
}
"""What docstrings name of others, and whose it is."""

VAGUE = {"found", "given", "made", "one", "each", "held", "place", "order", "asked"}
LIMITS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["torchrelay"]["words"]
"""By package: how many fragments and vague names it may still have. The numbers only sink."""


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def _words(tree: ast.AST) -> Iterator[str]:
    """Every identifier in a module, and each word of its texts but for its docstrings."""
    docstrings = {id(each) for each in _docstrings(tree)}
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield from re.findall(r"\w+", text)


@cache
def _known() -> frozenset[str]:
    known = {*dir(builtins), *keyword.kwlist, *ELSEWHERE}
    for top in READ:
        for path in (ROOT / top).rglob("*"):
            known |= {path.name, path.stem}
            if path.suffix == ".py":
                known |= set(_words(ast.parse(path.read_text())))
            elif path.suffix in (".lua", ".html", ".yaml", ".toml", ".conf"):
                known |= set(re.findall(r"\w+", path.read_text()))
    for path in ROOT.glob("*.*"):
        known |= {path.name, path.stem}
        if path.suffix in (".toml", ".yml"):
            known |= set(re.findall(r"\w+", path.read_text()))
    return frozenset(known)


def _named(text: str) -> Iterator[str]:
    """The names in backticks, and files."""
    for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text):
        yield from name.strip(".").split(".") if name not in _known() else ()
    yield from re.findall(r"\b\w+\.py\b", text)


def _unknown(source: str) -> list[str]:
    return [
        f"{docstring.lineno}: {name}"
        for docstring in _docstrings(ast.parse(source))
        for name in _named(str(docstring.value))
        if name not in _known()
    ]


def test_what_a_docstring_names_exists() -> None:
    unknown = {path.relative_to(ROOT).as_posix(): _unknown(path.read_text()) for path in FILES}
    assert {path: names for path, names in unknown.items() if names} == {}


@pytest.mark.parametrize("text", ["See `{}`.", "({}.py)", "`Path.{}`", "`{}()`"])
def test_a_name_that_is_gone_is_seen(text: str) -> None:
    gone = "no_such" + "_name"  # in two words: this file is read, too
    assert _unknown(f'def f():\n    """{text.format(gone)}"""\n') != []


def _fragments(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, beginning) of docstrings that begin with `Of`, `As` or `In`, and so are rarely sentences."""
    for docstring in _docstrings(tree):
        text = str(docstring.value).strip()
        if re.match(r"(Of|As|In)\b", text):
            yield docstring.lineno, text[:40]


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of all parameters, but for those of lambdas, and of all attributes, with their methods."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(args=of) | ast.AsyncFunctionDef(args=of):
                for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg):
                    if arg is not None:
                        yield arg.lineno, arg.arg
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ClassDef():
                for member in node.body:
                    match member:
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            yield member.lineno, name
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            yield member.lineno, name
                        case ast.Assign(targets=[ast.Name(id=name)]):
                            yield member.lineno, name


def _vague(tree: ast.AST) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in _names(tree) if name.strip("_") in VAGUE)


@pytest.mark.parametrize("kind", ["fragments", "names"])
@pytest.mark.parametrize("top", TOPS)
def test_no_package_has_more_fragments_and_vague_names_than_before(top: str, kind: str) -> None:
    listed = _fragments if kind == "fragments" else _vague
    places = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        if path.is_relative_to(ROOT / top)
        for line, text in listed(ast.parse(path.read_text()))
    ]
    assert len(places) <= LIMITS[top][kind], "\n".join(places)
