"""Which nodes have room for a job's ranks. Resources have Ray's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...compiler.api.training.jobs import TrainSpec
from ..scheduling.ray_resources import OFFER


def fewest_ranks(spec: TrainSpec) -> int:
    """With how many ranks the job runs at least."""
    return spec.min_workers or spec.workers


def why_no_room(spec: TrainSpec, nodes: Sequence[Mapping[str, float]]) -> str:
    """Why `nodes` (the resources of each) can never hold the ranks; '' if they can."""
    offering = [node for node in nodes if OFFER in node]
    if not offering:
        return "no node runs jobs"
    if spec.device == "cuda" and not any(node.get("GPU", 0) >= 1 for node in offering):
        return "no node has a GPU"
    fit = sum(ranks_on(node, spec) for node in offering)
    least = fewest_ranks(spec)
    if fit >= least:
        return ""
    each = [f"{spec.cpus:g} CPU"]
    if spec.device == "cuda":
        each.append("1 GPU")
    if spec.memory_bytes:
        each.append(f"{spec.memory_bytes / (1 << 30):.1f} GiB")
    return f"the nodes together hold {fit} ranks of {', '.join(each)} each, and the job needs {least}"


def after_placing(
    specs: Iterable[TrainSpec], nodes: Iterable[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """What is left of the nodes' resources once these jobs have their fewest ranks, placed where most fit."""
    left = [dict(node) for node in nodes if OFFER in node]
    for spec in specs:
        ranks = fewest_ranks(spec)
        for node in sorted(left, key=lambda node: -ranks_on(node, spec)):
            placed = min(ranks, ranks_on(node, spec))
            ranks -= placed
            for name, amount in rank_resources(spec).items():
                node[name] = node.get(name, 0.0) - placed * amount
    return list(left)


def ranks_on(node: Mapping[str, float], spec: TrainSpec) -> int:
    """How many of the job's ranks fit into these resources of a node."""
    return min(int((node.get(name, 0.0) + 1e-6) // amount) for name, amount in rank_resources(spec).items())


def rank_resources(spec: TrainSpec) -> dict[str, float]:
    asked = {"CPU": spec.cpus, "memory": float(spec.memory_bytes), "GPU": float(spec.device == "cuda")}
    return {name: amount for name, amount in asked.items() if amount > 0}
