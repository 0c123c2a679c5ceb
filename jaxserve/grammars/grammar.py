"""Structured output (host side): compiles grammars on threads, and tells which tokens a grammar allows next.

llguidance does the work (https://github.com/guidance-ai/llguidance; its docs/json_schema.md lists the supported parts
of JSON Schema). It limits its own time and memory, but recurses over grammars, so its threads need a large stack.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from jaxserve import heap
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from jaxserve.types import Grammar, InvalidRequestError, QueueFullError

log = logging.getLogger(__name__)
T = TypeVar("T")

COMPILE_SECONDS = 5.0  # a grammar that takes longer is rejected
COMPILED = 256  # most compiled grammars that are kept
MAX_QUEUED = 256  # most grammars that wait for a thread, in a server
STACK_BYTES = 2**29  # stack of a compiling thread; enough for 16,000 rules that refer to each other
_MOST_NOTED = 1000  # things left out of tools' schemas that the log tells
_noted: set[str] = set()


class Matcher:
    """The position of one completion in its grammar."""

    def __init__(self, compiled: LLMatcher):
        self._compiled = compiled
        self.state = compiled.deep_copy()

    def fork(self) -> Matcher:
        """A matcher for another completion, at the grammar's beginning."""
        return Matcher(self._compiled)

    @property
    def ended(self) -> bool:
        """Whether no token can follow, or the matcher has failed."""
        return self.state.is_stopped()

    @property
    def error(self) -> str | None:
        return _reason(self.state.get_error()) if self.state.is_error() else None

    def forced(self) -> list[int]:
        """The next tokens where the grammar leaves no choice of text. A model may write the same text in other tokens.
        Empty if the text of tokens is not known well enough."""
        return self.state.compute_ff_tokens()

    def allows(self, tokens: list[int]) -> int:
        """How many of the next `tokens` the grammar allows."""
        return self.state.validate_tokens(tokens)

    def fill_behind(self, tokens: list[int], masks: np.ndarray) -> int:
        """Writes to masks[i], int32 [tokens, words], which tokens may follow tokens[: i + 1]. Returns for how many of
        the tokens: the grammar ends before or with the others, or does not allow them."""
        followed = 0
        for i, token in enumerate(tokens):
            if not self.state.try_consume_tokens([token]):
                break
            followed += 1
            if self.ended:
                self.state.rollback(followed)
                return i
            fill_next_token_bitmask(self.state, masks, i)
        self.state.rollback(followed)
        return followed


class Compilation:
    """A grammar that waits for a thread, is being compiled, or is compiled.

    Attributes:
      future: the matcher at its beginning, or an InvalidRequestError.
    """

    def __init__(self, pool: ThreadPoolExecutor, vocabulary: Future[LLTokenizer], grammar: Grammar):
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._started: float | None = None
        self._num_waiting = 0  # requests that wait for this grammar
        self.future: Future[LLMatcher] = submit(pool, self._run)

    def _run(self) -> LLMatcher:
        tokens = self._vocabulary.result()
        self._started = time.monotonic()
        return _build(tokens, self._grammar)

    @property
    def is_queued(self) -> bool:
        return self._started is None and not self.future.done()

    @property
    def error(self) -> BaseException | None:
        """Why compiling failed or took too long; None if it did neither. Time in the queue does not count."""
        if self.future.done():
            return self.future.exception()
        late = self._started is not None and time.monotonic() - self._started > COMPILE_SECONDS
        return _error(self._grammar, f"it was not compiled within {COMPILE_SECONDS:g} s") if late else None

    def join(self) -> None:
        """Adds a waiting request."""
        self._num_waiting += 1

    def leave(self) -> None:
        """Removes a waiting request; without any, a grammar that is still queued is not compiled."""
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self.future.cancel()


class Compiler:
    """Compiles the grammars of one model's requests, and keeps the last COMPILED of them.

    `max_queued`: most grammars that wait for a thread; None is no limit.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], *, max_queued: int | None = None):
        self._folder = folder
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_queued = max_queued
        self._pool = ThreadPoolExecutor(2, "grammar")
        self._compiled: OrderedDict[Grammar, Compilation] = OrderedDict()

    @cached_property
    def vocabulary(self) -> Future[LLTokenizer]:
        """The bytes of each token, read by a thread at the first use."""
        return submit(self._pool, read_vocabulary, self._folder, self.vocab_size, self._eos_token_ids)

    def check(self, grammar: Grammar) -> None:
        """Waits until a grammar is compiled. Raises InvalidRequestError when that fails or takes too long."""
        compilation = self.compile(grammar)
        compilation.join()
        while not compilation.future.done() and compilation.error is None:
            wait([compilation.future], 0.05)
        compilation.leave()
        if (error := compilation.error) is not None:
            raise error

    def compile(self, grammar: Grammar) -> Compilation:
        """The compilation of a grammar: one that is kept, or a new one. Raises QueueFullError."""
        vocabulary = self.vocabulary
        found = self._compiled.pop(grammar, None)
        if found is None or found.future.cancelled():
            queued = sum(one.is_queued for one in self._compiled.values())
            if self._max_queued is not None and queued >= self._max_queued:
                raise QueueFullError(f"{queued} grammars wait to be compiled already; try again later")
            found = Compilation(self._pool, vocabulary, grammar)
        self._compiled[grammar] = found
        if len(self._compiled) > COMPILED:
            self._compiled.popitem(last=False)
        return found


def submit(pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> Future[T]:
    """Submits a call to a pool whose threads get a large stack: `submit` may start a thread."""
    default = threading.stack_size(STACK_BYTES)
    try:
        return pool.submit(call, *args)
    finally:
        threading.stack_size(default)


def _build(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher:
    try:
        return _matcher(tokens, grammar)
    except ValueError as error:
        parts = tuple((name, _usable(tokens, part)) for name, part in grammar.parts)
        if parts == grammar.parts:
            raise _error(grammar, str(error)) from None
    return _build(tokens, msgspec.structs.replace(grammar, parts=parts))


def _usable(tokens: LLTokenizer, part: Grammar) -> Grammar:
    """A part that compiles: the part itself or, if it is loose, as much of it as can be enforced. Raises
    InvalidRequestError else."""
    try:
        _matcher(tokens, part)
        return part
    except ValueError as error:
        if not part.is_loose:
            raise _error(part, str(error)) from None
    lenient = msgspec.structs.replace(part, is_loose=False, is_lenient=True)
    try:
        _matcher(tokens, lenient)
        return lenient
    except ValueError as error:
        _note(f"all but its type, because {error}")
        known = {name: value for name, value in json.loads(part.value).items() if name == "type"}
        return Grammar("json", json.dumps(known))


def _matcher(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compiles a grammar. Raises ValueError with llguidance's reason."""
    sources = [_source(tokens, grammar)]
    sources += [{**_source(tokens, part), "name": name} for name, part in grammar.parts]
    matcher = LLMatcher(tokens, json.dumps({"grammars": sources}), log_level=0)
    if not matcher.is_error():  # some errors appear only when the first mask is computed
        fill_next_token_bitmask(matcher, allocate_token_bitmask(1, tokens.vocab_size))
    if matcher.is_error():
        raise ValueError(_reason(matcher.get_error()))
    if grammar.is_lenient or any(part.is_lenient for _, part in grammar.parts):
        for warning in matcher.get_grammar_warnings():
            _note(warning)
    return matcher


def _note(what: str) -> None:
    """Logs what is left out of tools' schemas, once each."""
    what = what[:500]
    if what not in _noted and len(_noted) < _MOST_NOTED:
        _noted.add(what)
        log.warning("a grammar leaves out a part of a tool's schema: %s", ascii(what)[1:-1])


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The bytes of each token, by llguidance from tokenizer.json if it can read that, else by our tokenizer."""
    try:
        return _read_vocabulary(folder, vocab_size, list(eos_token_ids) or None)
    finally:
        heap.trim()  # parsing frees as much memory as the result takes


def _read_vocabulary(folder: Path, vocab_size: int, eos: list[int] | None) -> LLTokenizer:
    file = folder / "tokenizer.json"
    if file.exists():
        try:
            return LLTokenizer(file.read_text(encoding="utf-8"), vocab_size, eos)
        except ValueError:
            pass
    return LLTokenizer(
        llguidance.TokenizerWrapper(_Pieces(load_tokenizer(folder, placeholder=True), vocab_size)), eos_token=eos
    )


class _Pieces:
    """A tokenizer with llguidance's interface, which needs to encode only special tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.eos_token_id = (*tokenizer.eos_token_ids, 0)[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._special = {self.tokens[token]: token for token in self.special_token_ids if token < vocab_size}

    def __call__(self, text: str | bytes) -> list[int]:
        token = self._special.get(text.encode() if isinstance(text, str) else text)
        return [] if token is None else [token]


def _source(tokens: LLTokenizer, grammar: Grammar) -> dict[str, Any]:
    """One grammar in llguidance's own form. Raises ValueError for a grammar that cannot be expressed."""
    if grammar.kind in ("json", "json_object"):
        schema = json.loads(grammar.value or '{"type": "object"}')
        if schema is False:
            raise ValueError("the schema false allows nothing")
        lenient = grammar.is_lenient
        options = {"whitespace_pattern": WHITESPACE, "lenient": lenient, "coerce_one_of": lenient}
        schema = {} if schema is True else without_trivia(schema, _note if lenient else None)
        return {"json_schema": schema | {"x-guidance": options}}
    if grammar.parts or grammar.marks:
        marks = [_mark_rules(tokens, name, text) for name, text in grammar.marks]
        return {"lark_grammar": "\n".join([grammar.value, *marks])}
    kind: Any = {"lark": "grammar"}.get(grammar.kind, grammar.kind)
    source = llguidance.grammar_from(kind, grammar.value)
    return json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}


def _mark_rules(tokens: LLTokenizer, name: str, text: str) -> str:
    """The rules of a mark, see Grammar. A model may write it as a special token, if there is one, or as text."""
    quoted = json.dumps(text, ensure_ascii=False)
    pattern = re.sub(r"([!-/:;?@\[-^`{-~])", r"\\\1", text)  # ASCII punctuation but < = > _
    upper = name.upper()
    mark = quoted
    until = f"written_{name}"
    if (token := _special_token(tokens, text)) is not None:
        mark = f"<[{token}]> | {quoted}"
        until = f"written_{name} | NO_{upper}? <[{token}]>"
    return f"""
{name}: {mark}
until_{name}: {until}
written_{name}[lazy]: /(?s:.*){pattern}/
no_{name}: NO_{upper}?
NO_{upper}: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/
"""


def _special_token(tokens: LLTokenizer, text: str) -> int | None:
    """The special token of this text, if there is one; llguidance does not match special tokens as text."""
    ids = tokens.tokenize_str(text, parse_special=True)
    special = [token for token in ids if tokens.is_special_token(token)]
    return special[0] if len(special) == 1 and len(ids) <= 2 else None


def _reason(error: str) -> str:
    """The readable part of llguidance's error message."""
    text = error.split("<state>")[0].split("Enable 'coerce_one_of'")[0].strip().rstrip("|")
    if text == "NoExtensionBias":
        text = "no text can match it"
    return text if len(text) <= 500 else text[:500] + "…"


def _error(grammar: Grammar, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{grammar.origin} cannot be used: {why}", grammar.field)


# Prepares clients' JSON schemas for llguidance.


WHITESPACE = r" |\n( {0,32}|\t{0,8})"  # allowed between JSON tokens; limited, so that no model can repeat it forever
# Values of `format` that llguidance supports. JSON Schema lets a validator ignore others.
FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
_DATA = frozenset(["const", "default", "enum", "example", "examples"])  # keys of plain values
_NAMED = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])  # schemas by name
# Look-around and references back, which no regular language has and llguidance refuses.
_NOT_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9]|\\k<)")
_NOTES = frozenset(["$comment", "description", "title"])  # keys without effect


def without_trivia(schema: Any, leave_out: Callable[[str], None] | None = None) -> Any:
    """A schema without unknown string formats and without keywords that every value satisfies. With `leave_out`, also
    without patterns that are not regular; it is told each of them."""
    if isinstance(schema, list):
        return [without_trivia(one, leave_out) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            kept[key] = {name: without_trivia(one, leave_out) for name, one in value.items()}
        elif key in _DATA:
            kept[key] = value
        elif key == "pattern" and leave_out and isinstance(value, str) and _NOT_REGULAR.search(value):
            leave_out(f"the pattern {value}")
        elif not _is_trivial(key, value):
            kept[key] = without_trivia(value, leave_out)
    return kept


def _is_trivial(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key == "uniqueItems":
        return value is False
    if key == "propertyNames":
        said = {name: one for name, one in value.items() if name not in _NOTES} if isinstance(value, dict) else value
        return said is True or said in ({}, {"type": "string"})
    return False
