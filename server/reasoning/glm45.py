"""GLM-4.5 and later: an answer has reasoning if the answer or the end of the prompt opens <think>."""

from __future__ import annotations

from jaxserve.server.reasoning import OPENING
from jaxserve.server.reasoning.qwen3 import splitter

__all__ = ["matches", "splitter"]


def matches(template: str) -> bool:
    return "[gMASK]<sop>" in template and OPENING in template
