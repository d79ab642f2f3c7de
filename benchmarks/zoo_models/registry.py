"""All models of the zoo by name; a suite's library is imported when the first of its models is wanted."""

from __future__ import annotations

import importlib
import importlib.util

from zoo_models.entry import SUITES, ZooModel

NEEDS = {
    "transformers": "transformers",
    "timm": "timm",
    "torchbench": "transformers",
    "newer": "transformers",
}
"""The library without which a suite cannot be listed."""


def models(suites: tuple[str, ...] = SUITES) -> dict[str, ZooModel]:
    """By `suite/name`, in upstream's order. A suite whose library is not installed has no models."""
    found: dict[str, ZooModel] = {}
    for suite in suites:
        if importlib.util.find_spec(NEEDS[suite]) is not None:
            module = importlib.import_module(f"zoo_models.from_{suite}")
            found |= {f"{suite}/{model.name}": model for model in module.MODELS}
    return found


def model(name: str) -> ZooModel:
    """Of a `suite/name`. Raises KeyError."""
    return models((name.partition("/")[0],))[name]
