"""Splits a completion's text into reasoning, content and tool calls."""

from __future__ import annotations

import msgspec

from jaxserve.server.reasoning import Splitter
from jaxserve.server.tools.base import Parsed, ToolParser
from jaxserve.text.detokenizer import ChoiceDelta
from jaxserve.types import TokenLogprob


class Piece(Parsed, kw_only=True):
    """What one choice gained that can be shown. A token whose text is held back comes with that text.

    `finish_reason` is "tool_calls" if the model stopped by itself after calls, otherwise that of ChoiceDelta.
    """

    index: int
    reasoning: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def extend(self, later: Piece) -> None:
        """Appends a later piece of the same choice."""
        self.reasoning += later.reasoning
        for part in later.parts:
            self.add(part)
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class OutputParser:
    """Turns one choice's deltas into pieces. `one_call`: of the calls, only the first is kept.

    Attributes:
      reasoning_tokens: number of tokens so far that belong to the reasoning.
    """

    def __init__(
        self,
        splitter: Splitter | None,
        tools: ToolParser | None,
        shows_reasoning: bool = True,
        *,
        one_call: bool = False,
    ):
        self._splitter = splitter
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self._one_call = one_call
        if splitter is not None and tools is not None:
            splitter.passes_messages = tools.reads_messages
        self._held: Piece | None = None  # tokens whose text is still held back
        self.reasoning_tokens = 0

    def push(self, delta: ChoiceDelta) -> Piece | None:
        """The piece that a delta completes; None while there is nothing to show."""
        piece = self._held or Piece(index=delta.index)
        self._held = None
        piece.token_ids += delta.token_ids
        piece.logprobs += delta.logprobs
        piece.finish_reason = delta.finish_reason
        piece.stop_reason = delta.stop_reason
        self._read(delta, piece)
        if piece.parts or piece.reasoning or piece.finish_reason:
            return piece
        self._held = piece
        return None

    def _read(self, delta: ChoiceDelta, piece: Piece) -> None:
        """Adds reasoning, content and calls to a piece."""
        text = delta.text
        ended = delta.finish_reason is not None
        is_cut = delta.finish_reason == "length"
        if (splitter := self._splitter) is not None:
            if splitter.reasons:
                self.reasoning_tokens += len(delta.token_ids)
            reasoning, text = splitter.push(text)
            if ended:
                more, rest = splitter.finish(is_cut)
                reasoning = reasoning + more
                text = text + rest
            piece.reasoning = reasoning if self._shows_reasoning else ""
        if (tools := self._tools) is None:
            piece.add(text)
            return
        parts = tools.push(text).parts
        if ended:
            parts += tools.finish(is_cut).parts
            if tools.num_calls and delta.finish_reason == "stop":
                piece.finish_reason = "tool_calls"
        for part in parts:
            if isinstance(part, str) or part.index == 0 or not self._one_call:
                piece.add(part)
