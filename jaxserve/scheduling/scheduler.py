"""Continuous batching (host side): which tokens of which sequences the next step computes.

Each step takes, within a token budget: every decoding sequence, then the running prompts' next chunks, then
newcomers, all in order of (priority, arrival). When pages run out, the last in that order is preempted: its pages are
freed, and it waits to be computed again; its tokens come out the same.

`schedule` may be called again before `commit` of the plans before it (steps in flight): it counts tokens that only the
device knows yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.prefixes import Prefixes
from jaxserve.scheduling.running_table import DetailedUpdate, Rows, RunningTable, StepPlan
from jaxserve.scheduling.sequence import Sequence, Status, child_seed
from jaxserve.scheduling.waiting import Waiting
from jaxserve.types import SequenceUpdate, StepOutput


class Scheduler:
    """Sequences in, plans out, results back in. Knows no device."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefill_chunk: int | None = None,
        prefill_bursts: bool = True,
        penalty_rows: int | None = None,
    ):
        self.blocks, self._prefixes = blocks, Prefixes(blocks)
        self._prefill_chunk, self._prefill_bursts = prefill_chunk, prefill_bursts
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)  # every decode fits in every step
        self.running = RunningTable(max_num_seqs, blocks.page_size, max_model_len, penalty_rows)
        self.waiting = Waiting()
        self._by_request: dict[str, list[Sequence]] = {}
        self.num_streaming = 0  # requests that a client reads as they come
        self._watermark = blocks.capacity // 100
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0

    # Coming and going

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def holds_up(self) -> bool:
        """Whether somebody would go on sooner if those that run drew one token a step."""
        lineup = self.running.lineup
        return bool(lineup.seqs and (self.waiting or lineup.any_masked or lineup.any_beams))

    @property
    def has_work(self) -> bool:
        return len(self.running) > 0 or len(self.waiting) > 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def everyone(self) -> list[Sequence]:
        return [seq for siblings in self._by_request.values() for seq in siblings]

    def start_over(self, seqs: Iterable[Sequence], waiting: Waiting) -> None:
        """Forgets who is here and what the pages hold; then these sequences wait, in an empty queue that is given."""
        self.blocks.clear()
        self.running, self.waiting, self._by_request = self.running.emptied(), waiting, {}
        for seq in seqs:
            self._by_request.setdefault(seq.request_id, []).append(seq)
            self._wait(seq, resumed=seq.num_cached is not None)
        self.num_streaming = sum(siblings[0].request.streams for siblings in self._by_request.values())

    def add(self, seq: Sequence) -> None:
        self._by_request[seq.request_id] = [seq]
        self.num_streaming += seq.request.streams
        self._wait(seq)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drops one completion of a request, or all of it; what is unknown or finished is left alone."""
        for seq in list(self._by_request.get(request_id, ())):
            if index is None:
                seq.unforked = []
                self._finish(seq)
            elif index == seq.index:
                self._fork(seq, share=False)
                self._finish(seq)
            elif index in seq.unforked:
                seq.unforked.remove(index)

    def _wait(self, seq: Sequence, *, resumed: bool = False) -> None:
        seq.status = Status.WAITING
        self.waiting.push(seq, resumed=resumed)

    def _displace(self, seq: Sequence) -> None:
        """Takes pages and slot from a running sequence; what it generated may be the prefix of a later prompt."""
        running = self.running  # the last token was drawn, but its keys and values may not be written
        computed = min(int(running.computed[seq.slot]), int(running.known[seq.slot]) - 1)
        self._prefixes.register(running, seq, computed, lazily=True)
        running.displace(seq)
        self.blocks.free(seq.pages)
        seq.pages = []

    def _finish(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self.waiting.settle(seq, int(self.running.known[seq.slot]) - seq.prompt_len)
            self._displace(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        siblings = self._by_request[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._by_request[seq.request_id]
            self.num_streaming -= seq.request.streams

    def pause(self, request_id: str, paused: bool) -> None:
        """Sets what runs of a request aside, but for beams, or lets it go on; the prefix cache keeps its pages."""
        for seq in self._by_request.get(request_id, ()):
            if paused and seq.status is Status.RUNNING and not seq.params.use_beam_search:
                self._displace(seq)
                seq.status = Status.PAUSED
            elif not paused and seq.status is Status.PAUSED:
                self._wait(seq, resumed=True)

    def _preempt(self, seq: Sequence) -> None:
        self._displace(seq)
        self._wait(seq, resumed=True)
        self.num_preemptions += 1

    # Schedule

    def schedule(self, tokens_per_call: int = 1) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. Where all rows decode and no newcomer can begin,
        each may draw up to `tokens_per_call` tokens, but only one if it is `Lineup.one_at_a_time`."""
        running, preemptions = self.running, self.num_preemptions
        if tokens_per_call > 1 and self.waiting and (self._next_admissible() or self.waiting.peek().pending_tokens):
            tokens_per_call = 1
        while True:
            rows = self._choose(tokens_per_call)
            growing, missing = self._growth(rows)
            shared = self._shared_pages(rows) if running.maybe_shared else []
            needed = int(missing.sum())
            if needed + len(shared) <= self.blocks.num_available:
                break
            if len(rows) and rows.num_new.max() > 1:
                tokens_per_call = 1
            else:
                self._preempt(running.last)
        copies = self._unshare(rows, shared)
        if needed:
            pages = self.blocks.allocate(needed)
            running.add_pages([rows.seqs[i] for i in growing.tolist()], rows.slot[growing], missing, pages)
        if self.waiting and self.num_preemptions == preemptions:
            decodes = int(np.count_nonzero(rows.count == 1))
            budget = self._prompt_budget(decodes) - (int(rows.count.sum()) - decodes)
            if len(newcomers := self._admit_newcomers(budget)):
                rows = rows.extend(newcomers)
        if not len(rows):
            slot = running.lineup.slot
            if self.waiting and running.lineup.any_beams and (running.known[slot] == running.total[slot]).all():
                self._preempt(running.last)  # beams wait for those that found no place
                return self.schedule(tokens_per_call)
            return None
        running.computed[rows.slot] = rows.reach
        running.total[rows.slot] += rows.num_new
        return StepPlan(rows, copies, *running.take_news())

    def _choose(self, tokens_per_call: int) -> Rows:
        """The next tokens of the running sequences: those that decode first, then prompts as far as the budget goes."""
        running, lineup = self.running, self.running.lineup
        total, start = running.total[lineup.slot], running.computed[lineup.slot]
        left, spare = total - start, lineup.limit - total
        num_new = np.minimum(spare, tokens_per_call)
        if tokens_per_call > 1 and (lineup.any_masked or lineup.any_beams):
            num_new[lineup.one_at_a_time] = np.minimum(spare, 1)[lineup.one_at_a_time]
        decodes = (left == 1) & (spare > 0)
        if lineup.any_beams:  # what a beam goes on with is chosen once all of them have drawn
            decodes &= ~running.beams[lineup.slot] | (running.known[lineup.slot] == total)
        if decodes.all():  # mostly
            return Rows(
                lineup.seqs,
                lineup.slot,
                lineup.slot_generation,
                start,
                lineup.one,
                num_new,
                lineup.none,
                only_decodes=True,
            )
        prompts = np.flatnonzero((left > 0) & ~decodes & (running.known[lineup.slot] == total))
        decodes = np.flatnonzero(decodes)
        one = lineup.one[decodes]
        if not len(prompts):
            return self._rows([lineup.seqs[i] for i in decodes.tolist()], one, num_new[decodes], only_decodes=True)
        left, spare = left[prompts], spare[prompts]
        budget = self._prompt_budget(len(one))
        count = np.clip(budget - (np.cumsum(left, dtype=np.int32) - left), 0, left)
        last = ((count == left) & (spare > 0)).astype(np.int32)
        some = count > 0
        index = np.concatenate([decodes, prompts[some]])
        return self._rows(
            [lineup.seqs[i] for i in index.tolist()],
            np.concatenate([one, count[some]]),
            np.concatenate([one, last[some]]),
        )

    def _prompt_budget(self, decodes: int) -> int:
        """Tokens of prompts beside so many who decode: what these leave of a chunk, an eighth at least, lest they
        stall; with bursts half a chunk at least, and more where prompts are many."""
        if not decodes or (chunk := self._prefill_chunk) is None:
            return self.max_num_batched_tokens - decodes
        if self._prefill_bursts:
            chunk *= max(1, 4 * (len(self.running) - decodes + len(self.waiting)) // decodes)
        least = -(-chunk // (2 if self._prefill_bursts else 8))
        return min(self.max_num_batched_tokens - decodes, max(chunk - decodes, least))

    def _rows(
        self, seqs: list[Sequence], count: np.ndarray, num_new: np.ndarray, *, only_decodes: bool = False
    ) -> Rows:
        running = self.running
        slot = np.asarray([seq.slot for seq in seqs], np.intp)
        start = running.computed[slot]
        scores_prompt = start < running.scored_until[slot]
        return Rows(
            seqs, slot, running.slot_generation[slot], start, count, num_new, scores_prompt, only_decodes=only_decodes
        )

    def _growth(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Which rows need more pages than they have, and how many more."""
        reach, num_pages = rows.reach, self.running.num_pages[rows.slot]
        growing = np.flatnonzero(reach > num_pages * self.blocks.page_size)
        return growing, self.blocks.pages_for(reach[growing]) - num_pages[growing]

    def _shared_pages(self, rows: Rows) -> list[tuple[Sequence, int]]:
        """Pages that rows would write to but must not: (sequence, index in its pages)."""
        shared = []
        for seq in self.running.maybe_shared.intersection(rows.seqs):
            index = int(self.running.computed[seq.slot]) // self.blocks.page_size
            if index < len(seq.pages) and not self.blocks.is_writable(seq.pages[index]):
                shared.append((seq, index))
        return sorted(shared, key=lambda pair: pair[0].order)

    def _unshare(self, rows: Rows, shared: list[tuple[Sequence, int]]) -> list[tuple[int, int]]:
        """Gives the rows pages of their own for these; returns copies to make, (source, target) each."""
        copies = []
        for seq, index in shared:
            if not self.blocks.is_writable(seq.pages[index]):  # the last of its owners may keep it
                copies.append(self.blocks.make_writable(seq.pages, index))
                self.running.show_pages(seq, index)
        if self.running.maybe_shared:
            self.running.maybe_shared.difference_update(rows.seqs)
        return copies

    # Admission

    def _admit_newcomers(self, budget: int) -> Rows:
        """Places waiting sequences, in order, as long as tokens of the budget, slots and pages are left."""
        seqs: list[Sequence] = []
        counts: list[int] = []
        num_new: list[bool] = []
        while budget > 0 and (seq := self._next_admissible()):
            left = self._admit(seq, budget)
            seqs.append(seq)
            counts.append(min(left, budget))
            num_new.append(left <= budget and seq.max_tokens > 0)
            budget -= counts[-1]
        return self._rows(seqs, np.asarray(counts, np.int32), np.asarray(num_new, np.int32))

    def _next_admissible(self) -> Sequence | None:
        """The first waiting sequence, if a slot and pages for all its known tokens are free."""
        if not self.waiting or (seq := self.waiting.peek()).pending_tokens or not self.running.num_places_for(seq):
            return None  # `pending_tokens`: preempted with a step in flight, so that its last token is not known yet
        room = self.blocks.num_available - (self._watermark if len(self.running) else 0)
        return seq if self._prefixes.fits(seq, room) else None

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Gives the first that waits, which was just found to fit, a slot, and pages for up to `budget` of the tokens
        that it has to compute, whose number it returns."""
        self.waiting.pop()
        seq.pages, seq.lookup = (seq.lookup.pages if seq.lookup else []), None
        self.blocks.share(seq.pages)
        computed = len(seq.pages) * self.blocks.page_size
        if seq.num_cached is None and seq.index == 0:
            seq.num_cached, seq.queue_seconds = computed, time.perf_counter() - seq.arrived
            self.prefix_queries += seq.prompt_len
            self.prefix_hits += computed
        left = len(seq.tokens) - computed
        seq.pages += self.blocks.allocate(self.blocks.pages_for(computed + min(left, budget)) - len(seq.pages))
        self.running.place(seq, computed)
        return left

    # Commit

    def commit(self, rows: Rows, tokens: np.ndarray) -> tuple[StepOutput, list[DetailedUpdate]]:
        """Takes in the tokens that a plan's rows drew; returns what there is to say of each sequence that has news.

        `rows` are the plan's, in any order and possibly cut into consecutive pieces. tokens: int32 [rows, most draws];
        -1 where a row drew none, because it was not to or had reached its end.
        """
        running, lineup, slot = self.running, self.running.lineup, rows.slot
        complete = self._advance(rows, tokens) if lineup.any_masked else []
        if rows.seqs is lineup.seqs and not (running.needs_detail or complete) and tokens.min() >= 0:  # mostly
            known = rows.end + tokens.shape[1]
            if not ((lineup.stop_ids == tokens[:, -1:]).any() or (known >= lineup.limit).any()):
                running.append(slot, tokens, tokens.shape[1])
                return StepOutput(lineup.request_ids, lineup.indices, tokens.tolist(), []), []
        drawn = np.count_nonzero(tokens >= 0, axis=1)
        held = running.slot_generation[slot] == rows.slot_generation  # the others have lost their slots since
        gained = held & (drawn > 0)
        some = np.flatnonzero(gained)
        running.append(slot[some], tokens[some], drawn[some])
        if not rows.only_decodes:
            for i in np.flatnonzero(held & (rows.count > 1)).tolist():
                self._prefixes.register(running, rows.seqs[i], int(rows.end[i]))

        # The few rows that mean more than their tokens.
        last = tokens[np.arange(len(rows)), drawn - 1]
        ended = (running.stop_ids[slot, : running.most_stops] == last[:, None]).any(axis=1)
        ended |= running.known[slot] >= running.limit[slot]
        ended[complete] = True
        special = ended | ~gained | np.asarray([seq in running.needs_detail for seq in rows.seqs])
        plain = np.flatnonzero(~special)
        seqs, ids = [rows.seqs[i] for i in plain.tolist()], tokens[plain].tolist()
        if (drawn[plain] < tokens.shape[1]).any():
            ids = [some[:count] for some, count in zip(ids, drawn[plain].tolist(), strict=True)]
        output = StepOutput([seq.request_id for seq in seqs], [seq.index for seq in seqs], ids, [])
        details = []
        for i in np.flatnonzero(special).tolist():
            seq, ids = rows.seqs[i], tokens[i, : drawn[i]].tolist()
            ends = bool(ended[i]) and bool(ids or rows.end[i] >= seq.prompt_len)  # the latter: max_tokens is 0
            if (one := self._settle(seq, ids, i, int(rows.num_new[i]), ends)) is not None:
                output.updates.append(one.update)
                details.append(one)
        return output, details

    def _advance(self, rows: Rows, tokens: np.ndarray) -> list[int]:
        """Tells grammars what their rows drew; returns the rows which that completes."""
        running, first = self.running, tokens[:, 0]
        mine = running.masked[rows.slot] & (running.slot_generation[rows.slot] == rows.slot_generation) & (first >= 0)
        index = np.flatnonzero(mine)
        pairs = zip(index.tolist(), first[index].tolist(), strict=True)
        return [i for i, token in pairs if rows.seqs[i].advance([token])]

    def _settle(self, seq: Sequence, ids: list[int], row: int, num_new: int, ended: bool) -> DetailedUpdate | None:
        """Takes in a row that means more than its tokens: siblings that may begin, the end, a preemption meanwhile."""
        if seq.status is Status.FINISHED:
            return None
        if seq.status is not Status.RUNNING:  # preempted or paused since; the arrays tell of others now
            seq.pending_tokens -= num_new
            if seq.params.use_beam_search:
                return None  # draws again
            seq.tokens = np.append(seq.tokens, np.asarray(ids, np.int32))
            seq.advance(ids)
            ended = bool(ids) and seq.finish_reason is not None
            is_first = seq.num_outputs == len(ids)
        else:
            is_first = self.running.known[seq.slot] == seq.prompt_len + len(ids)
            if seq.params.logprobs is None and ids:
                self.running.needs_detail.discard(seq)
        if ids:
            self._fork(seq)
        if ended:
            self._finish(seq)
        elif not ids:
            return None
        reason = seq.finish_reason if ended else None
        return DetailedUpdate(SequenceUpdate(seq.request_id, seq.index, ids, reason), seq, row, bool(is_first))

    def _fork(self, seq: Sequence, *, share: bool = True) -> None:
        """Starts the request's other completions, from the same pages where the prompt is computed (`share`)."""
        if not seq.unforked:
            return  # mostly
        computed = seq.prompt_len - 1
        pages = seq.pages[: self.blocks.pages_for(computed)] if share and seq.pages else None
        placed = min(len(seq.unforked), self.running.num_places_for(seq)) if pages is not None else 0
        if placed:
            self.blocks.share(pages or (), placed)
        for i, index in enumerate(seq.unforked):
            child = seq.fork(index, child_seed(seq.seed, index), self.blocks.page_size)
            self.adopt(child, pages.copy() if pages is not None and i < placed else None, computed, like=seq.slot)
        if placed:
            self.running.maybe_shared.add(seq)
        seq.unforked = []

    def adopt(self, seq: Sequence, pages: list[int] | None, computed: int, *, like: int) -> None:
        """Adds a sibling of sequences that are here. It goes on from `pages`, which are its own already, hold so many
        tokens and are the first of those in the slot `like`, where a slot is free for it, and else waits."""
        self._by_request[seq.request_id].append(seq)
        if pages is not None and self.running.num_places_for(seq):
            seq.pages = pages
            self.waiting.charge(seq)
            self.running.place(seq, computed, like)
        else:
            self.blocks.free(pages or ())
            self._wait(seq, resumed=seq.params.use_beam_search)  # whose siblings wait for it

    def check_integrity(self) -> None:
        """Asserts the invariants between sequences, slots and pages."""
        self.blocks.check_integrity([seq.pages for seq in self.running])
        self.running.check_integrity()
        self.waiting.check_integrity()
        assert {seq for seq in self.everyone if seq.status is not Status.PAUSED} == {*self.running, *self.waiting}
