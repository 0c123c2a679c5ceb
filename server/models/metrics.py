"""/metrics of a server with several models: each model's metrics under its name, and what became of each model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxserve.server.http.listing import MODEL_STATES, Listed
from jaxserve.server.observe.metrics import Metrics

Row = tuple[Listed, int, int, int, float]  # entry, requests that wait for a start, starts, failures, seconds of a start


def render(server: Metrics, models: Mapping[str, Metrics], rows: Iterable[Row], budget: Mapping[str, int]) -> bytes:
    """The exposition text. server: metrics of no model, of which connections that were refused are shown."""
    families: dict[str, Metric] = {}
    refused = [metric for metric in server.registry.collect() if metric.name.endswith(":admission_rejections")]
    of_models = (metric for metrics in models.values() for metric in metrics.registry.collect())
    for metric in (*of_models, *refused, *_of_rows(server.prefix, list(rows), budget)):
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


def _of_rows(prefix: str, rows: list[Row], budget: Mapping[str, int]) -> Iterator[Metric]:
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
    for listed, count, started, failed, took in rows:
        labels = [listed.name]
        for state in MODEL_STATES:
            states.add_metric([*labels, state], int(listed.state == state))
        resident = listed.state in ("starting", "ready", "unloading")
        memory.add_metric(labels, (listed.size or 0) if resident else 0)
        waiting.add_metric(labels, count)
        starts.add_metric(labels, started)
        failures.add_metric(labels, failed)
        seconds.add_metric(labels, took)
    for device, most in budget.items():
        limit.add_metric([device], most)
    yield from (states, memory, waiting, starts, failures, seconds, limit)
