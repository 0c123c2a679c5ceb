"""Messages in channels: OpenAI's harmony format, which gpt-oss writes.

    <|start|>assistant<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>

A message has a header and a text. The header names a channel, and the recipient of a call as `to=functions.NAME`,
before or after the channel. See https://github.com/openai/harmony/blob/main/docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from jaxserve.text.detokenizer import StopMatcher, StopStrings

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
FUNCTIONS = "functions."
FRAME = (  # the marks that grammars use, by name
    ("begin", START), ("channel", CHANNEL), ("message", MESSAGE), ("constrain", CONSTRAIN), ("end", END),
)  # fmt: skip
MAX_HEADER = 1024  # characters
_ENDS = (END, CALL, RETURN, START)  # of a text; `<|start|>` also begins the next header
_BEGINNINGS = (START, CHANNEL, MESSAGE, *_ENDS, "to=")  # of a header
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]+)")


def matches(template: str) -> bool:
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


class Message(msgspec.Struct, frozen=True):
    """A message's header."""

    channel: str = "final"
    recipient: str | None = None

    @classmethod
    def read(cls, header: str) -> Message:
        channels = _CHANNEL.findall(header)
        recipient = _RECIPIENT.search(header.replace(CHANNEL, " "))
        return cls(channels[-1] if channels else "final", recipient[1] if recipient else None)

    @property
    def function(self) -> str | None:
        """The name of the function that the message calls; None if it calls none of the client's functions.

        The other recipients (`python`, `browser.search`) are tools that a server may build in. There are none here, so
        that a message to them is ordinary text in its channel.
        """
        name = (self.recipient or "").partition(FUNCTIONS)[2]
        return name if name and self.recipient == FUNCTIONS + name else None

    @property
    def is_reasoning(self) -> bool:
        return self.channel == "analysis" and self.function is None

    @property
    def is_content(self) -> bool:
        return self.channel != "analysis" and self.function is None

    def header(self) -> str:
        """The header in one fixed form, with the marks around it."""
        to = f" to={self.recipient}" if self.recipient else ""
        return f"{START}assistant{to}{CHANNEL}{self.channel}{MESSAGE}"


class Part(msgspec.Struct, frozen=True):
    """The next part of a message's text. `begins`, `ends`: the first and the last part. `before`: marks and headers
    since the last part."""

    message: Message
    text: str = ""
    before: str = ""
    begins: bool = False
    ends: bool = False


class MessageReader:
    """Reads messages from a growing text.

    `inside`: the message whose text the reader begins in; None if it begins with a header. A text where a header is due
    and that cannot be one is read as a message in the final channel.

    Attributes:
      message: the message whose text is being read; None in a header.
    """

    def __init__(self, inside: Message | None = None):
        self.message = inside
        self._buffer = self._before = ""
        self._is_new = inside is not None  # the message has no part yet
        self._is_named = False  # `<|start|>` came before the header

    def push(self, text: str) -> list[Part]:
        """Takes the next piece of text; returns the parts that are certain now."""
        self._buffer += text
        parts: list[Part] = []
        while self._header() if self.message is None else self._text(parts):
            pass
        return parts

    def finish(self, is_cut: bool = False) -> list[Part]:
        """Ends the text; returns what was held back. An incomplete header is dropped. If the limit of tokens cut the
        text (`is_cut`), so is half a mark, and the last message does not end."""
        is_text = "<|" not in self._buffer and self._buffer.strip() and not self._is_named
        if self.message is None and is_text and not is_cut:
            self._begin(Message())
        held = self._buffer
        self._buffer = ""
        if self.message is None:
            return []
        return [Part(self.message, "" if is_cut else held, self._take_before(), self._is_new, ends=not is_cut)]

    def rest(self) -> str:
        """Ends the text; returns all that no part has had."""
        held = self._buffer
        self._buffer = ""
        return self._take_before() + held

    def _begin(self, message: Message) -> None:
        self.message = message
        self._is_new = True
        self._is_named = False

    def _take_before(self) -> str:
        before = self._before
        self._before = ""
        return before

    def _header(self) -> bool:
        """In a header: takes it if it is complete. Returns whether there is more to read."""
        if not self._is_named:
            begun = self._buffer.lstrip()
            self._before += self._buffer[: len(self._buffer) - len(begun)]
            self._buffer = begun
            if not any(mark.startswith(begun[: len(mark)]) for mark in _BEGINNINGS):
                self._begin(Message())
                return True
        place, mark = _first(self._buffer, (MESSAGE, *_ENDS))
        if (place if mark else len(self._buffer) - len(RETURN)) > MAX_HEADER:
            self._begin(Message())
            return True
        if not mark:
            return False
        header = self._buffer[:place]
        self._buffer = self._buffer[place + len(mark) :]
        self._before += header + mark
        if mark == MESSAGE:
            self._begin(Message.read(header))
        else:
            self._is_named = mark == START
        return True

    def _text(self, parts: list[Part]) -> bool:
        """In a text: takes what is certain of it. Returns whether there is more to read."""
        assert self.message is not None
        place, mark = _first(self._buffer, _ENDS)
        if not mark:
            held = (n for end in _ENDS for n in range(1, len(end)) if self._buffer.endswith(end[:n]))
            place = len(self._buffer) - max(held, default=0)
        text = self._buffer[:place]
        self._buffer = self._buffer[place + len(mark) :]
        if text or mark or self._is_new:
            parts.append(Part(self.message, text, self._take_before(), self._is_new, ends=bool(mark)))
            self._is_new = False
        if mark:
            self._before = mark
            self.message = None
            self._is_named = mark == START
        return bool(mark)


class Joined:
    """Joins the texts of messages, with an empty line between two of them."""

    separator: ClassVar[str] = "\n\n"

    def __init__(self) -> None:
        self._is_empty = True
        self._is_due = False

    def add(self, part: Part) -> str:
        """The text that the part adds."""
        self._is_due |= part.begins and not self._is_empty
        if not part.text:
            return ""
        before = self.separator if self._is_due else ""
        self._is_empty = self._is_due = False
        return before + part.text


class MessageStops(StopStrings):
    """Stop strings that are looked for in the messages that a client sees as content. `inside`: see MessageReader."""

    def __init__(self, stops: Sequence[str], inside: Message | None):
        super().__init__(stops)
        self._inside = inside

    def matcher(self, include_in_output: bool) -> StopMatcher:
        return _MessageStopMatcher(self, include_in_output, self._inside) if self.stops else StopMatcher(self)


class _MessageStopMatcher(StopMatcher):
    """Returns the whole text, marks included. A stop string does not go on from one message to another."""

    def __init__(self, stops: StopStrings, include_in_output: bool, inside: Message | None):
        super().__init__(stops, include_in_output)
        self._reader = MessageReader(inside)

    def push(self, text: str) -> tuple[str, str | None]:
        shown = ""
        for part in self._reader.push(text):
            if part.before or part.begins:
                shown += super().flush() + part.before
            if part.message.is_content:
                more, matched = super().push(part.text)
                shown += more
                if matched is not None:
                    return shown, matched
            else:
                shown += part.text
        return shown, None

    def skip(self, text: str) -> str:
        return super().flush() + "".join(part.before + part.text for part in self._reader.push(text))

    def flush(self) -> str:
        return super().flush() + self._reader.rest()


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """The position of the first of the marks, and the mark; (length, "") if there is none."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, default=(len(text), ""))
