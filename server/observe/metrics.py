"""Prometheus metrics: gauges and counters from the engine's statistics, histograms from what the API server observes.

If a server has several API servers, prometheus_client keeps what each of them observes in files (its multiprocess
mode), and each API server adds up all files, also those of API servers that have ended. Only the process that starts
them (see `jaxserve.server.process.api_servers`) counts the engine's statistics, and writes them to a file that all API
servers read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client import Histogram as ObservedHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from jaxserve.limits import BACKGROUND
from jaxserve.scheduling.engine_stats import EngineStats, Histogram
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.observe.request_record import note_generation
from jaxserve.types import Request

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5)) + (1_000_000,)
_FEW = (1, 2, 5, 10, 20, 50, 100)

_LABELS = ("model_name", "engine")
TOTALS = "totals"  # name of the file for EngineTotals

# name, kind, description, field of EngineStats
_FROM_STATS = (
    ("num_requests_running", "gauge", "Completions in the running batch", "num_running"),
    ("num_requests_waiting", "gauge", "Completions in the queue that wait for a place in the batch", "num_waiting"),
    ("num_preemptions", "counter",
     "Completions taken out of the running batch to free KV pages, and computed again later", "preemptions"),
    ("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache", "prefix_queries"),
    ("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache", "prefix_hits"),
    ("images_encoded", "counter", "Pictures whose features were computed", "images_encoded"),
    ("images_reused", "counter", "Pictures in prompts whose features another prompt has had computed", "images_reused"),
    ("prompt_tokens", "counter", "Prompt tokens computed, or found in the prefix cache", "prompt_tokens"),
    ("generation_tokens", "counter", "Tokens generated", "generation_tokens"),
    ("failed_steps", "counter", "Steps that failed on the devices and were computed again", "failed_steps"),
    ("failed_requests", "counter",
     "Requests that ended with an error after failed steps", "failed_requests"),
    ("moe_routed_tokens", "counter",
     "Tokens given to experts, each once per expert, over all layers and passes", "moe_routed_tokens"),
    ("moe_mean_expert_tokens", "counter",
     "Tokens of an average expert, added up over layers and passes", "moe_mean_tokens"),
    ("moe_busiest_expert_tokens", "counter",
     "Tokens of the busiest expert of each layer, added up over layers and passes", "moe_busiest_tokens"),
    ("moe_active_experts", "counter", "Experts that had tokens, added up over layers and passes", "moe_active_experts"),
    ("spec_decode_num_drafts", "counter", "Rows whose proposed tokens speculative decoding checked", "spec_drafts"),
    ("spec_decode_num_draft_tokens", "counter", "Tokens that speculative decoding proposed", "spec_proposed"),
    ("spec_decode_num_accepted_tokens", "counter",
     "Tokens that speculative decoding proposed and the model kept", "spec_accepted"),
    ("lora_loads", "counter", "LoRA adapters uploaded to the devices", "adapter_loads"),
    ("lora_evictions", "counter", "LoRA adapters evicted from the devices for others", "adapter_evictions"),
    ("external_prefix_cache_hits", "counter",
     "Prompt tokens whose KV pages came back from host memory, files or prefill servers", "offload_hits"),
    ("kv_offload_host_bytes", "gauge", "Bytes of KV pages in host memory", "offload_host_bytes"),
    ("kv_offload_host_capacity_bytes", "gauge", "Bytes of host memory for KV pages", "offload_host_capacity"),
    ("kv_offload_host_evictions", "counter", "KV pages given up in host memory", "offload_host_evictions"),
    ("kv_offload_store_bytes", "counter",
     "Bytes of KV pages copied from the devices to host memory", "offload_stored_bytes"),
    ("kv_offload_load_bytes", "counter",
     "Bytes of KV pages copied from host memory to the devices", "offload_loaded_bytes"),
    ("kv_offload_dropped_pages", "counter",
     "KV pages that the prefix cache evicted without a copy, as too many copies were under way", "offload_dropped"),
    ("kv_offload_disk_bytes", "gauge", "Bytes of KV pages in files", "offload_disk_bytes"),
    ("kv_offload_disk_evictions", "counter", "Files of KV pages deleted to make room", "offload_disk_evictions"),
    ("kv_offload_disk_store_bytes", "counter", "Bytes of KV pages written to files", "offload_disk_written_bytes"),
    ("kv_offload_disk_load_bytes", "counter", "Bytes of KV pages read from files", "offload_disk_read_bytes"),
    ("kv_offload_disk_damaged_pages", "counter", "Files of KV pages found damaged", "offload_disk_damaged"),
    ("prefill_fetch_requests", "counter", "Prompts whose KV pages were asked of prefill servers", "fetch_requests"),
    ("prefill_fetch_failed", "counter",
     "Prompts whose KV pages were asked of prefill servers and did not all come", "fetch_failed"),
    ("prefill_fallbacks", "counter",
     "Prompts for prefill servers that were computed here, wholly or in part", "fetch_fallbacks"),
    ("prefill_fetch_pages", "counter", "KV pages received from prefill servers", "fetch_pages"),
    ("prefill_fetch_bytes", "counter", "Bytes of KV pages received from prefill servers", "fetch_bytes"),
    ("prefill_fetch_seconds", "counter",
     "Seconds of transfers of KV pages from prefill servers, computing prompts included", "fetch_seconds"),
    ("prefill_servers_up", "gauge", "Prefill servers that can be asked", "prefill_servers_up"),
    ("prefill_export_requests", "counter", "Prompts whose KV pages decode servers asked for", "export_requests"),
    ("prefill_export_pages", "counter", "KV pages sent to decode servers", "export_pages"),
    ("prefill_export_bytes", "counter", "Bytes of KV pages sent to decode servers", "export_bytes"),
    ("prefill_export_lost", "counter", "KV pages evicted before a decode server got a copy", "export_lost"),
    ("executables", "gauge", "Compiled programs that steps run", "executables"),
    ("compilations", "counter", "Programs compiled since the engine started", "compilations"),
    ("compilation_cache_hits", "counter",
     "Programs read from the compilation cache instead of being compiled", "compile_cache_hits"),
)  # fmt: skip


# The metrics of llama.cpp's server that have a counterpart here: name, kind, and the counterpart's sample.
_LLAMACPP = (
    ("prompt_tokens_total", "counter", "prompt_tokens_total"),
    ("prompt_seconds_total", "counter", "request_prefill_time_seconds_sum"),
    ("tokens_predicted_total", "counter", "generation_tokens_total"),
    ("tokens_predicted_seconds_total", "counter", "request_decode_time_seconds_sum"),
    ("n_decode_total", "counter", "iteration_tokens_total_count"),
    ("requests_processing", "gauge", "num_requests_running"),
    ("requests_deferred", "gauge", "num_requests_waiting"),
    ("kv_cache_usage_ratio", "gauge", "kv_cache_usage_perc"),
)


def _in_llamacpp_names(text: bytes, prefix: str) -> bytes:
    """Samples of an exposition under llama.cpp's names, for dashboards that ask for these."""
    lines = text.splitlines(keepends=True)
    found = []
    for name, kind, ours in _LLAMACPP:
        begin = f"{prefix}:{ours}{{".encode()
        theirs = f"llamacpp:{name}{{".encode()
        samples = [theirs + line.removeprefix(begin) for line in lines if line.startswith(begin)]
        if samples:
            found += [f"# HELP llamacpp:{name} {prefix}:{ours}\n# TYPE llamacpp:{name} {kind}\n".encode(), *samples]
    return b"".join(found)


class EngineTotals(msgspec.Struct):
    """Statistics of a server's engines together, those that have died included.

    Attributes:
      stats: the latest statistics, with counters continued from engine to engine.
      past: what the counters were when the present engine began.
      restarts: engines that were started where one had died.
      front_restarts: API servers that were started where one had died; None if the server has one API server.
    """

    stats: EngineStats = msgspec.field(default_factory=EngineStats)
    past: EngineStats = msgspec.field(default_factory=EngineStats)
    restarts: int = 0
    front_restarts: int | None = None

    def on_stats(self, stats: EngineStats) -> None:
        """Takes the engine's latest statistics."""
        self.stats = stats.after(self.past)

    def on_restart(self) -> None:
        """Another engine is being started. It counts from zero; the counters here continue from the earlier totals."""
        self.restarts += 1
        self.on_end()

    def on_end(self) -> None:
        """The engine has ended. The next one counts from zero."""
        self.past = self.stats
        self.on_stats(EngineStats())


_decode_totals = msgspec.msgpack.Decoder(EngineTotals).decode


class Metrics:
    """The metrics of one API server. `prefix` begins every name, as in `jaxserve:num_requests_running`.

    `shared`: a folder, if the server has several API servers. It has the file `totals` with an EngineTotals in msgpack,
    and is where prometheus_client keeps its files."""

    def __init__(self, model_name: str, prefix: str = "jaxserve", shared: Path | None = None):
        self.registry = CollectorRegistry()
        self.totals = EngineTotals()
        self._shared = shared
        self.prefix = prefix
        self._labels = (model_name, "0")
        self._info: Ready | None = None
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token", _SECONDS
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of a completion", _TOKEN_SECONDS
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per token of a request, after its first token",
            _TOKEN_SECONDS,
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its last token", _REQUEST_SECONDS
        )
        self.queue = self._histogram(
            "request_queue_time_seconds",
            "Seconds from a request's arrival to its place in the running batch",
            _REQUEST_SECONDS,
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds",
            "Seconds from a request's place in the running batch to its first token",
            _REQUEST_SECONDS,
        )
        self.inference = self._histogram(
            "request_inference_time_seconds",
            "Seconds from a request's place in the running batch to its last token",
            _REQUEST_SECONDS,
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Seconds from a request's first token to its last", _REQUEST_SECONDS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.output_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a request, all completions together", _TOKENS
        )
        self.max_output_tokens = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest completion", _TOKENS
        )
        self.n = self._histogram("request_params_n", "Completions that a request asked for (its parameter n)", _FEW)
        self.max_tokens = self._histogram(
            "request_params_max_tokens",
            "Most output tokens that a request asked for (its parameter max_tokens)",
            _TOKENS,
        )
        self._success = Counter(
            f"{prefix}:request_success",
            "Completions that ended, by reason",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        rejections = Counter(
            f"{prefix}:admission_rejections",
            "Requests refused for now, as the queue or the number of connections was full",
            _LABELS,
            registry=self.registry,
        )
        self.rejections = rejections.labels(*self._labels)
        self.registry.register(self)  # type: ignore[arg-type]  # see collect

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> ObservedHistogram:
        histogram = ObservedHistogram(f"{self.prefix}:{name}", text, _LABELS, registry=self.registry, buckets=buckets)
        return histogram.labels(*self._labels)

    def succeeded(self, reason: str) -> None:
        """Counts one completion that ended with `reason`."""
        self._success.labels(*self._labels, reason).inc()

    def on_ready(self, info: Ready) -> None:
        self._info = info

    def render(self) -> bytes:
        """The exposition text of /metrics."""
        text = self._own_text()
        return text if self.prefix == "llamacpp" else text + _in_llamacpp_names(text, self.prefix)

    def latest(self) -> EngineStats:
        """The engine's latest statistics."""
        if self._shared is not None:
            self.totals = _decode_totals((self._shared / TOTALS).read_bytes())
        return self.totals.stats

    def _own_text(self) -> bytes:
        if self._shared is None:
            return generate_latest(self.registry)
        self.latest()
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._shared))  # type: ignore[no-untyped-call]
        registry.register(self)  # type: ignore[arg-type]
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics that come from the engine's statistics. prometheus_client calls this method."""
        stats = self.totals.stats
        totals = self.totals
        for name, kind, text, field in _FROM_STATS:
            yield self._family(kind, name, text, getattr(stats, field))
        yield self._family(
            "counter", "engine_restarts", "Starts of an engine's process where another one had died", totals.restarts
        )
        if totals.front_restarts is not None:
            text = "Starts of an API server's process where another one had died"
            yield self._family("counter", "front_restarts", text, totals.front_restarts)
        yield self._family("counter", "compile_seconds", "Seconds spent compiling programs", stats.compile_seconds)
        yield self._histogram_family("iteration_tokens_total", "Tokens that a step computed", {(): stats.step_tokens})
        phases: dict[tuple[str, ...], Histogram] = {
            (phase,): histogram for phase, histogram in stats.step_seconds.items()
        }
        yield self._histogram_family(
            "step_seconds", "Seconds of a step, by phase on the host and on the devices", phases, ("phase",)
        )
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._family("gauge", "kv_cache_usage_perc", "KV pages in use, as a fraction from 0 to 1", used)
        accepted = CounterMetricFamily(
            f"{self.prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Tokens that speculative decoding proposed and the model kept, by position among the proposals of a row",
            labels=[*_LABELS, "position"],
        )
        for position, count in enumerate(stats.spec_accepted_at):
            accepted.add_metric([*self._labels, str(position)], count)
        yield accepted
        if self._info is not None:
            info = GaugeMetricFamily(
                f"{self.prefix}:cache_config_info",
                "Always 1; the labels are tokens per KV page and the number of KV pages",
                labels=[*_LABELS, "block_size", "num_gpu_blocks"],
            )
            info.add_metric([*self._labels, str(self._info.page_size), str(stats.pages_total)], 1)
            yield info
            yield from self._weights(self._info)
            if self._info.max_loras:
                yield self._adapters(self._info.max_loras, stats)

    def _weights(self, info: Ready) -> Iterator[Metric]:
        """The version of the weights in a label; how often they were replaced; and vLLM's state of an engine's sleep: 1
        for the state that it is in."""
        version = GaugeMetricFamily(
            f"{self.prefix}:weight_version_info",
            "Always 1; the label is the version of the weights",
            labels=[*_LABELS, "weight_version"],
        )
        version.add_metric([*self._labels, info.weights.version], 1)
        yield version
        yield self._family("counter", "weight_updates", "Times that the weights were replaced", info.weights.updates)
        sleep = GaugeMetricFamily(
            f"{self.prefix}:engine_sleep_state",
            "1 for the state of sleep that the engine is in, 0 for others",
            labels=[*_LABELS, "sleep_state"],
        )
        for level, name in enumerate(("awake", "weights_offloaded", "discard_all")):
            sleep.add_metric([*self._labels, name], int(info.sleep_level == level))
        yield sleep

    def _adapters(self, most: int, stats: EngineStats) -> Metric:
        """Which adapters requests use, in labels; the value is the time, so that the latest of several is known."""
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = GaugeMetricFamily(
            f"{self.prefix}:lora_requests_info",
            "Time of this scrape in seconds since 1970; the labels list LoRA adapters in use",
            labels=[*_LABELS, *labels],
        )
        names = ",".join(stats.adapters_running), ",".join(stats.adapters_waiting)
        info.add_metric([*self._labels, str(most), *names], time.time())
        return info

    def describe(self) -> Iterable[Metric]:
        """Empty, so that prometheus_client checks names only when it collects the metrics."""
        return []

    def _histogram_family(
        self, name: str, text: str, histograms: dict[tuple[str, ...], Histogram], labels: tuple[str, ...] = ()
    ) -> Metric:
        """A metric of the engine's histograms; the keys of `histograms` are the values of `labels`."""
        family = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=(*_LABELS, *labels))
        for values, histogram in histograms.items():
            counts = accumulate(histogram.counts)
            bounds = (*map(str, histogram.bounds), "+Inf")
            family.add_metric((*self._labels, *values), list(zip(bounds, counts, strict=True)), histogram.total)
        return family

    def _family(self, kind: str, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        metric = family(f"{self.prefix}:{name}", text, labels=_LABELS)
        metric.add_metric(self._labels, value)
        return metric


class RequestTimes:
    """The times of one prompt's request, from time.monotonic(). They are observed in `metrics` as they come, unless the
    request is one of a batch, which takes long because others come first.

    Attributes:
      adapter: name of the request's LoRA adapter; "": none.
      arrival: when the request arrived.
      first, latest: when its first and latest tokens came; `first` is None before a token has come.
      queued: seconds that the request waited for a place in the batch.
      ended: whether all its completions have ended.
      finish_reasons: those of the completions that have ended.
    """

    def __init__(self, metrics: Metrics, request: Request):
        self._metrics = metrics
        self._is_timed = request.priority != BACKGROUND
        self.adapter = request.adapter
        self.params = params = request.params
        self.num_prompt_tokens = num_prompt_tokens = len(request.prompt_token_ids)
        self.arrival = self.latest = time.monotonic()
        self.queued = 0.0
        self.first: float | None = None
        self.ended = False
        self.finish_reasons: list[str] = []
        self._last: dict[int, float] = {}  # completion -> time of its latest token
        self._tokens: dict[int, int] = {}
        self._record = note_generation(self)
        metrics.n.observe(params.n)
        if params.max_tokens is not None:
            metrics.max_tokens.observe(params.max_tokens)
        metrics.prompt_tokens.observe(num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        return sum(self._tokens.values())

    def tokens(self, index: int, count: int, now: float, queued: float) -> None:
        """Notes `count` tokens of completion `index`. `queued`: how long the request waited for a place, in seconds."""
        if count == 0:
            return
        if self.first is None:
            self.first = now
            self.queued = queued
            if self._is_timed:
                self._metrics.ttft.observe(now - self.arrival)
        if self._is_timed and (last := self._last.get(index)) is not None:
            self._metrics.itl.observe((now - last) / count)
        self._last[index] = self.latest = now
        self._tokens[index] = self._tokens.get(index, 0) + count

    def seconds(self) -> tuple[float, float]:
        """Seconds from the request's place in the batch to its first token, and from there to its latest token."""
        first = self.latest if self.first is None else self.first
        return max(first - self.arrival - self.queued, 0.0), self.latest - first

    def finished(self, now: float) -> None:
        """Notes that all completions have ended."""
        metrics = self._metrics
        self.ended = True
        metrics.output_tokens.observe(self.num_output_tokens)
        metrics.max_output_tokens.observe(max(self._tokens.values(), default=0))
        if self._is_timed:
            metrics.e2e.observe(now - self.arrival)
        if self._is_timed and self.first is not None:
            metrics.queue.observe(self.queued)
            metrics.prefill.observe(max(self.first - self.arrival - self.queued, 0.0))
            metrics.inference.observe(max(now - self.arrival - self.queued, 0.0))
            metrics.decode.observe(now - self.first)
            longest = max(self._tokens.values())
            if longest > 1:
                metrics.tpot.observe((now - self.first) / (longest - 1))
        if self._record is not None and self._record.on_late is not None:
            self._record.on_late(self)
