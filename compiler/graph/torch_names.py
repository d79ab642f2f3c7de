"""The names on the wire of torch's dtypes, layouts, memory formats and devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import Unsupported
from ..request import allowed_names


def dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in allowed_names.DTYPE_BYTES:
        raise Unsupported(f"dtype {name} is not known to the service")
    return name


MEMORY_FORMATS = {getattr(torch, name): name for name in sorted(allowed_names.MEMORY_FORMATS)}


LAYOUTS = {getattr(torch, name): name for name in sorted(allowed_names.LAYOUTS)}


DTYPES = {getattr(torch, name): name for name in allowed_names.DTYPE_BYTES if hasattr(torch, name)}


def torch_device(kind: str, device_index: Mapping[str, int]) -> torch.device:
    if kind not in allowed_names.DEVICES:
        raise Unsupported(f"device {kind[:40]!r} is not known")
    return torch.device(kind, device_index[kind]) if kind in device_index else torch.device(kind)


def torch_value(name: str, allowed: Any) -> Any:
    if name not in allowed or not hasattr(torch, name):
        raise Unsupported(f"torch {torch.__version__} has no {name[:40]!r}")
    return getattr(torch, name)
