"""Structured output (host side): grammars, compiled off the engine's loop, and what each allows next.

llguidance parses and masks (https://github.com/guidance-ai/llguidance; its docs/json_schema.md says what of JSON Schema
it knows). It bounds time and memory by itself, but walks grammars recursively: hence threads with a large stack.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from jaxserve.tokenizer import Tokenizer, load_tokenizer
from jaxserve.types import Grammar, InvalidRequestError

COMPILE_SECONDS = 5.0  # a grammar that takes longer is refused
COMPILED = 256  # grammars that are kept
STACK_BYTES = 2**29  # of a compiling thread; 16,000 rules that name each other need a part of it
WHITESPACE = r" |\n( {0,32}|\t{0,8})"  # what JSON may hold between its parts: no model can go on with it forever


class Matcher:
    """Where one completion stands in its grammar."""

    def __init__(self, compiled: LLMatcher):
        self._compiled = compiled
        self.state = compiled.deep_copy()

    def fork(self) -> Matcher:
        """Another completion, at its beginning."""
        return Matcher(self._compiled)

    @property
    def ended(self) -> bool:
        """Nothing can follow, or it failed."""
        return self.state.is_stopped()

    @property
    def error(self) -> str | None:
        return _reason(self.state.get_error()) if self.state.is_error() else None


class Compiler:
    """Compiles the grammars of one model's requests, and keeps them."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._folder, self.vocab_size, self._eos_token_ids = folder, vocab_size, eos_token_ids
        self._pool = ThreadPoolExecutor(2, "grammar")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()

    @cached_property
    def vocabulary(self) -> Future[LLTokenizer]:
        """The bytes of each token; the first to ask has them read in the background."""
        return self._submit(read_vocabulary, self._folder, self.vocab_size, self._eos_token_ids)

    def check(self, grammar: Grammar) -> None:
        """Waits until it is compiled. Raises InvalidRequestError when it cannot be, or not in time."""
        try:
            self.compile(grammar).result(COMPILE_SECONDS)
        except TimeoutError:
            raise too_slow() from None

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """The matcher at its beginning, or an InvalidRequestError."""
        vocabulary = self.vocabulary
        found = self._compiled.pop(grammar, None) or self._submit(_build, vocabulary, grammar)
        self._compiled[grammar] = found
        if len(self._compiled) > COMPILED:
            self._compiled.popitem(last=False)
        return found

    def _submit(self, *call) -> Future:
        usual = threading.stack_size(STACK_BYTES)  # of threads that the pool may start now
        try:
            return self._pool.submit(*call)
        finally:
            threading.stack_size(usual)


def _build(vocabulary: Future[LLTokenizer], grammar: Grammar) -> LLMatcher:
    tokens = vocabulary.result()
    try:
        matcher = LLMatcher(tokens, _source(grammar), log_level=0)
    except ValueError as error:
        raise InvalidRequestError(f"the grammar cannot be used: {error}", "grammar") from None
    if not matcher.is_error():  # the first mask shows what is wrong with some
        fill_next_token_bitmask(matcher, allocate_token_bitmask(1, tokens.vocab_size))
    if matcher.is_error():
        raise InvalidRequestError(f"the grammar cannot be used: {_reason(matcher.get_error())}", "grammar")
    return matcher


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The bytes of each token; those of tokenizer.json where it is of a kind that llguidance reads."""
    eos = list(eos_token_ids) or None
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
    """A tokenizer as llguidance asks for it; it never needs to encode."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.eos_token_id = (*tokenizer.eos_token_ids, 0)[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def _source(grammar: Grammar) -> str:
    """In llguidance's own form. Raises ValueError when it has none."""
    if grammar.kind in ("json", "json_object"):
        schema = json.loads(grammar.value or '{"type": "object"}')
        if schema is False:
            raise ValueError("the schema false allows nothing")
        return LLMatcher.grammar_from_json_schema(
            {} if schema is True else schema,
            overrides={"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False},
        )
    kind: Any = {"lark": "grammar"}.get(grammar.kind, grammar.kind)
    return llguidance.grammar_from(kind, grammar.value)


def _reason(error: str) -> str:
    """An error of llguidance without its inner state."""
    text = error.split("<state>")[0].split("Enable 'coerce_one_of'")[0].strip().rstrip("|")
    if text == "NoExtensionBias":
        text = "no text can match it"
    return text if len(text) <= 500 else text[:500] + "…"


def too_slow() -> InvalidRequestError:
    return InvalidRequestError(f"the grammar was not compiled within {COMPILE_SECONDS:g} s", "grammar")
