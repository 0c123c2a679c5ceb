"""Beam search on copy-on-write pages (host side).

A beam is a sequence. In a round, every beam of a request samples once. The sampled token is not kept: a beam's possible
continuations are the most likely tokens, which the step reports with their log-probabilities. The best continuations of
all beams become the beams of the next round. The scheduler gives each of them a sequence with the pages of the beam
that it continues, which are shared until one of them writes.

The rules are those of Hugging Face transformers' `generate(num_beams=n, early_stopping=False)`. A continuation that
ends, and is among the n best of its round, is an output. Outputs are ranked by log-probability / length **
length_penalty, and the n best are kept. The search ends once there are n outputs and the best beam ranks no higher than
the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from jaxserve.adapters.registry import ServedAdapter
from jaxserve.limits import MAX_LOGPROBS
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import DetailedUpdate, read_scores
from jaxserve.types import InvalidRequestError, Request, SequenceUpdate, TokenLogprob


@dataclass(frozen=True)
class Hypothesis:
    """The output of a beam so far."""

    score: float  # sum of the tokens' log-probabilities
    entries: tuple[TokenLogprob, ...]  # one per token

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
    beams: list[Hypothesis] = field(default_factory=lambda: [Hypothesis(0.0, ())])  # one per sequence
    ended: list[Hypothesis] = field(default_factory=list)  # outputs, the best first, at most n
    # Beams that have sampled in this round -> (token, log-probability) of each continuation, the most likely first.
    sampled: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of output tokens, which is the same for all beams of a request."""
        return len(self.beams[0].entries)


class Beams:
    """The beam searches of one engine."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: tuple[int, ...]):
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self.groups: dict[str, Group] = {}

    def check(self, request: Request, tokens: int, stops: int) -> None:
        """Raises InvalidRequestError for a search that cannot run. Each beam has at most `tokens` tokens, prompt
        included; `stops` is the number of stop ids."""
        if self._scheduler.recurrent:
            raise InvalidRequestError(
                "this model has recurrent layers, which beam search cannot copy", "use_beam_search"
            )
        blocks = self._scheduler.blocks
        width = request.params.n
        if (most := min(MAX_LOGPROBS - stops, self._scheduler.running.num_slots)) < width:
            raise InvalidRequestError(f"with use_beam_search n must be at most {most}, got {width}", "n")
        if (pages := width * (blocks.pages_for(tokens) + blocks.num_groups)) > (room := blocks.capacity * 99 // 100):
            raise InvalidRequestError(
                f"{width} beams of {tokens} tokens need {pages} KV pages; there are {room}: lower n or max_tokens",
                "n",
            )

    def start(
        self,
        request: Request,
        max_tokens: int,
        stop_ids: frozenset[int],
        arrival: int,
        adapter: ServedAdapter | None = None,
    ) -> None:
        """Queues a search. It starts with one beam, whose continuations become the others."""
        few = msgspec.structs.replace(request.params, n=1, logprobs=request.params.n + len(stop_ids), temperature=0.0)
        single = msgspec.structs.replace(request, params=few)
        seq = Sequence(single, 0, 0, max_tokens + 1, frozenset(), arrival, adapter=adapter)
        self.groups[request.request_id] = Group(request, max_tokens, stop_ids, seq, [seq])
        self._scheduler.add(seq)

    def start_over(self, groups: dict[str, Group]) -> None:
        """Forgets all searches, then starts these again. The scheduler must not have any of their sequences."""
        self.groups = {}
        for group in groups.values():
            first = group.first
            self.start(group.request, group.max_tokens, group.stop_ids, first.order[1], first.adapter)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.groups

    def abort(self, request_id: str) -> None:
        self.groups.pop(request_id, None)
        self._scheduler.abort(request_id)

    def take(self, detail: DetailedUpdate, scores: np.ndarray) -> None:
        """Notes the possible continuations of a beam from the step's `scores` (`Sampled.scores`)."""
        seq = detail.seq
        entry = read_scores(scores[0, detail.row], 0, seq.params.logprobs or 0)
        self.groups[seq.request_id].sampled[seq] = entry.top

    def advance(self, counters: EngineStats) -> list[SequenceUpdate]:
        """Runs the next round of every search whose beams have all sampled. Returns the outputs of searches that are
        over, and counts their tokens."""
        updates = []
        for request_id, group in list(self.groups.items()):
            # A beam that was preempted in the meantime samples again.
            group.sampled = {seq: top for seq, top in group.sampled.items() if self._scheduler.running.is_idle(seq)}
            if len(group.sampled) == len(group.seqs) and self._next_round(group):
                updates += self._updates(group)
                counters.prompt_tokens += len(group.request.prompt_token_ids)
                counters.generation_tokens += sum(len(one.entries) for one in group.ended)
                self.abort(request_id)
        return updates

    def _next_round(self, group: Group) -> bool:
        """Chooses the continuations; returns whether the search is over."""
        params = group.request.params
        places = {seq: i for i, seq in enumerate(group.seqs)}
        found = [
            (-(group.beams[places[seq]].score + logprob), places[seq], rank, token, logprob)
            for seq, top in group.sampled.items()
            for rank, (token, logprob) in enumerate(top, start=1)
        ]
        length = len(group.beams[0].entries) + 1
        going: list[tuple[int, Hypothesis]] = []
        for position, (_, place, rank, token, logprob) in enumerate(sorted(found)):
            alternatives = group.sampled[group.seqs[place]][: params.logprobs or 0]
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
        """Gives each continuation (index of its parent, output) a sequence that continues its parent.

        A parent's first continuation keeps the parent's sequence. The others take the sequences of beams without a
        continuation, and then new ones. Parents change last, because the others copy from them.
        """
        scheduler = self._scheduler
        parents = group.seqs
        heirs = {place: at for at, (place, _) in reversed(list(enumerate(going)))}  # first continuation of each parent
        spare = [seq for place, seq in enumerate(parents) if place not in heirs]
        index = max(seq.index for seq in parents)
        group.seqs = [parents[place] for place, _ in going]
        for at, (place, hypothesis) in enumerate(going):
            token = hypothesis.entries[-1].token_id
            parent = parents[place]
            if heirs[place] == at:
                continue
            if spare:
                group.seqs[at] = spare.pop()
                scheduler.reassign(group.seqs[at], parent, token)
            else:
                index += 1
                group.seqs[at] = scheduler.branch(parent, index, token)
        for place, at in heirs.items():
            scheduler.reassign(parents[place], parents[place], going[at][1].entries[-1].token_id)
        for seq in spare:
            scheduler.abort(seq.request_id, seq.index)
        group.beams = [hypothesis for _, hypothesis in going]
        group.sampled = {}

    def _updates(self, group: Group) -> list[SequenceUpdate]:
        """The updates for a search that is over, with the best output first."""
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
