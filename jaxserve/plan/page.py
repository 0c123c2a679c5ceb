"""A plan as a page: one file, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from jaxserve.plan.report import PARTS
from jaxserve.plan.text import table_of, text_of

WIDTH = 800
HEIGHT = 22
LEFT = 210
LEGEND = 120
MEMORY_PARTS = ("weights", "slots", "states", "temporaries", "results", "code", "reserve")
CACHE = "KV cache"
COLORS = ("#1f5fa8", "#4c9f70", "#d98e2b", "#a8443f", "#8a8f98", "#6b5b95", "#5b8f9f", "#c7d3e3")
STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:68em;color:#222}pre{background:#f5f6f8;padding:1em;"
    "overflow:auto;font-size:12px}text{font:12px system-ui}h2{margin-top:2em}"
)


def page_of(plans: Sequence[Mapping[str, Any]]) -> str:
    """HTML with the memory and the time of decode steps of each plan as bars, and its text."""
    parts = [_text(table_of(plans))] if len(plans) > 1 else []
    parts += [_section(plan) for plan in plans]
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    head = f"<meta charset='utf-8'>{policy}<title>jaxserve plan</title><style>{STYLE}</style>"
    body = f"<body><h1>jaxserve plan</h1>{''.join(parts)}</body>"
    return f"<!doctype html><html lang='en'><head>{head}</head>{body}</html>\n"


def _section(plan: Mapping[str, Any]) -> str:
    title = f"<h2>{escape(plan['model'])} on {escape(plan['target'])} {escape(plan['label'])}</h2>"
    held = plan["memory"]
    amounts = {name: held[name] / 2**30 for name in MEMORY_PARTS if held.get(name)}
    if plan["fits"]:
        amounts[CACHE] = plan["capacity"]["cache_bytes"] / 2**30
    drawn = _bars([("memory of a device", amounts)], (*MEMORY_PARTS, CACHE), "GiB")
    if plan["fits"]:
        decodes = plan["roofline"]["decode"]
        rows = [(_label(one), _times(one)) for one in decodes]
        drawn += "<h3>A decode step in ms, by batch and tokens of context</h3>" + _bars(rows, PARTS, "ms")
    if "measured" in plan:
        keys = {"measured": "tpot", "predicted": "predicted"}
        rows = [
            (f"{_label(one)}, {name}", {name: 1e3 * one[key]})
            for one in plan["measured"]["decode"]
            for name, key in keys.items()
        ]
        drawn += "<h3>Measured and predicted decode steps in ms</h3>" + _bars(rows, tuple(keys), "ms")
    return f"{title}{drawn}{_text(text_of(plan))}"


def _text(lines: Iterable[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _label(step: Mapping[str, Any]) -> str:
    return f"batch {step['batch']}, {step['context']:,} tokens"


def _times(one: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by part; where weights are read while products are computed, only the longer counts."""
    times = {part: 1e3 * one["tpot"] * one["shares"][part] for part in PARTS}
    if sum(times.values()) > 1e3 * one["tpot"] * 1.001:
        times.pop(min(("weights", "products"), key=lambda part: times[part]))
    return times


def _bars(rows: Sequence[tuple[str, Mapping[str, float]]], all_names: Sequence[str], unit: str) -> str:
    """Stacked bars as SVG, with a legend. all_names: of parts that a bar may have, each of which has its own color."""
    most = max(sum(row.values()) for _, row in rows) or 1.0
    colors = dict(zip(all_names, COLORS, strict=False))
    names = [name for name in all_names if any(row.get(name) for _, row in rows)]
    drawn = []
    for i, (label, row) in enumerate(rows):
        x = float(LEFT)
        y = i * (HEIGHT + 6)
        drawn.append(f"<text x='{LEFT - 8}' y='{y + 15}' text-anchor='end'>{escape(label)}</text>")
        for name, value in row.items():
            wide = value / most * (WIDTH - LEFT - 90)
            said = f"<title>{escape(name)}: {value:.3g} {unit}</title>"
            drawn.append(
                f"<rect x='{x:.1f}' y='{y}' width='{wide:.1f}' height='{HEIGHT}' fill='{colors[name]}'>{said}</rect>"
            )
            x += wide
        drawn.append(f"<text x='{x + 6:.1f}' y='{y + 15}'>{sum(row.values()):.3g} {unit}</text>")
    low = len(rows) * (HEIGHT + 6) + 14
    for i, name in enumerate(names):
        at = 10 + i * LEGEND
        drawn.append(f"<rect x='{at}' y='{low}' width='10' height='10' fill='{colors[name]}'/>")
        drawn.append(f"<text x='{at + 14}' y='{low + 9}'>{escape(name)}</text>")
    return f"<svg width='{WIDTH}' height='{low + 20}' role='img'>{''.join(drawn)}</svg>"
