"""Hunyuan 3: as Qwen3 writes it, with marks that may have a suffix. The prompt ends with one of them, which tells."""

from __future__ import annotations

from jaxserve.server.reasoning import CLOSING, OPENING, Splitter, ends_inside

SUFFIXED_OPENING = "<think:opensource>"
SUFFIXED_CLOSING = "</think:opensource>"


class SuffixedSplitter(Splitter):
    openings = (SUFFIXED_OPENING,)
    closings = (SUFFIXED_CLOSING,)


def matches(template: str) -> bool:
    """The template puts the marks together from their names and the suffix."""
    return "hy_User" in template and "reasoning_mode" in template


def splitter(prompt: str) -> Splitter:
    suffixed = ends_inside(prompt, SUFFIXED_OPENING, SUFFIXED_CLOSING)
    if suffixed is not None:
        return SuffixedSplitter(inside=suffixed)
    return Splitter(inside=ends_inside(prompt, OPENING, CLOSING) is True)
