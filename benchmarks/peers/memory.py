"""A server's memory: its process and all descendants, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

MIB = 2**20
FIELDS = {"Rss": "rss_mib", "Pss": "pss_mib", "Pss_Anon": "anonymous_mib", "Pss_File": "file_mib"}


def family(process: int) -> list[int]:
    """A process and all that descend from it."""
    found = [process]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, _text(children).split())
    return found


def resident(process: int) -> dict[str, float] | None:
    """MiB that a process and its descendants hold now: `rss_mib`, pages that several map counted for each; `pss_mib`,
    those counted once, which is `anonymous_mib` and `file_mib` (and a little that is shared); `largest_mib`, the Rss of
    the largest of them; and `peak_mib`, the most that each of them has had as its Rss since it began, starting and
    compiling included, of all together. None where the system does not tell."""
    each = [_of_one(process) for process in family(process)]
    if not any(each):
        return None
    total = {name: sum(one.get(field, 0.0) for one in each) for field, name in FIELDS.items()}
    return total | {
        "largest_mib": max(one.get("Rss", 0.0) for one in each),
        "peak_mib": sum(one.get("VmHWM", 0.0) for one in each),
    }


def _of_one(process: int) -> dict[str, float]:
    lines = _text(Path(f"/proc/{process}/smaps_rollup")).splitlines()[1:]
    status = _text(Path(f"/proc/{process}/status")).splitlines() if lines else []
    lines += [line for line in status if line.startswith("VmHWM:")]
    pairs = [line.split(":") for line in lines]
    return {name: int(value.split()[0]) * 1024 / MIB for name, value in pairs}


def _text(path: Path) -> str:
    """A file of /proc; empty where the process has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""
