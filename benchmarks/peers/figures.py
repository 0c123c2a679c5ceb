"""Computes the figures that engines are compared by from the requests' records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from jaxserve.bench.report import table
from jaxserve.bench.stats import RequestRecord, summarize

FIGURES = (
    "output_tokens_per_s",
    "decode_tokens_per_s",
    "ttft_p50_ms",
    "tpot_p50_ms",
    "pss_mib",
    "anonymous_mib",
    "peak_mib",
)
TITLES = ("output tok/s", "decode tok/s", "TTFT p50 ms", "TPOT p50 ms", "memory MiB", "of it not file", "peak MiB")
OURS = "jaxserve"

Run = Mapping[str, Any]  # engine, concurrency, repeat, and those of FIGURES that there are


def figures(records: Sequence[RequestRecord], concurrency: int) -> dict[str, float | None]:
    """The figures of one run."""
    summary = summarize(records)
    p50 = {name: (summary[f"{name}_ms"] or {}).get("p50") for name in ("ttft", "tpot")}
    return {
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "decode_tokens_per_s": decode_rate(records, concurrency),
        "ttft_p50_ms": p50["ttft"],
        "tpot_p50_ms": p50["tpot"],
    }


def decode_rate(records: Sequence[RequestRecord], concurrency: int) -> float | None:
    """Output tokens a second while all of `concurrency` requests were past their first token and before their last.

    Prefill is outside of these times, whether it has steps of its own or shares them. None where they never were.
    """
    full = min(concurrency, len(records))
    edges = sorted(
        [(r.arrivals[0], 1) for r in records if r.arrivals] + [(r.arrivals[-1], -1) for r in records if r.arrivals]
    )
    times = np.concatenate([np.asarray(r.arrivals) for r in records] or [np.empty(0)])
    weights = np.concatenate(
        [np.full(len(r.arrivals), r.output_tokens / max(1, len(r.arrivals))) for r in records] or [np.empty(0)]
    )
    running = 0
    since = 0.0
    seconds = 0.0
    tokens = 0.0
    for at, change in edges:
        if running == full and at > since:
            seconds += at - since
            tokens += weights[(times > since) & (times <= at)].sum()
        running = running + change
        since = at
    return float(tokens / seconds) if seconds > 0 else None


def medians(runs: Sequence[Run]) -> dict[tuple[int, str], dict[str, float | None]]:
    """The median of each figure over the repeats, by concurrency and engine, in the order in which they ran."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["concurrency"], run["engine"]), []).append(run)
    result = {}
    for key in sorted(groups, key=lambda key: key[0]):
        values = {name: [run[name] for run in groups[key] if run.get(name) is not None] for name in FIGURES}
        result[key] = {name: median(each) if each else None for name, each in values.items()}
    return result


def ratios(results: Mapping[tuple[int, str], Mapping[str, float | None]]) -> list[dict[str, Any]]:
    """How many times a peer's tokens per second ours come to, whole load and decode alone."""
    rows = []
    for (concurrency, engine), theirs in results.items():
        ours = results.get((concurrency, OURS))
        if ours is None or engine == OURS:
            continue
        row: dict[str, Any] = {"concurrency": concurrency, "peer": engine}
        for name in ("output_tokens_per_s", "decode_tokens_per_s"):
            mine = ours[name]
            other = theirs[name]
            row[name] = mine / other if mine and other else None
        rows.append(row)
    return rows


def results_table(results: Mapping[tuple[int, str], Mapping[str, float | None]]) -> str:
    """Engines by concurrency, with our ratios to each."""
    by_peer = {(row["concurrency"], row["peer"]): row for row in ratios(results)}
    rows: list[list[Any]] = [["engine", "at a time", *TITLES, "ours / it, output", "decode"]]
    for (concurrency, engine), values in results.items():
        ratio = by_peer.get((concurrency, engine), {})
        shares = [ratio.get(name) for name in ("output_tokens_per_s", "decode_tokens_per_s")]
        cells = [None if share is None else f"{share:.2f}" for share in shares]
        rows.append([engine, concurrency, *(values[name] for name in FIGURES), *cells])
    return table(rows)


def agreement(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """How far greedy answers to the same prompts agree.

    After the first difference the contexts differ, so tokens count up to there. `gaps` are how far our tokens were
    ahead of the runners-up: at a first difference a small gap is a near tie, and a large one a mistake.
    """
    agreed = 0
    at_difference = []
    for mine, other, ahead in zip(ours, theirs, gaps, strict=True):
        same = next(
            (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
        )
        agreed += same
        if same < len(mine):
            at_difference.append(ahead[same] if same < len(ahead) else None)
    return {
        "tokens": sum(map(len, ours)),
        "agree": agreed,
        "answers": len(ours),
        "differ": len(at_difference),
        "gaps_at_first_difference": at_difference,
    }


def agreement_line(engine: str, result: Mapping[str, Any]) -> str:
    text = f"{engine}: {result['agree']} of {result['tokens']} tokens as ours"
    if result["differ"]:
        gaps = ", ".join("?" if gap is None else f"{gap:.1e}" for gap in result["gaps_at_first_difference"])
        text += f"; {result['differ']} of {result['answers']} answers part at a token that was ahead by (nats): {gaps}"
    return text
