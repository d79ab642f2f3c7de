"""Modules of configuration entries, as torch.utils._config_module.install_config_module makes them."""

from __future__ import annotations

import importlib
from typing import Any


def config_entries(module: str) -> dict[str, Any]:
    """Every entry of a module as it is now; {} where this torch has no such module."""
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return {}
    return dict(found.get_config_copy())


def settable_entries(module: str) -> set[str]:
    """The entries of a module that still do something; setting a deprecated one only warns."""
    found: Any = importlib.import_module(module)
    return {name for name, entry in found._config.items() if not getattr(entry, "deprecated", False)}


def own_default(module: str, name: str) -> Any:
    """What an entry has in this process if no code has set it."""
    found: Any = importlib.import_module(module)
    return found._config[name].default
