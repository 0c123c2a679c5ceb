"""What the host launches of a program that is compiled for a GPU which is not here."""

import re
from pathlib import Path

from jaxserve.devices.command_buffers import compiler_options


def compiled(runner, name, folder: Path) -> tuple[str, list[str]]:
    """A program's HLO, and the kinds of its thunks (XLA's units of launching) outside of command buffers. What is in
    one, in a loop or in a branch, is indented in XLA's dump."""
    dump = folder / f"dump {name}"
    dumps = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    made = runner.lower(name).compile(compiler_options=compiler_options(runner.mesh) | dumps)
    *_, sequence = sorted(dump.glob("*thunk_sequence*"), key=lambda path: len(path.name))  # after all passes, if any
    return made.as_text(), re.findall(r"^\d+: (k\w+)", sequence.read_text(), re.MULTILINE)
