"""Granite 3.2, whose marks are sentences before the reasoning and before the answer.

Granite 3.3 writes <think>…</think><response>…</response>.
"""

from __future__ import annotations

from jaxserve.server.reasoning import CLOSING, OPENING, Splitter


class GraniteSplitter(Splitter):
    openings = ("Here is my thought process:", "Here's my thought process:", OPENING)
    closings = ("Here is my response:", "Here's my response:", CLOSING)
    wrappings = (("<response>", "</response>"),)


def matches(template: str) -> bool:
    return GraniteSplitter.openings[0] in template or ("<|start_of_role|>" in template and OPENING in template)


def splitter(prompt: str) -> Splitter:
    return GraniteSplitter(inside=False)
