"""torchrelay: compile PyTorch programs once, on a shared service, and hand the result to everyone.

    model = torch.compile(model, backend="torchrelay")

The names below load what they need when first used: importing torchrelay imports neither torch nor a server
library, starts no thread and changes nothing in the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .compiler import VERSION as __version__  # noqa: N811

if TYPE_CHECKING:
    from .clients.artifacts.lowered import LoweredGraph, lower, lower_graph
    from .clients.backend import compile, disable, enable
    from .clients.reports.run_report import FallbackWarning, StaleProgramWarning, report
    from .compiler import errors
    from .compiler.api.runs import Report
    from .compiler.errors import RelayError

__all__ = [
    "FallbackWarning",
    "LoweredGraph",
    "RelayError",
    "Report",
    "StaleProgramWarning",
    "__version__",
    "compile",
    "disable",
    "enable",
    "errors",
    "lower",
    "lower_graph",
    "report",
]


def __getattr__(name: str) -> Any:
    # The imports stand inside so that each name costs only what it needs.
    if name in ("compile", "enable", "disable"):
        from .clients.artifacts.load import collector

        with collector.paused():
            from .clients import backend
        return getattr(backend, name)
    if name in ("lower", "lower_graph", "LoweredGraph"):
        from .clients.artifacts import lowered

        return getattr(lowered, name)
    if name in ("report", "Report", "FallbackWarning", "StaleProgramWarning"):
        from .clients.reports import run_report

        return getattr(run_report, name)
    if name in ("errors", "RelayError"):
        from .compiler import errors

        return errors if name == "errors" else errors.RelayError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
