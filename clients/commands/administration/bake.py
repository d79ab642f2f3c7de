"""`torchrelay bake FILE`: the artifacts of the last run in one file, from which it runs without a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....compiler.api.html.page import bytes_of, plural
from ....compiler.api.runs import HITS, GraphRecord
from ....compiler.errors import ClientError, SettingsError
from ...artifacts.disk_cache import BakedFile, DiskCache
from ...artifacts.verification import Verifier
from ...atomic_file import file_errors
from ...gateway.compile_client import GatewayClient
from ...reports.run_report import last_run, process_report
from ...settings import ClientSettings, load_settings
from .. import output
from ..output import Json

_SERVED = (*HITS, "miss", "coalesced")


def bake(
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    json: Json = False,
) -> None:
    """Write what the service made for the last run into one file of signed artifacts.

    With TORCHRELAY_BAKED=FILE and the service's public keys a process takes them from there, without a service and
    without a compiler; with TORCHRELAY_MODE=require nothing is compiled here. The file is for machines with the same
    PyTorch, Python and processor or GPU.
    """
    settings = load_settings()
    run = None if settings.state_dir is None else last_run(settings.state_dir)
    if run is None:
        raise ClientError("no run has left a record on this machine", hint="Run the script first")
    graphs = [graph for process in run.processes for graph in process.graphs]
    if lacking := [graph for graph in graphs if graph.outcome not in _SERVED or not graph.key]:
        raise ClientError(
            f"the service did not make {plural(len(lacking), 'graph')} of {run.program}",
            hint="`torchrelay explain` says why",
        )
    if not graphs:
        raise ClientError(f"the last run, {run.program}, compiled nothing", hint="Run the script first")
    with GatewayClient(settings) as gateway:
        artifacts = _verified(settings, graphs, gateway)
    with file_errors(file, "written", hint="Name another file"):
        BakedFile(file.absolute()).write(artifacts)
    total = sum(map(len, artifacts.values()))
    if json:
        output.print_json(
            {"file": str(file), "program": run.program, "keys": sorted(artifacts), "bytes": total}
        )
        return
    print(f"baked {plural(len(artifacts), 'artifact')} of {run.program}, {bytes_of(total)}, into {file}")
    print(
        f"TORCHRELAY_BAKED={file} TORCHRELAY_MODE=require "
        f"TORCHRELAY_PUBLIC_KEYS={','.join(settings.public_keys)} python {run.program}"
    )


def _verified(
    settings: ClientSettings, graphs: list[GraphRecord], gateway: GatewayClient
) -> dict[str, bytes]:
    """The artifacts by key, of this machine, else of the gateway. Raises RelayError."""
    if not settings.public_keys:
        raise SettingsError("no public key is trusted", hint="`torchrelay login` stores the service's")
    disk, verifier = (
        DiskCache(settings.cache_dir, settings.disk_cache_bytes),
        Verifier(settings, process_report(), gateway),
    )
    artifacts: dict[str, bytes] = {}
    for key in {graph.key for graph in graphs}:
        data = disk.get(key) or gateway.artifact(key, deadline=settings.deadline)
        verifier.signed(data, key)
        artifacts[key] = data
    return artifacts
