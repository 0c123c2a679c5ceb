"""Kimi K2 Thinking: an answer has reasoning if it or the end of the prompt opens <think>. Calls may end it."""

from __future__ import annotations

from jaxserve.server.reasoning import OPENING, Splitter, ends_inside


class KimiSplitter(Splitter):
    followers = ("<|tool_calls_section_begin|>",)


def matches(template: str) -> bool:
    return OPENING in template and "<|im_middle|>" in template


def splitter(prompt: str) -> Splitter:
    return KimiSplitter(inside=ends_inside(prompt) is True)
