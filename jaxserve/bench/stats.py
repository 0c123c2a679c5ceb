"""Records of requests, statistics over them, and what speculative decoding gained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jaxserve.scheduling.engine_stats import EngineStats

PERCENTILES = (50, 90, 99)
# Name in goodput limits and results -> title in the table; all in milliseconds.
METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2e": "End-to-end latency",
}


@dataclass
class RequestRecord:
    """One request. Times are in seconds on the clock of the run, which starts at 0.

    Attributes:
      start: when the request was begun, before a new connection was opened.
      end: when its answer was complete, or it failed.
      arrivals: when each chunk with tokens arrived; empty if the answer was not streamed.
      last: when the last chunk of the answer arrived, which may have only a finish reason.
      error: why the request failed.
    """

    start: float
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    last: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from the start to the first token."""
        return self.arrivals[0] - self.start if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first: (last - first) / (tokens - 1); None for fewer than two."""
        if not self.arrivals or self.output_tokens < 2:
            return None
        return (max(self.last, self.arrivals[-1]) - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between chunks."""
        return np.diff(self.arrivals).tolist()

    @property
    def e2e(self) -> float:
        """Seconds from the start to the end."""
        return self.end - self.start

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Whether it succeeded within limits in milliseconds; a metric without value (TPOT of one token) passes."""
        values = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return self.error is None and all(1e3 * (values[name] or 0.0) <= limit for name, limit in limits.items())

    def as_row(self) -> dict[str, Any]:
        """The row of the results file: all fields, and the latencies in milliseconds."""
        ms = {f"{name}_ms": None if value is None else 1e3 * value for name, value in self._latencies().items()}
        return asdict(self) | ms

    def _latencies(self) -> dict[str, float | None]:
        return {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "e2e:5000"]` as milliseconds by name. Raises ValueError for another form."""
    result = {}
    for text in limits:
        name, _, value = text.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if name not in ("ttft", "tpot", "e2e") or not milliseconds > 0:
            raise ValueError(f"a goodput limit is ttft, tpot or e2e with milliseconds, as in ttft:200; got {text!r}")
        result[name] = milliseconds
    return result


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None without values."""
    if not len(seconds):
        return None
    values = 1e3 * np.asarray(seconds)
    percentiles = np.percentile(values, PERCENTILES)
    return {"mean": float(values.mean())} | {
        f"p{name}": float(value) for name, value in zip(PERCENTILES, percentiles, strict=True)
    }


def latencies(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Name -> values in seconds of all successful requests."""
    good = [record for record in records if record.error is None]
    return {
        "ttft": [r.ttft for r in good if r.ttft is not None],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap in r.itl],
        "e2e": [r.e2e for r in good],
    }


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """The largest number of open requests at one time."""
    _, running = concurrency(records)
    return int(running.max(initial=0))


def concurrency(records: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Times [2n] in seconds, in order, and the number of open requests from each on."""
    times = np.array([r.end for r in records] + [r.start for r in records])
    change = np.repeat([-1, 1], len(records))
    order = np.argsort(times, kind="stable")  # of equal times, ends come first
    return times[order], np.cumsum(change[order])


def throughput(records: Sequence[RequestRecord], bins: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Edges [bins + 1] in seconds, and output tokens per second [bins]; all chunks of a request count equally."""
    good = [r for r in records if r.error is None and r.output_tokens]
    times = [np.asarray(r.arrivals or [r.end]) for r in good]
    weights = [np.full(len(at), r.output_tokens / len(at)) for r, at in zip(good, times, strict=True)]
    end = max((r.end for r in records), default=0.0) or 1.0
    counts, edges = np.histogram(
        np.concatenate(times or [np.empty(0)]), bins, (0.0, end), weights=np.concatenate(weights or [np.empty(0)])
    )
    return edges, counts * bins / end


def summarize(records: Sequence[RequestRecord], limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The results of a run: rates per second, latencies in milliseconds (None without measurements).

    Only tokens of successful requests count. `limits`, milliseconds by metric, add the goodput.
    """
    good = [record for record in records if record.error is None]
    duration = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)
    input_tokens = sum(r.input_tokens for r in good)
    output_tokens = sum(r.output_tokens for r in good)
    chunks = sum(len(r.arrivals) for r in good)
    per_second = 1 / duration if duration > 0 else 0.0
    summary: dict[str, Any] = {
        "duration_s": duration,
        "successful": len(good),
        "failed": len(records) - len(good),
        "first_error": next((r.error for r in records if r.error is not None), None),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "tokens_per_chunk": output_tokens / chunks if chunks else None,
        "requests_per_s": len(good) * per_second,
        "input_tokens_per_s": input_tokens * per_second,
        "output_tokens_per_s": output_tokens * per_second,
        "total_tokens_per_s": (input_tokens + output_tokens) * per_second,
        "peak_concurrency": peak_concurrency(records),
    }
    summary |= {f"{name}_ms": distribution(values) for name, values in latencies(records).items()}
    if limits:
        met = sum(record.meets(limits) for record in records)
        share = 100 * met / len(records) if records else 0.0
        summary |= {"goodput_requests_per_s": met * per_second, "goodput_percent": share}
    return summary


# What speculative decoding gained in a run: differences of a server's metrics or of an engine's counters.


_SAMPLE = re.compile(r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{.*\})? (\S+)$", re.M)


@dataclass(frozen=True)
class Checks:
    """drafts: rows whose proposals were checked. proposed: tokens that were proposed for them. accepted: of these,
    tokens that were kept."""

    drafts: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0

    @classmethod
    def of_metrics(cls, text: str) -> Checks:
        """The counters in Prometheus's text format, by vLLM's names, summed over labels; 0 if they are not there."""
        sums = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
        for name, value in _SAMPLE.findall(text):
            sums[name] += float(value)
        return cls(*sums.values())

    @classmethod
    def of_stats(cls, stats: EngineStats) -> Checks:
        return cls(stats.spec_drafts, stats.spec_proposed, stats.spec_accepted)

    def summary(self, before: Checks) -> dict[str, float]:
        """What happened since `before`; nothing if no proposal was checked. The mean accepted length includes the token
        that each check samples anyway, as vLLM reports it."""
        drafts = self.drafts - before.drafts
        proposed = self.proposed - before.proposed
        if drafts <= 0 or proposed <= 0:
            return {}
        accepted = self.accepted - before.accepted
        return {"mean_accepted_length": 1 + accepted / drafts, "proposals_kept_percent": 100 * accepted / proposed}
