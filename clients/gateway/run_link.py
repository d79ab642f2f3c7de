"""The line that a script prints when it ends: what the service saved it, and the page of its run.

Every process of a job tells the gateway of itself; only the first prints, and none that multiprocessing started.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sys

from ...compiler.api import runs
from ...compiler.api.html.page import plural
from ..settings import ClientSettings

_log = logging.getLogger(__name__)


def tell(settings: ClientSettings, record: runs.RunRecord) -> None:
    """Send the record to the gateway, and print the line to stderr. A failure is logged at level info, and nothing is
    printed. Of a run that could not reach the gateway, nothing is sent."""
    if "gateway_unreachable" in record.fallbacks:
        return
    from . import compile_client  # the back end imports this module, and a start does not wait for the client

    try:
        with compile_client.GatewayClient(settings) as gateway:
            reply = gateway.record_run(record)
    except Exception as error:  # the process ends as it would have
        _log.info("the run could not be recorded at %s: %s", settings.url, error)
        return
    if not record.rank and multiprocessing.parent_process() is None and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # the program closed it
            print(line(record, reply, settings.url), file=sys.stderr)


def line(record: runs.RunRecord, reply: runs.RunReply, url: str) -> str:
    parts = [plural(len(record.graphs), "graph"), plural(runs.hits(record), "hit")]
    if local := runs.local_compiles(record):
        parts.append(f"{local} compiled locally")
    if record.programs:
        parts.append(f"{record.programs} started without tracing")
    if reply.saved_seconds >= 1:
        parts.append(f"saved {duration(reply.saved_seconds)}")
    return f"torchrelay: {', '.join(parts)}, {url}{reply.path}"


def duration(seconds: float) -> str:
    """Like `45 s`, `3 min 10 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
