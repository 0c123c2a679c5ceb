"""Granite 3.2, whose marks are sentences before the reasoning and before the answer. Later versions write <think>."""

from __future__ import annotations

from jaxserve.server.reasoning import CLOSING, OPENING, Splitter


class GraniteSplitter(Splitter):
    openings = ("Here is my thought process:", "Here's my thought process:", OPENING)
    closings = ("Here is my response:", "Here's my response:", CLOSING)


def matches(template: str) -> bool:
    return GraniteSplitter.openings[0] in template


def splitter(prompt: str) -> Splitter:
    return GraniteSplitter(inside=False)
