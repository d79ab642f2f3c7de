"""Ranks that start together on one large artifact: what memory a gateway needs, and how often it reads the store."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import gateway
from support.scale_load import Asking, ask
from support.scale_rows import Row, at_most, exponent
from support.scale_service import bytes_read, cpu_seconds, forget_peak, peak_bytes, running_service
from torchrelay.compiler.request import codec

ARTIFACT_BYTES = 20_000_000
RANKS = (250, 500, 1000)
MEGABYTE = 1e6


def rows(ranks: Sequence[int] = RANKS, *, artifact_bytes: int = ARTIFACT_BYTES) -> list[Row]:
    peaks, reads, walls, cpus = [], [], [], []
    for count in ranks:
        # each number starts with processes that have served nothing
        with tempfile.TemporaryDirectory(prefix="tr-") as name, running_service(Path(name)) as service:
            body = codec.pack_request(gateway.graph(artifact_bytes))
            service.compile(body)
            for pid in service.gateways:
                forget_peak(pid)
            before = [bytes_read(pid) for pid in service.gateways]
            cpu = cpu_seconds(service.gateways)
            answers = ask(Asking(service.port, [service.post(body)], count))
            assert answers.statuses == {200: count}, answers.statuses
            assert answers.body_bytes > count * artifact_bytes
            peaks.append(max(map(peak_bytes, service.gateways)) / MEGABYTE)
            each = zip(service.gateways, before, strict=True)
            reads.append(max((bytes_read(pid) - already) / artifact_bytes for pid, already in each))
            walls.append(answers.wall)
            cpus.append(cpu_seconds(service.gateways) - cpu)
    what = f"{ranks[-1]:,} ranks, one artifact of {artifact_bytes / MEGABYTE:g} MB"
    law = f"ranks^{{:.2f}}, {ranks[0]:,} to {ranks[-1]:,}" if len(ranks) > 1 else ""

    def grows(values: Sequence[float]) -> str:
        return law.format(exponent(ranks, values)) if law else ""

    return [
        at_most(f"{what}: a gateway's peak memory", peaks[-1], "MB", 300, grows(peaks)),
        at_most(f"{what}: reads of the store by a gateway", reads[-1], "times its bytes", 1.1, grows(reads)),
        Row(f"{what}: until the last has it", walls[-1], "s", law=grows(walls)),
        Row(f"{what}: gateways' processor time", cpus[-1], "s", law=grows(cpus)),
    ]
