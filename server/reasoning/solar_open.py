"""Solar Open, whose answers are messages: <|think|>REASONING<|end|><|begin|>assistant<|content|>ANSWER<|end|>, or calls
in the place of the last one."""

from __future__ import annotations

from jaxserve.server.reasoning import Splitter, ends_inside

OPENING = "<|think|>"
CLOSING = "<|end|>"
BEGIN = "<|begin|>assistant"
CONTENT = "<|content|>"


class SolarSplitter(Splitter):
    openings = (OPENING,)
    closings = (CLOSING,)
    followers = ("<|tool_calls|>",)
    wrappings = ((BEGIN + CONTENT, CLOSING), (CONTENT, CLOSING))

    @property
    def forced_closing(self) -> str:
        return CLOSING + BEGIN


def matches(template: str) -> bool:
    return OPENING in template and "<|tool_calls|>" in template


def splitter(prompt: str) -> Splitter:
    return SolarSplitter(inside=ends_inside(prompt, OPENING, CLOSING) is True)
