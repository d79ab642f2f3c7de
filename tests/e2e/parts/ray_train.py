"""The job of ranks.py under Ray Train: FOLDER RANKS in; FOLDER/<rank>.json of each worker out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def work(config: dict[str, Any]) -> None:
    """One of Ray Train's workers: its process group is there already."""
    sys.path.insert(0, config["here"])
    import ranks
    import torch

    ranks.run(Path(config["folder"]), torch.device("cpu"))


def main() -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    handed = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("TORCHRELAY_", "XDG_", "PYTHONPATH"))
    }
    ray.init(address="local", num_cpus=ranks, include_dashboard=False, runtime_env={"env_vars": handed})
    TorchTrainer(
        work,
        train_loop_config={"folder": str(folder), "here": str(Path(__file__).resolve().parent)},
        scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 1}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()


if __name__ == "__main__":
    main()
