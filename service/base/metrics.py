"""What Prometheus reads: this process' own measurements, and the installation's counters from Redis.

Several gateway processes on one port are measured together: prometheus_client does that where the environment has
PROMETHEUS_MULTIPROC_DIR when it is imported (service/local/gateway.py sets it).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from .counters import GAUGES, Counters

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_COMPILE_BUCKETS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class GatewayMetrics:
    """One registry for each app, so that several gateways can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "torchrelay_http_requests",
            "HTTP requests by route and status",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.http_seconds = Histogram(
            "torchrelay_http_seconds",
            "Seconds from a request's head to its answer's last byte",
            ["route"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.compile_seconds = Histogram(
            "torchrelay_compile_seconds",
            "Seconds a compile took from its lease to its publication",
            buckets=_COMPILE_BUCKETS,
            registry=self.registry,
        )
        self.compiles_here = Gauge(
            "torchrelay_compiles_in_progress",
            "Compiles whose lease this dispatcher holds",
            registry=self.registry,
        )
        self.compile_errors = Counter(
            "torchrelay_compile_errors", "Failed compiles by code", ["code"], registry=self.registry
        )
        self.takeovers = Counter(
            "torchrelay_takeovers", "Compiles taken over from a dead holder", registry=self.registry
        )
        self.background_failures = Counter(
            "torchrelay_background_failures",
            "Errors of background tasks, which go on after them",
            ["task"],
            registry=self.registry,
        )
        self.damaged_blobs = Counter(
            "torchrelay_damaged_blobs",
            "Artifacts found lost or damaged when they were asked for",
            registry=self.registry,
        )
        self.searches = Counter(
            "torchrelay_searches",
            "Problems that searchers were to search, by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self.searchers = Gauge("torchrelay_searchers", "Searchers of this dispatcher", registry=self.registry)
        self.searches_queued = Gauge(
            "torchrelay_searches_queued",
            "Problems that wait for a searcher, by who wants them",
            ["wanted_by"],
            registry=self.registry,
        )
        self.trains = Gauge(
            "torchrelay_trains",
            "Training jobs that have not ended, of all namespaces, by state; every dispatcher reports the same",
            ["state"],
            registry=self.registry,
        )
        self.trains_here = Gauge(
            "torchrelay_trains_driven", "Training jobs that this dispatcher runs", registry=self.registry
        )
        self.streams = Gauge(
            "torchrelay_event_streams",
            "Open event streams",
            multiprocess_mode="livesum",
            registry=self.registry,
        )

    def render(self, shared: Mapping[str, Counters] | None) -> bytes:
        """The text format. `shared`: counters by namespace; None while Redis cannot be asked."""
        own = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            own = CollectorRegistry()
            MultiProcessCollector(own)  # type: ignore[no-untyped-call]
        return generate_latest(own) + (_shared_text(shared) if shared is not None else b"")


def _shared_text(shared: Mapping[str, Counters]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_SharedCounters(shared))
    return generate_latest(registry)


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
