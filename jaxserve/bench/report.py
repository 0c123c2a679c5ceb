"""Reports of results: the machine, aligned tables, JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxserve import __version__
from jaxserve.bench.stats import METRICS, PERCENTILES


def machine(*, device: bool) -> dict[str, Any]:
    """Describes the machine. `device` asks JAX too, which reserves the accelerator, so not while a server needs it."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "jaxserve": __version__,
        "jax": metadata.version("jax"),
    }
    if device:
        import jax

        devices = jax.devices()
        facts |= {"backend": devices[0].platform, "device": devices[0].device_kind, "devices": len(devices)}
    return facts


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _lines(info) if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def machine_line(facts: Mapping[str, Any]) -> str:
    """The machine in one line."""
    parts = [facts["platform"], f"{facts['cpus']} × {facts['cpu']}"]
    if "device" in facts:
        parts.append(f"{facts['devices']} × {facts['backend']} device ({facts['device']})")
    versions = f"Python {facts['python']}, jax {facts['jax']}, jaxserve {facts['jaxserve']}"
    return "; ".join([*parts, versions])


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as text: the first column is left-aligned, the others right-aligned."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max((len(row[i]) for row in cells if i < len(row)), default=0) for i in range(max(map(len, cells)))]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))).rstrip()
        for row in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


SPECULATION = {"Mean accepted length (tokens)": "mean_accepted_length", "Proposals kept (%)": "proposals_kept_percent"}
_COUNTS = {
    "Duration (s)": "duration_s",
    "Successful requests": "successful",
    "Failed requests": "failed",
    "Peak concurrency": "peak_concurrency",
    "Input tokens": "input_tokens",
    "Output tokens": "output_tokens",
    "Output tokens per chunk": "tokens_per_chunk",
    "Requests per second": "requests_per_s",
    "Input tokens per second": "input_tokens_per_s",
    "Output tokens per second": "output_tokens_per_s",
    "Total tokens per second": "total_tokens_per_s",
    "Goodput (requests per second)": "goodput_requests_per_s",
    "Goodput (% of requests)": "goodput_percent",
    "Client CPU (% of a core)": "client_cpu_percent",
} | SPECULATION


def summary_text(summary: Mapping[str, Any]) -> str:
    """A summary of `stats.summarize` as two tables."""
    counts = table([[title, summary[key]] for title, key in _COUNTS.items() if key in summary])
    header = ["Milliseconds", "mean", *(f"p{p}" for p in PERCENTILES)]
    rows = []
    for name, title in METRICS.items():
        values = summary.get(f"{name}_ms") or {}
        rows.append([title, *(values.get(column) for column in header[1:])])
    text = f"{counts}\n\n{table([header, *rows])}"
    if summary.get("first_error"):
        text += f"\n\nFirst error: {summary['first_error']}"
    return text


def check_writable(*paths: Path | None) -> None:
    """Raises ValueError for a file whose folder is missing; called before a long run."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """Writes the results; None writes nothing."""
    if path is not None:
        path.write_text(dumps(document))
        print(f"wrote {path}", file=sys.stderr)


def dumps(document: Mapping[str, Any]) -> str:
    """Results as JSON."""
    return json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """`value` with paths and infinities as text, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
