"""Which tokens of the running sequences the next step computes: decodes first, then prompts within the token budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows


@dataclass(frozen=True)
class TokenBudget:
    """How many tokens a step may compute in each group of devices."""

    most: int  # at least the number of slots, so that every decode fits in every step
    chunk: int | None = None  # limit for a step that computes prompts while others decode; None: `most`
    bursts: bool = True  # many prompts may use more than `chunk`
    least: int = 0  # tokens that prompts get beside any number of decodes, if `most` has room for them
    stages: int = 1  # of a pipeline: so many steps share `most` tokens of prompts, so that all stages have work
    always: bool = False  # `chunk` also limits steps in which nothing decodes
    whole: int = 0  # tokens of the largest picture, if its tokens are computed in one step

    def short(self) -> TokenBudget:
        """The same for steps that are to be short even if nothing decodes."""
        return replace(self, bursts=False, always=True)

    def for_prompts(self, decodes: int, prompts: int, patches: int = 0) -> int:
        """Tokens for prompts beside `decodes` rows; `prompts` is the number of other sequences, waiting ones included.
        Decodes count against the chunk, and so do the `patches` of pictures that are encoded before the step, but
        prompts keep at least an eighth of it, or half of it with bursts. With bursts the chunk grows when prompts
        outnumber a quarter of the decodes, and prompts get at least as many tokens as there are decodes: where
        arithmetic takes the time, this doubles that of a step."""
        if (chunk := self.chunk) is None or not (decodes or self.always):
            return max(-(-self.most // self.stages), min(decodes + 1, self.most)) - decodes
        if self.bursts:
            chunk *= max(1, 4 * prompts // decodes)
        least = max(-(-chunk // 2), decodes) if self.bursts else max(-(-chunk // 8), self.least)
        return min(self.most - decodes, max(chunk - decodes - patches, least, self.whole))


def choose_rows(
    running: RunningTable,
    tokens_per_call: int,
    budget: TokenBudget,
    num_waiting: int,
    turns: MicroBatches,
    patches: int = 0,
) -> Rows:
    """The rows of the next step. A decoding row samples up to `tokens_per_call` tokens. turns: which of them decode.
    patches: of pictures that are encoded before the step."""
    batch = running.batch
    total = running.total[batch.slot]
    start = running.computed[batch.slot]
    left = total - start  # tokens to compute
    spare = batch.limit - total  # tokens that may still be sampled
    decodes, prompts = _decodes_and_prompts(running, num_waiting, turns)
    num_new = np.minimum(spare, tokens_per_call)
    if tokens_per_call > 1 and (batch.any_masked or batch.any_beams):
        num_new[batch.one_at_a_time] = np.minimum(spare, 1)[batch.one_at_a_time]
    checks = running.proposes and bool(running.proposed[batch.slot[decodes]].any())
    if decodes.all() and not checks:  # the usual case
        columns = (
            batch.slot,
            batch.slot_generation,
            start,
            batch.one,
            num_new,
            batch.none,
        )
        return Rows(batch.seqs, *columns, only_decodes=True)
    decoding = np.flatnonzero(decodes)
    one = batch.one[decoding]
    if checks:  # the step samples a token after each proposal, and one after the row's last known token
        one = 1 + running.proposed[batch.slot[decoding]]
    elif not prompts.any():
        return running.rows([batch.seqs[i] for i in decoding.tolist()], one, num_new[decoding], only_decodes=True)
    most = np.minimum(left, running.ahead(batch.slot))
    group = running.group_of(batch.slot)
    parts = []
    for number in range(running.device_groups):
        here = group == number
        decoded = one[group[decoding] == number]
        others = (
            np.count_nonzero(here) - len(decoded) - turns.held_back[number] + -(-num_waiting // running.device_groups)
        )
        room = budget.for_prompts(int(decoded.sum()), int(others), patches)
        some = np.flatnonzero(prompts & here)
        parts.append(_prompt_chunks(batch.seqs, some, start, left, most, spare, room))
    chunks, count, last = map(np.concatenate, zip(*parts, strict=True))
    seqs = [batch.seqs[i] for i in np.concatenate([decoding, chunks]).tolist()]
    return running.rows(seqs, np.concatenate([one, count]), np.concatenate([one, last]))


def next_decodes(running: RunningTable, num_waiting: int, turns: MicroBatches) -> list[Sequence]:
    """The sequences that decode in the next step."""
    seqs, (decodes, _) = running.batch.seqs, _decodes_and_prompts(running, num_waiting, turns)
    return [seqs[i] for i in np.flatnonzero(decodes).tolist()]


def _decodes_and_prompts(running: RunningTable, num_waiting: int, turns: MicroBatches) -> tuple[np.ndarray, np.ndarray]:
    """Which sequences of the running batch decode in the next step, and which have a prompt to compute; bool each."""
    batch = running.batch
    total = running.total[batch.slot]
    known = running.known[batch.slot]
    left = total - running.computed[batch.slot]
    decodes = (left == 1) & (batch.limit > total) & (running.image_stop[batch.slot] > running.computed[batch.slot])
    if batch.any_beams:  # a beam waits until all beams of its request have sampled and were rearranged
        decodes &= ~running.beams[batch.slot] | (known == total)
    prompts = (left > 0) & ~decodes & (known == total)
    if running.steps_aside:
        decodes &= ~batch.background
        prompts &= ~batch.background
    if turns.stages > 1:
        decodes = turns.choose(running, decodes, may_wait=not num_waiting and not prompts.any())
    return decodes, prompts


@dataclass(slots=True)
class _Chunk:
    """Tokens of a prompt that a step computes. lends: how many of them new requests may still have."""

    seq: Sequence
    count: int
    lendable: int = 0


class AdmissionBudget:
    """Tokens that new requests may compute beside a step's rows, in each group of devices.

    These are what the rows leave of the budget, and half of each chunk that does not end its prompt. Halves are lent
    to new requests whose prompts end in this step thereby, unless these are less important: short prompts need not wait
    for a long one that runs. Long prompts still end in their order. `patches`: as in `choose_rows`.
    """

    def __init__(
        self,
        running: RunningTable,
        rows: Rows,
        budget: TokenBudget,
        turns: MicroBatches,
        num_waiting: int,
        patches: int = 0,
    ):
        self._rows = rows
        groups = running.device_groups
        group = running.group_of(rows.slot)
        self._free = []
        for number in range(groups):
            count = rows.count[group == number]
            decodes = int(np.count_nonzero(count == 1))
            others = running.num_running(number) - decodes - int(turns.held_back[number]) + -(-num_waiting // groups)
            self._free.append(budget.for_prompts(decodes, others, patches) - (int(count.sum()) - decodes))
        self._fewest = max(budget.whole, 1)
        self._charges = budget.chunk is not None and bool((rows.count == 1).any())
        unfinished = () if rows.only_decodes else np.flatnonzero(rows.end < running.total[rows.slot]).tolist()
        counts = {place: int(rows.count[place]) for place in unfinished}
        self._running = {
            place: _Chunk(seq := rows.seqs[place], count, _lendable(seq, count)) for place, count in counts.items()
        }
        self._newcomers: list[_Chunk] = []

    def room(self, seq: Sequence, group: int, left: int | None = None) -> int:
        """Most tokens that a group can compute of a new request, which has `left` tokens to compute; None: few
        enough."""
        free = self._free[group]
        free_to_lend = sum(chunk.lendable for chunk in self._lenders(seq, group))
        return free + free_to_lend if left is None or left <= free + free_to_lend else free

    def charge(self, patches: int) -> None:
        """A new request's pictures have so many patches to encode. It may still begin, with a token or more, or with a
        picture that is computed as a whole."""
        if self._charges:
            self._free = [max(free - patches, min(free, self._fewest)) for free in self._free]

    def offers(self, seq: Sequence, left: int, group: int = 0) -> bool:
        """Whether a new request, which has `left` tokens to compute, gets some."""
        start = len(seq.tokens) - left
        return (room := self.room(seq, group, left)) > 0 and seq.step_end(start, start + min(left, room)) > start

    def take(self, seq: Sequence, left: int, ahead: int) -> int:
        """Gives a new request its share of at most `ahead` tokens, and returns their number."""
        start = len(seq.tokens) - left
        count = seq.step_end(start, start + min(left, ahead, self.room(seq, seq.group, left))) - start
        missing = max(0, count - self._free[seq.group])
        self._free[seq.group] -= count - missing
        for chunk in self._lenders(seq, seq.group):
            lent = min(chunk.lendable, missing)
            chunk.count = chunk.count - lent
            chunk.lendable = chunk.lendable - lent
            missing = missing - lent
        self._newcomers.append(_Chunk(seq, count, _lendable(seq, count) if count < left else 0))
        return count

    def counts(self) -> np.ndarray:
        """Takes from the rows what they lent. Returns the new requests' numbers of tokens, int32 [new requests]."""
        for place, chunk in self._running.items():
            self._rows.count[place] = chunk.count
        return np.asarray([chunk.count for chunk in self._newcomers], np.int32)

    def _lenders(self, seq: Sequence, group: int) -> list[_Chunk]:
        chunks = (*self._running.values(), *self._newcomers)
        least = seq.request.priority
        return [chunk for chunk in chunks if chunk.seq.group == group and chunk.seq.request.priority >= least]


def _lendable(seq: Sequence, count: int) -> int:
    """How many of `count` tokens of a prompt others may have; none if that could cut a picture."""
    return 0 if seq.has_whole_images else count // 2


def _prompt_chunks(
    seqs: list[Sequence],
    prompts: np.ndarray,
    start: np.ndarray,
    left: np.ndarray,
    most: np.ndarray,
    spare: np.ndarray,
    budget: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spends the budget, in tokens, on `prompts` (indices of `seqs`) in their order. A prompt has `left` tokens to
    compute from `start` on, of which this step may compute `most`, and `spare` tokens to sample. The first whose tokens
    exceed the budget leaves half of what it found to equally important ones behind it that end thereby.

    Returns the indices of the prompts that get part of the budget, how many tokens each computes, and how many it
    samples: 1 if the chunk ends its prompt, else 0.
    """
    left = left[prompts]
    most = most[prompts]
    spare = spare[prompts]
    count = np.clip(budget - (np.cumsum(most, dtype=np.int32) - most), 0, most)
    for place in np.flatnonzero(count < most)[:1].tolist():
        lendable = _lendable(seqs[prompts[place]], int(count[place]))
        priority = seqs[prompts[place]].request.priority
        for other in np.flatnonzero((left <= lendable) & (most == left)).tolist():
            if other > place and left[other] <= lendable and seqs[prompts[other]].request.priority == priority:
                count[other] = left[other]
                lendable = lendable - left[other]
        count[place] -= count[place + 1 :].sum()
    for place, index in enumerate(prompts.tolist()):
        if seqs[index].images:
            begin = int(start[index])
            count[place] = seqs[index].step_end(begin, begin + int(count[place])) - begin
    last = ((count == left) & (spare > 0)).astype(np.int32)
    some = count > 0
    return prompts[some], count[some], last[some]


# Which sequences decode in the next step of a pipeline, so that its stages work on different steps at the same time.
#
# A sequence that has sampled in a step can sample again when that step has left the last stage. So running sequences
# take as many turns as there are stages: while one turn is in the last stage, the next one is in the stage before.


LONG_AGO = -(2**40)


class MicroBatches:
    """Chooses the decodes of each step. With one stage these are all decodes.

    If there are several groups of devices with sequences of their own (`groups`), each step has its share of the
    sequences of every group, so that no group idles while others work.

    Attributes:
      held_back: sequences of each group that could decode and were not chosen the last time, intp [groups].
    """

    def __init__(self, stages: int, num_slots: int, groups: int = 1):
        self.stages = stages
        self.held_back = np.zeros(groups, np.intp)
        self._step = 0
        self._planned = np.full(num_slots, LONG_AGO)  # the last step in which each slot's sequence sampled

    def choose(self, running: RunningTable, decodes: np.ndarray, *, may_wait: bool) -> np.ndarray:
        """Some of `decodes`, bool [sequences of the running batch]: as many as the turns need to be equal, those first
        that have waited longest. They are sequences whose last token has left the last stage when the step begins. If
        there is none and the step `may_wait`, they are sequences whose last token is still computed: the devices wait
        for it, and the host is still ahead of them."""
        slot = running.batch.slot
        planned = self._planned[slot]
        pending = running.total[slot] - running.known[slot]
        ready = decodes & ((planned <= self._step - self.stages) | (pending == 0))
        if may_wait and not ready.any():
            waits = decodes & (pending == 1) & ~running.batch.one_at_a_time
            ready = waits & (planned == planned[waits].min(initial=self._step))
        chosen = np.zeros_like(decodes)
        owner = running.group_of(slot)
        for group in range(len(self.held_back)):
            some = decodes & (owner == group)
            here = np.flatnonzero(ready & (owner == group))
            under_way = len(np.unique(planned[some & ~ready]))  # turns on their way through the stages
            count = int(np.count_nonzero(some))
            most = max(self.stages - under_way, 1)
            size = min(-(-count // self.stages), -(-len(here) // most))
            chosen[here[np.argsort(planned[here], kind="stable")[:size]]] = True
            self.held_back[group] = count - size
        return chosen

    def begin(self, rows: Rows) -> None:
        """A step of these rows is planned."""
        self._planned[rows.slot[rows.num_new > 0]] = self._step
        self._step += 1
