"""Launches of a compiled GPU program: the instructions that XLA:GPU runs as a kernel, a copy or a library call."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

# Instructions without cost: names for memory, and the ends of asynchronous instructions.
PASSIVE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
    "copy-done", "async-done", "all-reduce-done", "all-gather-done", "all-to-all-done", "collective-permute-done",
    "partition-id", "replica-id",
}  # fmt: skip
CALLS = {"while", "conditional", "call", "async-start"}  # run other computations
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\(")


class Launch(NamedTuple):
    """One instruction: its opcode (a custom call's target), its name, and the JAX operation that it comes from."""

    kind: str
    name: str
    source: str

    def __str__(self) -> str:
        return f"{self.kind:<14} {self.name:<44} {self.source}"


def launches(text: str) -> list[Launch]:
    """All launches of a compiled program (`Compiled.as_text()`). Loop bodies count once, and of a conditional only the
    branch with most launches."""
    computations, entry = _computations(text)

    def of(name: str) -> list[Launch]:
        found = []
        for line in computations[name]:
            match = _INSTRUCTION.match(line)
            if not match or match[2] in PASSIVE:
                continue
            if match[2] in CALLS:
                branches = [of(called) for called in _called(line) if called in computations]
                found += (
                    max(branches, key=lambda some: len(list(some)), default=[])
                    if match[2] == "conditional"
                    else [x for some in branches for x in some]
                )
                if match[2] in ("call", "async-start"):
                    continue
            found.append(_launch(match, line))
        return found

    return of(entry)


class Count(NamedTuple):
    """Launches of a step: per layer on average, and outside of the layers."""

    per_layer: float
    outside: float
    layer: Counter  # (kind, source) -> average launches per layer


def count(few: str, more: str, layers: int) -> Count:
    """Counts from two compiled programs of the same step, with `layers` and twice as many equal layers."""
    first = launches(few)
    second = launches(more)
    each = (len(second) - len(first)) / layers
    grouped = [Counter((x.kind, _general(x.source)) for x in some) for some in (first, second)]
    layer = Counter({key: (n - grouped[0][key]) / layers for key, n in grouped[1].items() if n != grouped[0][key]})
    return Count(each, len(first) - layers * each, layer)


def describe(found: Count) -> str:
    """Lines that say what a layer launches."""
    lines = [f"{found.per_layer} launches per layer, {found.outside} outside the layers"]
    lines += [f"{n:6.2f}  {kind:<16} {source}" for (kind, source), n in sorted(found.layer.items())]
    return "\n".join(lines)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the entry."""
    found: dict[str, list[str]] = {}
    entry = ""
    current = None
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            current = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return found, entry


def _called(line: str) -> list[str]:
    """The computations that an instruction runs."""
    called = re.findall(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line)
    for names in re.findall(r"branch_computations=\{([^}]*)\}", line):
        called += [name.strip().lstrip("%") for name in names.split(",")]
    return called


def _launch(match: re.Match, line: str) -> Launch:
    target = re.search(r'custom_call_target="([^"]*)"', line)
    source = re.search(r'op_name="([^"]*)"', line)
    return Launch(target[1] if target else match[2], match[1], source[1] if source else "")


def _general(source: str) -> str:
    return re.sub(r"^jit\([^()]*\)/|while/body/|closed_call/", "", source)


class Exchange(NamedTuple):
    """Collectives of one kind in a program: how many, and the bytes of their results on a device, together."""

    number: int
    bytes: int


def exchanges(text: str) -> dict[str, Exchange]:
    """Kind of collective -> what a compiled program has of it. Loop bodies count once."""
    found: dict[str, Exchange] = {}
    pattern = r"= (\S.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
    for shapes, kind in re.findall(pattern, text):
        sizes = []
        for dtype, dims in re.findall(r"([a-z]+\d+\w*)\[([\d,]*)\]", shapes):
            bits = int(re.findall(r"\d+", dtype)[0])
            sizes.append(math.prod(map(int, filter(None, dims.split(",")))) * bits // 8)
        before = found.get(kind, Exchange(0, 0))
        found[kind] = Exchange(before.number + 1, before.bytes + max(sizes, default=0))
    return found
