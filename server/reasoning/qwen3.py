"""Qwen3 and its like: an answer reasons where it, or the end of the prompt, opens <think>."""

from __future__ import annotations

from jaxserve.server.reasoning import CLOSING, OPENING, Splitter, ends_inside


def matches(template: str) -> bool:
    return OPENING in template and CLOSING in template and "<｜Assistant｜>" not in template


def splitter(prompt: str) -> Splitter:
    return Splitter(inside=ends_inside(prompt) is True)
