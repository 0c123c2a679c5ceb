"""Splits a completion's text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from jaxserve.server.reasoning import Splitter
from jaxserve.server.tools.base import CallDelta, ToolParser
from jaxserve.text.detokenizer import ChoiceDelta
from jaxserve.types import TokenLogprob


class Piece(msgspec.Struct, kw_only=True):
    """What one choice gained that can be shown. A token whose text is held back comes with that text.

    `finish_reason` is "tool_calls" if the model stopped by itself after calls, otherwise that of ChoiceDelta.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def extend(self, later: Piece) -> None:
        """Appends a later piece of the same choice."""
        self.content += later.content
        self.reasoning += later.reasoning
        self.calls = merge_calls([*self.calls, *later.calls])
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls or self.finish_reason)


class OutputParser:
    """Turns one choice's deltas into pieces.

    Attributes:
      reasoning_tokens: number of tokens so far that belong to the reasoning.
    """

    def __init__(self, splitter: Splitter | None, tools: ToolParser | None, shows_reasoning: bool = True):
        self._splitter, self._tools, self._shows_reasoning = splitter, tools, shows_reasoning
        if splitter is not None and tools is not None:
            splitter.passes_messages = tools.reads_messages
        self._held: Piece | None = None  # tokens whose text is still held back
        self.reasoning_tokens = 0

    def push(self, delta: ChoiceDelta) -> Piece | None:
        """The piece that a delta completes; None while there is nothing to show."""
        piece, self._held = self._held or Piece(index=delta.index), None
        piece.token_ids += delta.token_ids
        piece.logprobs += delta.logprobs
        piece.finish_reason, piece.stop_reason = delta.finish_reason, delta.stop_reason
        piece.content = self._read(delta, piece) if self._splitter or self._tools else delta.text
        if piece.is_empty:
            self._held = piece
            return None
        return piece

    def _read(self, delta: ChoiceDelta, piece: Piece) -> str:
        """Adds reasoning and calls to a piece; returns the content."""
        text, ended = delta.text, delta.finish_reason is not None
        if (splitter := self._splitter) is not None:
            if splitter.reasons:
                self.reasoning_tokens += len(delta.token_ids)
            reasoning, text = splitter.push(text)
            if ended:
                more, rest = splitter.finish()
                reasoning, text = reasoning + more, text + rest
            piece.reasoning = reasoning if self._shows_reasoning else ""
        if (tools := self._tools) is None:
            return text
        parsed = tools.push(text)
        piece.calls, content = parsed.calls, parsed.content
        if ended:
            last = tools.finish()
            piece.calls, content = merge_calls([*piece.calls, *last.calls]), content + last.content
            if tools.num_calls and delta.finish_reason == "stop":
                piece.finish_reason = "tool_calls"
        return content


def merge_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """Joins the deltas of each call."""
    merged: dict[int, CallDelta] = {}
    for delta in deltas:
        if (call := merged.get(delta.index)) is None:
            merged[delta.index] = delta
        else:
            call.arguments += delta.arguments
    return list(merged.values())
