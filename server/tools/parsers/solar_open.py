"""Calls of Solar Open, in a message of their own:

<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{…}<|tool_call:end|>…<|calls|>

The ids are kept, because the template writes them into later prompts. Marks of other messages in the answer are
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers import kimi_k2
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted

CALLS = "<|tool_calls|>"
CALLS_END = "<|calls|>"
CALL = "<|tool_call:begin|>"
NAME = "<|tool_call:name|>"
ARGUMENTS = "<|tool_call:args|>"
CALL_END = "<|tool_call:end|>"
BEGIN = "<|begin|>assistant"
CONTENT = "<|content|>"
END = "<|end|>"


def matches(template: str) -> bool:
    return CALL in template and ARGUMENTS in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    names = " | ".join(f"{quoted(function.name)} arguments {function.rule}" for function in functions)
    rules = rf"""
calls: W? {one_or_more("call", "W?", many)} W? all_end?
call: begin /[A-Za-z0-9_-]{{0,64}}/ name ({names}) call_end
"""
    marks = (("begin", CALL), ("name", NAME), ("arguments", ARGUMENTS), ("call_end", CALL_END), ("all_end", CALLS_END))
    return Syntax(rules, opening=CALLS, marks=marks)


class Parser(kimi_k2.Parser):
    call_mark = CALL
    arguments_mark = ARGUMENTS
    call_end = CALL_END
    around = (CALLS, CALLS_END, BEGIN, CONTENT, END, "<|flush|>")

    def read_head(self, head: str) -> tuple[str, str]:
        call_id, _, name = head.partition(NAME)
        return call_id.strip(), name.strip()
