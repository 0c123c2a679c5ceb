"""The memory that programs need, by the compiler's figures of those that are compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.execution.memory import Needs
from jaxserve.execution.programs import StepProgram, bounds_code
from jaxserve.execution.signatures import AuxProgram, ProgramName


def needs_of(names: Sequence[ProgramName], compiled: Mapping[ProgramName, Any]) -> Needs:
    """The memory that programs need, by the compiler's figures of those that are compiled. The code of each other
    program is bounded by the smallest compiled one that is larger in every respect, else by the largest of all."""
    code = {name: figures.generated_code_size_in_bytes for name, figures in compiled.items()}
    upkeep = [code[name] for name in code if isinstance(name, AuxProgram)]

    def bound(name: ProgramName) -> int:
        if isinstance(name, AuxProgram):
            return max(upkeep or code.values(), default=0)  # the compiled ones sample or have the output head
        larger = [n for n in code if isinstance(n, StepProgram) and bounds_code(n, name)]
        return min((code[n] for n in larger), default=max(code.values(), default=0))

    return Needs.of(list(compiled.values()), [bound(name) for name in names if name not in compiled])
