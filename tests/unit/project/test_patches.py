"""docs/patches.md lists what compiler/torch_internals replaces in PyTorch and Triton, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INTERNALS = ROOT / "compiler" / "torch_internals"
FILES = sorted(path for path in INTERNALS.rglob("*.py") if path.name != "patching.py")
REPLACING = ("patched", "replace", "hooks.put", "hooks.observe")
SETTINGS = ("config", "counters", "torch.backends.cudnn")
"""Of PyTorch, not parts of it: they are there to be set."""


def written(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else f"{{{ast.unparse(node)}}}"


def replaced(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in REPLACING:
            owner, name, *_ = node.args
            yield f"{ast.unparse(owner)}.{written(name)}"


def assigned(tree: ast.AST) -> Iterator[str]:
    """Attributes of what a file imports from PyTorch or Triton that it sets without `replace`."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] in ("torch", "triton")
    }
    for node in ast.walk(tree):
        target = ""
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target = ast.unparse(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            target = ast.unparse(node.args[0])
        if target.partition(".")[0] in imported and target not in SETTINGS:
            yield f"{target}: line {getattr(node, 'lineno', 0)}"


def listed() -> set[tuple[str, str]]:
    rows: set[tuple[str, str]] = set()
    for line in (ROOT / "docs" / "patches.md").read_text().splitlines():
        if match := re.match(r"\| `([\w/]+\.py)` \| ([^|]+) \|", line):
            rows |= {(match[1], name) for name in re.findall(r"`([^`]+)`", match[2])}
    return rows


def test_the_table_of_patches_is_the_codes() -> None:
    found = {
        (str(path.relative_to(INTERNALS)), name)
        for path in FILES
        for name in replaced(ast.parse(path.read_text()))
    }
    assert listed() == found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(INTERNALS)))
def test_nothing_of_pytorch_is_set_in_another_way(path: Path) -> None:
    assert list(assigned(ast.parse(path.read_text()))) == []


def test_assignments_are_seen() -> None:
    code = "from torch import _guards as g\nimport torch\ng.eval = 1\nsetattr(torch.cuda, 'x', 2)\nx.y = 3\n"
    assert list(assigned(ast.parse(code))) == ["g: line 3", "torch.cuda: line 4"]
