"""Apertus: an answer has reasoning if it or the end of the prompt opens <|inner_prefix|>. Calls may end it."""

from __future__ import annotations

from jaxserve.server.reasoning import Splitter, ends_inside

OPENING = "<|inner_prefix|>"
CLOSING = "<|inner_suffix|>"


class ApertusSplitter(Splitter):
    openings = (OPENING,)
    closings = (CLOSING,)
    followers = ("<|tools_prefix|>",)


def matches(template: str) -> bool:
    return OPENING in template


def splitter(prompt: str) -> Splitter:
    return ApertusSplitter(inside=ends_inside(prompt, OPENING, CLOSING) is True)
