"""DeepSeek R1 and similar models: an answer begins with reasoning, unless the prompt has closed the reasoning.

After a tool's result V3.1 goes on without reasoning, and its template writes no mark. Calls of V3.2 and V4 may end the
reasoning.
"""

from __future__ import annotations

from jaxserve.server.reasoning import CLOSING, Splitter, ends_inside

RESULT_END = "<｜tool▁output▁end｜>"


class DeepSeekSplitter(Splitter):
    followers = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")


def matches(template: str) -> bool:
    return CLOSING in template and "<｜Assistant｜>" in template


def splitter(prompt: str) -> Splitter:
    return DeepSeekSplitter(inside=ends_inside(prompt) is not False and not prompt.rstrip().endswith(RESULT_END))
