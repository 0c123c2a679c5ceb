"""Ernie 4.5: REASONING</think><response>ANSWER</response>, after a prompt that opens <think>; the inner marks may be
missing."""

from __future__ import annotations

from jaxserve.server.reasoning import CLOSING, Splitter, ends_inside


class ErnieSplitter(Splitter):
    wrappings = (("<response>", "</response>"),)


def matches(template: str) -> bool:
    """The templates of Granite and MiniMax have <response> too; the latter around results of tools."""
    others = ("<|start_of_role|>", "minimax")
    return CLOSING in template and "<response>" in template and not any(mark in template for mark in others)


def splitter(prompt: str) -> Splitter:
    return ErnieSplitter(inside=ends_inside(prompt) is True)
