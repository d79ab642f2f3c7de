"""Traces of a CUDA training as Kineto writes them (kineto/libkineto/src/output_json.cpp), built event by event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOST, GPU = 4242, 0
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
SGEMM = "ampere_sgemm_128x64_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Trace:
    """Times are microseconds from `begin`; a step of `step` microseconds begins with each call of `step`."""

    def __init__(self, begin: float = 4_469_727_149_000.0) -> None:
        self.begin = begin
        self.events: list[dict[str, Any]] = []
        self._external = 0

    def add(self, cat: str, name: str, at: float, took: float, **args: Any) -> None:
        gpu = cat in ("kernel", "gpu_memcpy", "gpu_memset")
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": GPU if gpu else HOST,
                "tid": args.get("stream", 7) if gpu else HOST,
                "ts": self.begin + at,
                "dur": took,
                "args": args,
            }
        )

    def step(self, number: int, at: float, took: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", at, took)

    def kernel(
        self,
        name: str,
        at: float,
        took: float,
        *,
        op: str = "",
        grid: tuple[int, int, int] = (132, 1, 1),
        block: tuple[int, int, int] = (256, 1, 1),
        stream: int = 7,
        occupancy: int = 12,
    ) -> None:
        self._external += 1
        if op:
            self.add("cpu_op", op, at - 5, 4, **{"External id": self._external, "Ev Idx": self._external})
            self.add("cuda_runtime", "cudaLaunchKernel", at - 4, 2, correlation=self._external)
        self.add(
            "kernel",
            name,
            at,
            took,
            **{
                "External id": self._external,
                "queued": 0,
                "device": 0,
                "context": 1,
                "stream": stream,
                "correlation": self._external,
                "registers per thread": 168,
                "shared memory": 213_000,
                "blocks per SM": 1.0,
                "warps per SM": 8.0,
                "grid": list(grid),
                "block": list(block),
                "est. achieved occupancy %": occupancy,
            },
        )

    def memory(self, at: float, size: int, address: int, allocated: int) -> None:
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": "[memory]",
                "pid": HOST,
                "tid": HOST,
                "ts": self.begin + at,
                "args": {
                    "Total Reserved": 1 << 30,
                    "Total Allocated": allocated,
                    "Bytes": size,
                    "Device Id": 0,
                    "Device Type": 1,
                    "Addr": address,
                    "Ev Idx": 1,
                },
            }
        )

    def text(self) -> str:
        properties = [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000}]
        return json.dumps(
            {"schemaVersion": 1, "deviceProperties": properties, "traceEvents": self.events, "traceName": "t"}
        )

    def write(self, path: Path) -> Path:
        path.write_text(self.text())
        return path
