"""A scheduler, the device below it (`null_device`), and the requests above it: plain ones, some with a grammar, whose
rows draw late, and beam searches."""

from collections import Counter, deque
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from random import Random

import numpy as np
from fake_tiers import LateThread, PageRunner, UnreliableFiles
from null_device import VOCAB, Device, Ran, each, fingerprint, next_token, root_state

from jaxserve.adapters.registry import AdapterError, ServedAdapter
from jaxserve.engine.adapter_places import Adapters
from jaxserve.engine.page_copies import PageCopies
from jaxserve.scheduling.adapter_pool import AdapterPool
from jaxserve.scheduling.beam import Beams
from jaxserve.scheduling.block_manager import BlockManager, StateSnapshots, most_pages
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.image_prompts import ImagePrompt, read_prompt
from jaxserve.scheduling.image_rows import ImageRows
from jaxserve.scheduling.page_tiers import PageTiers
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence, Status, child_seed
from jaxserve.scheduling.step_plan import StepPlan
from jaxserve.scheduling.waiting import expected_tokens
from jaxserve.types import Image, ImageTokens, Request, SamplingParams

PICTURE = VOCAB  # the token in whose place features of pictures stand
KIND = ImageTokens(PICTURE, 1, 1, has_three_positions=True)
WHOLE = ImageTokens(PICTURE, 1, 1, whole=True)
TOKENS_PER_CALL = (1, 3, 16)  # tokens that a row may draw in one call


class Grammar:
    """No token twice in a row, and an end where nothing can follow; stands in for
    `jaxserve.grammars.grammar.Matcher`."""

    error = None

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.state = self

    def fork(self) -> "Grammar":
        return Grammar()

    def consume_tokens(self, tokens: list[int]) -> None:
        assert all(self.allows(token) for token in tokens)
        self.tokens += tokens

    def allows(self, token: int) -> bool:
        return token not in self.tokens[-1:]

    @property
    def ended(self) -> bool:
        return len(self.tokens) > 2 and sum(self.tokens) % 11 == 0


@dataclass
class Job:
    """A request, and what must become of it: found by computing one completion at a time, without any batch."""

    request: Request
    seed: int
    stop_ids: frozenset[int]
    scored: list[int] = field(default_factory=list)  # positions whose hidden state was scored
    adapter: ServedAdapter | None = None
    seen: ImagePrompt | None = None
    _known: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def trace(self, index: int) -> tuple[list[int], list[int]]:
        """Tokens of a completion, prompt included, as if nothing stopped it, and the state after each."""
        if index not in self._known:
            seed = child_seed(self.seed, index)
            tokens = list(self.request.prompt_token_ids) if self.seen is None else self.seen.tokens.tolist()
            states = []
            prompt_len = len(tokens)
            masked = self.request.params.has_mask
            state = root_state(self.request.cache_salt, self.adapter)
            for position in range(prompt_len + self.request.params.max_tokens):
                if position == len(tokens):
                    last = tokens[prompt_len:][-1:] if masked else []
                    tokens.append(next_token(state, seed, lambda token, last=last: token not in last))
                state = fingerprint(state, tokens[position])
                states.append(state)
            self._known[index] = tokens, states
        return self._known[index]

    def answer(self, index: int) -> tuple[list[int], str]:
        """Output tokens and finish reason."""
        output = self.trace(index)[0][len(self.request.prompt_token_ids) :]
        grammar = Grammar()
        for i, token in enumerate(output):
            grammar.tokens.append(token)
            if token in self.stop_ids or (self.request.params.has_mask and grammar.ended):
                return output[: i + 1], "stop"
        return output, "length"


class Disk:
    """Stands in for `Registry`: weights come when they were asked for three times, and a lost adapter's never."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.reading = False
        self._asked: Counter[str] = Counter()

    def weights(self, wanted: list[ServedAdapter], *, patience: float | None = 0.0) -> ServedAdapter | None:
        first = wanted[0]
        if first.digest in self.lost:
            raise AdapterError(f"{first.name} is lost")
        self._asked[first.digest] += 1
        self.reading = self._asked[first.digest] % 3 != 0 and patience is not None
        return None if self.reading else first


LONG = 80  # tokens; no request needs to be longer


class CountingBlocks(BlockManager):
    evictions = lookups = 0

    def _evict(self) -> int:
        self.evictions += 1
        return super()._evict()

    def match(self, root, hashes):
        self.lookups += 1
        return super().match(root, hashes)


class Simulation:
    """Every operation checks all it can."""

    def __init__(
        self, *, num_pages=200, page_size=4, max_num_seqs=4, budget=16, prefix_caching=True, cost=None, chunk=None,
        windows=(None,), snapshots=None, interval=0, places=None, tiers=None, files=False, image_rows=None,
        whole=0,
    ):  # fmt: skip
        """`snapshots`: the model is recurrent, and keeps so many states of prefixes, within prompts after every
        `interval` pages. `places`: for adapters. `tiers`: pages that the host's memory holds; None: there are no lower
        tiers. `files`: there are files, too. `image_rows`: of the features of pictures. `whole`: features of the
        largest picture, if all features of a picture are computed in one step."""
        random = Random(num_pages)
        kept = UnreliableFiles(random) if files else None
        below = PageTiers(tiers, kept) if tiers is not None and prefix_caching and snapshots is None else None
        states = None
        if snapshots:
            states = StateSnapshots(max_num_seqs + 1, snapshots, least=page_size, interval=interval * page_size)
        caches = prefix_caching and snapshots != 0
        self.blocks = CountingBlocks(
            num_pages, page_size, prefix_caching=caches, windows=windows, states=states, tiers=below
        )
        self.budget = max(budget, max_num_seqs)
        self.max_num_seqs = max_num_seqs
        pool = None if places is None else AdapterPool(places)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
            max_model_len=self.longest,
            prefill_chunk=chunk,
            prefill_bursts=cost is None,
            recurrent=snapshots is not None,
            adapters=pool,
            images=None if image_rows is None else ImageRows(image_rows, image_rows, self.budget, whole),
        )
        self.beams = Beams(self.scheduler, ())
        self.kind = WHOLE if whole else KIND
        self.device = Device(self.blocks, max_num_seqs, self._check_read, cost, self.longest, snapshots, whole)
        self.most_expected = 0  # the most that `expected_tokens` said of a sequence that began
        self.disk = Disk()
        self.adapters: Adapters | None = None
        if pool is not None:
            self.adapters = Adapters(self.disk, pool, self.device)
            self.device.place_of = pool.place_of
        self.threads = [LateThread(random) for _ in range(3)]
        self.copies: PageCopies | None = None
        if below is not None:
            self.copies = PageCopies(below, PageRunner(self.device), kept, self.threads)
            self.copies.patience = 0.0
        self.events: Counter[str] = self.device.events
        self.in_flight: deque[list[Ran]] = deque()
        self.jobs: dict[str, Job] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.paused: set[str] = set()
        self._arrivals = count()

    @property
    def longest(self) -> int:
        """Tokens of the longest request that an engine with so many pages admits."""
        blocks = self.blocks

        def fits(tokens: int) -> bool:
            return sum(most_pages(tokens, blocks.page_size, blocks.windows, self.budget)) <= blocks.capacity

        most = max(blocks.capacity // blocks.num_groups * blocks.page_size, LONG)
        return next(tokens for tokens in range(most, -1, -1) if fits(tokens))

    # Requests

    def add(
        self, prompt, *, n=1, max_tokens=8, priority=0, stop_ids=(), salt=None, scored=False, masked=False, beams=False,
        adapter=None, pictures=(),
    ) -> str:  # fmt: skip
        """Raises InvalidRequestError for beams that have no room. `adapter`: its name. `pictures`: (place, features,
        content) of each."""
        arrival = next(self._arrivals)
        assert len(prompt) + max_tokens <= self.longest, "the engine would not have accepted this"
        options = {"use_beam_search": True} if beams else {"prompt_logprobs": 0 if scored else None}
        params = SamplingParams(n=n, max_tokens=max_tokens, allowed_token_ids=(0,) if masked else (), **options)
        name = f"r{arrival}"
        stops = frozenset(stop_ids)
        request = Request(
            request_id=name, prompt_token_ids=list(prompt), params=params, priority=priority, cache_salt=salt
        )
        served = None if adapter is None else ServedAdapter(adapter, f"digest of {adapter}", "")
        if beams:
            self.beams.check(request, len(prompt) + max_tokens, len(stops))
            self.beams.start(request, max_tokens, stops, arrival, served)
        else:
            seen = None
            if pictures:
                images = [Image(at, n, (1, 1, n), b"", sha256(content).digest()) for at, n, content in pictures]
                seen = read_prompt(prompt, images, salt, self.kind)
            seq = Sequence(request, 0, 1000 + arrival, max_tokens, stops, arrival, adapter=served, seen=seen)
            seq.matcher = Grammar() if masked else None
            self.scheduler.add(seq)
        self.jobs[name] = Job(request, 1000 + arrival, stops, adapter=served)
        if pictures:
            self.jobs[name].seen = seen
        self.check()
        return name

    def abort(self, name: str, index: int | None = None) -> None:
        params = self.jobs[name].request.params
        if index is not None and params.use_beam_search:
            return  # beams come to their ends together
        indices = range(params.n) if index is None else [index]
        self.aborted |= {(name, i) for i in indices if (name, i) not in self.reasons}
        if name in self.beams:
            self.beams.abort(name)
        else:
            self.scheduler.abort(name, index)
        self.check()

    # Steps

    def propose(self, most: int, right: int) -> None:
        """Proposes up to `most` tokens for each decoding sequence. The first `right` are right, the others wrong."""
        while self.in_flight:
            self.commit()
        running = self.scheduler.running
        room = self.budget - len(running)
        for seq in running:
            known = int(running.known[seq.slot])
            count = min(most, room, int(running.limit[seq.slot]) - known - 1, int(running.ahead(seq.slot)) - 1)
            count = min(count, max(shape.tokens for shape in self.device.shapes if not shape.decode_only) - 1)
            special = seq.params.has_mask or seq.params.use_beam_search or not seq.num_outputs
            if count <= 0 or special or not known == running.total[seq.slot] == running.computed[seq.slot] + 1:
                continue
            job = self.jobs[seq.request_id]
            tokens = job.trace(seq.index)[0][known : known + count]
            wrong = [(token + 1) % VOCAB for token in tokens]
            running.propose(seq.slot, np.asarray(tokens[:right] + wrong[right:], np.int32))
            room -= count

    def dispatch(self, tokens_per_call: int = 1) -> StepPlan | None:
        """Schedules a step and runs it; its tokens wait in `in_flight`."""
        if self.scheduler.running.proposes and self.in_flight:
            self.commit()  # as the engine does
        placing = self._place_adapters()
        self._copy_pages()
        waiting = [seq for seq in self.scheduler.waiting if not self._is_parked(seq)]
        preemptions = self.scheduler.num_preemptions
        before = {seq: self.left(seq) for seq in self.scheduler.running}
        admissible = self.scheduler.can_admit()
        plan = self.scheduler.schedule(tokens_per_call)
        self._check_schedule(plan, waiting, admissible, preemptions, before, placing)
        if plan is not None:
            self._note_scored(plan)
            if self.copies is not None:
                self.copies.save()
            self.in_flight.append(self.device.run(plan, self.scheduler.running))
            self._sample_deferred()
        self.check()
        return plan

    def _place_adapters(self) -> bool:
        """As the engine does. Returns whether that has something to do."""
        if self.adapters is None:
            return False
        busy = len(self.scheduler.running) > 0 or len(self.in_flight) > 0
        failed = self.adapters.place(self.scheduler.waiting, busy=busy, at_once=False)
        for name in failed:
            self.events["lost adapters"] += 1
            self.abort(name)
        return bool(failed) or self.adapters.uploading or self.disk.reading

    def _is_parked(self, seq: Sequence) -> bool:
        if any(load.seq is seq for load in self.scheduler.loads.active):
            return True
        return self.adapters is not None and seq in set(self.adapters.pool.parked)

    def _copy_pages(self) -> None:
        """As the engine does, with threads that are late."""
        for thread in self.threads:
            thread.run()
        if self.copies is not None:
            busy = len(self.scheduler.running) > 0 or len(self.in_flight) > 0
            self.copies.before_step(self.scheduler, busy=busy, may_load=True)
            self.events["loads while others run"] += busy and self.copies.loading

    def reset_prefix_cache(self) -> None:
        self.blocks.reset_prefix_cache()
        if self.copies is not None:
            self.copies.clear(self.scheduler)

    def pause(self, name: str, paused: bool) -> None:
        """A client stops reading, or goes on."""
        self.scheduler.pause(name, paused)
        self.paused = (self.paused | {name}) if paused else self.paused - {name}
        self.check()

    def _sample_deferred(self) -> None:
        """As the engine does once all steps before the last one have been taken in."""
        if len(self.in_flight) == 1:
            for ran in self.in_flight[0]:
                self.device.sample_deferred(ran, self.scheduler.running)

    def commit(self) -> None:
        for ran in self.in_flight.popleft():
            output, details = self.scheduler.commit(ran.rows, ran.tokens)
            assert not output.updates
            assert all(ran.rows.seqs[one.row] is one.seq for one in details)
            for one in details:
                if one.seq.params.use_beam_search:
                    self.beams.take(one, ran.scores)
                else:
                    output.updates.append(one.update)
            for update in output:
                key = update.request_id, update.index
                assert update.token_ids or update.finish_reason
                if key not in self.outputs or update.finish_reason:
                    (one,) = (one for one in details if one.update is update)
                    assert self.sequences.setdefault(key, one.seq) is one.seq, "a completion was made twice"
                    assert one.is_first is (key not in self.outputs)
                self._take(update)
        for update in self.beams.advance(EngineStats()):
            self._take(update)
            self.events["beams"] += 1
        self._sample_deferred()
        self.check()

    def _take(self, update) -> None:
        key = update.request_id, update.index
        assert key not in self.reasons, "an update after the last one"
        assert key not in self.aborted, "an update after an abort"
        if update.token_ids:
            self.outputs.setdefault(key, []).extend(update.token_ids)
        if update.finish_reason is not None:
            self.reasons[key] = update.finish_reason

    def step(self, tokens_per_call: int = 1) -> StepPlan | None:
        """One step, with nothing in flight before and after."""
        while self.in_flight:
            self.commit()
        if (plan := self.dispatch(tokens_per_call)) is not None:
            self.commit()
        return plan

    def overlapped_step(self, tokens_per_call: int = 1) -> None:
        """Dispatches a step before the one in flight is committed."""
        self.events["overlapped"] += bool(self.in_flight)
        if (self.dispatch(tokens_per_call) is None or len(self.in_flight) == 2) and self.in_flight:
            self.commit()

    def drain(self, *, overlapped: bool = False) -> None:
        """Steps to the end, which must come in bounded time: the first running sequence advances in every step."""
        for name in list(self.paused):
            self.pause(name, False)
        work = 8 * len(self.jobs) if self.adapters is not None else 0
        for job in self.jobs.values():
            params = job.request.params
            tokens = params.n * (len(job.request.prompt_token_ids) + params.max_tokens + 2)
            work += tokens * (4 if params.use_beam_search else 1)  # beams take turns, and draw again what was preempted
        work *= 1 if self.copies is None else 8
        for i in range(2 * work + 2):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.overlapped_step(TOKENS_PER_CALL[i % 3]) if overlapped else self.step(TOKENS_PER_CALL[i % 3])
        assert not self.scheduler.has_work, "a request starves"
        self.check_end()

    # Checks

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.device.scribble()

    def left(self, seq: Sequence) -> int:
        """Tokens that a running sequence has to compute; 0 where that has to wait for a step in flight."""
        running = self.scheduler.running
        slot = seq.slot
        in_flight = running.total[slot] > running.known[slot]
        if in_flight and (running.beams[slot] or running.total[slot] == running.limit[slot]):
            return 0
        return int(running.total[slot] - running.computed[slot])

    def _check_read(self, seq: Sequence, first: int, seen: list) -> None:
        """`seen`: what the sequence's last token sees, from the position `first` on."""
        end = first + len(seen)
        if seq.params.use_beam_search:  # the host knows all of its tokens
            states = []
            state = root_state(seq.request.cache_salt, seq.adapter)
            for token in self.scheduler.running.tokens[seq.slot, :end].tolist():
                state = fingerprint(state, token)
                states.append(state)
        else:
            states = self.jobs[seq.request.request_id].trace(seq.index)[1][:end]
        assert seen == states[first:], f"{seq.request.request_id}[{seq.index}] reads what is not its own"

    def _note_scored(self, plan: StepPlan) -> None:
        for row in each(plan.rows):
            first = max(row.start, row.seq.num_scored)
            end = min(row.end, row.seq.prompt_len - 1)
            if row.seq.scores_prompt and first < end:
                assert row.scores_prompt, "a row that is wanted for its hidden states does not say so"
            if row.scores_prompt and first < end:
                self.jobs[row.seq.request.request_id].scored += range(first, end)
                row.seq.num_scored = end

    def _check_schedule(
        self, plan: StepPlan | None, waiting: list[Sequence], admissible: bool, preemptions: int, before: dict,
        placing: bool,
    ) -> None:  # fmt: skip
        """`before`: what was left to compute of the running sequences. `placing`: adapters are being uploaded."""
        rows = each(plan.rows) if plan else []
        scheduled = {row.seq: row for row in rows}
        acts = plan is not None or self.in_flight or placing or self.scheduler.loads.active
        assert acts or not self.scheduler.has_work, "there is work, and nothing is done"
        if plan is not None:
            assert rows
            assert sum(row.count for row in rows) <= self.budget
            assert len(rows) <= self.max_num_seqs
            assert all(row.count > 0 for row in rows)
            assert len(scheduled) == len(rows)
            limits = {row.seq: row.seq.prompt_len + row.seq.max_tokens for row in rows}
            assert all(row.end + (1 if row.checks else row.num_new) <= limits[row.seq] for row in rows)
            assert all(row.num_new <= 1 for row in rows if row.seq.params.has_mask or row.seq.params.use_beam_search)
            looped = any(row.num_new > 1 and not row.checks for row in rows)
            assert not looped or not admissible, "a newcomer waits for a loop to end"
            self.events["loops while others wait"] += looped and bool(waiting)
        for seq in self.scheduler.running:
            full = sum(row.count for row in rows) == self.budget
            no_rows = self.scheduler.running.image_stop[seq.slot] <= self.scheduler.running.computed[seq.slot]
            self.events["waits for rows"] += no_rows
            computed = int(self.scheduler.running.computed[seq.slot])
            whole = any(one.whole and one.first <= computed < one.end for one in seq.images)
            aside = seq.is_background and self.scheduler.running.steps_aside
            assert seq not in scheduled or not aside, "a background sequence does not step aside"
            self.events["steps aside"] += aside
            may_wait = full or no_rows or whole or aside or before.get(seq) == 0
            self.events["waits for room"] += whole and seq not in scheduled and not no_rows
            assert seq in scheduled or may_wait, "a running sequence was left out for no reason"
            # With max_tokens 0, the last token of a prompt is left.
            decodes = before.get(seq) == 1 and seq.max_tokens > 0 and not no_rows and not aside
            assert seq in scheduled or not decodes, "a decoding sequence was left out"
        admitted = [seq for seq in waiting if seq.status is Status.RUNNING]
        left = [seq for seq in waiting if seq.status is Status.WAITING and not self._is_parked(seq)]
        self.check_order(admitted, left)
        self.events["preemptions"] += self.scheduler.num_preemptions - preemptions
        self.events["chunks"] += any(row.count > 1 and row.num_new == 0 for row in rows)

    def check_order(self, admitted: list[Sequence], left: list[Sequence]) -> None:
        """Sequences begin in order, but for those that pass new requests that wait for pages, within a bound."""
        assert all(a.order < b.order or b.tokens_passing for a in admitted for b in left), "admission out of order"
        self.most_expected = max([self.most_expected, *map(expected_tokens, admitted)])
        for b in left:
            assert b.tokens_passing < expected_tokens(b) + self.most_expected, "too much has passed it"
            self.events["waits that were passed"] += b.tokens_passing > 0

    def check_end(self) -> None:
        assert not self.in_flight
        assert not self.scheduler.running
        assert len(self.scheduler.waiting) == 0
        if self.adapters is not None:
            assert not list(self.adapters.pool.parked)
            assert not any(place.held for place in self.adapters.pool.places)
            self.events["evicted adapters"] = self.adapters.pool.evictions
        assert self.blocks.num_used == 0
        assert not any(name in self.scheduler or name in self.beams for name in self.jobs)
        for name, job in self.jobs.items():
            params = job.request.params
            if params.use_beam_search:
                if (name, 0) not in self.aborted and len(self.jobs) > 1:
                    mine = {key[1]: output for key, output in self.outputs.items() if key[0] == name}
                    assert mine == search_alone(job), "a search found something else in company"
                continue
            for index in range(params.n):
                if (name, index) not in self.aborted:
                    output, reason = job.answer(index)
                    assert self.outputs.get((name, index), []) == output
                    assert self.reasons[name, index] == reason
            if params.prompt_logprobs is not None and (name, 0) not in self.aborted:
                assert sorted(job.scored) == list(range(len(job.request.prompt_token_ids) - 1))
        self.events["evictions"] = self.blocks.evictions
        self.events["prefix hits"] = self.scheduler.prefix_hits
        if self.copies is not None:
            self.events["found below"] = self.scheduler.loads.hits
            self.events["evicted below"] = self.copies.tiers.evictions
            self.events["failed loads"] = self.copies.failed


def search_alone(job: Job) -> dict[int, list[int]]:
    """What a search finds when nothing else runs, with room for everything; output by index."""
    params = job.request.params
    prompt = job.request.prompt_token_ids
    places = None if job.adapter is None else 1
    alone = Simulation(num_pages=400, max_num_seqs=params.n, budget=64, prefix_caching=False, places=places)
    adapter = None if job.adapter is None else job.adapter.name
    request = {"n": params.n, "max_tokens": params.max_tokens, "stop_ids": job.stop_ids, "adapter": adapter}
    alone.add(prompt, salt=job.request.cache_salt, beams=True, **request)
    alone.drain()
    return {index: output for (_, index), output in alone.outputs.items()}
