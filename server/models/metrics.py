"""/metrics of a server with several models: each model's metrics under its name, and what became of each model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxserve.server.http.listing import MODEL_STATES, Listed
from jaxserve.server.observe.metrics import Metrics


class Row(NamedTuple):
    """A model's entry, the metrics of its engines, the requests that wait for its start, how often it has started and
    failed, and the seconds that its latest start took."""

    listed: Listed
    metrics: Metrics
    waiting: int
    starts: int
    failures: int
    start_seconds: float


class Device(NamedTuple):
    """Bytes of a device that all models may take, and that they take now."""

    most: int
    used: int


def render(server: Metrics, rows: Sequence[Row], devices: Mapping[str, Device]) -> bytes:
    """The exposition text, of one moment. server: metrics of no model, of which connections that were refused are
    shown."""
    families: dict[str, Metric] = {}
    refused = [metric for metric in server.registry.collect() if metric.name.endswith(":admission_rejections")]
    of_models = (metric for row in rows for metric in row.metrics.registry.collect())
    for metric in (*of_models, *refused, *_of_rows(server.prefix, rows, devices)):
        if (known := families.get(metric.name)) is None:
            families[metric.name] = metric
        else:
            known.samples.extend(metric.samples)
    return generate_latest(_Collected(list(families.values())))  # type: ignore[arg-type]


class _Collected:
    """What `generate_latest` asks of a registry."""

    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _of_rows(prefix: str, rows: Sequence[Row], devices: Mapping[str, Device]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        f"{prefix}:model_state", "1 for the state that a model is in, 0 for others", labels=["model_name", "state"]
    )
    memory = GaugeMetricFamily(
        f"{prefix}:model_memory_bytes",
        "Bytes of each of its devices that a model takes; 0 while it is not in memory",
        labels=["model_name"],
    )
    waiting = GaugeMetricFamily(
        f"{prefix}:model_requests_waiting", "Requests that wait for their model to start", labels=["model_name"]
    )
    starts = CounterMetricFamily(f"{prefix}:model_starts", "Starts of a model", labels=["model_name"])
    failures = CounterMetricFamily(
        f"{prefix}:model_failures", "Starts that failed, and engines that died for good", labels=["model_name"]
    )
    seconds = GaugeMetricFamily(
        f"{prefix}:model_start_seconds", "Seconds that the latest start of a model took", labels=["model_name"]
    )
    limit = GaugeMetricFamily(
        f"{prefix}:models_memory_limit_bytes", "Bytes of a device that all models may take", labels=["device"]
    )
    used = GaugeMetricFamily(
        f"{prefix}:models_memory_bytes",
        "Bytes of a device that models take, from the start of their processes until these have ended",
        labels=["device"],
    )
    for row in rows:
        labels = [row.listed.name]
        for state in MODEL_STATES:
            states.add_metric([*labels, state], int(row.listed.state == state))
        resident = row.listed.state in ("starting", "ready", "unloading")
        memory.add_metric(labels, (row.listed.size or 0) if resident else 0)
        waiting.add_metric(labels, row.waiting)
        starts.add_metric(labels, row.starts)
        failures.add_metric(labels, row.failures)
        seconds.add_metric(labels, row.start_seconds)
    for name, device in devices.items():
        limit.add_metric([name], device.most)
        used.add_metric([name], device.used)
    yield from (states, memory, waiting, starts, failures, seconds, limit, used)
