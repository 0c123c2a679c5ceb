"""Recovery from failed steps (host side): only the request that makes a step fail ends; all others continue.

A step that raises does not say which request caused it. So all sequences return to the tokens that they had before the
step, and are computed again as after a preemption. The requests that took part are suspects. One half of them runs
without the other, then the other half runs. A part that fails again is halved again, until one request fails by itself:
it ends with an error. A part that gets further than the failed step is cleared and waits. When all parts have run, all
requests continue. Tokens are the same as without a failure.

Before a convicted request ends, the engine runs a request of its own. If that request fails too, the devices are at
fault, and the error goes to the engine's caller. The error also goes to the caller when steps keep failing although no
request fails by itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.engine.adapter_places import Adapters
from jaxserve.engine.in_flight import InFlightStep
from jaxserve.execution.runner import ModelRunner
from jaxserve.hosts.first_host import FirstHost
from jaxserve.scheduling.adapter_pool import AdapterPool
from jaxserve.scheduling.beam import Beams, Group
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.running_table import RunningBatch
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence, Status
from jaxserve.scheduling.waiting import Waiting
from jaxserve.speculation.speculator import Speculator
from jaxserve.types import Request, SamplingParams, SequenceUpdate, StepOutput

log = logging.getLogger(__name__)

UNEXPLAINED = 3  # failed steps without a convicted request, among the last WINDOW steps, before the error is raised
WINDOW = 1000
_PROBE = "probe"  # id of the engine's own request; ids of clients' requests contain a slash
_PROBE_STEPS = 100


class Steps(Protocol):
    """What recovery needs of an engine (`jaxserve.engine.engine.Engine`)."""

    scheduler: Scheduler
    beams: Beams
    in_flight: deque[InFlightStep]
    runner: ModelRunner
    speculator: Speculator | None
    adapters: Adapters | None
    counters: EngineStats
    hosts: FirstHost | None

    def advance(self, output: StepOutput) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...


class SuspectQueue(Waiting):
    """A queue that serves only some requests, strictly in their order. It holds the others until it is opened."""

    def __init__(self, request_ids: Container[str], adapters: AdapterPool | None):
        super().__init__(adapters=adapters)
        self._request_ids = request_ids
        self._served: set[Sequence] = set()

    def __bool__(self) -> bool:
        """Whether it has a sequence to serve."""
        return bool(self._served)

    def _enqueue(self, seq: Sequence) -> None:
        super()._enqueue(seq)
        if seq.request_id in self._request_ids:
            self._served.add(seq)

    def peek(self) -> Sequence:
        return min(self._served, key=lambda seq: seq.order)

    def pass_by(self) -> bool:
        return False

    def _dequeue(self, seq: Sequence) -> None:
        super()._dequeue(seq)
        self._served.discard(seq)

    def open(self) -> Waiting:
        """A queue with the same sequences that serves all of them."""
        waiting = Waiting(adapters=self.adapters)
        for seq in list(self):
            waiting.push(seq, resumed=seq.num_cached is not None)
        return waiting


@dataclass
class _Before:
    """The state before a commit."""

    batch: RunningBatch
    known_of_batch: np.ndarray  # int32 [sequences]
    displaced: dict[Sequence, int]  # tokens of sequences without a slot that the commit may add to
    groups: dict[str, Group]

    @property
    def known(self) -> dict[Sequence, int]:
        """The number of tokens of each sequence that the commit may add to."""
        return dict(zip(self.batch.seqs, self.known_of_batch.tolist(), strict=True)) | self.displaced


class Recovery:
    """What an engine does about steps that fail. The engine tells how each of its steps has ended."""

    def __init__(self, engine: Steps):
        self._engine = engine
        self._before: _Before | None = None  # while a commit is under way
        self._trial: list[str] = []  # the part that runs now, while all other requests wait
        self._parts: list[list[str]] = []  # parts still to be tried, the last one first
        self._goals: dict[Sequence | str, int] = {}  # suspect -> tokens that clear it; a beam search goes by its id
        self._idle_since = -1  # counters.steps when nothing was in flight any more; -1: a step is in flight
        self._unexplained: list[int] = []  # counters.steps of failures without a convicted request

    @property
    def active(self) -> bool:
        """Whether suspects run alone while others wait."""
        return bool(self._trial)

    def passed(self, output: StepOutput) -> None:
        """A step has not failed. Extends `output` where that lets the next part of the suspects run."""
        if self._trial and self._is_cleared():
            self._next(output)

    @contextlib.contextmanager
    def undoing(self, step: InFlightStep) -> Iterator[None]:
        """Remembers the state before a commit, so that `failed` can undo it."""
        running = self._engine.scheduler.running
        displaced = {}
        for batch in step.batches:
            for i in np.flatnonzero(~running.holds(batch.rows)).tolist():
                if (seq := batch.rows.seqs[i]).status is Status.WAITING:
                    displaced[seq] = len(seq.tokens)
        running_batch = running.batch
        self._before = _Before(
            running_batch, running.known[running_batch.slot], displaced, dict(self._engine.beams.groups)
        )
        yield
        self._before = None

    # A step has failed

    def failed(self, error: Exception, output: StepOutput) -> None:
        """A step has failed: undoes what it did, and lets a part of its requests run. Extends `output` with the ends of
        requests. Raises the error if no request caused it."""
        engine = self._engine
        trial = self._trial
        if engine.hosts is not None and not engine.runner.is_whole():
            engine.hosts.fail(f"a step failed on the devices: {error}")  # ends the replica
        engine.counters.failed_steps += 1
        suspects = trial or self._participants()
        what = "again, for a part of them:" if trial else "failed; each part of them is tried alone:"
        log.error("a step %s %d requests", what, len(suspects), exc_info=None if trial else error)
        self._set_goals(suspects)
        if not trial:
            steps = engine.counters.steps
            self._unexplained = [at for at in self._unexplained if steps - at < WINDOW] + [steps]
        if not suspects or len(self._unexplained) > UNEXPLAINED:
            raise error
        self._restart(trial, output)
        engine.runner.restore()
        if engine.adapters is not None:
            engine.adapters.restore()
        if engine.speculator is not None:
            engine.speculator.restore()
        half = len(suspects) // 2
        if half:
            self._parts += [suspects[half:], suspects[:half]]
        elif not trial:
            self._parts.append(suspects)
        elif trial[0] in engine.scheduler:
            self._convict(trial[0], error, output)
        self._next(output)

    def _participants(self) -> list[str]:
        """Requests that may have caused a failure, in order: running ones, those in flight, and the waiting ones that
        the step may have placed; after an unexplained failure, all waiting ones."""
        scheduler = self._engine.scheduler
        engine = self._engine
        running = scheduler.running
        waiting = sorted(scheduler.waiting, key=lambda seq: seq.order)
        if not self._unexplained:
            waiting = waiting[: running.num_slots - len(running)]
        in_flight = [seq for step in engine.in_flight for batch in step.batches for seq in batch.rows.seqs]
        known = self._before.known if self._before is not None else {}
        all_sequences = sorted({*running, *in_flight, *waiting, *known}, key=lambda seq: seq.order)
        here = {seq.request_id for seq in scheduler.all_sequences} | {seq.request_id for seq in known}
        return list(dict.fromkeys(seq.request_id for seq in all_sequences if seq.request_id in here))

    def _set_goals(self, suspects: list[str]) -> None:
        """Sets the number of tokens that clears each suspect: one more than all steps so far should have given it."""
        running = self._engine.scheduler.running
        chosen = set(suspects)
        for seq in self._engine.scheduler.all_sequences:
            if seq.request_id in chosen:
                total = int(running.total[seq.slot]) if seq.slot >= 0 else len(seq.tokens) + seq.pending_tokens
                self._goals[seq] = max(self._goals.get(seq, 0), total + 1)
        for seq, known in (self._before.known if self._before is not None else {}).items():
            self._goals[seq] = max(self._goals.get(seq, 0), known + 1)  # includes sequences that have ended
        for request_id, group in list(self._engine.beams.groups.items()):
            self._goals[request_id] = max(self._goals.get(request_id, 0), group.length + 2)

    def _restart(self, request_ids: Container[str], output: StepOutput) -> None:
        """Undoes the failed commit, forgets steps in flight and queues all sequences. Serves only these requests."""
        scheduler = self._engine.scheduler
        beams = self._engine.beams
        known = {}
        groups = dict(beams.groups)
        if self._before is not None:
            known = self._before.known
            groups = self._before.groups
        self._before = None
        seqs = [seq for seq in dict.fromkeys([*scheduler.all_sequences, *known]) if seq.request_id not in groups]
        young = _unfork(seqs, known)
        broken = {}
        for seq in seqs:
            if seq.status is not Status.WAITING or seq in known:
                try:
                    seq.go_back(known.get(seq, len(seq.tokens)))
                except Exception as wrong:  # its grammar failed
                    broken[seq.request_id] = wrong
        self._engine.in_flight.clear()
        remaining = [seq for seq in seqs if seq not in young]
        scheduler.start_over(remaining, SuspectQueue(request_ids, scheduler.adapters))
        beams.start_over(groups)
        for request_id, error in broken.items():
            self._end(request_id, error, output)

    def _convict(self, request_id: str, error: Exception, output: StepOutput) -> None:
        """Ends a request that failed by itself. Raises the error if the engine's own request fails, too."""
        self._probe(error, output)
        self._end(request_id, error, output)

    def _end(self, request_id: str, error: Exception, output: StepOutput) -> None:
        """Ends a request that caused this error."""
        log.error("request %s is ended, for which a step fails: %s: %s", request_id, type(error).__name__, error)
        text = f"internal_error: request {request_id} failed inside the engine; the server's log has the details"
        output.updates += ended(self._engine, request_id, text)
        self._engine.counters.failed_requests += 1
        self._unexplained.clear()

    def _probe(self, error: Exception, output: StepOutput) -> None:
        """Raises the error unless the engine can answer a request of its own."""
        engine = self._engine
        self._trial = [_PROBE]
        self._restart(self._trial, output)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(request_id=_PROBE, prompt_token_ids=[0], params=params)
        engine.scheduler.add(Sequence(request, 0, 0, 1, frozenset(), 0))
        try:
            for _ in range(_PROBE_STEPS):
                engine.advance(StepOutput([], [], [], []))
                if _PROBE not in engine.scheduler:
                    return
        except Exception:
            log.exception("a request of the engine's own fails, too")
        raise error

    # Trials

    def _is_cleared(self) -> bool:
        """Whether all requests of the part that runs are cleared, or have nothing left to compute."""
        engine = self._engine
        if not engine.in_flight and engine.counters.steps == self._idle_since:
            return True
        self._idle_since = -1 if engine.in_flight else engine.counters.steps
        chosen = set(self._trial)
        for seq in engine.scheduler.all_sequences:
            is_plain = seq.request_id in chosen and seq.request_id not in engine.beams.groups
            if is_plain and len(seq.tokens) < self._goals.get(seq, 0):
                return False
        groups = list(engine.beams.groups.items())
        return all(group.length >= self._goals.get(name, 0) for name, group in groups if name in chosen)

    def _next(self, output: StepOutput) -> None:
        """Lets the next part run; after the last part, all requests continue."""
        engine = self._engine
        self._idle_since = -1
        while self._parts:
            self._trial = [request_id for request_id in self._parts.pop() if request_id in engine.scheduler]
            if self._trial:
                self._restart(frozenset(self._trial), output)
                return
        self._trial = []
        self._goals.clear()
        assert isinstance(engine.scheduler.waiting, SuspectQueue)
        engine.scheduler.waiting = engine.scheduler.waiting.open()


def ended(engine: Steps, request_id: str, error: str, param: str | None = None) -> list[SequenceUpdate]:
    """Ends a request; returns the last updates of its completions, which tell the error."""
    group = engine.beams.groups.get(request_id)
    seqs = [seq for seq in engine.scheduler.all_sequences if seq.request_id == request_id]
    indices = [index for seq in seqs for index in (seq.index, *seq.unforked)]
    if group is not None:
        indices = list(range(group.request.params.n))
    engine.abort(request_id)
    return [SequenceUpdate(request_id, index, [], "error", error=error, error_param=param) for index in indices]


def _unfork(seqs: list[Sequence], known: dict[Sequence, int]) -> set[Sequence]:
    """Undoes the forks of sequences that lose their first token again; returns the siblings that this removes."""
    young: set[Sequence] = set()
    for parent, count in known.items():
        if parent.index == 0 and parent.params.n > 1 and count == parent.prompt_len:
            siblings = {seq for seq in seqs if seq.request_id == parent.request_id and seq is not parent}
            parent.unforked = sorted({seq.index for seq in siblings}.union(parent.unforked))
            young |= siblings
    return young
