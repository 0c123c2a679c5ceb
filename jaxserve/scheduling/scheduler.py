"""Continuous batching (host side): which tokens of which sequences the next step computes.

The engine calls, once per step:

    plan = schedule()
        rows = every decoding sequence                           in order of (priority, arrival)
             + the next chunks of running prompts                while the token budget lasts
        while the rows need more pages than are available:
            preempt the last running sequence; choose the rows again
        rows += waiting sequences that find a slot and pages     while the token budget lasts; short ones borrow from
                                                                 chunks that do not end their prompts
        count the rows' tokens as computed, and add their new tokens to the totals

    details = commit(rows, tokens)                               once the devices have run the plan
        every row: append its tokens to the running table; offer full pages to the prefix cache
        rows that end, fork, want log-probabilities or have lost their slot: one at a time

A preempted sequence loses its pages and waits to be computed again. It samples the same tokens as without preemption.
`schedule` may be called again before plans are committed that check no proposals. It counts tokens only devices know.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jaxserve.scheduling.adapter_pool import AdapterPool
from jaxserve.scheduling.background import step_aside
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.image_rows import ImageRows
from jaxserve.scheduling.page_loads import PageLoads
from jaxserve.scheduling.prefix_cache import Prefixes, common_prefix, shared_pages, uncached, unshare
from jaxserve.scheduling.row_choice import AdmissionBudget, MicroBatches, TokenBudget, choose_rows
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence, Status, child_seed
from jaxserve.scheduling.step_plan import DetailedUpdate, Rows, StepPlan
from jaxserve.scheduling.waiting import Fetches, Waiting, expected_tokens
from jaxserve.types import SequenceUpdate, StepOutput


class Scheduler:
    """Turns sequences into plans of steps, and takes in the results. It knows no device."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefill_chunk: int | None = None,
        prefill_bursts: bool = True,
        prompts_first: bool = False,
        penalty_rows: int | None = None,
        recurrent: bool = False,
        adapters: AdapterPool | None = None,
        stages: int = 1,
        images: ImageRows | None = None,
    ):
        """`recurrent`: the model has layers with states that are not in pages. Sequences then share pages only if a
        snapshot of the state at the end of these pages exists. `stages`: of a pipeline. `prompts_first`: the limit
        `prefill_chunk` is one only while a client streams. `images`: of a model that sees."""
        self.blocks, self.recurrent, self._prefixes, self.loads = blocks, recurrent, Prefixes(blocks), PageLoads(blocks)
        assert not (recurrent and blocks.prefix_caching and blocks.states is None), "pages hold no states"
        assert max_num_batched_tokens >= max_num_seqs, "every decode must fit in every step"
        self.turns = MicroBatches(stages, max_num_seqs)
        self._watermark = blocks.capacity // 100
        self._has_windows = any(window is not None for window in blocks.windows)
        whole = 0 if images is None else images.whole
        self._budget = TokenBudget(max_num_batched_tokens, prefill_chunk, prefill_bursts, stages=stages, whole=whole)
        self._whole_steps = replace(self._budget, chunk=None) if prompts_first else None
        sizes = max_num_seqs, blocks.page_size, max_model_len, penalty_rows, blocks.windows
        self.running, self.images = RunningTable(*sizes, sees=images is not None), images
        self.adapters, self.waiting = adapters, Waiting(adapters=adapters)
        self.fetches: Fetches | None = None
        self._by_request: dict[str, list[Sequence]] = {}
        self.num_streaming = 0  # requests whose clients read the tokens as they come
        self.num_background = 0  # requests that step aside for others
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0

    # Coming and going

    @property
    def budget(self) -> TokenBudget:
        budget = self._budget if self._whole_steps is None or self.num_streaming else self._whole_steps
        return budget.short() if self.running.short_steps else budget

    def limit_chunk(self, tokens: int, least: int) -> None:
        """From now on, steps with prompts beside decodes have `tokens` tokens, and at least `least` of prompts."""
        self._budget = replace(self._budget, chunk=tokens, least=least)

    @property
    def holds_up(self) -> bool:
        """Whether a waiting sequence or a row would continue sooner if every step sampled one token per row."""
        batch = self.running.batch
        return bool((batch.seqs and (self.waiting or batch.any_masked or batch.any_beams)) or self.loads.active)

    @property
    def has_work(self) -> bool:
        return len(self.running) > 0 or len(self.waiting) > 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def all_sequences(self) -> list[Sequence]:
        return [seq for siblings in self._by_request.values() for seq in siblings]

    def start_over(self, seqs: Iterable[Sequence], waiting: Waiting) -> None:
        """Forgets all sequences and the contents of all pages. `seqs` then wait in `waiting`, an empty queue."""
        self.blocks.clear()
        self.loads.start_over()
        if self.images is not None:
            self.images.start_over()
        if self.adapters is not None:
            self.adapters.start_over()
        self.running = self.running.emptied()
        self.waiting = waiting
        self._by_request = {}
        for seq in seqs:
            self._by_request.setdefault(seq.request_id, []).append(seq)
            self._wait(seq, resumed=seq.num_cached is not None)
        self.num_streaming = sum(siblings[0].request.streams for siblings in self._by_request.values())
        self.num_background = sum(siblings[0].is_background for siblings in self._by_request.values())

    def add(self, seq: Sequence) -> None:
        self._by_request[seq.request_id] = [seq]
        self.num_streaming += seq.request.streams
        self.num_background += seq.is_background
        self._wait(seq, held=self.fetches is not None and self.fetches.begin(seq))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drops one completion of a request, or all of them. Ignores one that is unknown or finished."""
        for seq in list(self._by_request.get(request_id, ())):
            if index is None:
                seq.unforked = []
                self._finish(seq)
            elif index == seq.index:
                self._fork(seq, share=False)
                self._finish(seq)
            elif index in seq.unforked:
                seq.unforked.remove(index)

    def _wait(self, seq: Sequence, *, resumed: bool = False, held: bool = False) -> None:
        seq.status = Status.WAITING
        self.waiting.push(seq, resumed=resumed, held=held)

    def _displace(self, seq: Sequence) -> None:
        """Takes pages and slot from a running sequence. The prefix cache may keep its pages, output included."""
        running = self.running
        computed = min(int(running.computed[seq.slot]), len(seq.tokens) - 1)  # the last token may not be computed yet
        self._prefixes.register(running, seq, computed, lazily=True)
        running.displace(seq)
        if self.images is not None:
            self.images.end(seq)
        self.blocks.free(seq.pages)
        seq.pages = []

    def _finish(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self.waiting.correct_charge(seq, seq.num_outputs)
            self._displace(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self.loads.drop(seq)
        seq.status = Status.FINISHED
        if self.adapters is not None:
            self.adapters.let_go(seq)
        siblings = self._by_request[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._by_request[seq.request_id]
            self.num_streaming -= seq.request.streams
            self.num_background -= seq.is_background

    def pause(self, request_id: str, paused: bool) -> None:
        """Displaces the running sequences of a request, except beams, or lets the paused ones wait for a slot."""
        for seq in self._by_request.get(request_id, ()):
            if paused and seq.status is Status.RUNNING and not seq.params.use_beam_search:
                self._displace(seq)
                seq.status = Status.PAUSED
                if self.adapters is not None:
                    self.adapters.let_go(seq)
            elif not paused and seq.status is Status.PAUSED:
                self._wait(seq, resumed=True)

    def _preempt(self, seq: Sequence) -> None:
        self._displace(seq)
        self._wait(seq, resumed=True)
        self.num_preemptions += 1

    # Schedule

    def schedule(self, tokens_per_call: int = 1) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. If all rows decode and no new request can begin,
        each row may sample up to `tokens_per_call` tokens, but only one if it is `RunningBatch.one_at_a_time`."""
        running = self.running
        if self.num_background or running.short_steps:
            tokens_per_call = step_aside(running, self.waiting, self.can_admit, self._preempt, tokens_per_call)
        preemptions = self.num_preemptions
        if self._has_windows:
            self._prefixes.release_unseen(running)
        if self.images is not None:
            self.images.advance(running, self.budget)
        if tokens_per_call > 1 and (self.can_admit() or (self.waiting and self.waiting.peek().pending_tokens)):
            tokens_per_call = 1
        rows, copies = self._rows_with_pages(tokens_per_call)
        if self.images is not None:
            self.images.note(rows)
        if self.waiting and self.num_preemptions == preemptions and len(new_sequences := self._admit_waiting(rows)):
            rows = rows.extend(new_sequences)
        if not len(rows):
            slot = running.batch.slot
            if self.waiting and running.batch.any_beams and (running.known[slot] == running.total[slot]).all():
                self._preempt(running.last)  # beams wait for siblings that find no slot
                return self.schedule(tokens_per_call)
            return None
        running.advance(rows)
        if self.turns.stages > 1:
            self.turns.begin(rows)
        kept = [] if self.blocks.states is None else self._prefixes.keep_states(running, rows)
        images = [] if self.images is None else self.images.drain()
        return StepPlan(rows, copies, *running.drain_updates(), kept, images)

    def _rows_with_pages(self, tokens_per_call: int) -> tuple[Rows, list[tuple[int, int]]]:
        """The next rows of running sequences, which get the pages that they need, and the page copies to make first. If
        pages run out, rows sample only one token each; if that is not enough, the last sequences are preempted."""
        running = self.running
        while True:
            rows = choose_rows(running, tokens_per_call, self.budget, len(self.waiting), self.turns, self._patches)
            growing, missing = running.growth(rows)
            shared = shared_pages(rows, running, self.blocks) if running.maybe_shared else []
            needed = int(missing.sum())
            if needed + len(shared) <= self.blocks.num_available:
                break
            if len(rows) and rows.num_new.max() > 1:
                tokens_per_call = 1
                running.drop_proposals(rows.slot)
            elif not self.loads.give_way(self.waiting):
                self._preempt(running.last)
        copies = unshare(rows, shared, running, self.blocks) if running.maybe_shared else []
        if needed:
            pages = self.blocks.allocate(needed)
            running.add_pages([rows.seqs[i] for i in growing.tolist()], rows.slot[growing], missing, pages)
        return rows, copies

    # Admission

    def _admit_waiting(self, rows: Rows) -> Rows:
        """Places waiting sequences in order, while tokens (also those that `rows` lend), slots and pages last. One that
        needs more pages than there are is passed by others."""
        seqs: list[Sequence] = []
        num_new: list[bool] = []
        share = AdmissionBudget(self.running, rows, self.budget, self.turns, len(self.waiting), self._patches)
        while seq := self._next_admissible(share):
            left = self._admit(seq, share)
            seqs.append(seq)
            num_new.append(share.take(seq, left, int(self.running.ahead(seq.slot))) == left and seq.max_tokens > 0)
        self.waiting.rejoin()
        return self.running.rows(seqs, share.counts(), np.asarray(num_new, np.int32))

    def can_admit(self) -> bool:
        """Whether a waiting sequence finds a slot and pages."""
        found = self._next_admissible() is not None
        self.waiting.rejoin()
        return found

    def _next_admissible(self, share: AdmissionBudget | None = None) -> Sequence | None:
        """The first waiting sequence that finds a slot, pages and, with `share`, tokens, if those before it wait for
        pages alone. These then are passed, until `Waiting.rejoin`. Sets those aside whose pages are to be loaded."""
        while self.waiting and not (seq := self.waiting.peek()).pending_tokens:  # else the last token is not known yet
            if share is not None and share.room(seq, 0) <= 0:
                break
            if self.running.num_places_for(seq) <= len(self.loads.active):
                break
            room = self.blocks.num_available - (self._watermark if len(self.running) else 0)
            if not self._prefixes.fits(seq, room, self.budget.most):
                if self.waiting.pass_by():
                    continue
                break
            left = uncached(seq, self.blocks)
            if share is not None and not share.offers(seq, left):
                break
            if self.images is not None and not self.images.can_begin(seq, len(seq.tokens) - left):
                break
            if self.blocks.tiers is None or not self.loads.begin(seq):
                return seq
            self.waiting.set_aside(seq)
        return None

    def _admit(self, seq: Sequence, share: AdmissionBudget) -> int:
        """Places the first waiting sequence, which was just found to fit, with pages for its share of the step. Returns
        the number of tokens that it has to compute."""
        blocks = self._pages_of(seq.group)
        self.waiting.pop()
        left = uncached(seq, blocks)
        computed = len(seq.tokens) - left
        most = min(left, share.room(seq, seq.group, left))
        seq.pages = seq.lookup.pages if seq.lookup else []
        seq.lookups = {}
        blocks.share(seq.pages)
        if seq.num_cached is None and seq.index == 0:
            seq.num_cached = computed
            seq.queue_seconds = time.perf_counter() - seq.arrived
            self.prefix_queries += seq.prompt_len
            self.prefix_hits += computed
        seq.pages += blocks.allocate(blocks.pages_for(computed + most) - len(seq.pages))
        self.running.place(seq, computed)
        if self.images is not None:
            patches = self.images.patches
            self.images.begin(self.running, seq)
            share.charge(self.images.patches - patches)
        if self.recurrent:
            self._prefixes.begin_state(self.running, seq, computed)
        return left

    @property
    def _patches(self) -> int:  # that are encoded before the next step
        return 0 if self.images is None else self.images.patches

    def _pages_of(self, group: int) -> BlockManager:  # of devices
        return self.blocks

    # Commit

    def commit(self, rows: Rows, tokens: np.ndarray) -> tuple[StepOutput, list[DetailedUpdate]]:
        """Takes in the tokens that a plan's rows sampled. Returns the updates that are nothing but tokens, as columns,
        and every other update.

        `rows` are the plan's, in any order and possibly cut into consecutive pieces. tokens: int32 [rows, most new
        tokens], -1 where a row sampled none, because it was not to or had reached its end.
        """
        running = self.running
        batch = self.running.batch
        complete = running.advance_grammars(rows, tokens) if batch.any_masked else []
        if not complete and running.only_add_tokens(rows, tokens):  # the usual case
            running.append(rows.slot, tokens, tokens.shape[1])
            return StepOutput(batch.request_ids, batch.indices, tokens.tolist(), []), []
        num_new = np.count_nonzero(tokens >= 0, axis=1)
        held = running.holds(rows)
        running.append_rows(rows, tokens, num_new, held)
        if not rows.only_decodes:
            for i in np.flatnonzero(held & (rows.count > 1) & ~rows.checks).tolist():
                self._prefixes.register(running, rows.seqs[i], int(rows.end[i]))
        ended = running.ended(rows, tokens, num_new)
        ended[complete] = True
        detailed = ended | ~held | (num_new == 0) | np.asarray([seq in running.needs_detail for seq in rows.seqs])
        output = rows.output(np.flatnonzero(~detailed), tokens, num_new)
        details = []
        for i in np.flatnonzero(detailed).tolist():
            seq = rows.seqs[i]
            ids = tokens[i, : num_new[i]].tolist()
            if held[i]:
                ends = bool(ended[i]) and bool(ids or rows.end[i] >= seq.prompt_len)  # without ids: max_tokens is 0
                detail = self._commit_running(seq, ids, i, ends)
            else:
                detail = self._commit_displaced(seq, ids, i, int(rows.num_new[i]))
            if detail is not None:
                details.append(detail)
        return output, details

    def _commit_running(self, seq: Sequence, ids: list[int], row: int, ended: bool) -> DetailedUpdate | None:
        """Takes in a row with more to say than its tokens, whose sequence holds its slot. `ids` are appended."""
        is_first = seq.num_outputs == len(ids)
        if ids:
            if seq.params.logprobs is None:
                self.running.needs_detail.discard(seq)
            if seq.unforked:
                self._fork(seq)
        if ended:
            self._finish(seq)
        elif not ids:
            return None
        reason = seq.finish_reason if ended else None
        return DetailedUpdate(SequenceUpdate(seq.request_id, seq.index, ids, reason), seq, row, is_first)

    def _commit_displaced(self, seq: Sequence, ids: list[int], row: int, num_new: int) -> DetailedUpdate | None:
        """Takes in a row whose sequence has lost its slot since: it has ended, is preempted or paused."""
        if seq.status is Status.FINISHED:
            return None
        seq.pending_tokens -= num_new
        if not ids or seq.params.use_beam_search:  # a beam samples again
            return None
        seq.append(ids)
        seq.advance(ids)
        is_first = seq.num_outputs == len(ids)
        reason = seq.finish_reason
        if seq.unforked:
            self._fork(seq)
        if reason is not None:
            self._finish(seq)
        return DetailedUpdate(SequenceUpdate(seq.request_id, seq.index, ids, reason), seq, row, is_first)

    # Siblings

    def _fork(self, seq: Sequence, *, share: bool = True) -> None:
        """Adds the request's other completions. With `share` the prompt is computed, and they share its pages. In a
        recurrent model they compute the prompt again: they begin with its last token, and the state in the slot already
        includes this token."""
        share = share and not self.recurrent
        computed = seq.prompt_len - 1
        pages = seq.pages[: self.blocks.pages_for(computed)] if share and seq.pages else None
        placed = min(len(seq.unforked), self.running.num_places_for(seq)) if pages is not None else 0
        if placed:
            self.blocks.share(pages or (), placed)
        for i, index in enumerate(seq.unforked):
            child = seq.fork(index, child_seed(seq.seed, index), self.blocks.page_size)
            self._adopt(child, pages.copy() if pages is not None and i < placed else None, computed, like=seq.slot)
        if placed:
            self.running.maybe_shared.add(seq)
        seq.unforked = []

    def _adopt(self, seq: Sequence, pages: list[int] | None, computed: int, *, like: int) -> None:
        """Adds a sibling of a running sequence. It already owns `pages`, which hold `computed` tokens and are the first
        pages of the slot `like`. If no slot is free, it gives up these pages and waits."""
        self._by_request[seq.request_id].append(seq)
        if pages is not None and self.running.num_places_for(seq):
            seq.pages = pages
            if self.adapters is not None:
                self.adapters.hold(seq)
            self.waiting.charge(seq, expected_tokens(seq))
            self.running.place(seq, computed, like)
            if self.images is not None:
                self.images.begin(self.running, seq)
        else:
            self.blocks.free(pages or ())
            self._wait(seq, resumed=seq.params.use_beam_search)  # a beam's siblings wait for it

    def reassign(self, seq: Sequence, parent: Sequence, token: int) -> None:
        """Makes the beam `seq`, idle in its slot, a continuation of `parent`: the parent's tokens, then `token`. Both
        have the same prompt and length. Their pages are shared until one of them writes."""
        running = self.running
        blocks = self.blocks
        if seq is not parent:
            kept = common_prefix(seq.pages, parent.pages)  # usually most of the pages
            blocks.share(parent.pages[kept:])
            blocks.free(seq.pages[kept:])
            seq.pages[kept:] = parent.pages[kept:]
            seq.keep_hashes(kept // blocks.num_groups)
            running.copy_outputs(seq, parent, kept)
        running.append(np.asarray([seq.slot]), np.asarray([[token]], np.int32), 1)
        running.total[seq.slot] += 1
        running.maybe_shared.add(seq)

    def branch(self, parent: Sequence, index: int, token: int) -> Sequence:
        """Adds a beam that continues `parent`: the parent's tokens, then `token`. It may have to wait for a slot."""
        computed = len(parent.tokens)
        pages = parent.pages.copy()
        child = parent.fork(index, 0, self.blocks.page_size)
        child.append([*parent.tokens[parent.prompt_len :].tolist(), token])
        self.blocks.share(pages)
        self._adopt(child, pages, computed, like=parent.slot)
        if child.slot >= 0:
            self.running.maybe_shared.add(child)
        return child

    def check_integrity(self) -> None:
        """Asserts the invariants between sequences, slots and pages."""
        self.blocks.check_integrity([one.pages for one in [*self.running, *self.loads.active]])
        self.running.check_integrity()
        self.waiting.check_integrity()
        if self.images is not None:
            self.images.check_integrity(self.running)
        if self.adapters is not None:
            self.adapters.check_integrity()
            assert all(self.adapters.place_of(seq) is not None for seq in self.running if seq.adapter is not None)
        assert {seq for seq in self.all_sequences if seq.status is not Status.PAUSED} == {*self.running, *self.waiting}
