"""What a newcomer reads to follow a hit, or a start without tracing: few of our files run, and a start imports few."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MOST_FILES = 30
MOST_FILES_OF_A_START = 40
ONLY_TO_TRACE = """
clients.artifacts.background clients.artifacts.programs.team_programs clients.artifacts.ranks.agreement
clients.jobfiles compiler.graph.capture compiler.graph.dtensors compiler.graph.encode compiler.graph.inputs
compiler.graph.names compiler.graph.triton_kernels compiler.request.key compiler.request.triton_source
compiler.torch_internals.dynamo.programs.comparison compiler.torch_internals.dynamo.programs.recording
compiler.torch_internals.dynamo.programs.questions.answers compiler.torch_internals.inductor.compile_fx
"""

PROGRAM = """
import json, os, sys
import torch, torch._dynamo
from torchrelay.clients import backend
from torchrelay.clients.artifacts import background
from torchrelay.clients.gateway import compile_client
from torchrelay.compiler.graph import capture
from torchrelay.compiler.request import key

root = os.path.dirname(os.path.dirname(os.path.abspath(backend.__file__))) + os.sep
files, sent = {}, []

def note(frame, event, arg):
    name = frame.f_code.co_filename
    if event != "call" or sent:
        return
    if frame.f_code.co_name == "stream" and name.endswith("httpx2/_client.py"):
        sent.append("stream")
    elif name.startswith((root + "clients", root + "compiler")):
        files[name.removeprefix(root)] = None

def traced(gm, inputs):
    sys.setprofile(note)
    try:
        backend.torchrelay(gm, inputs)
    except Exception as error:  # there is no gateway
        sent.append(type(error).__name__)
    finally:
        sys.setprofile(None)
    return gm.forward

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
torch.compile(model, backend=traced)(torch.ones(2, 4))
print(json.dumps([list(files), sent]))
"""


START = """
import json, os, sys
import torch
import torchrelay
from torchrelay.clients.artifacts.source import LoadedArtifact, LocalSource

root = os.path.dirname(torchrelay.__file__) + os.sep
files = {}

def note(frame, event, arg):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith((root + "clients", root + "compiler")):
        files[name.removeprefix(root)] = None

def program(x):
    return x * 2

LocalSource.obtain = lambda self, wanted: LoadedArtifact(wanted.key, lambda x: (x * 2,), "disk_hit", b"")
compiled = torch.compile(program, backend="torchrelay")
sys.setprofile(note)
assert compiled(torch.ones(1)).item() == 2
sys.setprofile(None)
imported = [name.removeprefix("torchrelay.") for name in sys.modules if name.startswith("torchrelay.")]
print(json.dumps([torchrelay.report().programs, list(files), imported]))
"""


def run(program: str, home: Path, **variables: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    environment |= dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"), str(home))
    # nothing compiles here
    environment |= {"TORCHRELAY_URL": "http://127.0.0.1:1", "TORCHRELAY_MODE": "require", **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_graph_is_sent_after_few_of_our_files(tmp_path: Path) -> None:
    files, sent = run(PROGRAM, tmp_path)
    assert sent == ["stream", "GatewayUnreachable"]
    assert "compiler/graph/capture.py" in files
    assert len(files) <= MOST_FILES, files


def test_a_start_without_tracing_runs_few_of_our_files_and_imports_nothing_that_only_a_trace_needs(
    tmp_path: Path,
) -> None:
    variables = {"TORCHRELAY_PROGRAMS": "1", "TORCHRELAY_PROGRAMS_CHECK": "0"}
    assert run(START, tmp_path, **variables)[0] == 0  # it is traced, and recorded
    started, files, imported = run(START, tmp_path, **variables)
    assert started == 1
    assert len(files) <= MOST_FILES_OF_A_START, files
    for name in ONLY_TO_TRACE.split():
        assert importlib.util.find_spec(f"torchrelay.{name}")
        assert name not in imported
