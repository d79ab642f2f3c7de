"""The c10d store that the processes of one job share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from .. import compatibility


def job_store(endpoint: tuple[str, int] | None, timeout: timedelta) -> Any:
    """The c10d store that the processes of this job share; None where there is none (yet).

    A connection of our own to the store at `endpoint`, else to the one behind the default process group
    (torch.distributed.distributed_c10d._get_default_store): waiting on it holds up nobody's collectives. Of a group
    whose store is not TCP, that store itself. Raises RuntimeError where it does not answer, Unsupported
    with a torch that has no such store (compatibility.py).
    """
    import torch.distributed as dist

    if not dist.is_available():
        return None
    compatibility.check("distributed")
    from torch._C import _distributed_c10d as c10d

    if endpoint is None:
        if not dist.is_initialized():
            return None
        from torch.distributed.distributed_c10d import _get_default_store

        store: Any = _get_default_store()
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, c10d.TCPStore):
            return store
        endpoint = store.host, store.port
    return c10d.TCPStore(*endpoint, None, False, timeout, wait_for_workers=False)
