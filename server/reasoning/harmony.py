"""gpt-oss: the messages of the analysis channel are the reasoning, also between calls; see
`jaxserve.server.tools.channel_messages`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.reasoning import Splitter
from jaxserve.server.tools.channel_messages import (
    CHANNEL,
    END,
    FRAME,
    MESSAGE,
    START,
    Joined,
    Message,
    MessageReader,
    MessageStops,
    Part,
    matches,
)
from jaxserve.server.tools.parsers import harmony as tool_format
from jaxserve.text.detokenizer import StopStrings

__all__ = ["matches", "splitter", "tool_format"]


class HarmonySplitter(Splitter):
    """Splits messages into reasoning and the texts of all others.

    If `passes_messages`, the rest is not texts but the other messages with their headers, in one fixed form, which the
    parser of `jaxserve.server.tools.parsers.harmony` reads.
    """

    openings = (f"{CHANNEL}analysis{MESSAGE}",)
    closings = (END,)

    def __init__(self, inside: Message | None):
        super().__init__(inside=inside is not None and inside.is_reasoning)
        self._inside = inside
        self.is_framed = inside is None
        self._reader = MessageReader(inside)
        self._reasoning, self._content = Joined(), Joined()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for _, mark in FRAME)

    @property
    def forced_closing(self) -> str:
        return f"{END}{START}assistant"

    @property
    def reasons(self) -> bool:
        return self._reader.message is not None and self._reader.message.is_reasoning

    def stop_strings(self, stops: Sequence[str]) -> StopStrings:
        return MessageStops(stops, self._inside)

    def push(self, text: str) -> tuple[str, str]:
        return self._texts(self._reader.push(text))

    def finish(self, is_cut: bool = False) -> tuple[str, str]:
        return self._texts(self._reader.finish(is_cut))

    def _texts(self, parts: list[Part]) -> tuple[str, str]:
        reasoning = rest = ""
        for part in parts:
            if part.message.is_reasoning:
                reasoning += self._reasoning.add(part)
            elif self.passes_messages:
                rest += part.message.header() * part.begins + part.text + END * part.ends
            else:
                rest += self._content.add(part)
        return reasoning, rest


def splitter(prompt: str) -> HarmonySplitter:
    return HarmonySplitter(_message_at_end(prompt))


def _message_at_end(prompt: str) -> Message | None:
    """The message in whose text a prompt ends; None if it ends in a header. `prompt` may be only the end of one: if no
    mark is in it, it is taken for the text of a final message."""
    _, start, header = prompt.rpartition(START)
    header, message, text = header.rpartition(MESSAGE)
    if message:
        return Message.read(header) if END not in text else None
    return None if start or not prompt else Message()
