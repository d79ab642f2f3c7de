"""A process's report as named numbers, for the logger of a trainer."""

from __future__ import annotations

from .run_report import report


class ReportValues:
    """`changed` gives the values after each graph, and nothing between two graphs."""

    def __init__(self) -> None:
        self._counted = 0

    def changed(self) -> dict[str, float]:
        """Counts of this process so far by outcome (hits include those of this machine's disk, of other ranks and of
        compiles that others started), and seconds by stage; {} if no graph was added since the last call."""
        now = report()
        hits = now.hits + now.disk_hits + now.shared + now.coalesced
        fallbacks = sum(now.fallbacks.values())
        counted = hits + now.misses + fallbacks
        if counted == self._counted:
            return {}
        self._counted = counted
        return {
            "torchrelay/hits": float(hits),
            "torchrelay/misses": float(now.misses),
            "torchrelay/fallbacks": float(fallbacks),
            **{f"torchrelay/{stage}_seconds": round(seconds, 4) for stage, seconds in now.seconds.items()},
        }
