"""Where a decode step's time goes: its kernels, from a trace by JAX's profiler."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

MOST_KERNELS = 60  # names that are listed
MOST_NAME = 100  # characters
LARGEST_GAPS = 8


class Kernel(NamedTuple):
    """One run of a kernel, or a copy. Times in ns."""

    name: str
    start: float
    duration: float


def step(folder: Path, steps: int) -> dict[str, Any]:
    """The kernels of one step on the first device, from the newest trace in a folder, which is of about `steps` equal
    steps. On CPU, the operations of XLA."""
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise RuntimeError("the profiler wrote no trace")
    return by_kernel(_kernels(traces[-1]), steps)


def _kernels(trace: Path) -> list[Kernel]:
    """Kernels in the order of their starts. A GPU's plane has a line for each stream, a TPU's one of operations; a
    CPU's operations are those events that name an operation of HLO."""
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    devices = sorted(
        (plane for plane in planes if plane.name.startswith(("/device:GPU", "/device:TPU"))),
        key=lambda plane: plane.name,
    )
    lines = [line for plane in devices[:1] or planes for line in plane.lines]
    if devices:
        streams = [line for line in lines if line.name.startswith("Stream")]
        lines = streams or [line for line in lines if line.name == "XLA Ops"]
    found = [
        Kernel(event.name, event.start_ns, event.duration_ns)
        for line in lines
        for event in line.events
        if devices or any(name == "hlo_op" for name, _ in event.stats)
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def by_kernel(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Figures of a step, in µs. kernels: name, how often in a step, time of one, time in a step, and the mean time
    before one in which nothing ran. order: the kernels of one step by their places in that list, each with its start
    in the step and its time. gaps: the longest ones, and the kernels before and after them.

    Steps are cut at a kernel that runs once in each. Without one, `whole_steps` is 0, and the whole trace counts as
    `steps` steps.
    """
    if not kernels:
        raise RuntimeError("the trace has no kernels")
    counts = Counter(kernel.name for kernel in kernels)
    marks = [name for name, count in counts.items() if steps > 2 and abs(count - steps) <= 1]
    cuts = [i for i, kernel in enumerate(kernels) if marks and kernel.name == marks[0]]
    cuts = cuts[1:] if len(cuts) > 3 else cuts  # what comes before the second one may be of another step
    whole = max(len(cuts) - 1, 0)
    used = kernels[cuts[0] : cuts[-1]] if whole else kernels
    end = kernels[cuts[-1]].start if whole else max(kernel.start + kernel.duration for kernel in used)
    count = whole or steps
    idle = []
    until = used[0].start
    for kernel in used:
        idle.append(max(kernel.start - until, 0.0))
        until = max(until, kernel.start + kernel.duration)
    groups = defaultdict(list)
    for kernel, gap in zip(used, idle, strict=True):
        groups[kernel.name].append((kernel.duration, gap))
    rows = [
        [name[:MOST_NAME], round(len(own) / count, 2), *(round(1e-3 * x, 2) for x in _times(own, count))]
        for name, own in groups.items()
    ]
    rows.sort(key=lambda row: -row[3])
    last = kernels[cuts[-2] : cuts[-1]] if whole else []
    places = {name: i for i, name in enumerate(row[0] for row in rows)}
    widest = sorted(range(1, len(used)), key=lambda i: -idle[i])[:LARGEST_GAPS]
    return {
        "whole_steps": whole,
        "step_us": 1e-3 * (end - used[0].start) / count,
        "busy_us": 1e-3 * sum(kernel.duration for kernel in used) / count,
        "idle_us": 1e-3 * (sum(idle) + max(end - until, 0.0)) / count,
        "kernels_per_step": len(used) / count,
        "kernels": rows[:MOST_KERNELS],
        "order": [
            [places[one.name[:MOST_NAME]], round(1e-3 * (one.start - last[0].start), 1), round(1e-3 * one.duration, 2)]
            for one in last
        ],
        "gaps": [[round(1e-3 * idle[i], 1), used[i - 1].name[:MOST_NAME], used[i].name[:MOST_NAME]] for i in widest],
    }


def _times(own: Sequence[tuple[float, float]], steps: int) -> tuple[float, float, float]:
    total = sum(duration for duration, _ in own)
    return total / len(own), total / steps, sum(gap for _, gap in own) / len(own)
