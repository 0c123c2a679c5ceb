"""Qwen3 and similar models: an answer has reasoning if the answer or the end of the prompt opens <think>."""

from __future__ import annotations

from jaxserve.server.reasoning import CLOSING, OPENING, Splitter, ends_inside


def matches(template: str) -> bool:
    return OPENING in template and CLOSING in template and "<｜Assistant｜>" not in template


def splitter(prompt: str) -> Splitter:
    return Splitter(inside=ends_inside(prompt) is True)
