"""Prompts that ask for the text between a prefix and a suffix, for models that were trained with markers around both.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", https://arxiv.org/abs/2207.14255. The
markers and their order are those of the models' own cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import InvalidRequestError


class _Form(NamedTuple):
    """Texts of the marker tokens. Without a marker for the middle, the suffix comes first and the prefix last."""

    prefix: str
    suffix: str
    middle: str | None = None


_FORMS = (
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Seed Coder
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Form("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Form("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# What follows the middle in training: the end of the text, the next file, or padding.
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    *("<fim_pad>", "<file_sep>", "<fim-pad>", "▁<EOT>"),
)


# What stands before a file's name, in prompts that show several files, and before the repository's name.
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")
_REPOS = ("<|repo_name|>", "<repo_name>", "<reponame>")
_NAME_WITHIN = "<file_sep>"  # with this one, the file that is filled in has its name behind the prefix's marker
# Names of what has none in a request, which are those that llama.cpp uses.
_PROJECT = "myproject\n"
_FILENAME = "filename\n"

_LEAD = "☺"  # a character that no tokenizer joins with what follows


def marker_ids(tokenizer: Tokenizer) -> list[int] | None:
    """Token ids of the markers, in the order of `_Form`: those that the model's files name, or known ones. None if
    there are none."""
    named = [tokenizer.fim_tokens.get(role) for role in _Form._fields]
    forms = [_Form(*cast("list[str]", named)), *_FORMS] if all(named) else _FORMS
    found = ([tokenizer.token_id(marker) for marker in form if marker] for form in forms)
    return cast("list[int] | None", next((ids for ids in found if None not in ids), None))


class FillInMiddle:
    """How a tokenizer's model is asked for the middle.

    Attributes:
      lead: what has to stand before the suffix when it is encoded. Some tokenizers put a space before every text, and
        `lead` keeps it away from the suffix, as in Code Llama's own code.
      end_ids: tokens that end a middle, besides those that end every text.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Raises InvalidRequestError if the tokenizer has no markers for it."""
        if (ids := marker_ids(tokenizer)) is None:
            raise InvalidRequestError(
                "suffix needs a model that fills in the middle; this model's tokenizer has none of the known markers, "
                "such as <|fim_prefix|>",
                "suffix",
                "unsupported_parameter",
            )
        self._prefix, self._suffix, *self._middle = ids
        self._opening = [i for i in tokenizer.encode("")[:1] if i == tokenizer.bos_token_id]
        lead = tokenizer.encode(_LEAD, add_special_tokens=False)
        spaced = tokenizer.token_bytes(lead[0]).startswith(b" ")
        self.lead, self._lead = (_LEAD, len(lead)) if spaced else ("", 0)
        named = [text for role in ("pad", "repo", "file") if (text := tokenizer.fim_tokens.get(role))]
        ends = dict.fromkeys((*_ENDS, *named))
        self.end_ids = tuple(i for text in ends if (i := tokenizer.token_id(text)) is not None)
        self._file = _first(tokenizer, tokenizer.fim_tokens.get("file"), *_FILES)
        repo = _first(tokenizer, tokenizer.fim_tokens.get("repo"), *_REPOS) if self._file else []
        self._project = [*repo, *tokenizer.encode(_PROJECT, add_special_tokens=False)] if repo else []
        self._name = tokenizer.encode(_FILENAME, add_special_tokens=False) if repo else []
        self._name_within = self._file == _first(tokenizer, _NAME_WITHIN)

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int], files: Sequence[Sequence[int]] = ()) -> list[int]:
        """The prompt's token ids. `prefix` and `suffix` are the ids of the two texts without special tokens, with
        `lead` before the suffix; `files` are those of other files, each with its name in the first line."""
        name = self._name if files else []
        before = [self._prefix, *(name if self._name_within else []), *prefix]
        after = [self._suffix, *suffix[self._lead :]]
        parts = [*before, *after, *self._middle] if self._middle else [*after, *before]
        if not files:
            return [*self._opening, *parts]
        others = (token for file in files for token in (*self._file, *file))
        return [*self._opening, *self._project, *others, *self._file, *([] if self._name_within else name), *parts]


def _first(tokenizer: Tokenizer, *texts: str | None) -> list[int]:
    """The id of the first of these texts that is a token; empty if none is."""
    found = (tokenizer.token_id(text) for text in texts if text)
    return [i for i in found if i is not None][:1]
