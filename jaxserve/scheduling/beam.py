"""Beam search on copy-on-write pages (host side).

A beam is a sequence in a slot. In a round every beam of a request draws once; what counts are the most likely tokens
with their log-probabilities, not the one that was drawn. Then the best continuations take over the slots: the pages of
a beam are those of the beam that it continues, shared until one of them writes.

The rules are those of Hugging Face transformers' `generate(num_beams=n, early_stopping=False)`: of the best
continuations, those among the first n that end are kept, by log-probability / length ** length_penalty. It is over once
n have ended and the best that goes on, so measured, is no better than the worst of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from jaxserve.limits import MAX_LOGPROBS
from jaxserve.scheduling.block_manager import common_prefix
from jaxserve.scheduling.logprobs import read_scores
from jaxserve.scheduling.running_table import DetailedUpdate
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.stats import EngineStats
from jaxserve.types import InvalidRequestError, Request, SequenceUpdate, TokenLogprob


@dataclass(frozen=True)
class Hypothesis:
    """An output so far."""

    score: float  # the sum of its log-probabilities
    entries: tuple[TokenLogprob, ...]  # of its tokens

    def then(self, entry: TokenLogprob) -> Hypothesis:
        return Hypothesis(self.score + entry.logprob, (*self.entries, entry))

    def value(self, length_penalty: float) -> float:
        return self.score / len(self.entries) ** length_penalty


@dataclass
class Group:
    """The beams of one request."""

    request: Request
    max_tokens: int
    stop_ids: frozenset[int]
    first: Sequence
    seqs: list[Sequence]
    beams: list[Hypothesis] = field(default_factory=lambda: [Hypothesis(0.0, ())])  # of the sequences
    ended: list[Hypothesis] = field(default_factory=list)  # the best first, at most n
    # Of those that drew in this round: what they may go on with, (token, log-probability), the most likely first.
    drawn: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the outputs so far."""
        return len(self.beams[0].entries)


class Beams:
    """The requests of one engine that search."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: tuple[int, ...]):
        self._scheduler, self._eos_token_ids = scheduler, eos_token_ids
        self._groups: dict[str, Group] = {}

    def check(self, request: Request, tokens: int, stops: int) -> None:
        """Raises InvalidRequestError for a search that cannot run; it has `tokens` at most, and `stops` stop ids."""
        blocks, width = self._scheduler.blocks, request.params.n
        if (most := min(MAX_LOGPROBS - stops, self._scheduler.running.num_slots)) < width:
            raise InvalidRequestError(f"with use_beam_search n must be at most {most}, got {width}", "n")
        if (pages := width * (blocks.pages_for(tokens) + 1)) > (room := blocks.capacity * 99 // 100):
            raise InvalidRequestError(
                f"{width} beams of {tokens} tokens need {pages} KV pages; there are {room}: lower n or max_tokens",
                "n",
            )

    def start(self, request: Request, max_tokens: int, stop_ids: frozenset[int], arrival: int) -> None:
        """Queues a search: first a single beam, whose draw yields the others."""
        few = msgspec.structs.replace(request.params, n=1, logprobs=request.params.n + len(stop_ids), temperature=0.0)
        single = msgspec.structs.replace(request, params=few)
        seq = Sequence(single, 0, 0, max_tokens + 1, frozenset(), arrival)
        self._groups[request.request_id] = Group(request, max_tokens, stop_ids, seq, [seq])
        self._scheduler.add(seq)

    @property
    def groups(self) -> dict[str, Group]:
        """The searches that are under way, by request."""
        return dict(self._groups)

    def start_over(self, groups: dict[str, Group]) -> None:
        """Forgets all searches; then these begin again. None of their sequences may be known to the scheduler."""
        self._groups = {}
        for group in groups.values():
            self.start(group.request, group.max_tokens, group.stop_ids, group.first.order[1])

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def abort(self, request_id: str) -> None:
        self._groups.pop(request_id, None)
        self._scheduler.abort(request_id)

    def take(self, detail: DetailedUpdate, scores: np.ndarray) -> None:
        """Takes in what a beam may go on with; the token that it drew is forgotten."""
        seq, running = detail.seq, self._scheduler.running
        running.known[seq.slot] -= 1
        running.total[seq.slot] -= 1
        entry = read_scores(scores[0, detail.row], 0, seq.params.logprobs or 0)
        self._groups[seq.request_id].drawn[seq] = entry.top

    def advance(self, counters: EngineStats) -> list[SequenceUpdate]:
        """Goes on with every search whose beams have all drawn; returns what has come to an end, and counts it."""
        updates = []
        for request_id, group in list(self._groups.items()):
            # A beam that was preempted since draws again.
            group.drawn = {seq: top for seq, top in group.drawn.items() if self._is_idle(seq)}
            if len(group.drawn) == len(group.seqs) and self._next_round(group):
                updates += self._updates(group)
                counters.prompt_tokens += len(group.request.prompt_token_ids)
                counters.generation_tokens += sum(len(one.entries) for one in group.ended)
                self.abort(request_id)
        return updates

    def _is_idle(self, seq: Sequence) -> bool:
        running = self._scheduler.running
        return seq.slot >= 0 and bool(running.computed[seq.slot] == running.total[seq.slot])

    def _next_round(self, group: Group) -> bool:
        """Chooses the continuations; returns whether that was the last round."""
        params = group.request.params
        places = {seq: i for i, seq in enumerate(group.seqs)}
        found = [
            (-(group.beams[places[seq]].score + logprob), places[seq], rank, token, logprob)
            for seq, top in group.drawn.items()
            for rank, (token, logprob) in enumerate(top, start=1)
        ]
        length = len(group.beams[0].entries) + 1
        going: list[tuple[int, Hypothesis]] = []
        for position, (_, place, rank, token, logprob) in enumerate(sorted(found)):
            alternatives = group.drawn[group.seqs[place]][: params.logprobs or 0]
            hypothesis = group.beams[place].then(TokenLogprob(token, logprob, rank, alternatives))
            if token not in group.stop_ids and length < group.max_tokens:
                going.append((place, hypothesis))
            elif position < params.n:
                group.ended.append(hypothesis)
        del going[params.n :]
        penalty = params.length_penalty
        group.ended = sorted(group.ended, key=lambda one: -one.value(penalty))[: params.n]
        if not going:
            return True
        if len(group.ended) == params.n and going[0][1].value(penalty) <= group.ended[-1].value(penalty):
            return True
        self._rearrange(group, going)
        return False

    def _rearrange(self, group: Group, going: list[tuple[int, Hypothesis]]) -> None:
        """Gives each continuation a slot, its parent's where that is not taken, and its parent's pages."""
        scheduler, running, parents = self._scheduler, self._scheduler.running, group.seqs
        length, prompt_len = int(running.known[parents[0].slot]), group.first.prompt_len
        heirs = {place: at for at, (place, _) in reversed(list(enumerate(going)))}  # the first of each parent
        spare = [seq for place, seq in enumerate(parents) if place not in heirs]
        group.seqs = []
        for at, (place, hypothesis) in enumerate(going):
            token, parent = hypothesis.entries[-1].token_id, parents[place]
            output = running.tokens[parent.slot, prompt_len:length]
            if heirs[place] == at:
                seq = parent
            elif spare:
                seq = spare.pop()
                self._take_over(seq, parent.pages)
                running.tokens[seq.slot, prompt_len:length] = output
            else:
                index = 1 + max(seq.index for seq in parents + group.seqs)
                seq = parent.fork(index, 0, running.page_size)
                seq.tokens = np.concatenate([seq.tokens, output, np.asarray([token], np.int32)])
                scheduler.blocks.share(parent.pages)
                scheduler.adopt(seq, parent.pages.copy(), length, like=parent.slot)
            group.seqs.append(seq)
            if seq.slot >= 0:
                running.tokens[seq.slot, length] = token
                running.known[seq.slot] = running.total[seq.slot] = length + 1
                running.maybe_shared.add(seq)
        for seq in spare:
            scheduler.abort(seq.request_id, seq.index)
        group.beams = [hypothesis for _, hypothesis in going]
        group.drawn = {}

    def _take_over(self, seq: Sequence, pages: list[int]) -> None:
        """Gives a running sequence the pages of another; mostly the first of them are its own already."""
        scheduler = self._scheduler
        running, blocks = scheduler.running, scheduler.blocks
        kept = common_prefix(seq.pages, pages)
        blocks.share(pages[kept:])
        blocks.free(seq.pages[kept:])
        seq.pages[kept:] = pages[kept:]
        seq.keep_hashes(kept)
        running.num_registered[seq.slot] = min(running.num_registered[seq.slot], kept)
        running.show_pages(seq, kept)

    def _updates(self, group: Group) -> list[SequenceUpdate]:
        """The outputs of a search that is over, the best first."""
        updates = []
        for index, one in enumerate(group.ended):
            ids = [entry.token_id for entry in one.entries]
            update = SequenceUpdate(group.request.request_id, index, ids, "length")
            if ids[-1] in group.stop_ids:
                update.finish_reason = "stop"
                update.stop_token = None if ids[-1] in self._eos_token_ids else ids[-1]
            if group.request.params.logprobs is not None:
                update.logprobs = list(one.entries)
            updates.append(update)
        updates[0].num_cached_tokens = group.first.num_cached or 0
        return updates
