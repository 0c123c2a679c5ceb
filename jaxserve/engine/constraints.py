"""Which tokens requests may sample (host side): grammars, lists of allowed tokens and bad words.

Requests with a grammar are held until the grammar is compiled. For running requests, masks tell which tokens may come
next.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from jaxserve.engine.in_flight import InFlightStep
from jaxserve.execution.runner import ModelRunner
from jaxserve.grammars.grammar import Compilation, Compiler, Matcher
from jaxserve.grammars.token_mask import AllowedTokens, TokenMask
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.types import Grammar, InvalidRequestError, SequenceUpdate


@dataclass
class _Held:
    """A sequence that waits for its grammar. `aborted`: completions of its request that were aborted meanwhile."""

    seq: Sequence
    compilation: Compilation
    aborted: list[int] = field(default_factory=list)


class Constraints:
    """The grammars and masks of one engine. Owns the sequences that wait for a grammar."""

    def __init__(self, compiler: Compiler):
        self._compiler = compiler
        self._masking = LLExecutor()
        self._allowed = AllowedTokens(mask_words(compiler.vocab_size))
        self._held: dict[str, _Held] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_completions(self) -> int:
        return sum(held.seq.params.n for held in self._held.values())

    def hold(self, seq: Sequence, grammar: Grammar) -> None:
        """Keeps a sequence until its grammar is compiled; see `release`. Raises QueueFullError."""
        compilation = self._compiler.compile(grammar)
        compilation.join()
        self._held[seq.request_id] = _Held(seq, compilation)

    def abort(self, request_id: str, index: int | None) -> None:
        """Drops a held request, or one of its completions."""
        if (held := self._held.get(request_id)) is None:
            return
        if index is not None:
            held.aborted.append(index)
        if index is None or len(set(held.aborted)) == held.seq.params.n:
            del self._held[request_id]
            held.compilation.leave()

    def release(self, scheduler: Scheduler, *, patience: float) -> list[SequenceUpdate]:
        """Hands sequences whose grammar is compiled to the scheduler.

        Returns an update without tokens for each of them, and the last updates of requests whose grammar failed. Waits
        up to `patience` seconds for the first grammar.
        """
        wait([held.compilation.future for held in self._held.values()], patience, FIRST_COMPLETED)
        updates = []
        for request_id, held in list(self._held.items()):
            future = held.compilation.future
            is_done = future.done()
            error = held.compilation.error
            if not is_done and error is None:
                continue
            del self._held[request_id]
            held.compilation.leave()
            if error is None:
                held.seq.matcher = Matcher(future.result())
                scheduler.add(held.seq)
                for index in held.aborted:
                    scheduler.abort(request_id, index)
                updates.append(SequenceUpdate(request_id, 0, []))
                continue
            param = error.param if isinstance(error, InvalidRequestError) else None
            indices = set(range(held.seq.params.n)) - set(held.aborted)
            updates += [
                SequenceUpdate(request_id, index, [], "error", error=str(error), error_param=param)
                for index in sorted(indices)
            ]
        return updates

    def sample_deferred(self, step: InFlightStep, running: RunningTable, runner: ModelRunner) -> None:
        """Dispatches the sampling of a step's deferred rows. All earlier steps must have been committed."""
        for batch in step.batches:
            rows = batch.rows
            deferred = batch.deferred
            if deferred is None or deferred.sampled:
                continue
            deferred.keep(running.holds(rows)[deferred.row])
            row = deferred.row
            number = deferred.number
            if not len(row):
                continue
            slot = rows.slot[row]
            position = (rows.end - rows.num_new + 1)[row] + number
            proposed = np.where(number + 1 < rows.num_new[row], running.tokens[slot, position], -1)
            draws = np.stack([slot, number, position, proposed], axis=1).astype(np.int32)
            masks = self._masks([rows.seqs[i] for i in row.tolist()], draws, running)
            deferred.sampled = runner.sample_deferred(draws, masks)
            wants_scores = any(rows.seqs[i].params.logprobs is not None for i in set(row.tolist()))
            for _, one in deferred.sampled:
                one.tokens.copy_to_host_async()
                if wants_scores and one.scores is not None:
                    one.scores.copy_to_host_async()

    def _masks(self, seqs: list[Sequence], draws: np.ndarray, running: RunningTable) -> np.ndarray:
        """Which tokens each draw of `seqs` may give, int32 [draws, words], a bit per token. A proposal that completes
        its sequence's grammar is taken out of `draws`, so that its row ends there."""
        masks = allocate_token_bitmask(len(seqs), self._compiler.vocab_size)
        first = np.flatnonzero(draws[:, 1] == 0).tolist()
        if matchers := [(matcher.state, i) for i in first if (matcher := seqs[i].matcher) is not None]:
            fill_next_token_bitmask_par(self._masking, matchers, masks)
        for i, end in zip(first, [*first[1:], len(seqs)], strict=True):
            if (matcher := seqs[i].matcher) is not None and end > i + 1:
                followed = matcher.fill_behind(draws[i : end - 1, 3].tolist(), masks[i + 1 : end])
                draws[i + followed : end, 3] = -1
        for mask, seq, (slot, _, position, _) in zip(masks, seqs, draws.tolist(), strict=True):
            if (own := self._token_mask(seq)) is not None:
                own.apply(mask, running.tokens[slot, seq.prompt_len : position], seq.stop_ids)
        return masks

    def _token_mask(self, seq: Sequence) -> TokenMask | None:
        """Mask of the request's own lists, made at its first step; None for most requests."""
        params = seq.params
        if not (params.allowed_token_ids or params.bad_words or params.ignore_eos or params.min_tokens):
            return None
        if seq.token_mask is None:
            ends = self._compiler.vocabulary.result().eos_tokens if seq.matcher and params.ignore_eos else []
            allowed = self._allowed.mask(params.allowed_token_ids)
            seq.token_mask = TokenMask(params, allowed, ends, mask_words(self._compiler.vocab_size))
        return seq.token_mask


def mask_words(vocab_size: int) -> int:
    """int32 words of a bitmask with a bit per token."""
    return -(-vocab_size // 32)
