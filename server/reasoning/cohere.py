"""Command R7B and A: <|START_THINKING|>…<|END_THINKING|>, then calls or <|START_RESPONSE|>…<|END_RESPONSE|>.

The models that reason without calls write <|START_TEXT|> and <|END_TEXT|> around the answer.
"""

from __future__ import annotations

from jaxserve.server.reasoning import Splitter, ends_inside

OPENING = "<|START_THINKING|>"
CLOSING = "<|END_THINKING|>"


class CohereSplitter(Splitter):
    openings = (OPENING,)
    closings = (CLOSING,)
    followers = ("<|START_ACTION|>", "<|START_RESPONSE|>", "<|START_TEXT|>")
    wrappings = (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))


def matches(template: str) -> bool:
    return OPENING in template


def splitter(prompt: str) -> Splitter:
    return CohereSplitter(inside=ends_inside(prompt, OPENING, CLOSING) is True)
