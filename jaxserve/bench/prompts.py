"""Prompts for benchmarks: random ones, ones with a common prefix, and those of recorded conversations.

Prompts are lists of token ids, with exact lengths, if the server accepts these; otherwise texts of common words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_CHARACTERS_PER_TOKEN = 4  # roughly, in English; estimates the tokens of a recorded answer
# limits of the recorded prompts and answers that are used
_MIN_CHARACTERS = 16
_MAX_CHARACTERS = 4096

_TEXT = (
    "the of and to in is that for it was on are as with they be at this have from or had by but what some we can out "
    "other were all there when up use your how said each she which do their time if will way about many then them "
    "would like so these her long make thing see him two has look more day could go come did number sound no most "
    "people my over know water than call first who may down side been now find any new work part take get place made "
    "live where after back little only round man year came show every good me give our under name very through just "
    "form great think say help low line before turn cause same mean differ move right boy old too does tell set three "
    "want air well also play small end put home read hand port large spell add even land here must big high such "
    "follow act why ask men change went light kind off need house picture try us again animal point mother world near "
    "build self earth father head stand own page should country found answer school grow study still learn plant"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Prompt:
    """A prompt, as token ids or text, and the number of tokens to generate."""

    content: list[int] | str
    output_len: int


@dataclass(frozen=True)
class Lengths:
    """Tokens per request: at least 1, and uniform within a fraction `range_ratio` (0 to 1) of the given lengths."""

    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1 or not 0 <= self.range_ratio <= 1:
            raise ValueError(
                f"lengths must be at least 1 and the range ratio in [0, 1], got {self.input_len} input tokens, "
                f"{self.output_len} output tokens, ratio {self.range_ratio}"
            )

    def draw(self, random: np.random.Generator) -> tuple[int, int]:
        return self._draw(random, self.input_len), self._draw(random, self.output_len)

    def _draw(self, random: np.random.Generator, mean: int) -> int:
        low = round(mean * (1 - self.range_ratio))
        high = round(mean * (1 + self.range_ratio))
        return int(random.integers(max(1, low), max(1, high), endpoint=True))


@dataclass(frozen=True)
class Vocabulary:
    """The elements of random prompts: `ids` or, if None, words of known numbers of tokens."""

    ids: Sequence[int] | range | None = None
    tokens_per_word: float = 1.0

    def draw(self, random: np.random.Generator, tokens: int) -> list[int] | list[str]:
        """A random piece of a prompt with this many tokens (approximately, for words)."""
        if self.ids is not None:
            return [int(self.ids[i]) for i in random.integers(len(self.ids), size=tokens)]
        count = max(1, round(tokens / self.tokens_per_word))
        return [WORDS[i] for i in random.integers(len(WORDS), size=count)]

    def join(self, pieces: list[int] | list[str]) -> list[int] | str:
        return pieces if self.ids is not None else " ".join(pieces)  # type: ignore[return-value,arg-type]


def random_prompts(vocabulary: Vocabulary, lengths: Lengths, count: int, seed: int) -> list[Prompt]:
    """Prompts without a common prefix."""
    return prefix_prompts(vocabulary, lengths, count, seed, prefix_len=0, num_prefixes=1)


def prefix_prompts(
    vocabulary: Vocabulary, lengths: Lengths, count: int, seed: int, *, prefix_len: int, num_prefixes: int
) -> list[Prompt]:
    """Prompts that begin with one of `num_prefixes` prefixes of `prefix_len` tokens, in turn."""
    if prefix_len < 0 or num_prefixes < 1:
        raise ValueError(f"there must be a prefix of 0 or more tokens, got {num_prefixes} of {prefix_len} tokens")
    random = np.random.default_rng(seed)
    prefixes: list[list] = [vocabulary.draw(random, prefix_len) if prefix_len else [] for _ in range(num_prefixes)]
    prompts = []
    for i in range(count):
        input_len, output_len = lengths.draw(random)
        own = vocabulary.draw(random, input_len)
        prompts.append(Prompt(vocabulary.join(prefixes[i % num_prefixes] + own), output_len))
    return prompts


def sharegpt_prompts(path: Path, count: int, seed: int, output_len: int | None = None) -> list[Prompt]:
    """The first questions of recorded conversations, in random order and without repetition.

    `path` is a JSON list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}.
    The output length is `output_len`, or by default that of the recorded answer, estimated from its characters. Raises
    ValueError when the file is not of this form, or has too few usable conversations.
    """
    try:
        conversations = [item.get("conversations", item.get("conversation")) for item in json.loads(path.read_bytes())]
        turns = [[(str(turn["from"]), str(turn["value"])) for turn in turns or []] for turns in conversations]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not in the ShareGPT format: {error!r}") from None
    usable = []
    for (asker, question), (_, answer) in (t[:2] for t in turns if len(t) >= 2):
        sizes = (len(question), len(answer))
        if asker in ("human", "user") and min(sizes) >= _MIN_CHARACTERS and max(sizes) <= _MAX_CHARACTERS:
            usable.append(Prompt(question, output_len or len(answer) // _CHARACTERS_PER_TOKEN))
    if len(usable) < count:
        raise ValueError(
            f"{path} has {len(usable)} usable conversations (of {_MIN_CHARACTERS} to {_MAX_CHARACTERS} characters a "
            f"turn), and {count} are needed; ask for fewer requests"
        )
    order = np.random.default_rng(seed).permutation(len(usable))[:count]
    return [usable[i] for i in order]
