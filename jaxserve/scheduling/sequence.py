"""One completion in the making: its tokens and its pages. While it runs, its progress is in `RunningTable`."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxserve.grammars.grammar import Matcher
from jaxserve.grammars.token_mask import TokenMask
from jaxserve.scheduling.block_manager import HASH_BYTES, page_hash, root_hash
from jaxserve.types import NO_PENALTY_ROW, FinishReason, Request, TokenLogprob

NO_SLOT = -1


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"  # set aside until its client reads on
    FINISHED = "finished"


class Lookup(NamedTuple):
    """What the prefix cache had for a sequence that waits, when it was looked up."""

    pages: list[int]
    needed: int  # available pages; it needs as many or more until the cache has another generation
    num_tokens: int  # that it had
    generation: int  # of the cache


class Sequence:
    """Host state of one completion."""

    def __init__(
        self,
        request: Request,
        index: int,
        seed: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        arrival: int,
        tokens: np.ndarray | None = None,  # the prompt's, where they are in an array already
    ):
        self.request = request
        self.request_id = request.request_id
        self.index = index  # which of the request's n completions
        self.seed = seed
        self.params = request.params
        self.max_tokens = max_tokens  # of output; the model's length limit is counted in
        self.stop_ids = stop_ids
        self.order = (request.priority, arrival, index)  # lower is served first

        # Its tokens, int32; while it runs: as they were when it got its slot. The array is replaced, never written to.
        self.tokens = np.asarray(request.prompt_token_ids if tokens is None else tokens, np.int32)
        self.prompt_len = len(request.prompt_token_ids)
        self.status = Status.WAITING
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache at the first admission
        self.arrived = time.perf_counter()
        self.queue_seconds = 0.0  # from then until the first admission
        self.num_scored = 0  # hidden states of the prompt that have been scored, or are being scored
        self.prompt_scores: list[TokenLogprob | None] = [None]  # of the prompt's tokens; the first has none
        # Siblings that begin when this one, the 0-th, has computed the prompt.
        self.unforked = list(range(1, request.params.n)) if index == 0 else []

        self.matcher: Matcher | None = None  # where it stands in its grammar, if it has one
        self.token_mask: TokenMask | None = None  # what its request's own lists allow, once they were asked
        self.slot = NO_SLOT
        self.penalty_row = NO_PENALTY_ROW  # where the device counts its tokens, while it runs and has penalties
        self.pages: list[int] = []
        self.lookup: Lookup | None = None  # while it waits
        self.pending_tokens = 0  # while it does not run: tokens that steps still in flight were to draw for it
        given = request.page_hashes
        self._page_hashes = [given[at : at + HASH_BYTES] for at in range(0, len(given), HASH_BYTES)]

    @property
    def num_outputs(self) -> int:
        """Output tokens, of a sequence that does not run."""
        return len(self.tokens) - self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of its prompt are asked for, and some are still to be computed."""
        return self.params.prompt_logprobs is not None and self.index == 0 and self.num_scored < self.prompt_len - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why its last token ends it, None if it goes on; of a sequence that does not run."""
        if self.num_outputs and (self.tokens[-1] in self.stop_ids or (self.matcher is not None and self.matcher.ended)):
            return "error" if self.matcher is not None and self.matcher.error else "stop"
        return "length" if self.num_outputs >= self.max_tokens else None

    @cached_property
    def root_hash(self) -> bytes:
        """Where the chain of its pages' hashes begins."""
        return root_hash(self.request.cache_salt)

    def page_hashes(self, tokens: np.ndarray, count: int, page_size: int) -> Iterator[bytes]:
        """Hashes of the first `count` pages, computed as they are taken; these must be full of `tokens`, which are this
        sequence's."""
        for i in range(count):
            yield self.page_hash(tokens, i, page_size)

    def page_hash(self, tokens: np.ndarray, index: int, page_size: int) -> bytes:
        """Hash of the page `index`, as `page_hashes` gives it; -1 is where the chain begins."""
        hashes = self._page_hashes
        while len(hashes) <= index:
            parent, start = hashes[-1] if hashes else self.root_hash, len(hashes) * page_size
            hashes.append(page_hash(parent, tokens[start : start + page_size]))
        return hashes[index] if index >= 0 else self.root_hash

    def keep_hashes(self, count: int) -> None:
        """From the page `count` on, its tokens are others now."""
        del self._page_hashes[count:]

    def go_back(self, tokens: np.ndarray) -> None:
        """Has these tokens and nothing else; its grammar stands where they lead."""
        self.tokens, self.slot, self.penalty_row, self.pages, self.pending_tokens = (
            tokens,
            NO_SLOT,
            NO_PENALTY_ROW,
            [],
            0,
        )
        self.num_scored = len(self.prompt_scores) - 1
        self.keep_hashes(0)
        self.lookup = None
        if self.matcher is not None:
            self.matcher = self.matcher.fork()
            self.advance(tokens[self.prompt_len :].tolist())

    def advance(self, tokens: list[int]) -> bool:
        """Takes tokens that were drawn to its grammar; returns whether nothing can follow."""
        if self.matcher is None or not tokens:
            return False
        self.matcher.state.consume_tokens(tokens)
        return self.matcher.ended

    def fork(self, index: int, seed: int, page_size: int) -> Sequence:
        """A sibling that shares the prompt. It recomputes the prompt's last token, to sample its own first one."""
        prompt = self.tokens[: self.prompt_len]
        child = Sequence(self.request, index, seed, self.max_tokens, self.stop_ids, self.order[1], prompt)
        child.matcher = self.matcher and self.matcher.fork()
        child.token_mask = self.token_mask
        child._page_hashes = self._page_hashes[: self.prompt_len // page_size]
        return child


def child_seed(seed: int, index: int) -> int:
    """Seed of the index-th completion of a request; the 0-th keeps the request's own."""
    if index == 0:
        return seed & (2**64 - 1)
    data = seed.to_bytes(9, "little", signed=True) + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
