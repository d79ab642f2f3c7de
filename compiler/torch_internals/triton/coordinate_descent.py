"""A kernel's coordinate descent: whether one is to come, and its end as text."""

from __future__ import annotations

import copy
import json
from typing import Any


def descends(kernel: Any, config: Any) -> bool:
    """Whether a CachingAutotuner would begin a coordinate descent when it runs with this configuration."""
    wanted = kernel.inductor_meta.get("coordinate_descent_tuning", False)
    return bool(wanted) and not getattr(config, "found_by_coordesc", False)


def encode_configuration(config: Any) -> str:
    """Where a coordinate descent has ended (triton.Config)."""
    return json.dumps([config.kwargs, config.num_warps, config.num_stages], sort_keys=True)


def decode_configuration(config: Any, where: str) -> Any:
    """The configuration that `_where` tells, from the one that the descent began with; None: it is none of its."""
    try:
        kwargs, warps, stages = json.loads(where)
        numbers = [*kwargs.values(), warps, stages]
    except (ValueError, TypeError, AttributeError):
        return None
    known = config.kwargs
    if kwargs.keys() != known.keys() or not all(type(number) in (int, bool) for number in numbers):
        return None
    moved = copy.deepcopy(config)
    moved.kwargs.update(kwargs)
    moved.num_warps, moved.num_stages = warps, stages
    return moved
