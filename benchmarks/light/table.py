"""The results of first_light.py as Markdown, for docs/kernels.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from light.record import read

FEW = 12  # wrong and failed rows of a file that are listed; the files have all
KERNELS = 14  # of a profile
BETTER = ("bytes_per_s", "flops_per_s")

Row = dict[str, Any]


def documents_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: found for path in sorted(folder.glob("*.json")) if (found := read(path)) is not None}


def compiled(folder: Path, target: str) -> str:
    """How much compiled for a target, and what did not."""
    documents = documents_of(folder)
    counts = {name: sum(row["status"] == "ok" for row in found["rows"]) for name, found in documents.items()}
    said = ", ".join(f"{count} of {name}" for name, count in counts.items() if name != "run")
    return "\n\n".join(filter(None, [f"Compiled for {target}: {said or 'nothing'}.", trouble(documents)]))


def markdown(folder: Path) -> str:
    """All results."""
    documents = documents_of(folder)
    if not documents:
        return f"There are no results in {folder}."
    ceilings = best(documents.get("run"))
    rows = {name: document["rows"] for name, document in documents.items()}
    parts = [machine(documents.get("run"), ceilings), decoding(rows.get("decode", []), ceilings)]
    parts += [*profiles(rows.get("decode", [])), recorded(rows.get("decode", [])), serving(rows.get("server", []))]
    parts += [tuned(rows.get("tune", [])), correctness(rows.get("correctness", [])), kernels(rows.get("kernels", []))]
    parts.append(trouble(documents))
    return "\n\n".join(part for part in parts if part)


def best(document: dict[str, Any] | None) -> dict[str, float]:
    """The device's highest rates: the better one of each library."""
    rows = [row for row in (document or {"rows": []})["rows"] if BETTER[0] in row]
    return {name: max(float(row[name]) for row in rows) for name in BETTER} if rows else {}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def machine(document: dict[str, Any] | None, ceilings: dict[str, float]) -> str:
    if document is None or "device" not in document["facts"]:
        return ""
    facts = document["facts"]
    said = [str(facts["device"]), f"driver {facts.get('nvidia_smi', {}).get('driver_version', 'unknown')}"]
    said += [f"{name} {version}" for name, version in facts.get("versions", {}).items() if name in ("jax", "jaxlib")]
    if ceilings:
        said.append(f"copies {1e-9 * ceilings['bytes_per_s']:,.0f} GB/s")
        said.append(f"matmul {1e-12 * ceilings['flops_per_s']:,.1f} TFLOP/s")
    return "; ".join(said) + "."


def decoding(rows: Sequence[Row], ceilings: dict[str, float]) -> str:
    """Decoding: our engine by format of weights, and peers."""
    header = ("weights", "rows", "ms a token", "floor ms", "of floor", "tokens/s, decoding", "tokens/s in all",
              "prompt tokens/s", "tokens a call", "dispatch ms", "ahead ms (least)", "late",
              "command buffers a step", "of them updated", "operations updated")  # fmt: skip
    lines: list[Sequence[Any]] = []
    for row in measured(rows, "token_ms"):
        floor = 1e3 * row["floor_bytes"] / ceilings["bytes_per_s"] if ceilings and "floor_bytes" in row else None
        ahead = f"{row['ahead_ms']:.2f} ({row['ahead_least_ms']:.2f})" if "ahead_ms" in row else None
        buffers = row.get("command_buffers", {})
        lines.append((
            row["weights"], row["rows"], row["token_ms"], floor, floor and floor / row["token_ms"],
            1e3 * row["rows"] / row["token_ms"], row["output_tokens_per_s"], row.get("prompt_tokens_per_s"),
            row.get("steps_per_call"), row.get("dispatch_ms"), ahead, row.get("late"), buffers.get("ran_per_step"),
            buffers.get("updated_per_step"), buffers.get("operations_updated_per_step"),
        ))  # fmt: skip
    return table(header, lines) if lines else ""


def profiles(rows: Sequence[Row]) -> Iterator[str]:
    """One step by kernel, for each form of weights and number of rows."""
    for row in measured(rows, "step_us"):
        said = [f"One step, {row['weights']}, {row['rows']} rows: {row['step_us']:,.0f} µs"]
        said += [
            f"{row['busy_us']:,.0f} in {row['kernels_per_step']:.0f} kernels and {row['idle_us']:,.0f} between them"
        ]
        if row["key"].endswith("one by one"):
            said.append("without command buffers")
        yield "; ".join(said) + "."
        header = ("kernel", "in a step", "µs each", "µs a step", "idle µs before one")
        yield table(header, row["kernels"][:KERNELS])


def recorded(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        for one in row.get("programs", []):
            counts = ["; ".join(f"{n} {kind}" for kind, n in one[how].items()) for how in ("launched", "recorded")]
            lines.append((row["key"].partition(",")[0], one["program"], *counts))
    return table(("weights", "program", "launched on their own", "recorded"), lines) if lines else ""


def serving(rows: Sequence[Row]) -> str:
    """Starts of a server, and its loads."""
    starts = [
        (row["key"], row["ready_s"], row.get("loaded_s"), row.get("compiled_s"), row.get("programs"))
        for row in rows
        if row.get("ready_s") is not None
    ]
    loads = []
    for row in measured(rows, "requests_per_s"):
        times = [(row.get(f"{name}_ms") or {}).get(which) for name in ("ttft", "itl") for which in ("p50", "p99")]
        loads.append((row["open"], row["output_tokens_per_s"], row["input_tokens_per_s"], *times, row["failed"]))
    header = ("requests at a time", "output tokens/s", "prompt tokens/s", "TTFT ms, median", "99%", "ITL ms, median",
              "99%", "failed")  # fmt: skip
    parts = [table(("start", "ready after s", "of it loading", "compiling", "programs"), starts)] if starts else []
    return "\n\n".join([*parts, table(header, loads)] if loads else parts)


def tuned(rows: Sequence[Row]) -> str:
    """What `jaxserve tune` printed."""
    said = [row["output"].strip() for row in rows if row.get("output")]
    return "\n\n".join(f"```\n{text}\n```" for text in said)


def correctness(rows: Sequence[Row]) -> str:
    counts: dict[tuple[str, str], dict[str, int]] = {}
    worst: dict[tuple[str, str], float] = {}
    for row in rows:
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
    return table(header, lines) if lines else ""


def kernels(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        for one in row.get("results", []):
            if "us" in one:
                rate = one["bytes"]
                seconds = 1e-6 * one["us"]
                lines.append((one["operation"], one["case"], one["backend"], one["us"], one["floor_us"],
                              one["fraction"], 1e-9 * rate / seconds, 1e-12 * one["flops"] / seconds))  # fmt: skip
    header = ("operation", "case", "backend", "µs", "floor µs", "of floor", "GB/s", "TFLOP/s")
    return table(header, lines) if lines else ""


def trouble(documents: dict[str, Any]) -> str:
    """Rows that are wrong, failed or cut off."""
    lines = []
    for name, document in documents.items():
        bad = [row for row in document["rows"] if row["status"] not in ("ok", "restarted")]
        lines += [f"- {name}: {row['key']}: {row['status']}: {row.get('reason', '')[:300]}" for row in bad[:FEW]]
        if len(bad) > FEW:
            lines.append(f"- {name}: {len(bad) - FEW} more")
    return "\n".join(["Not right, or not done:", "", *lines]) if lines else ""


def measured(rows: Sequence[Row], name: str) -> Iterator[Row]:
    return (row for row in rows if row["status"] == "ok" and name in row)
