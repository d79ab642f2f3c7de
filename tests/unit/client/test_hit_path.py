"""What a newcomer reads to follow a hit: few of our files run before a graph is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST_FILES = 30

PROGRAM = """
import json, os, sys
import torch, torch._dynamo
from torchrelay.clients import backend

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


def test_a_graph_is_sent_after_few_of_our_files(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    folders = dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"), str(tmp_path))
    environment |= folders | {"TORCHRELAY_URL": "http://127.0.0.1:1"}
    environment["TORCHRELAY_MODE"] = "require"  # nothing compiles here
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    files, sent = json.loads(done.stdout)
    assert sent == ["stream", "GatewayUnreachable"]
    assert "compiler/graph/capture.py" in files
    assert len(files) <= MOST_FILES, files
