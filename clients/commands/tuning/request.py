"""Makes the request for a tuning job, after its captured graphs have been sent."""

from __future__ import annotations

from pathlib import Path

from ....compiler.api.tuning.jobs import GraphTuneItem, KernelTuneItem, TuneItem, TuneRequest
from ....compiler.errors import BadTuneJob, SettingsError
from ...gateway.tuning_jobs import TuningJobsClient
from ...jobfiles import captured_graphs
from ...jobfiles.tune_file import TuneFile


def tune_request(spec: TuneFile, path: Path, tunes: TuningJobsClient, *, threads: int) -> TuneRequest:
    """Sends the file's captured graphs and returns the job's request. path: of the file. threads: of kernels on a CPU,
    if the file does not say. Raises BadTuneJob, with the line."""
    items: list[TuneItem] = [*spec.operators, *spec.graphs]
    for file in spec.files:
        try:
            bodies = captured_graphs.read_graphs(path.parent / file.path)
        except SettingsError as error:
            raise BadTuneJob(f"{spec.file}, line {file.line}: {error.message}", hint=error.advice) from None
        named = Path(file.path).name[-200:]
        for n, key in enumerate(map(tunes.store_graph, bodies), 1):
            which = f"{named}, {n} of {len(bodies)}" if len(bodies) > 1 else named
            items.append(GraphTuneItem(file.line, key, file.mode, which))
    if spec.kernels:
        from ...capture.tuning_kernels import resolve_kernel

        for item in spec.kernels:
            kernel = resolve_kernel(item, path.parent.absolute())
            items.append(KernelTuneItem(item.line, item.text, kernel))
    return TuneRequest(
        name=spec.name or path.stem[:200],
        items=items,
        device=spec.device,
        torch=spec.torch,
        threads=spec.threads or threads,
        budget=spec.budget,
        file=spec.file[-300:],
        lines=spec.lines,
    )
