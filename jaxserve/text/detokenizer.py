"""Turns token ids into text one at a time: emits whole characters only, cuts stop strings, makes deltas for clients.

`Detokenizer` turns tokens into text, `StopMatcher` watches that text, and `OutputProcessor` puts both together for the
completions of one request. The server and the offline API both read engine output through `OutputProcessor`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import FinishReason, Request, SequenceUpdate, TokenLogprob

_PROMPT_CONTEXT = 4  # prompt tokens that are decoded together with the first output token
_MAX_HELD_TOKENS = 4  # a character has at most four bytes, so more tokens cannot complete a broken one


class Detokenizer:
    """Text of a growing token sequence, emitted as soon as it can no longer change.

    *Raw* tokens always stand for the same bytes (byte-level BPE, sentencepiece's `<0xAB>`). They go through an
    incremental UTF-8 decoder, which holds back an unfinished character and replaces invalid bytes by U+FFFD. The text
    of other tokens depends on those before them (leading spaces, word pieces). They are decoded together with a few
    earlier tokens, whose own text is then cut off. The cost per token is constant for both kinds.

    Where sentencepiece's own decoder would replace a whole run of byte tokens because one of them is invalid, this one
    replaces the invalid bytes only, since the characters before them have been emitted already.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # ids[:read] has been emitted (or was in the prompt); ids[read:] waits for the rest of a character
        self._ids = [token for token in prompt_token_ids[-_PROMPT_CONTEXT:] if token not in self._skipped]
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        """Adds the next token; returns the text that can no longer change, possibly empty."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.raw_bytes(token_id)
        if data is not None:
            text = self._release() + self._utf8.decode(data)
            self._ids = [token_id]
            self._read = 1
            return text
        unfinished = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._ids.append(token_id)
        held = len(self._ids) - self._read
        return unfinished + self._decode_window(hold=held < _MAX_HELD_TOKENS)

    def flush(self) -> str:
        """Returns the text that was held back, with U+FFFD for an unfinished character."""
        return self._release() + self._utf8.decode(b"", final=True)

    def _release(self) -> str:
        return self._decode_window(hold=False) if len(self._ids) > self._read else ""

    def _decode_window(self, hold: bool) -> str:
        decode = self._tokenizer.decode
        before = decode(self._ids[: self._read], skip_special_tokens=False)
        text = decode(self._ids, skip_special_tokens=False)
        if hold and text.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text[len(before) :]


class StopStrings:
    """The stop strings of a request, prepared once for all of its completions.

    Attributes:
      stops: the strings, in the client's order.
      failures: the failure table of each, for Knuth-Morris-Pratt matching.
      beginnings: first character -> positions of the strings that begin with it.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self.stops = tuple(stops)
        self.failures = [_failure_table(stop) for stop in self.stops]
        self.beginnings: dict[str, list[int]] = {}
        for i, stop in enumerate(self.stops):
            self.beginnings.setdefault(stop[0], []).append(i)

    def matcher(self, include_in_output: bool) -> StopMatcher:
        """A matcher for one completion."""
        return StopMatcher(self, include_in_output)


class StopMatcher:
    """Finds the stop string that completes first in a growing text; ties go by the order of the list.

    Text that may be the beginning of a stop string is held back. Each character costs a constant time for each stop
    string whose beginning the text ends with.
    """

    def __init__(self, stops: StopStrings, include_in_output: bool = False):
        self._stops = stops
        self._begun: dict[int, int] = {}  # index of a stop string -> length of its prefix that the text ends with
        self._include = include_in_output
        self._held = ""  # the longest of these beginnings

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds a piece of text; returns the text that may be shown and, when one matches, the stop string."""
        if not self._stops.stops:
            return text, None
        buffer = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            if not self._begun and char not in self._stops.beginnings:
                continue  # the common case
            if (stop := self._advance(char)) is not None:
                self._held = ""
                return buffer[: position if self._include else position - len(stop)], stop
        self._held = buffer[len(buffer) - max(self._begun.values(), default=0) :]
        return buffer[: len(buffer) - len(self._held)], None

    def skip(self, text: str) -> str:
        """Adds a piece of text in which nothing is looked for; returns the text that may be shown."""
        return text

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the sequence."""
        held = self._held
        self._held = ""
        self._begun = {}
        return held

    def _advance(self, char: str) -> str | None:
        """Adds one character; returns the first stop string of the list that it completes."""
        before = self._begun
        self._begun = {}
        completed = []
        for i in {*before, *self._stops.beginnings.get(char, ())}:
            stop = self._stops.stops[i]
            failure = self._stops.failures[i]
            state = before.get(i, 0)
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                completed.append(i)
            elif state:
                self._begun[i] = state
        return self._stops.stops[min(completed)] if completed else None


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table


class ChoiceDelta(msgspec.Struct, kw_only=True):
    """What one completion gained since its last delta. A token whose text is held back comes with its text.

    Attributes:
      index: which of the request's n completions.
      text_offsets: for each token, where its text begins in the completion's text.
      stop_reason: the stop string or stop token id that ended it; None for the model's own end-of-sequence tokens.
      abort: a stop string ended it, and the caller must abort it in the engine, which does not know stop strings.
      error: explains a finish_reason of "error" or "abort".
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    text_offsets: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    abort: bool = False
    error: str | None = None

    def extend(self, later: ChoiceDelta) -> None:
        """Appends a later delta of the same completion, so that a sum of deltas is the completion."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text_offsets += later.text_offsets
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.abort = later.abort
        self.error = later.error


class OutputProcessor:
    """Turns the engine's updates of one request into deltas for the client.

    Attributes:
      num_cached_tokens: prompt tokens that came from the prefix cache.
      num_output_tokens: tokens of all completions, each up to the one that completed its stop string.
      prompt_logprobs: one entry per prompt token (None for the first), as far as the engine has sent them.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, stops: StopStrings | None = None):
        """`stops` are the request's stop strings, if they are prepared already."""
        stops = stops or StopStrings(request.params.stop)
        self.request = request
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._open = {index: _Choice(tokenizer, request, index, stops) for index in range(request.params.n)}

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return not self._open

    def process(self, update: SequenceUpdate) -> ChoiceDelta | None:
        """The delta of an update; None if its text is held back, or a stop string has ended the completion before."""
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *update.prompt_logprobs]
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        choice = self._open.get(update.index)
        if choice is None:
            return None
        before = choice.num_tokens
        delta = choice.process(update)
        self.num_output_tokens += choice.num_tokens - before
        if delta is not None and delta.finish_reason is not None:
            del self._open[update.index]
        return delta


class _Choice:
    """One completion: its detokenizer, its stop strings, and the delta that was not yet returned."""

    def __init__(self, tokenizer: Tokenizer, request: Request, index: int, stops: StopStrings):
        params = request.params
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._matcher = stops.matcher(params.include_stop_str_in_output)
        self._eos = tokenizer.eos_token_ids
        self._index = index
        self._length = 0  # characters of detokenized text, held ones included
        self._next = ChoiceDelta(index=index)
        self.num_tokens = 0

    def process(self, update: SequenceUpdate) -> ChoiceDelta | None:
        delta = self._next
        reason = update.finish_reason
        last = len(update.token_ids) - 1 if reason == "stop" and not update.complete else None
        for i, token in enumerate(update.token_ids):
            delta.token_ids.append(token)
            delta.text_offsets.append(self._length)
            if update.logprobs is not None:
                delta.logprobs.append(update.logprobs[i])
            self.num_tokens += 1
            matched = self._add_text(self._text_of(token, ends=i == last, stop=update.stop_token))
            if matched is not None:
                return self._finish("stop", matched, abort=reason is None)
        if reason is None:
            return self._show() if delta.text else None
        if (matched := self._add_text(self._detokenizer.flush())) is not None:
            return self._finish("stop", matched)
        delta.text += self._matcher.flush()
        delta.error = update.error
        return self._finish(reason, None if update.stop_token in self._eos else update.stop_token)

    def _text_of(self, token: int, ends: bool, stop: int | None) -> str:
        """The token's text. It is empty for the token that ended the sequence, except a stop token to be included."""
        if ends and (stop is None or not self._params.include_stop_str_in_output):
            return ""
        return self._detokenizer.push(token)

    def _add_text(self, text: str) -> str | None:
        self._length += len(text)
        if self.num_tokens <= self._params.min_tokens:  # stop strings are ignored before min_tokens
            self._next.text += self._matcher.skip(text)
            return None
        shown, matched = self._matcher.push(text)
        self._next.text += shown
        return matched

    def _finish(self, reason: FinishReason, stop_reason: str | int | None, abort: bool = False) -> ChoiceDelta:
        delta = self._show()
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        delta.abort = abort
        return delta

    def _show(self) -> ChoiceDelta:
        delta = self._next
        self._next = ChoiceDelta(index=self._index)
        return delta
