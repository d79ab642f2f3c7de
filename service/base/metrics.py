"""What Prometheus reads: this process' own measurements, and the installation's counters and load from Redis.

Several gateway processes on one port are measured together: prometheus_client does that where the environment has
PROMETHEUS_MULTIPROC_DIR when it is imported (service/local/gateway.py sets it).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from .counters import GAUGES, Counters

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_COMPILE_BUCKETS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_LAG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class TargetLoad(Struct, frozen=True):
    """What waits for workers of one kind, and what these do. oldest_wait: seconds. slots: how many, by state."""

    device: str
    toolchain: str
    waiting: int
    oldest_wait: float
    slots: Mapping[str, int]


class Load(Struct, frozen=True):
    """What the whole installation has to do. dispatchers: how many, by whether they are ready."""

    dispatchers: Mapping[str, int]
    targets: Sequence[TargetLoad]


class GatewayMetrics:
    """One registry for each app, so that several gateways can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.http_requests = counter(
            "torchrelay_http_requests", "HTTP requests by route and status", ["method", "route", "status"]
        )
        self.http_seconds = histogram(
            "torchrelay_http_seconds",
            "Seconds from a request's head to its answer's last byte",
            ["route"],
            buckets=_LATENCY_BUCKETS,
        )
        self.request_parses = counter(
            "torchrelay_request_parses",
            "Bodies of graphs that were decoded and checked; those known by their bytes are not again",
        )
        self.compile_seconds = histogram(
            "torchrelay_compile_seconds",
            "Seconds a compile took from its lease to its publication",
            buckets=_COMPILE_BUCKETS,
        )
        self.compiles_here = gauge(
            "torchrelay_compiles_in_progress", "Compiles whose lease this dispatcher holds"
        )
        self.compile_errors = counter("torchrelay_compile_errors", "Failed compiles by code", ["code"])
        self.takeovers = counter("torchrelay_takeovers", "Compiles taken over from a dead holder")
        self.background_failures = counter(
            "torchrelay_background_failures", "Errors of background tasks, which go on after them", ["task"]
        )
        self.event_loop_lag = histogram(
            "torchrelay_event_loop_lag_seconds",
            "How late the event loop comes to what is due, measured twice a second",
            buckets=_LAG_BUCKETS,
        )
        self.redis_errors = counter(
            "torchrelay_redis_errors",
            "Calls that Redis failed after all retries, by the kind of error",
            ["error"],
        )
        self.store_errors = counter(
            "torchrelay_blob_store_errors",
            "Calls that the blob store failed after all retries",
            ["operation"],
        )
        for operation in ("read", "write", "delete", "sweep"):  # so that a rate sees the first one
            self.store_errors.labels(operation)
        self.damaged_blobs = counter(
            "torchrelay_damaged_blobs", "Artifacts found lost or damaged when they were asked for"
        )
        self.searches = counter(
            "torchrelay_searches", "Problems that searchers were to search, by outcome", ["outcome"]
        )
        self.searchers = gauge("torchrelay_searchers", "Searchers of this dispatcher")
        self.searches_queued = gauge(
            "torchrelay_searches_queued",
            "Problems that wait for a searcher, by who wants them",
            ["wanted_by"],
        )
        self.trains = gauge(
            "torchrelay_trains",
            "Training jobs that have not ended, of all namespaces, by state; every dispatcher reports the same",
            ["state"],
        )
        self.trains_here = gauge("torchrelay_trains_driven", "Training jobs that this dispatcher runs")
        self.streams = gauge("torchrelay_event_streams", "Open event streams", multiprocess_mode="livesum")

    def render(
        self, shared: Mapping[str, Counters] | None, load: Load | None, *, redis_up: bool, signer_up: bool
    ) -> bytes:
        """The text format. `shared`: counters by namespace, if they are shown. `load`: None if it is not known."""
        own = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            own = CollectorRegistry()
            MultiProcessCollector(own)  # type: ignore[no-untyped-call]
        now = CollectorRegistry()
        # as this process finds them, of several on one port
        Gauge("torchrelay_redis_up", "Whether Redis answers", registry=now).set(redis_up)
        Gauge("torchrelay_signer_up", "Whether the signing keys can be used", registry=now).set(signer_up)
        if shared is not None:
            now.register(_SharedCounters(shared))
        if load is not None:
            now.register(_SharedLoad(load))
        return generate_latest(own) + generate_latest(now)


class _SharedLoad(Collector):
    """Every gateway and dispatcher of an installation reports the same values: do not sum them."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        dispatchers = GaugeMetricFamily(
            "torchrelay_shared_dispatchers", "Dispatchers that live", labels=["state"]
        )
        for state, count in self._load.dispatchers.items():
            dispatchers.add_metric([state], count)
        yield dispatchers
        kind = ["device", "toolchain"]
        waiting = GaugeMetricFamily(
            "torchrelay_shared_waiting",
            "Compiles that wait for a worker, by what it must be for",
            labels=kind,
        )
        oldest = GaugeMetricFamily(
            "torchrelay_shared_oldest_wait_seconds", "How long the first of them has waited", labels=kind
        )
        slots = GaugeMetricFamily(
            "torchrelay_shared_slots", "Workers' slots by state", labels=[*kind, "state"]
        )
        for each in self._load.targets:
            waiting.add_metric([each.device, each.toolchain], each.waiting)
            oldest.add_metric([each.device, each.toolchain], each.oldest_wait)
            for state, count in each.slots.items():
                slots.add_metric([each.device, each.toolchain, state], count)
        yield from (waiting, oldest, slots)


class _SharedCounters(Collector):
    """Every gateway of an installation reports the same values: do not sum them over gateways."""

    def __init__(self, shared: Mapping[str, Counters]) -> None:
        self._shared = shared

    def collect(self) -> Iterator[Metric]:
        for name in Counters.__struct_fields__:
            if name == "fallbacks":
                continue
            about = f"{name.replace('_', ' ')}, over all gateways"
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            family = kind(f"torchrelay_shared_{name}", about, labels=["namespace"])
            for namespace, counters in self._shared.items():
                family.add_metric([namespace], getattr(counters, name))
            yield family
        fallbacks = CounterMetricFamily(
            "torchrelay_shared_fallbacks", "Clients' local compiles by reason", labels=["namespace", "reason"]
        )
        for namespace, counters in self._shared.items():
            for code, count in counters.fallbacks.items():
                fallbacks.add_metric([namespace, code], count)
        yield fallbacks
