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


def moving(text: str) -> tuple[list[str], list[str]]:
    """What a program allocates anew in each call, by its HLO: the types of results that are no argument's memory, and
    the instructions that read the last argument, which is the host's. XLA records those again whose arrays lie
    elsewhere than in the call before.

    Results that are an argument's memory must be those of the cache and the slots, each in its own place: arrays that
    changed places would lie elsewhere in each call.
    """
    head = text.partition("\n")[0]
    entry = text[text.index("\nENTRY ") :]
    own = {int(result): int(argument) for result, argument in re.findall(r"\{(\d+)\}: \((\d+), \{\}, ", head)}
    assert len({argument - result for result, argument in own.items()}) == 1, own
    _, _, results = head.partition("->(")
    types = re.findall(r"([a-z]\w*\[[\d,]*\])", results[: results.index(")}")])
    arguments = re.findall(r"(%[\w.-]+) = \S+ parameter\((\d+)\)", entry)
    host, number = max(arguments, key=lambda found: int(found[1]))
    assert int(number) == max(own.values()) + 1, "the host's buffer follows the slots"
    readers = re.findall(rf"(%[\w.-]+) = .*{re.escape(host)}[,)]", entry)
    return [kind for i, kind in enumerate(types) if i not in own], readers
