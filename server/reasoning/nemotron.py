"""Nemotron: an answer has reasoning if it or the end of the prompt opens <think>. A system message turns this on."""

from __future__ import annotations

from jaxserve.server.reasoning.qwen3 import splitter

__all__ = ["matches", "splitter"]


def matches(template: str) -> bool:
    return "detailed thinking" in template or "<SPECIAL_10>" in template
