"""What becomes of a step that fails (host side): everybody goes on but the request that it fails for.

A step that raises says nothing of whose fault it was. So all sequences go back to what was known of them before it, to
be computed again as after a preemption, and those that took part are suspects. Half of them run alone, then the other
half, and again the halves of a part that fails, until a request fails by itself: it ends with an error. A part that has
come further than where the step failed is cleared and waits; when all are tried, everybody goes on. The tokens are the
same as without any of this.

Where a request of the engine's own fails in the same way, the devices are at fault and not the requests: then the error
goes to whoever called the engine, as it does where steps fail again and again and no request fails alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.engine.in_flight import InFlightStep
from jaxserve.execution.runner import ModelRunner
from jaxserve.scheduling.beam import Beams, Group
from jaxserve.scheduling.running_table import Lineup
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence, Status
from jaxserve.scheduling.stats import EngineStats
from jaxserve.scheduling.waiting import Waiting
from jaxserve.types import Request, SamplingParams, SequenceUpdate, StepOutput

log = logging.getLogger(__name__)

UNEXPLAINED = 3  # steps that may fail and not fail again, among so many:
WINDOW = 1000
_PROBE = "probe"  # the engine's own request; a front's ids have a slash
_PROBE_STEPS = 100


class Steps(Protocol):
    """What recovery needs of an engine (`jaxserve.engine.engine.Engine`)."""

    scheduler: Scheduler
    beams: Beams
    in_flight: deque[InFlightStep]
    runner: ModelRunner
    counters: EngineStats

    def advance(self, output: StepOutput) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...


class Selected(Waiting):
    """A queue in which only some requests are served, by their order; the others are there and wait."""

    def __init__(self, request_ids: Container[str]):
        super().__init__()
        self._request_ids = request_ids
        self._served: set[Sequence] = set()

    def __bool__(self) -> bool:
        """Whether there is somebody to serve."""
        return bool(self._served)

    def push(self, seq: Sequence, *, resumed: bool = False) -> None:
        super().push(seq, resumed=resumed)
        if seq.request_id in self._request_ids:
            self._served.add(seq)

    def peek(self) -> Sequence:
        return min(self._served, key=lambda seq: seq.order)

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        self._served.discard(seq)

    def open(self) -> Waiting:
        """The same sequences in a queue that serves all."""
        waiting = Waiting()
        for seq in self:
            waiting.push(seq, resumed=seq.num_cached is not None)
        return waiting


@dataclass
class _Before:
    """How things stood before a commit."""

    lineup: Lineup
    known_of_lineup: np.ndarray  # int32 [sequences]
    displaced: dict[Sequence, int]  # tokens of those that lost their slots, and that the commit may add to
    groups: dict[str, Group]

    @property
    def known(self) -> dict[Sequence, int]:
        """Tokens that each had to whom the commit may add."""
        return dict(zip(self.lineup.seqs, self.known_of_lineup.tolist(), strict=True)) | self.displaced


class Recovery:
    """Runs the steps of one engine, and sees to those that fail."""

    def __init__(self, engine: Steps):
        self._engine = engine
        self._before: _Before | None = None  # while a commit is under way
        self._trial: list[str] = []  # the requests that run alone now
        self._parts: list[list[str]] = []  # those that are still to be tried; the last is the next
        self._goals: dict[Sequence | str, int] = {}  # tokens at which a suspect is cleared; of a search, by its id
        self._idle_since = -1  # steps that had been dispatched when nothing was left in flight
        self._unexplained: list[int] = []  # likewise, when steps failed for which nobody was to blame

    @property
    def active(self) -> bool:
        """Some run alone while others wait."""
        return bool(self._trial)

    def step(self) -> StepOutput:
        """One step of the engine. Raises what it raises where no request is to blame for it."""
        output = StepOutput([], [], [], [])
        try:
            self._engine.advance(output)
        except Exception as error:
            self._failed(error, output)
        else:
            if self._trial and self._passed():
                self._next(output)
        return output

    @contextlib.contextmanager
    def commit(self, step: InFlightStep) -> Iterator[None]:
        """A commit that is undone where it fails."""
        running, displaced = self._engine.scheduler.running, {}
        for rows in step.rows:
            for i in np.flatnonzero(running.slot_generation[rows.slot] != rows.slot_generation).tolist():
                if (seq := rows.seqs[i]).status is Status.WAITING:
                    displaced[seq] = len(seq.tokens)
        lineup = running.lineup
        self._before = _Before(lineup, running.known[lineup.slot], displaced, self._engine.beams.groups)
        yield
        self._before = None

    # A step has failed

    def _failed(self, error: Exception, output: StepOutput) -> None:
        engine, trial = self._engine, self._trial
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
        half = len(suspects) // 2
        if half:
            self._parts += [suspects[half:], suspects[:half]]
        elif not trial:
            self._parts.append(suspects)
        elif trial[0] in engine.scheduler:
            self._convict(trial[0], error, output)
        self._next(output)

    def _participants(self) -> list[str]:
        """The requests that a step may have failed for, in order: those that run or are in flight, and those that may
        have been about to begin. All, where looking at these has not helped before."""
        scheduler, engine = self._engine.scheduler, self._engine
        running = scheduler.running
        waiting = sorted(scheduler.waiting, key=lambda seq: seq.order)
        if not self._unexplained:
            waiting = waiting[: running.num_slots - len(running)]
        flying = [seq for step in engine.in_flight for rows in step.rows for seq in rows.seqs]
        known = self._before.known if self._before is not None else {}
        everyone = sorted({*running, *flying, *waiting, *known}, key=lambda seq: seq.order)
        here = {seq.request_id for seq in scheduler.everyone} | {seq.request_id for seq in known}
        return list(dict.fromkeys(seq.request_id for seq in everyone if seq.request_id in here))

    def _set_goals(self, suspects: list[str]) -> None:
        """Suspects are cleared when they have a token more than the steps so far were to draw for them."""
        running, chosen = self._engine.scheduler.running, set(suspects)
        for seq in self._engine.scheduler.everyone:
            if seq.request_id in chosen:
                total = int(running.total[seq.slot]) if seq.slot >= 0 else len(seq.tokens) + seq.pending_tokens
                self._goals[seq] = max(self._goals.get(seq, 0), total + 1)
        for seq, known in (self._before.known if self._before is not None else {}).items():
            self._goals[seq] = max(self._goals.get(seq, 0), known + 1)  # some have ended
        for request_id, group in self._engine.beams.groups.items():
            self._goals[request_id] = max(self._goals.get(request_id, 0), group.length + 2)

    def _restart(self, request_ids: Container[str], output: StepOutput) -> None:
        """Has everybody wait and only these requests be served; what is in flight is forgotten, what failed undone."""
        scheduler, beams = self._engine.scheduler, self._engine.beams
        known, groups = {}, beams.groups
        if self._before is not None:
            known, groups = self._before.known, self._before.groups
        self._before = None
        seqs = [seq for seq in dict.fromkeys([*scheduler.everyone, *known]) if seq.request_id not in groups]
        young, broken = _unfork(seqs, known), {}
        for seq in seqs:
            if seq.status is not Status.WAITING or seq in known:
                tokens = scheduler.running.known_tokens(seq) if seq.slot >= 0 else seq.tokens
                try:
                    seq.go_back(tokens[: known.get(seq, len(tokens))])
                except Exception as wrong:  # with its grammar
                    broken[seq.request_id] = wrong
        self._engine.in_flight.clear()
        scheduler.start_over([seq for seq in seqs if seq not in young], Selected(request_ids))
        beams.start_over(groups)
        for request_id, error in broken.items():
            self._end(request_id, error, output)

    def _convict(self, request_id: str, error: Exception, output: StepOutput) -> None:
        """Ends a request that failed alone. Raises the error where another one fails, too."""
        self._probe(error, output)
        self._end(request_id, error, output)

    def _end(self, request_id: str, error: Exception, output: StepOutput) -> None:
        """Ends a request that is to blame for this."""
        scheduler, group = self._engine.scheduler, self._engine.beams.groups.get(request_id)
        seqs = [seq for seq in scheduler.everyone if seq.request_id == request_id]
        indices = [index for seq in seqs for index in (seq.index, *seq.unforked)]
        if group is not None:
            indices = list(range(group.request.params.n))
        self._engine.abort(request_id)
        log.error("request %s is ended, for which a step fails: %s: %s", request_id, type(error).__name__, error)
        text = f"internal_error: request {request_id} failed inside the engine; the server's log has the details"
        output.updates += [SequenceUpdate(request_id, index, [], "error", error=text) for index in indices]
        self._engine.counters.failed_requests += 1
        self._unexplained.clear()

    def _probe(self, error: Exception, output: StepOutput) -> None:
        """Raises the error where the engine cannot answer a request of its own."""
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

    def _passed(self) -> bool:
        """Whether all who run alone are cleared, or nothing is left for them to do."""
        engine = self._engine
        if not engine.in_flight and engine.counters.steps == self._idle_since:
            return True
        self._idle_since = -1 if engine.in_flight else engine.counters.steps
        chosen, running = set(self._trial), engine.scheduler.running
        for seq in engine.scheduler.everyone:
            if seq.request_id in chosen and seq.request_id not in engine.beams.groups:
                known = int(running.known[seq.slot]) if seq.slot >= 0 else len(seq.tokens)
                if known < self._goals.get(seq, 0):
                    return False
        groups = engine.beams.groups.items()
        return all(group.length >= self._goals.get(name, 0) for name, group in groups if name in chosen)

    def _next(self, output: StepOutput) -> None:
        """Has the next part run alone; after the last, everybody goes on."""
        engine = self._engine
        self._idle_since = -1
        while self._parts:
            self._trial = [request_id for request_id in self._parts.pop() if request_id in engine.scheduler]
            if self._trial:
                self._restart(frozenset(self._trial), output)
                return
        self._trial = []
        self._goals.clear()
        assert isinstance(engine.scheduler.waiting, Selected)
        engine.scheduler.waiting = engine.scheduler.waiting.open()


def _unfork(seqs: list[Sequence], known: dict[Sequence, int]) -> set[Sequence]:
    """Takes back the forks of those whose first token is taken back; returns the siblings that are gone by that."""
    young: set[Sequence] = set()
    for parent, count in known.items():
        if parent.index == 0 and parent.params.n > 1 and count == parent.prompt_len:
            siblings = {seq for seq in seqs if seq.request_id == parent.request_id and seq is not parent}
            parent.unforked = sorted({seq.index for seq in siblings}.union(parent.unforked))
            young |= siblings
    return young
