"""LongCat: an answer has reasoning if it or the end of the prompt opens <longcat_think>."""

from __future__ import annotations

from jaxserve.server.reasoning import Splitter, ends_inside

OPENING = "<longcat_think>"
CLOSING = "</longcat_think>"


class LongCatSplitter(Splitter):
    openings = (OPENING,)
    closings = (CLOSING,)


def matches(template: str) -> bool:
    return OPENING in template


def splitter(prompt: str) -> Splitter:
    return LongCatSplitter(inside=ends_inside(prompt, OPENING, CLOSING) is True)
