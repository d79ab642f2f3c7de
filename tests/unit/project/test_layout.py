"""The package's outside: public names, what importing costs, where settings are read, what is packaged."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torchrelay

ROOT = Path(torchrelay.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
DATA = PROJECT["tool"]["setuptools"]["package-data"]
HEAVY = {
    "torch", "numpy", "ray", "fastapi", "starlette", "uvicorn", "redis", "pydantic", "obstore", "typer", "jinja2"
}  # fmt: skip


def imported(statement: str) -> set[str]:
    """Modules that `statement` adds to a fresh interpreter."""
    program = (
        "import json, sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    # of nobody's: who has a gateway configured here imports what prefetching from it takes
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    environment = kept | {"XDG_CONFIG_HOME": os.devnull}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return set(json.loads(done.stdout))


def roots(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_the_public_names_are_these() -> None:
    assert torchrelay.__all__ == [
        "FallbackWarning",
        "LoweredGraph",
        "RelayError",
        "Report",
        "StaleProgramWarning",
        "__version__",
        "compile",
        "disable",
        "enable",
        "errors",
        "lower",
        "lower_graph",
        "report",
    ]


def test_every_public_name_resolves_and_is_listed() -> None:
    program = (
        "import torchrelay\n"
        "for name in torchrelay.__all__: getattr(torchrelay, name)\n"
        "assert set(torchrelay.__all__) <= set(dir(torchrelay))\n"
        "from torchrelay import *\n"
        "assert compile is torchrelay.compile and callable(enable) and callable(disable)\n"
        "assert issubclass(errors.NoWorker, RelayError) and isinstance(report(), Report)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_such"):
        torchrelay.nothing_such  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    added = imported("import torchrelay")
    assert roots(added) - set(sys.stdlib_module_names) == {"torchrelay"}
    assert {name for name in added if name.startswith("torchrelay.")} == {"torchrelay.compiler"}


@pytest.mark.parametrize(
    "statement",
    [
        "from torchrelay import report, errors",
        "from torchrelay.clients import cli, settings; from torchrelay.clients.artifacts import disk_cache; "
        "from torchrelay.clients.gateway import compile_client",
        "from torchrelay.compiler.artifact import container; "
        "from torchrelay.compiler.request import codec, key, validate",
    ],
)
def test_the_thin_parts_need_neither_torch_nor_a_server_library(statement: str) -> None:
    assert roots(imported(statement)) & HEAVY == set()


def test_jinja2_is_imported_when_a_page_is_written_and_not_before() -> None:
    added = imported("from torchrelay.clients.commands.jobs import train, tune")
    assert "torchrelay.compiler.api.html.page" in added
    assert "jinja2" not in roots(added)


def test_the_back_end_does_not_wait_for_the_http_client() -> None:
    assert "httpx2" not in roots(imported("import torchrelay.clients.backend"))


def test_the_gateway_needs_no_torch() -> None:
    assert "torch" not in roots(imported("import torchrelay.service.gateway.app"))


def test_every_folder_of_code_is_packaged_and_every_package_exists() -> None:
    found = {
        ".".join(("torchrelay", *path.parent.relative_to(ROOT).parts))
        for top in ("clients", "compiler", "service", "workers", "examples")
        for path in (ROOT / top).rglob("*.py")
    }
    files = {name for name in PACKAGES if not [*(ROOT / Path(*name.split(".")[1:])).glob("*.py")]}
    assert sorted(set(PACKAGES) - files) == sorted(found | {"torchrelay"})
    assert files <= DATA.keys()  # listed for their files


def test_only_the_two_settings_modules_of_the_client_read_the_environment() -> None:
    readers = set()
    for path in (ROOT / "clients").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                readers.add(path.relative_to(ROOT).as_posix())
    assert readers == {"clients/settings.py", "clients/training/rank_environment.py"}


def test_make_flow_lists_every_step_of_a_compile_in_order_and_imports_nothing() -> None:
    program = [sys.executable, "-I", "-S", str(ROOT / "docs" / "flow.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=os.sep)
    rows = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    stages = [int(row[0]) for row in rows]
    assert stages == sorted(stages)
    assert set(stages) == set(range(1, 11))
    steps = [row[1] for row in rows if len(row) == 4]
    assert " ".join(step.replace(" ", "_") for step in steps) == (
        "capture request key send route authentication limits cache single_flight queue intake dispatch pool slot "
        "fork_server child rebuild equal_layers compile compare sign publish answer fetch verify load"
    )
    modules = [row[-2] for row in rows]
    assert all((ROOT / module).is_file() for module in modules)
    assert {path.partition("/")[0] for path in modules} == {"clients", "compiler", "service", "workers"}


GENERATORS = {f"compiler/request/operator_table/{name}.py" for name in ("generate", "rules")}
"""Run by a developer for each new torch, never by client, gateway or worker."""


PRIVATE_OF_RAY = ("ray.core.generated", "ray.train.v2")
"""Named without an underscore, and not in Ray's documentation."""

PRIVATE_ATTRIBUTES = {
    "_cdata",
    "_orig_mod",
    "_register_builtin_comm_hook",
    "_local_tensor",
    "_spec",
    "_schema",
}
"""Of instances of PyTorch's classes: no module's name stands before them."""


def private_names(source: str, library: str = "torch") -> set[str]:
    """Names in a module's code that are private ones of `library`: dotted under it, or an attribute of PyTorch's."""
    found = set()
    attributes = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                pass  # an attribute of one of our own classes
            case (
                ast.Attribute(attr=name)
                | ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_])
            ):
                attributes.add(name)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    of_instances = attributes & PRIVATE_ATTRIBUTES if library == "torch" else set()
    return of_instances | {
        name
        for name in found
        if name.startswith(f"{library}.")
        and (
            name.startswith(PRIVATE_OF_RAY)
            or any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        )
    }


INTERNALS = "compiler/torch_internals/"


def test_private_pytorch_apis_are_touched_in_torch_internals_only() -> None:
    touching = {
        path.relative_to(ROOT).as_posix(): names
        for folder in ("clients", "compiler", "workers", "service")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := private_names(path.read_text()))
    }
    assert {path for path in touching if not path.startswith(INTERNALS)} <= GENERATORS
    assert any(path.startswith(INTERNALS) for path in touching)


def test_private_parts_of_ray_are_touched_in_one_file_only() -> None:
    folders = ("clients", "compiler", "workers", "service", "examples", "benchmarks")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    touching = [path for path in files if private_names(path.read_text(), "ray")]
    assert [path.relative_to(ROOT).as_posix() for path in touching] == ["workers/ray_internals.py"]
    assert private_names("from ray.train.v2.api import x", "ray")
    assert not private_names("import ray.train\nray.get(1).__class__", "ray")
