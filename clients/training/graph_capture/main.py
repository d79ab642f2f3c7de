"""The capture run: `python -m torchrelay.clients.training.graph_capture.main OUTPUT [--function] TARGET [ARGUMENTS]`.

Runs a job's script as rank 0 with fake process groups, up to its first optimizer step, and writes the graphs that all
ranks will request to OUTPUT, as CapturedGraphs. The environment is that of rank 0. Nothing is trained.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from ....compiler.api.training.node_messages import CapturedGraphs
from ....compiler.errors import RelayError
from ....compiler.torch_internals.distributed import fake_process_group
from ...atomic_file import write_atomically
from ..rank_environment import begin_capture, load_rank

_USAGE = (
    "usage: python -m torchrelay.clients.training.graph_capture.main OUTPUT [--] SCRIPT [ARGUMENTS] | "
    "OUTPUT --function MODULE:FUNCTION [--] [ARGUMENTS]"
)
_LOG_CHARACTERS = 8192


def main(arguments: Sequence[str]) -> None:
    """Write OUTPUT, even if the script fails. Raises SystemExit for wrong use, OSError if OUTPUT cannot be written."""
    if len(arguments) < 2:
        raise SystemExit(_USAGE)
    begin_capture()
    output = Path(arguments[0]).absolute()
    write_atomically(output, msgspec.msgpack.encode(_captured(arguments[1:])), mode=0o600)


def _captured(target: Sequence[str]) -> CapturedGraphs:
    from .. import precision
    from ..rank import run_script
    from ..rank.main import runner
    from .script_graphs import GraphRecorder, run_recorded

    rank = load_rank()
    spec = rank.spec
    recorder = GraphRecorder(
        "", unnamed=run_script.TUNED_MODE if spec is not None and spec.tune else "default"
    )
    ended, log = "", ""
    run = runner(list(target))
    if spec is not None:
        precision.set_precision(spec.precision)
    try:
        with fake_process_groups(rank.rank, rank.world_size):
            ended = run_recorded(run, recorder, unnamed=spec is None or spec.compile == "torchrelay")
    except SystemExit as error:
        ended = f"failed: it exited with {error.code}"
    except BaseException as error:
        ended = f"failed: {_line(error)}"
        log = "".join(traceback.format_exception(type(error), error, run_script.user_traceback(error)))
        print(log, file=sys.stderr)
    return recorder.captured(ended, log[-_LOG_CHARACTERS:])


def _line(error: BaseException) -> str:
    text = str(error) if isinstance(error, RelayError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:1000] if text.strip() else type(error).__name__


@contextmanager
def fake_process_groups(rank: int, world_size: int) -> Iterator[None]:
    """Inside, `init_process_group` of any back end makes this process `rank` of `world_size`, without the others.

    Shapes, meshes, buckets and shards are those of the real job, and so are the graphs. Data from other ranks is
    invented, so numbers mean nothing here."""
    if not dist.is_available():
        yield
        return
    start, group, barrier = dist.init_process_group, dist.new_group, dist.monitored_barrier
    backends: dict[Any, str] = {}

    def init_process_group(backend: Any = None, *_: Any, **options: Any) -> None:
        size, mine = options.get("world_size", -1), options.get("rank", -1)
        with ExitStack() as real:
            real.enter_context(fake_process_group.replaced_everywhere(init_process_group, start))
            fake_process_group.init_fake_process_group(
                rank if mine < 0 else mine, world_size if size < 0 else size
            )
        backends[None] = backends[dist.group.WORLD] = _name(backend)

    def new_group(ranks: Any = None, *_: Any, **options: Any) -> Any:
        kept = {
            name: options[name] for name in ("group_desc", "use_local_synchronization") if name in options
        }
        made = group(ranks, **kept)
        backends[made] = _name(options["backend"]) if options.get("backend") else backends.get(None, "")
        return made

    def get_backend(of: Any = None) -> str:
        return backends.get(of) or asked(of)

    with ExitStack() as stack:
        stack.enter_context(fake_process_group.replaced_everywhere(start, init_process_group))
        stack.enter_context(fake_process_group.replaced_everywhere(group, new_group))
        stack.enter_context(fake_process_group.replaced_everywhere(barrier, lambda *_, **__: None))
        asked = stack.enter_context(fake_process_group.replaced_in_torch_distributed(get_backend))
        stack.enter_context(fake_process_group.ddp_without_reduction())
        stack.enter_context(fake_process_group.refusing_rpc())
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _name(backend: Any) -> str:
    """The name that `get_backend` returns; '' for one that this torch does not have."""
    name = dist.Backend.UNDEFINED if backend is None else dist.Backend(backend)
    known = name == dist.Backend.UNDEFINED or ":" in name or dist.is_backend_available(name)
    return name if known else ""


if __name__ == "__main__":
    # The script replaces __main__, so the module is imported under its own name. os._exit: threads of the script may
    # still run.
    import os

    from torchrelay.clients.training.graph_capture import main as _capture

    _capture.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
