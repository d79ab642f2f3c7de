"""Helion's remote cache of autotuned configurations, in the team's service.

    HELION_AUTOTUNE_CACHE=RemoteAutotuneCache HELION_REMOTE_CACHE_BACKEND=torchrelay.integrations.HelionCache

Source: helion/autotuner/remote_cache.py (Helion 1.5).
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from typing import Any

from helion.autotuner.remote_cache import RemoteCacheBackend

from ....compiler import decoding
from ...reports.run_report import process_report
from .team_winners import caller_locals, process_winners

_log = logging.getLogger(__name__)

_DEPTH = 4
"""Lists in lists of a configuration."""
_LARGEST = 1 << 53


class HelionCache(RemoteCacheBackend):  # type: ignore[misc, unused-ignore]
    """The configuration alone travels: not the source, nor a compiled kernel, nor the key's parts.

    Does not raise: failures of the service are counted, and Helion measures. `list`, for warm starts from other
    kernels' configurations, is the base class' and empty.
    """

    def get(self, key: str) -> str | None:
        """The team's configuration as Helion's JSON; None if there is none that this kernel can have."""
        cache = caller_locals("helion.autotuner.remote_cache", "get").get("self")
        if cache is None:
            return None
        try:
            text = process_winners().find("helion", _version(), key)
            if text is None:
                return None
            config = checked_config(text)
            record = {"config": json.dumps(config)}
            # Helion checks what it got outside of any `try`, in the launch of the kernel: so first here.
            cache._validate_config_policy(record)
            check_within(cache.kernel.config_spec, config)
        except Exception as error:  # whatever Helion has against it
            _log.info("torchrelay: the team's configuration for %s is not used: %s", key[:16], error)
            return None
        process_report().count("autotune_hits")
        return json.dumps(record)

    def put(self, key: str, data: str) -> None:
        """Send a measured configuration, unless it names a file (advanced_controls_file) or has a policy of the CuTe
        back end."""
        try:
            record = json.loads(data)
            if "cute_structural_policy" in record:
                return
            text = json.dumps(checked_config(record["config"]), allow_nan=False, separators=(",", ":"))
            process_winners().store("helion", _version(), key, text)
        except Exception as error:  # a form that this version does not know
            _log.info("torchrelay: the configuration for %s is not sent: %s", key[:16], error)


def checked_config(text: str) -> dict[str, Any]:
    """The configuration in a JSON text. Raises ValueError if it is no object of plain, finite, small values, or names
    a file of this machine."""
    config: dict[str, Any] = decoding.from_json(text, type=dict[str, Any])
    if not _is_plain(config, _DEPTH) or config.get("advanced_controls_file"):
        raise ValueError("no configuration of plain values")
    return config


def check_within(spec: Any, config: dict[str, Any]) -> None:
    """Raises whatever Helion raises for a configuration that the kernel's ConfigSpec does not allow; ValueError for one
    that no search of this kernel would try."""
    space = spec.create_config_generation()
    values = space.flatten(spec.normalized_config(config))
    for fragment, value in zip(space.flat_spec, values, strict=True):
        if not _tries(fragment, value):
            raise ValueError(f"{value!r} is outside of {fragment}")


def _tries(fragment: Any, value: Any) -> bool:
    # imported here, where a version without these names is a miss, and not with the back end
    from helion.autotuner.config_fragment import (
        BaseIntegerFragment,
        EnumFragment,
        ListOf,
        PowerOfTwoFragment,
    )

    match fragment:
        case ListOf():
            return all(_tries(fragment.inner, part) for part in value)
        case EnumFragment():
            return value in fragment.choices
        case BaseIntegerFragment():
            power = not isinstance(fragment, PowerOfTwoFragment) or value.bit_count() == 1
            return type(value) is int and power and fragment.low <= value <= fragment.high
    return True


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)
    return not isinstance(value, int | float) or abs(value) < _LARGEST


def _version() -> str:
    return importlib.metadata.version("helion")
