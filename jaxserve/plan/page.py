"""A plan as a page: one file, which loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxserve.plan.report import PARTS, text_of

WIDTH, HEIGHT, LEFT = 800, 22, 190
COLORS = ("#1f5fa8", "#4c9f70", "#d98e2b", "#a8443f", "#8a8f98", "#6b5b95", "#c7d3e3")
STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:60em;color:#222}pre{background:#f5f6f8;padding:1em;"
    "overflow:auto;font-size:13px}text{font:12px system-ui}h2{margin-top:2em}"
)


def page_of(plans: Sequence[Mapping[str, Any]]) -> str:
    """HTML with the memory and the time of decode steps of each plan as bars, and its text."""
    parts = [_section(plan) for plan in plans]
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    head = f"<meta charset='utf-8'>{policy}<title>jaxserve plan</title><style>{STYLE}</style>"
    body = f"<body><h1>jaxserve plan</h1>{''.join(parts)}</body>"
    return f"<!doctype html><html lang='en'><head>{head}</head>{body}</html>\n"


def _section(plan: Mapping[str, Any]) -> str:
    title = f"<h2>{escape(plan['model'])} on {escape(plan['target'])} {escape(plan.get('label', ''))}</h2>"
    held = plan["memory"]
    names = ("weights", "slots", "states", "temporaries", "results", "code", "reserve")
    amounts = {name: held[name] / 2**30 for name in names if held[name]}
    if plan["fits"]:
        amounts["KV cache"] = plan["capacity"]["cache_bytes"] / 2**30
    drawn = _bars([("memory of a device", amounts)], "GiB")
    if plan["fits"]:
        decodes = plan["roofline"]["decode"]
        rows = [(f"batch {one['batch']}, {one['context']:,}", _times(one)) for one in decodes]
        drawn += "<h3>A decode step in ms, by batch and context</h3>" + _bars(rows, "ms")
    if "measured" in plan:
        pairs = [(f"batch {one['batch']}, {one['context']:,}", one) for one in plan["measured"]["decode"]]
        rows = [(f"{label}, {name}", {name: 1e3 * one[key]}) for label, one in pairs
                for name, key in (("measured", "tpot"), ("predicted", "predicted"))]  # fmt: skip
        drawn += "<h3>Measured and predicted decode steps in ms</h3>" + _bars(rows, "ms")
    return f"{title}{drawn}<pre>{escape(chr(10).join(text_of(plan)))}</pre>"


def _times(one: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by part; where weights are read while products are computed, only the longer counts."""
    times = {part: 1e3 * one["tpot"] * one["shares"][part] for part in PARTS}
    if sum(times.values()) > 1e3 * one["tpot"] * 1.001:
        times.pop(min(("weights", "products"), key=lambda part: times[part]))
    return times


def _bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """Stacked bars as SVG, with a legend."""
    most = max(sum(row.values()) for _, row in rows) or 1.0
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    colors = dict(zip(names, COLORS * 2, strict=False))
    drawn = []
    for i, (label, row) in enumerate(rows):
        x, y = float(LEFT), i * (HEIGHT + 6)
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
        at = 10 + i * 110
        drawn.append(f"<rect x='{at}' y='{low}' width='10' height='10' fill='{colors[name]}'/>")
        drawn.append(f"<text x='{at + 14}' y='{low + 9}'>{escape(name)}</text>")
    return f"<svg width='{WIDTH}' height='{low + 20}' role='img'>{''.join(drawn)}</svg>"
