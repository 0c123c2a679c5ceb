"""Draws the table and the plot of README's chapter on speed from `results/compare-cpu-gguf.json`.

  python benchmarks/readme_figures.py                  prints the table
  python benchmarks/readme_figures.py --write          puts it into README.md and docs/benchmarks.md, and draws the plot

The results are those that `benchmarks/compare.py --json` wrote, a run of one shape and file each. Nothing is measured
here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "compare-cpu-gguf.json"
PLOT = RESULTS.with_suffix(".png")
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
PEER = "llama.cpp, flash attention"
SHAPES = {"Qwen3-0.6B": "Qwen3-0.6B's shape", "100M": "a Llama of 100 M", "Llama-3.2-1B": "Llama-3.2-1B's shape"}
FILES = {"Q4_K_M": "Q4_K_M", "Q8_0": "Q8_0", "BF16": "BF16, `--dtype bfloat16`"}
CONCURRENCY = {1: "alone", 8: "8 at a time", 32: "32 at a time"}
TABLE = re.compile(r"^\| weights \| file \| alone .*?\n\n", re.M | re.S)  # the first one of a document


@dataclass(frozen=True)
class Figure:
    """Output tokens a second over a whole load, ours and the peer's; medians of so many runs."""

    ours: float
    peer: float
    repeat: int


def read(path: Path = RESULTS) -> dict[tuple[str, str, int], Figure]:
    """The figures by shape, file and requests at a time. Raises KeyError if one has no peer in its run."""
    figures = {}
    for run in json.loads(path.read_text()):
        rates = {(row["concurrency"], row["engine"]): row["output_tokens_per_s"] for row in run["medians"]}
        for (concurrency, engine), rate in rates.items():
            if engine == "jaxserve":
                peer = rates[concurrency, PEER]
                figures[run["shape"], run["file"], concurrency] = Figure(rate, peer, run["settings"]["repeat"])
    return figures


def table(figures: Mapping[tuple[str, str, int], Figure]) -> str:
    """A table in Markdown: a row for each shape and file, and in each cell our tokens a second and the ratio."""
    lines = [f"| weights | file | {' | '.join(CONCURRENCY.values())} |", "|---|---|---|---|---|"]
    for shape, name in SHAPES.items():
        for i, (file, described) in enumerate(FILES.items()):
            row = [figures[shape, file, concurrency] for concurrency in CONCURRENCY]
            cells = [f"{one.ours:,.0f} ({one.ours / one.peer:.2f})" for one in row]
            lines.append(f"| {name if i == 0 else ''} | {described} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def plot(figures: Mapping[tuple[str, str, int], Figure], path: Path) -> None:
    """Plots a row of axes for each shape, a column for each number of requests, and bars for each file."""
    from jaxserve.bench.plot import require_matplotlib

    require_matplotlib()
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(11, 8), layout="constrained")
    canvas.suptitle("Output tokens a second on two CPU cores: 128 tokens in, 64 out; above the bars the ratio")
    grid = canvas.subplots(len(SHAPES), len(CONCURRENCY), squeeze=False)
    for axes_row, (shape, name) in zip(grid, SHAPES.items(), strict=True):
        for axes, (concurrency, described) in zip(axes_row, CONCURRENCY.items(), strict=True):
            row = [figures[shape, file, concurrency] for file in FILES]
            places = range(len(row))
            axes.bar([place - 0.2 for place in places], [one.ours for one in row], 0.4, label="jaxserve")
            axes.bar([place + 0.2 for place in places], [one.peer for one in row], 0.4, label=PEER)
            for place, one in zip(places, row, strict=True):
                top = max(one.ours, one.peer)
                axes.annotate(f"{one.ours / one.peer:.2f}", (place, top), ha="center", va="bottom")
            axes.margins(y=0.12)
            axes.set_title(f"{name}, {described}", fontsize=10)
            axes.set_xticks(places, FILES)
            axes.grid(axis="y", alpha=0.3)
    canvas.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    canvas.savefig(path, dpi=110, format="png")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the documents and the plot instead of printing")
    args = parser.parse_args(argv)
    figures = read()
    if not args.write:
        print(table(figures), end="")
        return 0
    for document in DOCUMENTS:
        text = document.read_text()
        document.write_text(TABLE.sub(lambda _: table(figures), text, count=1))
    plot(figures, PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
