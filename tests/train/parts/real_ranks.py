"""A real rank of keys_script.py, under torchrun: FOLDER in; FOLDER/RANK.json, the keys that each kind asks for, out.

The back end is torchrelay's, from Dynamo's graph to the key; there is no gateway, and what it would have Inductor
compile runs as it is: only the keys are looked at. Three steps, so that later ones would show what they add.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keys_script
import torch
import torch.distributed as dist
import torchrelay
from torchrelay.clients import backend
from torchrelay.clients.training.rank import run_script


def eagerly(gm: torch.fx.GraphModule, *_: Any) -> Any:
    return gm.forward


def main() -> None:
    found: dict[str, list[str]] = {}
    known = 0
    ranks: list[int] = []

    def after(kind: str) -> None:
        nonlocal known
        graphs = torchrelay.report().graphs
        found[kind] = [graph.key for graph in graphs[known:]]
        known = len(graphs)
        torch.compiler.reset()
        ranks[:] = [dist.get_rank()]

    backend._compile_locally = eagerly
    run_script.compile_through_service()
    keys_script.main(list(keys_script.KINDS), 3, after)
    Path(sys.argv[1], f"{ranks[0]}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
