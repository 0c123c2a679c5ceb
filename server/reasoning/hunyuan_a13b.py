"""Hunyuan: <think>REASONING</think><answer>ANSWER</answer>, unless the prompt has closed the reasoning."""

from __future__ import annotations

from jaxserve.server.reasoning import CLOSING, Splitter, ends_inside


class HunyuanSplitter(Splitter):
    wrappings = (("<answer>", "</answer>"),)


def matches(template: str) -> bool:
    return CLOSING in template and "<answer>" in template


def splitter(prompt: str) -> Splitter:
    return HunyuanSplitter(inside=ends_inside(prompt) is True)
