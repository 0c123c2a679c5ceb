"""Plots a run: distributions of latencies, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.stats import METRICS, RequestRecord, concurrency, latencies, throughput

_LINE = "#1f5fa8"
_AREA = "#cfe0f3"


def require_matplotlib() -> Any:
    """Imports matplotlib for drawing to files. Raises RuntimeError with instructions if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError('--plot needs matplotlib; install it with: pip install "jaxserve[bench]"') from None
    matplotlib.use("Agg")
    return matplotlib


def plot_run(path: Path, records: Sequence[RequestRecord], title: str) -> None:
    """Writes a PNG. Raises RuntimeError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.4))
    top, bottom = halves
    values = latencies(records)
    for axes, name in zip(top.subplots(1, 3), ("ttft", "itl", "e2e"), strict=True):
        _plot_distribution(axes, METRICS[name], 1e3 * np.sort(values[name]))
    upper, lower = bottom.subplots(2, 1, sharex=True)
    edges, rates = throughput(records)
    upper.stairs(rates, edges, fill=True, color=_AREA)
    upper.stairs(rates, edges, color=_LINE)
    upper.set_ylabel("output tokens / s")
    times, running = concurrency(records)
    lower.step(times, running, where="post", color=_LINE)
    lower.fill_between(times, running, step="post", color=_AREA)
    lower.set(ylabel="requests under way", xlabel="seconds since the start", xlim=(0, edges[-1]))
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def _plot_distribution(axes: Any, title: str, values: np.ndarray) -> None:
    """The cumulative distribution of sorted values (ms), with marks at the median and the 99th percentile."""
    axes.set(title=title, xlabel="ms", ylabel="share", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if not len(values):
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        return
    axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=_LINE)
    for percentile, style in ((50, "--"), (99, ":")):
        value = float(np.percentile(values, percentile))
        axes.axvline(value, color="0.4", linestyle=style, label=f"p{percentile} {value:,.1f} ms")
    axes.legend(loc="lower right", fontsize="small")
