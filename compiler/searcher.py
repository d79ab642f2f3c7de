"""Stage 8, apart from any compile: problems in, one after the other; what a search of each found out.

A searcher is a long-lived job at one device. It asks the service for tasks, rebuilds each one's operator from the
problem alone, builds the candidates of the next while it measures the present one, and tells what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import tuning, wire
from .kernel_store import Exchange
from .search_order import SearchOrder


def serve(
    order: SearchOrder,
    ask: tuning.Ask,
    *,
    workdir: Path,
    progress: Callable[[wire.Stage, str], None],
    kernels: Exchange | None = None,
    beside: Path | None = None,
) -> None:
    """Search what `ask` hands out until it says that it is over.

    workdir: a folder of this job alone. kernels: where what was built is found and laid. beside: a folder that the
    searches on this machine share, so that only one measures at a time; None: that of `kernels`. Raises Unavailable
    if the service does not answer for long. The process ends where a candidate hangs or breaks the device.
    """
    raise NotImplementedError
