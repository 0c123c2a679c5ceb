"""Gemma 4: <|channel>thought, a line break, the reasoning, <channel|>. Calls may end it."""

from __future__ import annotations

from jaxserve.server.reasoning import Splitter, ends_inside

OPENING = "<|channel>thought"
CLOSING = "<channel|>"


class GemmaSplitter(Splitter):
    openings = (OPENING,)
    closings = (CLOSING,)
    followers = ("<|tool_call>",)


def matches(template: str) -> bool:
    return OPENING in template and CLOSING in template


def splitter(prompt: str) -> Splitter:
    return GemmaSplitter(inside=ends_inside(prompt, OPENING, CLOSING) is True)
