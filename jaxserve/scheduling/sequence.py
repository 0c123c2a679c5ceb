"""An unfinished completion: its tokens and its pages. While it runs, its progress is in `RunningTable`."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxserve.adapters.registry import ServedAdapter
from jaxserve.grammars.grammar import Matcher
from jaxserve.grammars.token_mask import TokenMask
from jaxserve.limits import BACKGROUND
from jaxserve.scheduling.block_manager import HASH_BYTES, NULL_PAGE, page_hash, root_hash
from jaxserve.scheduling.image_prompts import ImagePrompt
from jaxserve.types import NO_PENALTY_ROW, FinishReason, Request, TokenLogprob

NO_SLOT = -1


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"  # without a slot until its client reads again
    FINISHED = "finished"


class Lookup(NamedTuple):
    """The result of looking up a waiting sequence in the prefix cache."""

    pages: list[int]  # cached pages that the sequence can start from
    needed: int  # available pages that placing it takes; no fewer while `gains` stay the same
    gains: tuple[int, int]  # `BlockManager.generation` at the lookup, and the sequence's number of tokens
    losses: int  # `BlockManager.losses` at the lookup


class Sequence:
    """Host state of one completion.

    It owns what does not change, its pages, and its tokens while it has no slot. While it runs, the running table owns
    its tokens and its progress, and `tokens` is a view.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        seed: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        arrival: int,
        prompt: np.ndarray | None = None,  # the request's, if it is in an array already
        adapter: ServedAdapter | None = None,
        seen: ImagePrompt | None = None,  # the request's prompt, if it has pictures
    ):
        self.request = request
        self.seen = seen
        self.images = () if seen is None else seen.images  # the pictures in its prompt
        self.adapter = adapter
        self.request_id = request.request_id
        self.index = index  # which of the request's n completions
        self.seed = seed
        self.params = request.params
        self.max_tokens = max_tokens  # most output tokens, within the model's length limit
        self.stop_ids = stop_ids
        self.order = (request.priority, arrival, index)  # lower is served first
        self.is_background = request.priority == BACKGROUND  # it steps aside for every sequence that is not

        # int32; siblings share the array, which is never written to.
        prompt = seen.tokens if seen is not None else prompt
        self.prompt = np.asarray(request.prompt_token_ids if prompt is None else prompt, np.int32)
        self.prompt_len = len(self.prompt)
        self._keep(self.prompt)  # the first `_known` of `_stored` are its tokens
        self.status = Status.WAITING
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache at the first admission
        self.arrived = time.perf_counter()
        self.queue_seconds = 0.0  # from `arrived` until the first admission
        self.num_scored = 0  # hidden states of the prompt that have been scored, or are being scored
        self.prompt_scores: list[TokenLogprob | None] = [None]  # for the prompt's tokens; the first has none
        self.pooled: np.ndarray | None = None  # float32 [hidden]: the result of pooling so far
        # Indices of siblings, which begin once this sequence, the 0-th, has computed the prompt.
        self.unforked = list(range(1, request.params.n)) if index == 0 else []

        self.matcher: Matcher | None = None  # its state in its grammar, if it has one
        self.token_mask: TokenMask | None = None  # mask of the request's own lists; made at the first step
        self.slot = NO_SLOT
        self.group = 0  # the group of devices whose slots and pages it has, or had last
        self.penalty_row = NO_PENALTY_ROW  # the devices' row of token counts, while it runs and has penalties
        self.pages: list[int] = []
        self.state_stops: list[int] = []  # see `RunningTable.state_stop`; those that it has not reached
        self.lookups: dict[int, Lookup] = {}  # while it waits: the latest for each group of devices
        self.is_resumed = False  # while it waits: it was placed before, see `Waiting.push`
        self.was_set_aside = False  # while it waits: pages have been loaded for it, see `page_loads`
        self.tokens_passing = 0  # while it waits for pages: what those that passed it were charged, see `waiting`
        self.pending_tokens = 0  # without a slot: tokens that steps still in flight sample for it
        given = request.page_hashes
        self._page_hashes = [given[at : at + HASH_BYTES] for at in range(0, len(given), HASH_BYTES)]

    @property
    def lookup(self) -> Lookup | None:
        """The latest lookup for its group of devices."""
        return self.lookups.get(self.group)

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and output so far, int32. A view, which is valid until the sequence is placed or displaced."""
        return self._stored[: self._known[0]]

    def store_in(self, row: np.ndarray, known: np.ndarray) -> None:
        """Moves the tokens to a row of the running table. `known`: a view of the table's count of them, int32 [1]."""
        row[: len(self.tokens)] = self.tokens
        self._stored = row
        self._known = known

    def take_tokens(self, count: int | None = None) -> None:
        """Takes the tokens, or the first `count` of them, back from the running table."""
        self._keep(self.tokens[:count].copy())

    def append(self, tokens: list[int]) -> None:
        """Adds tokens to a sequence without a slot; `RunningTable.append` adds them to one that has a slot."""
        self._keep(np.append(self.tokens, np.asarray(tokens, np.int32)))

    def _keep(self, tokens: np.ndarray) -> None:
        self._stored = tokens
        self._known = np.asarray([len(tokens)])

    def num_released(self, num_groups: int) -> list[int]:
        """For each group of layers, how many of its first pages the sequence has given up."""
        groups = (self.pages[group::num_groups] for group in range(num_groups))
        return [next((i for i, page in enumerate(pages) if page != NULL_PAGE), len(pages)) for pages in groups]

    @property
    def has_whole_images(self) -> bool:
        """Whether there are places in its prompt where no step may end; see `step_end`."""
        return any(one.whole for one in self.images)

    def step_end(self, start: int, end: int) -> int:
        """The last place up to `end` where a step from `start` on may end, since a picture may have to be computed as a
        whole. `start` itself: nowhere."""
        return next((max(one.first, start) for one in self.images if one.whole and one.first < end < one.end), end)

    @property
    def num_outputs(self) -> int:
        """Output tokens."""
        return int(self._known[0]) - self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.params.prompt_logprobs is not None and self.index == 0 and self.num_scored < self.prompt_len - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why its last token ends the sequence; None if it continues."""
        if self.num_outputs and (self.tokens[-1] in self.stop_ids or (self.matcher is not None and self.matcher.ended)):
            return "error" if self.matcher is not None and self.matcher.error else "stop"
        return "length" if self.num_outputs >= self.max_tokens else None

    @cached_property
    def root_hash(self) -> bytes:
        """Start of the chain of its pages' hashes."""
        salt = self.request.cache_salt
        if self.seen is not None and self.seen.salt:
            salt = f"{salt} {self.seen.salt}"
        return root_hash(salt, self.adapter.digest if self.adapter is not None else None)

    def page_hashes(self, tokens: np.ndarray, count: int, page_size: int) -> Iterator[bytes]:
        """Hashes of the first `count` pages, each computed when it is taken. The pages must be full; `tokens` are the
        sequence's."""
        yield from self._page_hashes[:count]
        for i in range(len(self._page_hashes), count):
            yield self.page_hash(tokens, i, page_size)

    def page_hash(self, tokens: np.ndarray, index: int, page_size: int) -> bytes:
        """Hash of the page `index`; of -1, the start of the chain."""
        hashes = self._page_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else self.root_hash
            start = len(hashes) * page_size
            hashes.append(page_hash(parent, tokens[start : start + page_size]))
        return hashes[index] if index >= 0 else self.root_hash

    def keep_hashes(self, count: int) -> None:
        """Keeps the hashes of the first `count` pages. The tokens of later pages have changed."""
        del self._page_hashes[count:]

    def go_back(self, count: int) -> None:
        """Returns to the state after its first `count` tokens; its grammar does too."""
        self.take_tokens(count)
        self.slot = NO_SLOT
        self.penalty_row = NO_PENALTY_ROW
        self.pages = []
        self.pending_tokens = 0
        self.num_scored = len(self.prompt_scores) - 1
        self.keep_hashes(0)
        self.lookups = {}
        if self.matcher is not None:
            self.matcher = self.matcher.fork()
            self.advance(self.tokens[self.prompt_len :].tolist())

    def advance(self, tokens: list[int]) -> bool:
        """Advances its grammar by sampled tokens; returns whether nothing can follow them."""
        if self.matcher is None or not tokens:
            return False
        self.matcher.state.consume_tokens(tokens)
        return self.matcher.ended

    def fork(self, index: int, seed: int, page_size: int) -> Sequence:
        """A sibling that shares the prompt. It recomputes the prompt's last token, to sample its own first one."""
        same = self.max_tokens, self.stop_ids, self.order[1], self.prompt, self.adapter, self.seen
        child = Sequence(self.request, index, seed, *same)
        child.matcher = self.matcher and self.matcher.fork()
        child.token_mask = self.token_mask
        child.group = self.group
        child._page_hashes = self._page_hashes[: self.prompt_len // page_size]
        return child


def child_seed(seed: int, index: int) -> int:
    """Seed of the index-th completion of a request; the 0-th keeps the request's own."""
    if index == 0:
        return seed & (2**64 - 1)
    data = seed.to_bytes(9, "little", signed=True) + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
