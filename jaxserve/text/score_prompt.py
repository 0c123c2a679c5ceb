"""Prompts of models that embed or score: end tokens, truncation, and a query and a document as one prompt."""

from __future__ import annotations

from typing import Literal

from jaxserve.text.tokenizer import Tokenizer

ScorePrompt = Literal["plain", "qwen3"]

# The prompt that Qwen3-Reranker was trained with, from its model card. As there, each part is tokenized by itself.
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def texts_of(kind: ScorePrompt, query: str, document: str, instruction: str | None = None) -> list[str]:
    """The texts of a query and a document. Each is tokenized by itself, without special tokens in its text."""
    if kind == "plain":
        return [query, document]
    return [f"<Instruct>: {instruction or QWEN3_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"]


def adds_special_tokens(kind: ScorePrompt) -> bool:
    """Whether each text gets the special tokens that the tokenizer adds."""
    return kind == "plain"


def joined(tokenizer: Tokenizer, kind: ScorePrompt, texts: list[list[int]], most: int | None = None) -> list[int]:
    """The prompt made of these texts' token ids. `most`: the most tokens that it may have; the last text is cut."""
    before = []
    after = []
    if kind == "qwen3":
        before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (_QWEN3_BEFORE, _QWEN3_AFTER))
    *others, last = texts
    ids = [*before, *(token for text in others for token in text)]
    if most is not None and len(ids) + len(last) + len(after) > most:
        last = cut(tokenizer, last, max(most - len(ids) - len(after), 1))
    return [*ids, *last, *after]


def prompt_of(
    tokenizer: Tokenizer, kind: ScorePrompt, query: str, document: str, instruction: str | None = None
) -> list[int]:
    """The prompt of a query and a document that are trusted: special tokens in their texts count as special."""
    special = adds_special_tokens(kind)
    parts = [tokenizer.encode(text, special) for text in texts_of(kind, query, document, instruction)]
    return joined(tokenizer, kind, [ended(tokenizer, ids) for ids in parts] if special else parts)


def ended(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """A text's tokens, with an end-of-sequence token if the tokenizer's settings ask for one (`add_eos_token`, as in
    e5-mistral) and its own rules have not added it already."""
    end = tokenizer.eos_token_ids[:1]
    return ids if not tokenizer.adds_eos or tuple(ids[-1:]) == end else [*ids, *end]


def cut(tokenizer: Tokenizer, ids: list[int], most: int) -> list[int]:
    """The first `most` tokens. A special token that the tokenizer puts at the end stays there."""
    if len(ids) <= most:
        return ids
    return [*ids[: most - 1], ids[-1]] if most > 1 and ids[-1] in tokenizer.special_ids else ids[:most]
