"""Stands in for llguidance on a machine that lacks it: no request there has a grammar."""

from __future__ import annotations

from typing import Any


class _Missing:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("llguidance is not installed: there are no grammars")


class LLMatcher(_Missing):
    pass


class LLTokenizer(_Missing):
    pass


class TokenizerWrapper(_Missing):
    pass


class LLExecutor:
    """Belongs to every engine, and has nothing to do."""


def grammar_from(kind: str, value: str) -> str:
    raise RuntimeError("llguidance is not installed: there are no grammars")
