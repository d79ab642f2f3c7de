"""Importing torchrelay does nothing. What names it explicitly in a process that may start without tracing imports what
that needs, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

FIRST_COMPILE = """
import sys
import torch
{before}
torch.compile(torch.nn.Linear(2, 2), backend="torchrelay")
print(*(name for name in ("networkx", "redis", "torch._dynamo.backends.cudagraphs") if name in sys.modules))
"""
AFTERWARDS = """
from torch._functorch._activation_checkpointing import graph_info_provider
from torch._dynamo.backends.registry import lookup_backend
import networkx
assert graph_info_provider.nx.DiGraph is networkx.DiGraph
assert "aot_eager" in torch._dynamo.list_backends(None)
from torchrelay.clients.backend import torchrelay
assert lookup_backend("torchrelay") is torchrelay
"""


def run(text: str, home: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    environment |= {"TORCHRELAY_PROGRAMS": "1", "HOME": str(home), "XDG_CONFIG_HOME": str(home)}
    environment |= variables
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "before",
    ["import torchrelay; torchrelay.enable()", "import torch._dynamo, torchrelay; torchrelay.compile(abs)"],
)
def test_the_first_compile_imports_no_library_and_no_back_end_that_a_start_needs_not(
    before: str, tmp_path: Path
) -> None:
    assert run(FIRST_COMPILE.format(before=before) + AFTERWARDS, tmp_path) == ""


MEANWHILE = """
import importlib.util, sys
import torch
from torchrelay.compiler.torch_internals.loading.light_imports import libraries_when_used
with libraries_when_used():
    assert importlib.util.find_spec("networkx").origin
    import networkx
    assert type(networkx).__name__ == "_LibraryStub"
assert networkx.__version__ and networkx.Graph is sys.modules["networkx"].Graph
"""


def test_who_asks_for_such_a_library_meanwhile_gets_it(tmp_path: Path) -> None:
    assert run(MEANWHILE, tmp_path) == ""


NOTHING = """
import importlib, json, sys, threading
import importlib._bootstrap, importlib._bootstrap_external, builtins
{before}

def state():
    watched = [importlib._bootstrap, importlib._bootstrap_external, importlib.machinery.SourceFileLoader, builtins]
    watched += [module for name, module in sorted(sys.modules.items()) if name == "torch" or name.startswith("torch.")]
    return {{str(each): {{name: id(value) for name, value in vars(each).items()}} for each in watched}}

before, finders, hooks = state(), list(sys.meta_path), list(sys.path_hooks)
modules = set(sys.modules)
import torchrelay
after = state()
after.keys() == before.keys() or sys.exit("torch's modules differ")
changed = [name for name in before if before[name] != after[name]]
new = {{name.partition(".")[0] for name in set(sys.modules) - modules}} - {{"torchrelay"}} - sys.stdlib_module_names
print(json.dumps([
    changed, sys.meta_path != finders, sys.path_hooks != hooks, threading.active_count(), sorted(new),
]))
"""


@pytest.mark.parametrize("before", ["", "import torch, torch._dynamo"])
def test_importing_torchrelay_starts_no_thread_changes_nothing_and_imports_no_library(
    before: str, tmp_path: Path
) -> None:
    told = {"TORCHRELAY_URL": "http://127.0.0.1:1", "TORCHRELAY_TRACE": str(tmp_path / "trace.json")}
    assert run(NOTHING.format(before=before), tmp_path, **told) == "[[], false, false, 1, []]"


OF_THE_PREFETCH = """
import sys
import torch
before = set(sys.modules)
import torchrelay.clients.artifacts.programs.process_programs, torchrelay.clients.gateway.compile_client
print(*(name for name in set(sys.modules) - before if name.partition(".")[0] in ("torch", "triton", "sympy")))
"""


def test_the_thread_that_prefetches_imports_nothing_of_pytorch_that_import_torch_has_not(
    tmp_path: Path,
) -> None:
    assert run(OF_THE_PREFETCH, tmp_path) == ""
