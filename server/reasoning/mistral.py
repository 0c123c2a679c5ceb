"""Magistral and other models of Mistral: an answer has reasoning if it or the end of the prompt opens [THINK]."""

from __future__ import annotations

from jaxserve.server.reasoning import Splitter, ends_inside

OPENING = "[THINK]"
CLOSING = "[/THINK]"


class MistralSplitter(Splitter):
    openings = (OPENING,)
    closings = (CLOSING,)


def matches(template: str) -> bool:
    return OPENING in template


def splitter(prompt: str) -> Splitter:
    return MistralSplitter(inside=ends_inside(prompt, OPENING, CLOSING) is True)
