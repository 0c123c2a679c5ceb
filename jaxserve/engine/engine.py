"""The engine: requests in, tokens out. A step is three calls: schedule, dispatch, commit.

One call of `Engine.advance`, without and with asynchronous scheduling:

    synchronous                        asynchronous
    schedule step N                    schedule step N         the devices run step N - 1
    dispatch step N                    dispatch step N         its programs queue behind step N - 1
                                       wait for step N - 1     the devices start step N
                                       commit step N - 1       the devices run step N
    sample deferred rows of N          sample deferred rows of N
    wait for step N
    commit step N

A step is scheduled (`StepPlan`), dispatched (`InFlightStep`, in `Engine.in_flight`), and committed. If one of these
fails, all steps in flight are forgotten, and `recovery` finds the request that is to blame.

Deferred rows need masks, and these need all earlier tokens. So their sampling is dispatched after the commit of step
N - 1, while the devices run the forward pass of step N.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from concurrent.futures import wait

import jax
import msgspec
import numpy as np

from jaxserve import heap
from jaxserve.checkpoints import gguf
from jaxserve.config import EngineConfig
from jaxserve.devices.compile_cache import CompileCounter
from jaxserve.engine.adapter_places import Adapters, find_adapter
from jaxserve.engine.admission import Admission, Seeds
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.in_flight import (
    Deferred,
    InFlightBatch,
    InFlightStep,
    complete,
    fill_slots,
    program_of,
)
from jaxserve.engine.live_weights import Weights
from jaxserve.engine.loading import EngineParts, load_parts, make_scheduler
from jaxserve.engine.page_copies import PageCopies
from jaxserve.engine.prompt_scores import PooledRows, PromptScores
from jaxserve.engine.recovery import Recovery, ended
from jaxserve.engine.sizing import compile_all
from jaxserve.engine.timeline import Timeline
from jaxserve.execution import memory
from jaxserve.execution.cost import MeasuredChunk
from jaxserve.execution.group_batches import split_groups
from jaxserve.execution.slots import NO_ADAPTER
from jaxserve.execution.step_buffer import split
from jaxserve.grammars.grammar import MAX_QUEUED, Compiler
from jaxserve.limits import BACKGROUND
from jaxserve.scheduling.beam import Beams
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.pace import Pace
from jaxserve.scheduling.page_snapshot import PoolSnapshot, pool_snapshot
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Sampler, StepPlan
from jaxserve.speculation.speculator import Models, Speculator, make_speculator
from jaxserve.types import QueueFullError, Request, StepOutput

log = logging.getLogger(__name__)

GARBAGE = 50_000  # new objects before a garbage collection; a step makes thousands of lists


class Engine:
    """One model on one mesh. Not thread-safe: one thread calls everything."""

    def __init__(self, config: EngineConfig, parts: EngineParts):
        plan = parts.plan
        model = parts.plan.model
        runner = parts.runner
        self.config = config
        self.model = model
        self.runner = runner
        self._parts = parts
        self.shapes = parts.shapes
        self._cost = parts.cost
        self._sizing = parts.sizing
        self.pooler = plan.pooler
        self._draft = parts.draft and parts.draft.runner
        self.hosts = parts.hosts
        self.model_folder = plan.folder
        self.image_processor = plan.eyes and plan.eyes.processor
        self.tokenizer_folder = plan.tokenizer
        self.weights = Weights(self, parts.held, self._draft)
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.sees = None if model.vision is None else model.vision.tokens
        self.dtype = np.dtype(runner.model.dtype).name
        queue = None if config.max_waiting is None else min(config.max_waiting, MAX_QUEUED)
        self.grammars = Compiler(self.tokenizer_folder, model.vocab_size, model.eos_token_ids, max_queued=queue)
        self.constraints = Constraints(self.grammars)
        self.timeline = Timeline(config.profile_dir)
        if runner.encoder is not None:
            runner.encoder.on_done = self.timeline.observer_of("encoder")
        self.counters = EngineStats(step_seconds=self.timeline.seconds)
        self.programs, self.pace = CompileCounter(), Pace(config.latency_goal(on_cpu=self._cost is None))
        self._schedules_ahead = config.async_scheduling and not config.cpu_offload_gib  # whose copies steps wait for
        self._arrivals, self._seeds, self.adapters = 0, Seeds(config), Adapters.of(config, runner)
        self._allocate()

    def _allocate(self) -> None:
        """Allocates the cache and creates everything that depends on its size. There must be no requests yet."""
        config = self.config
        model = self.model
        runner = self.runner
        runner.allocate()
        layout = runner.layout
        self.max_model_len = self._sizing.longest
        self.page_size = layout.page_size
        pool = None if self.adapters is None else self.adapters.pool
        self.copies = PageCopies.of(config, self._parts)
        tiers = None if self.copies is None else self.copies.tiers
        self.scheduler = make_scheduler(config, self._parts, self.max_model_len, pool, tiers)
        self.blocks = self.scheduler.blocks
        mixed = [shape.tokens for shape in self.shapes if not shape.decode_only]
        self._chunk = MeasuredChunk.of(config, self._cost, mixed)
        self.speculator = make_speculator(config, self.scheduler, Models(runner, self._draft, self.shapes))
        self.beams = Beams(self.scheduler, model.eos_token_ids)
        rules = config, model, self.max_model_len, self.scheduler, self.constraints, self.beams
        self._admission = Admission(*rules, pools=self.pooler is not None)
        self.in_flight: deque[InFlightStep] = deque()
        self.recovery = Recovery(self)
        self.counters.pages_total = self.blocks.capacity
        log.info(
            "KV cache: %d pages of %d tokens (%s, %d bytes a token in %s), %d tokens; longest request %d tokens",
            layout.num_pages, layout.page_size, memory.size(layout.num_pages * layout.page_bytes), layout.token_bytes,
            layout.dtype, memory.fitting_tokens(config, layout, self.max_model_len), self.max_model_len,
        )  # fmt: skip

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        devices: list[jax.Device] | None = None,
        progress: bool = True,
        static_steps: bool | None = None,
        checks: bool = True,
    ) -> Engine:
        """Reads the model, places it on the mesh and sizes the cache. Raises ConfigError or CheckpointError.

        `static_steps` chooses the kind of step programs; None: what suits the platform. See `execution.programs`.
        `checks`: kernels are checked on the devices before they are used. Without, for benchmarks, those that the
        devices should run are used, right or wrong; a draft model's are checked all the same.
        """
        parts = load_parts(config, devices, progress=progress, static_steps=static_steps, checks=checks)
        return cls(config, parts)

    def compile(self) -> None:
        """Compiles every executable that serving can need. Without this call, each is compiled when it is first used.

        If they need more memory than was reserved for them, the cache becomes smaller. Raises ConfigError if it would
        become too small.
        """
        start = time.perf_counter()
        early = [] if self._cost is None else [self.grammars.vocabulary]  # 60 MiB: on CPU the first grammar loads it
        names = self.runner.names(self.shapes)
        compile_all(self.runner, names, "compiling programs", shown=self._parts.progress)
        if self.runner.encoder is not None:
            self.runner.encoder.compile()
        wait(early)  # a failure affects only requests with a grammar
        if self._sizing.finish(self.shapes):
            assert not self.has_work
            self._allocate()
        if self.speculator is not None:
            self.speculator.measure(self.runner, self.shapes)
        if self.copies is not None:
            self.copies.begin(self, self._parts)
        if self.hosts is not None:
            self.hosts.wait_idle()
        self.runner.frozen = self.config.forbid_compile
        seconds = time.perf_counter() - start
        hits = self.programs.cache_hits
        log.info("compiled %d executables in %.1f s, %d from the cache", self.runner.num_executables, seconds, hits)
        gguf.forget()
        heap.freeze()
        gc.set_threshold(max(gc.get_threshold()[0], GARBAGE), *gc.get_threshold()[1:])

    # Requests

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequestError or QueueFullError; then nothing has changed."""
        self.add_requests([request])

    def add_requests(self, requests: list[Request]) -> None:
        """Queues all of these requests, or none. They share one SamplingParams, which is checked once.

        Raises InvalidRequestError or QueueFullError; then nothing has changed.
        """
        if self.weights.level:
            raise QueueFullError("the engine sleeps: its weights are not on the devices until it is woken up")
        self._admission.check_queue(requests)
        params = requests[0].params
        stop_ids = frozenset(self._admission.check(requests))
        adapter = find_adapter(self.adapters, requests[0]) if requests[0].adapter else None
        for request in requests:
            room = self.max_model_len - len(request.prompt_token_ids)
            max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
            if self.config.scheduling_policy != "priority" and request.priority != BACKGROUND:
                request.priority = 0
            self._arrivals += 1
            if params.use_beam_search:
                self.beams.start(request, max_tokens, stop_ids, self._arrivals, adapter)
                continue
            own = self._seeds.of(request), max_tokens, stop_ids, self._arrivals
            seq = Sequence(request, 0, *own, adapter=adapter, seen=self._admission.seen(request))
            if params.grammar is None:
                self.scheduler.add(seq)
            else:
                self.constraints.hold(seq, params.grammar)

    def pool(self) -> PoolSnapshot:
        """A snapshot of the KV pages and their owners."""
        return pool_snapshot(self.blocks, self.scheduler, self.stats())

    def reset_prefix_cache(self) -> None:
        """Forgets the pages of earlier prompts, also in lower tiers; those in use stay with their owners."""
        self.blocks.reset_prefix_cache()
        if self.scheduler.images is not None:
            self.scheduler.images.forget_unread()
        if self.copies is not None:
            self.copies.clear(self.scheduler)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drops a request, or one of its n completions, and frees its pages at once. Unknown ids are fine."""
        if request_id in self.beams:
            if index is None:  # the beams of a search end together
                self.beams.abort(request_id)
            return
        self.constraints.abort(request_id, index)
        self.scheduler.abort(request_id, index)

    def pause(self, request_id: str, paused: bool) -> None:
        """Pauses a request whose client does not read, or resumes it. Unknown ids are fine."""
        self.scheduler.pause(request_id, paused)

    def check_request(self, request: Request) -> None:
        """Raises InvalidRequestError for a request that this model cannot serve."""
        self._admission.check([request])
        find_adapter(self.adapters, request)

    # The step

    @property
    def has_work(self) -> bool:
        copying = self.copies is not None and self.copies.has_work
        return self.scheduler.has_work or bool(self.in_flight) or len(self.constraints) > 0 or copying

    @property
    def _is_busy(self) -> bool:
        return len(self.scheduler.running) > 0 or bool(self.in_flight)

    @property
    def compiling(self) -> bool:
        return self.runner.compiling

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self.constraints)

    def step(self) -> StepOutput:
        """Runs one step; returns what a step added to each completion.

        A request that makes a step fail ends with an error, see `recovery`. Raises errors that no request causes.
        """
        output = StepOutput([], [], [], [])
        try:
            with self.timeline.step(), self.pace.call():
                self.advance(output)
        except Exception as error:
            self.recovery.failed(error, output)
        else:
            self.recovery.passed(output)
        return output

    def advance(self, output: StepOutput) -> None:
        """One step, in the order that the module's docstring shows. Extends `output` with each committed step."""
        if len(self.constraints) and not self.recovery.active:
            busy = self.scheduler.has_work or self.in_flight
            output.updates += self.constraints.release(self.scheduler, patience=0.0 if busy else 0.005)
        if self.adapters is not None:
            self._place_adapters(self.adapters, output)
        if self.copies is not None:
            with self.timeline.phase("pages"):
                self.copies.before_step(self.scheduler, busy=self._is_busy, may_load=not self.recovery.active)
        if self.speculator is not None:
            self._propose(self.speculator, output)
        with self.timeline.phase("schedule"):
            plan = self.scheduler.schedule(self._tokens_per_call())
        if plan is not None:
            with self.timeline.phase("upload"):
                self.in_flight.append(self.dispatch(plan))
        if len(self.in_flight) > (most := self.runner.num_stages):
            output.extend(self._commit_oldest())
        if self.in_flight:
            with self.timeline.phase("mask"):
                if any(batch.deferred is not None for batch in self.in_flight[-1].batches):
                    self.constraints.sample_deferred(self.in_flight[-1], self.scheduler.running, self.runner)
            waits = self.scheduler.running.short_steps or not self._schedules_ahead
            if plan is None or (len(self.in_flight) == most and waits):
                output.extend(self._commit_oldest())

    def _place_adapters(self, adapters: Adapters, output: StepOutput) -> None:
        """Uploads weights of adapters that requests wait for. Ends requests whose adapter cannot be read any more."""
        with self.timeline.phase("adapters"):
            failed = adapters.place(self.scheduler.waiting, busy=self._is_busy, at_once=self.recovery.active)
        for request_id, reason in failed.items():
            output.updates += ended(self, request_id, reason, "model")

    def _propose(self, speculator: Speculator, output: StepOutput) -> None:
        """Proposes tokens for the next step if that may pay. The steps that its sequences are in must be committed for
        that, and so must a step that checks proposals when it is its sequences' turn again."""
        scheduler = self.scheduler
        host_seconds = self.pace.host_seconds
        if len(self.in_flight) == self.runner.num_stages and self.in_flight[0].checks:
            output.extend(self._commit_oldest())
        while self.in_flight and speculator.wants(scheduler, host_seconds):
            output.extend(self._commit_oldest())
        with self.timeline.phase("schedule"):
            speculator.propose(scheduler, host_seconds)

    def _commit_oldest(self) -> StepOutput:
        """Waits for the oldest step in flight and commits it."""
        step = self.in_flight.popleft()
        tokens = self.wait(step)
        with self.timeline.phase("commit"), self.recovery.undoing(step):
            return self.commit(step, tokens)

    def _tokens_per_call(self) -> int:
        """How many tokens a row may sample in the next call."""
        scheduler = self.scheduler
        running = self.scheduler.running
        most = max(map(running.num_running, range(running.device_groups)))
        lengths = self.runner.programs.lengths(self.shapes, most, running.batch.sampler)
        holds_up = scheduler.holds_up or (self.adapters is not None and self.adapters.uploading)
        return self.pace.tokens_per_call(lengths, watched=scheduler.num_streaming > 0, holds_up=holds_up)

    def dispatch(self, plan: StepPlan) -> InFlightStep:
        """Sends a plan to the devices and returns without waiting for them."""
        if self.copies is not None:
            self.copies.save()
        fill_slots(plan.placed, self.scheduler.running, self.runner, self._place_of)
        if plan.copies:
            self.runner.copy_pages(plan.copies)
        if plan.restored:
            self.runner.copy_states(plan.restored)
        if plan.images:
            self.runner.encode_images(plan.images)
        if self.speculator is not None:
            self.speculator.prepare(plan, self.scheduler.running)
        step = InFlightStep([], max(int(plan.rows.num_new.max()), 1), time.perf_counter())
        copies = plan.table_copies
        updates = plan.table_updates
        running = self.scheduler.running
        if running.device_groups == 1:
            batches = list(split(plan.rows, self.shapes, self._cost))
        else:
            batches = list(split_groups(plan.rows, running, self.shapes, self._cost))
        for batch in batches:
            room = batch.shape.table_updates
            if copies or updates.shape[1] > room:
                self.runner.update_tables(copies, updates[:, room:])
            sampled, hidden = self.runner.step(
                program_of(batch, running, self.runner.programs), batch.pack(running, updates[:, :room])
            )
            sampled = batch.of_rows(sampled)
            # all copies and updates go with the first batch
            copies = []
            updates = updates[:, :0]
            deferred = Deferred.of(batch.rows, running) if running.batch.any_masked else None
            sent = InFlightBatch(batch.rows, sampled, deferred)
            sent.send_for_results(scores=running.batch.sampler is Sampler.FULL)
            if hidden is not None and self.pooler is not None:
                hidden.copy_to_host_async()
                sent.pooled = PooledRows(batch.rows, hidden)
            elif hidden is not None and batch.rows.scores:
                sent.prompt_scores = PromptScores.start(batch, self.runner, self._place_of)
            step.batches.append(sent)
        if plan.kept:
            self.runner.copy_states(plan.kept)
        if self._chunk is not None and not plan.rows.only_decodes and not step.checks:
            sizes = [batch.shape.tokens for batch in batches]
            step.estimated = self._chunk.estimate(sizes, plan.rows.count, running.device_groups)
        self.counters.steps += 1
        self.counters.step_tokens.observe(plan.rows.num_tokens)
        return step

    def _place_of(self, seq: Sequence) -> int:
        """The place of a running sequence's adapter on the devices, or NO_ADAPTER."""
        place = None if self.adapters is None else self.adapters.pool.place_of(seq)
        return NO_ADAPTER if place is None else place

    def wait(self, step: InFlightStep) -> list[np.ndarray]:
        """Waits for a step's tokens, and returns those of each batch. Measures the devices' time."""
        asked = time.perf_counter()
        tokens = [batch.tokens() for batch in step.batches]
        passes = step.passes(tokens, static=self.runner.programs.static)
        seconds = self.pace.arrived(asked, step.dispatched, passes)
        self.timeline.seconds["device"].observe(seconds)
        if self._chunk is not None and step.estimated is not None and self.pace.is_exact:
            self._chunk.took(seconds, step.estimated)
            self.scheduler.limit_chunk(self._chunk.tokens, self._chunk.least)
        return tokens

    def commit(self, step: InFlightStep, tokens: list[np.ndarray]) -> StepOutput:
        """Commits a step's tokens; returns what they add to each completion."""
        output = StepOutput([], [], [], [])
        for batch in step.batches:
            if batch.sampled.expert_load is not None:
                self.counters.count_experts(batch.expert_load().tolist(), self.model.num_experts)
        for batch in step.batches:  # finish all scores before any commit, which may end a request that has scores
            if batch.prompt_scores is not None:
                batch.prompt_scores.finish()
            if batch.pooled is not None and self.pooler is not None:
                batch.pooled.finish(self.pooler)
        for batch, ids in zip(step.batches, tokens, strict=True):
            sampled = ids[: step.tokens_per_call, : len(batch.rows)].T
            if self.speculator is not None:
                self.speculator.learn(batch.rows, sampled, self.counters)
            part, details = self.scheduler.commit(batch.rows, sampled)
            output.extend(part)
            scores = batch.scores() if any(one.seq.params.logprobs is not None for one in details) else None
            for detail in details:
                if detail.seq.params.use_beam_search:
                    assert scores is not None  # `Sampler.of` chooses programs that compute them, here and below
                    self.beams.take(detail, scores)
                else:
                    if self.speculator is not None and detail.update.finish_reason is not None:
                        self.speculator.finished(detail.seq)
                    facts = self.eos_token_ids, self.pooler, self.counters, batch.rows.checks
                    output.updates.append(complete(detail, scores, *facts))
        if self.beams.groups:
            output.updates += self.beams.advance(self.counters)
        self.counters.generation_tokens += sum(map(len, output.tokens))
        return output

    # Besides steps

    def idle(self) -> bool:
        """Uses the time while there is no work. Returns whether there is more to do in such time."""
        return self.copies is not None and self.copies.idle(self.blocks)

    def profile(self, steps: int) -> None:
        """Traces the next `steps` steps with JAX's profiler into `EngineConfig.profile_dir`, if it is set."""
        self.timeline.trace(steps)

    def stats(self) -> EngineStats:
        """A snapshot: present values of gauges, counters since start."""
        adapters = {} if self.adapters is None else self.adapters.stats(self.scheduler)
        copies = {} if self.copies is None else self.copies.stats(self.scheduler.loads)
        return msgspec.structs.replace(
            self.counters,
            **adapters,
            **copies,
            num_running=len(self.scheduler.running),
            num_waiting=self.num_waiting,
            pages_used=self.blocks.num_used,
            preemptions=self.scheduler.num_preemptions,
            prefix_queries=self.scheduler.prefix_queries,
            prefix_hits=self.scheduler.prefix_hits,
            **({} if self.scheduler.images is None else self.scheduler.images.stats()),
            executables=self.runner.num_executables,
            compilations=self.programs.compilations,
            compile_cache_hits=self.programs.cache_hits,
            compile_seconds=self.runner.compile_seconds,
        )
