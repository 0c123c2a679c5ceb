"""The results of first_light.py as Markdown, for docs/first-light.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from light.record import read

ENGINES = {"engine-bf16": "bf16", "engine-fp8": "fp8", "engine-int4": "int4"}
FEW = 12  # wrong and failed rows of a stage that are listed; the files have all


def markdown(folder: Path) -> str:
    """All results. Missing ones are named."""
    documents = {path.stem: found for path in sorted(folder.glob("*.json")) if (found := read(path)) is not None}
    if not documents:
        return f"There are no results in {folder}."
    parts = [machine(documents.get("device")), correctness(documents.get("correctness"))]
    parts += [engine(documents), kernels(documents.get("kernels")), resources(documents.get("resources"))]
    parts.append(trouble(documents))
    return "\n\n".join(part for part in parts if part)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def machine(document: dict[str, Any] | None) -> str:
    if document is None:
        return ""
    facts, rates = document["facts"], _row(document, "ceilings")
    said = [str(facts.get("device")), f"driver {facts.get('nvidia_smi', {}).get('driver_version', 'unknown')}"]
    said += [f"{name} {version}" for name, version in facts.get("versions", {}).items() if name in ("jax", "jaxlib")]
    if "bytes_per_s" in rates:
        said.append(f"copies {1e-9 * rates['bytes_per_s']:,.0f} GB/s")
        said.append(f"matmul {1e-12 * rates['flops_per_s']:,.1f} TFLOP/s")
    return "; ".join(said) + "."


def correctness(document: dict[str, Any] | None) -> str:
    if document is None:
        return ""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    worst: dict[tuple[str, str], float] = {}
    for row in document["rows"]:
        case, _, backend = row["key"].rpartition(", ")
        kind = ("matmul by expert" if "by expert" in case else case.split()[0]), backend
        counts.setdefault(kind, {}).setdefault(row["status"], 0)
        counts[kind][row["status"]] += 1
        if row["status"] == "ok" and row.get("allowed"):
            worst[kind] = max(worst.get(kind, 0.0), float(row["error"]) / float(row["allowed"]))
    header = ("checked against exact answers", "backend", "right", "wrong", "failed", "worst error / allowed")
    lines = []
    for kind, found in counts.items():
        failed = found.get("failed", 0) + found.get("crashed", 0)
        lines.append((*kind, found.get("ok", 0), found.get("wrong", 0), failed, worst.get(kind)))
    return table(header, lines)


def engine(documents: dict[str, Any]) -> str:
    """Decoding: our engine by format of weights, and peers."""
    header = ("weights", "batch", "ms a token", "floor ms", "of floor", "tokens/s, decoding", "tokens/s in all",
              "prompt tokens/s", "tokens a call", "dispatch ms", "ahead ms (least)", "late", "start s")  # fmt: skip
    lines: list[Sequence[Any]] = []
    for name, weights in ENGINES.items():
        document = documents.get(name)
        start = _row(document, "start") if document else {}
        whole = start.get("load_s", 0.0) + start.get("compile_s", 0.0)
        for row in _measured(document):
            ahead = f"{row['ahead_ms']:.2f} ({row['ahead_least_ms']:.2f})"
            lines.append((weights, row["batch"], row["token_ms"], row["floor_ms"], row["of_floor"],
                          row["batch"] * row["tokens_per_s_each"], row["output_tokens_per_s"],
                          row["prompt_tokens_per_s"], row["steps_per_call"], row["dispatch_ms"], ahead, row["late"],
                          whole))  # fmt: skip
    for row in _measured(documents.get("peers")):
        decoding = 1e3 * row["batch"] / row["token_ms"]
        lines.append((row["key"].partition(",")[0], row["batch"], row["token_ms"], None, None, decoding,
                      row["output_tokens_per_s"]) + (None,) * 6)  # fmt: skip
    return table(header, lines) if lines else ""


def kernels(document: dict[str, Any] | None) -> str:
    if document is None:
        return ""
    lines = []
    for row in document["rows"]:
        for one in row.get("results", []):
            if "us" in one:
                rate, seconds = one["bytes"], 1e-6 * one["us"]
                lines.append((one["operation"], one["case"], one["backend"], one["us"], one["floor_us"],
                              one["fraction"], 1e-9 * rate / seconds, 1e-12 * one["flops"] / seconds))  # fmt: skip
    header = ("operation", "case", "backend", "µs", "floor µs", "of floor", "GB/s", "TFLOP/s")
    return table(header, lines) if lines else ""


def resources(document: dict[str, Any] | None) -> str:
    lines = []
    for row in (document or {"rows": []})["rows"]:
        for one in row.get("kernels", []):
            spills = one.get("spill_stores", 0) + one.get("spill_loads", 0)
            lines.append((row["key"], one["kernel"], one.get("registers"), spills, one.get("static_shared"),
                          one.get("dynamic_shared"), one.get("programs")))  # fmt: skip
    header = ("case", "kernel", "registers", "spilled bytes", "static shared", "dynamic shared", "programs per SM")
    return table(header, lines) if lines else ""


def trouble(documents: dict[str, Any]) -> str:
    """Incomplete stages, and wrong or failed rows."""
    lines = []
    for name, document in documents.items():
        if document["status"] != "complete" or "reason" in document:
            lines.append(
                f"- {name}: {document['status']}; {document.get('reason', 'it goes on where it is run again')}"
            )
        bad = [row for row in document["rows"] if row["status"] != "ok"]
        lines += [f"- {name}: {row['key']}: {row['status']}: {row.get('reason', '')[:300]}" for row in bad[:FEW]]
        if len(bad) > FEW:
            lines.append(f"- {name}: {len(bad) - FEW} more")
    return "\n".join(["Not right, or not done:", "", *lines]) if lines else ""


def _row(document: dict[str, Any] | None, key: str) -> dict[str, Any]:
    return next((row for row in (document or {"rows": []})["rows"] if row["key"] == key), {})


def _measured(document: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    return (row for row in (document or {"rows": []})["rows"] if row["status"] == "ok" and "token_ms" in row)
