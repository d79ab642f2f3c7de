"""The head of an embedded Ray cluster, as a program: it starts Ray's servers, says where they are, and holds them.

A process of its own, because Ray's start keeps Python's lock for up to half a minute: it can be killed at any time, and
all that it has started with it.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any


def command(**options: Any) -> list[str]:
    """The command line; `options`: of ray.init. It prints the cluster's address (host:port)."""
    return [sys.executable, "-m", __name__, json.dumps(options)]


def main(options: str) -> None:
    import ray

    started = ray.init(
        include_dashboard=False, logging_level="ERROR", log_to_driver=False, **json.loads(options)
    )
    print(started.address_info["gcs_address"], flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
