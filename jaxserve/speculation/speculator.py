"""Which running sequences get proposals, and how many: as many as pay by measured acceptance and measured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from jaxserve.config import EngineConfig, SpeculativeConfig
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.grammars.grammar import Matcher
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.row_choice import next_decodes
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows, StepPlan
from jaxserve.speculation.draft_head import DraftHead
from jaxserve.speculation.draft_model import DraftModel
from jaxserve.speculation.ngram import Ngram, Suffix
from jaxserve.speculation.proposal import Method, Proposal
from jaxserve.speculation.step_times import StepTimes

# Proposals must raise the tokens per second by at least this factor.
MIN_SPEEDUP = 1.03
# Where steps were not measured, proposals are taken to pay for up to FEW_ROWS running sequences, and only those tokens
# that are kept with at least the chance MIN_ACCEPTANCE.
FEW_ROWS = 4
MIN_ACCEPTANCE = 0.3
# The chances of acceptance for which the number of sequences that may get proposals is computed in advance.
ACCEPTANCE_GRID = np.linspace(0.05, 1, 20)
# The next proposals of a draft may be kept more often than the last ones, by this much.
ACCEPTANCE_MARGIN = 0.05
# When no proposal was found that pays, a sequence waits this many tokens until the next attempt.
RETRY_TOKENS = 8
# When two checks kept nothing, a sequence gets no proposals for COOLDOWN tokens; each further time for twice as many.
COOLDOWN = 16
MAX_COOLDOWN = 256
# Assumed at first for text that a grammar forces: the model may write it in other tokens than expected.
FORCED_ACCEPTANCE = 0.9
# With each check, what was learnt about acceptance before counts by this factor less.
ACCEPTANCE_DECAY = 0.7


class Acceptance:
    """The chance that a proposal is kept if those before it were, from recent checks."""

    def __init__(self, chance: float):
        self._kept = 2 * chance
        self._checked = 2.0

    @property
    def chance(self) -> float:
        return self._kept / self._checked

    def learn(self, proposed: int, kept: int) -> None:
        """Takes in a check of `proposed` tokens, of which the first `kept` were right.

        The token after those was checked and found wrong. Tokens behind it say nothing about the chance.
        """
        self._kept = ACCEPTANCE_DECAY * self._kept + kept
        self._checked = ACCEPTANCE_DECAY * self._checked + min(kept + 1, proposed)


class Record:
    """What is known about the proposals of one sequence.

    Attributes:
      acceptance: by kind of proposal.
      kind: the kind of the proposal that is being checked.
      next_attempt: the sequence gets no proposals before it has this many tokens.
    """

    def __init__(self, acceptance: List[Acceptance]):
        self.acceptance = [Acceptance(one.chance) for one in acceptance]
        self.kind = 0
        self.next_attempt = 0
        self._cooldown = COOLDOWN
        self._failures = 0

    def learn(self, proposed: int, kept: int, known: int) -> None:
        """Takes in a check, after which the sequence has `known` tokens.

        A sequence whose proposals fail twice in a row gets none for a while, and for twice as long each further time.
        """
        self.acceptance[self.kind].learn(proposed, kept)
        self._failures = 0 if kept else self._failures + 1
        if kept == proposed:
            self._cooldown = COOLDOWN
        if self._failures == 2:
            self.next_attempt = known + self._cooldown
            self._failures = 0
            self._cooldown = min(2 * self._cooldown, MAX_COOLDOWN)


class Speculator:
    """Proposes tokens for sequences that decode.

    Proposals continue the tokens of the step before, so an engine can make them only when that step is done, and the
    devices wait meanwhile. The engine therefore asks first whether waiting is worth it (`wants`). It is not where many
    rows fill the devices anyway, where all sequences are in a cooldown because their proposals failed, or where
    proposals for the tokens known so far would not pay.

    In a pipeline, sequences take turns: a step has one of `stages` equal parts of them. Steps are measured from the
    first stage to the last, which is how long a sequence waits for its next turn if all stages take equally long. When
    the devices wait for the host, the steps of all turns are late, so that this time counts once for each turn.

    Attributes:
      times: seconds of steps. None: they were not measured, and up to FEW_ROWS rows get all tokens that are likely to
        be kept.
    """

    def __init__(self, method: Method, most: int, budget: int, stages: int = 1):
        """most: proposals of a sequence in a step. budget: tokens of a step."""
        self._method = method
        self._most = most
        self._budget = budget
        self._stages = stages
        self._records: WeakKeyDictionary[Sequence, Record] = WeakKeyDictionary()
        # Of all sequences; new ones begin with it. The last kind are tokens that a grammar forces.
        self._acceptance = [Acceptance(chance) for chance in (*method.chances, FORCED_ACCEPTANCE)]
        self.set_times(None)
        method.allocate()

    def measure(self, runner: ModelRunner, shapes: List[StepShape]) -> None:
        """Measures steps, whose programs are compiled. There are no requests."""
        self._method.measure()
        self.set_times(StepTimes.measure(runner, shapes, self._most))

    def set_times(self, times: StepTimes | None) -> None:
        self.times = times
        self._gaining = [] if times is None else [self._rows_that_gain(times, chance) for chance in ACCEPTANCE_GRID]

    def _rows_that_gain(self, times: StepTimes, chance: float) -> int:
        """The most running sequences for which proposals pay if each is kept with this chance."""
        gaining = 0
        depth = np.arange(1, self._most + 1)
        for rows in times.decode.sizes.tolist():
            tokens = rows + np.cumsum(np.repeat(chance**depth, rows))
            seconds = times.check(rows, rows + np.arange(1, self._most * rows + 1))
            seconds = seconds + self._method.seconds(rows, np.repeat(depth, rows))
            if (tokens / seconds).max() >= MIN_SPEEDUP * rows / times.decode(rows):
                gaining = rows
        return gaining

    @property
    def _most_rows(self) -> int:
        """The most running sequences for which proposals may pay.

        A draft's are assumed to be kept a little more often than lately. A lookup may find text of which all is kept.
        """
        if self.times is None:
            return FEW_ROWS
        chance = self._acceptance[0].chance + ACCEPTANCE_MARGIN if self._method.proposes_later else 1.0
        return self._gaining[min(int(np.searchsorted(ACCEPTANCE_GRID, chance)), len(ACCEPTANCE_GRID) - 1)]

    def wants(self, scheduler: Scheduler, host_seconds: float) -> bool:
        """Whether to wait for the step in flight because proposals for its sequences would pay.

        This is judged by the tokens known so far; the step in flight may add tokens that change the answer.
        `host_seconds` is the same as for `propose`.
        """
        running = scheduler.running
        return any(count and _is_pending(seq, running) for seq, _, count in self._look(scheduler, host_seconds))

    def _is_open(self, seq: Sequence, running: RunningTable) -> bool:
        params = seq.params
        if params.use_beam_search or not seq.num_outputs:
            return False
        record = self._records.get(seq)
        return record is None or bool(running.known[seq.slot] >= record.next_attempt)

    def propose(self, scheduler: Scheduler, host_seconds: float) -> None:
        """Proposes tokens for the sequences that decode in the next step and are in no step in flight.

        host_seconds: how long the devices wait between two steps if each is committed before the next one begins.
        """
        running = scheduler.running
        slot = running.batch.slot
        if (running.known[slot] < running.total[slot]).all():
            return  # all are in steps in flight
        for seq, proposal, count in self._look(scheduler, host_seconds, may_be_pending=False):
            if count:
                self._records[seq].kind = proposal.kind
                running.propose(seq.slot, proposal.tokens[:count])

    def _look(
        self, scheduler: Scheduler, host_seconds: float, *, may_be_pending: bool = True
    ) -> Iterator[tuple[Sequence, Proposal, int]]:
        """Yields each sequence with a proposal, and how many of its tokens pay.

        A sequence for which none pay gets no further attempt for RETRY_TOKENS tokens, or more where many sequences run.
        With few sequences this holds only if there was something to propose.
        """
        running = scheduler.running
        rows = -(-len(running) // self._stages)
        cost = host_seconds * min(self._stages, len(running))
        if rows > self._most_rows:
            return
        seqs = next_decodes(running, len(scheduler.waiting), scheduler.turns)
        if scheduler.recurrent:  # with a mask, a step ends before it is known how far its states have to advance
            seqs = [seq for seq in seqs if not seq.params.has_mask]
        looked = {
            seq: self._proposal(seq, running)
            for seq in seqs
            if self._is_open(seq, running) and (may_be_pending or not _is_pending(seq, running))
        }
        found = [(seq, one) for seq, one in looked.items() if one is not None]
        # Masks need the tokens before, as proposals do; in a pipeline other steps run meanwhile.
        waits = host_seconds if running.batch.any_masked and self._stages == 1 else 0.0
        counts = self._counts([self._chances(*one) for one in found], rows, cost, waits)
        retry_after = RETRY_TOKENS * max(rows // FEW_ROWS, 1)  # many rows cause no more attempts a step than a few do
        paying = {seq for (seq, _), count in zip(found, counts, strict=True) if count}
        for seq, one in looked.items():
            if seq in self._records and seq not in paying and (one is not None or rows > FEW_ROWS):
                self._records[seq].next_attempt = int(running.known[seq.slot]) + retry_after
        for (seq, proposal), count in zip(found, counts, strict=True):
            yield seq, proposal, count

    def _proposal(self, seq: Sequence, running: RunningTable) -> Proposal | None:
        """A proposal to follow the known tokens of a sequence that decodes."""
        slot = seq.slot
        known = int(running.known[slot])
        room = min(self._most, int(running.limit[slot]) - known - 1, int(running.ahead(slot)) - 1)
        if room <= 0 or running.computed[slot] + 1 < known:
            return None
        if seq not in self._records:
            self._records[seq] = Record(self._acceptance)
        found = self._method.propose(seq, running.tokens[slot, :known], room)
        if seq.matcher is None or self._method.proposes_later:
            return found
        return self._guided(seq.matcher, found, room)

    def _guided(self, matcher: Matcher, found: Proposal | None, room: int) -> Proposal | None:
        """The longer one of what a grammar forces and what it allows of a proposal."""
        forced = matcher.forced()[:room]
        allowed = 0 if found is None else matcher.allows(found.tokens.tolist())
        if forced and len(forced) >= allowed:
            return Proposal(np.asarray(forced, np.int32), len(self._method.chances))
        return found._replace(tokens=found.tokens[:allowed]) if found is not None and allowed else None

    def _chances(self, seq: Sequence, proposal: Proposal) -> np.ndarray:
        """The chance of each token of a proposal to be kept."""
        chance = self._records[seq].acceptance[proposal.kind].chance
        return chance ** np.arange(1, len(proposal.tokens) + 1)

    def _counts(self, chances: List[np.ndarray], rows: int, host_seconds: float, waits: float) -> list[int]:
        """How many tokens of each proposal to check: the likeliest ones, while they pay. waits: seconds that the
        devices wait between two steps without proposals."""
        if not chances:
            return []
        every = np.concatenate(chances)
        owner = np.repeat(np.arange(len(chances)), [len(one) for one in chances])
        depth = np.concatenate([np.arange(1, len(one) + 1) for one in chances])
        order = np.argsort(-every, kind="stable")
        seconds = host_seconds + self._method.seconds(len(chances), np.maximum.accumulate(depth[order]))
        worthwhile = order[: self._num_worthwhile(every[order], rows, seconds, waits)]
        return np.bincount(owner[worthwhile], minlength=len(chances)).tolist()

    def _num_worthwhile(self, chances: np.ndarray, rows: int, seconds: np.ndarray, waits: float = 0.0) -> int:
        """How many of the proposed tokens pay.

        chances: each token's chance to be kept, in descending order. seconds: for each number of tokens, what making
        them costs beside the step that checks them. waits: as in `_counts`.
        """
        chances = chances[: max(self._budget - rows, 0)]
        if self.times is None:
            return int(np.count_nonzero(chances >= MIN_ACCEPTANCE))
        tokens = rows + np.cumsum(chances)
        speed = tokens / (self.times.check(rows, rows + np.arange(1, len(chances) + 1)) + seconds[: len(chances)])
        worthwhile = len(speed) > 0 and speed.max() >= MIN_SPEEDUP * rows / (self.times.decode(rows) + waits)
        return 1 + int(speed.argmax()) if worthwhile else 0

    def learn(self, rows: Rows, tokens: np.ndarray, stats: EngineStats) -> None:
        """Takes in what a step kept, and counts it. tokens: int32 [rows, any], -1 where a row sampled none."""
        index = np.flatnonzero(rows.checks)
        all_proposed = rows.num_new[index] - 1
        all_kept = np.maximum(np.count_nonzero(tokens[index] >= 0, axis=1) - 1, 0)
        stats.count_drafts(all_proposed, all_kept)
        for i, proposed, kept in zip(index.tolist(), all_proposed.tolist(), all_kept.tolist(), strict=True):
            if (record := self._records.get(rows.seqs[i])) is not None:
                record.learn(proposed, kept, int(rows.end[i]) - proposed + kept + 1)
                self._acceptance[record.kind].learn(proposed, kept)

    def prepare(self, plan: StepPlan, running: RunningTable) -> None:
        """Called before a plan is dispatched. A draft head reads its tokens, too, unless too many sequences run for
        proposals to pay."""
        running.draft_reads = self.times is None or len(running) <= self._most_rows
        self._method.prepare(plan, running)

    def restore(self) -> None:
        """After a step that failed: whatever the method had on the devices may be lost."""
        self._method.allocate()

    def finished(self, seq: Sequence) -> None:
        """A sequence has ended; its tokens are complete."""
        self._method.finished(seq)


def _is_pending(seq: Sequence, running: RunningTable) -> bool:
    """Whether a step in flight samples tokens of a running sequence."""
    return bool(running.known[seq.slot] < running.total[seq.slot])


class Models(NamedTuple):
    """What methods may run: the target, and the draft model if there is one; and the buckets of their steps."""

    target: ModelRunner
    draft: ModelRunner | None
    shapes: List[StepShape]


def _draft_model(config: SpeculativeConfig, models: Models) -> Method:
    assert models.draft is not None
    return DraftModel(models.draft, models.shapes, config.num_speculative_tokens)


def _draft_head(config: SpeculativeConfig, models: Models) -> Method:
    return DraftHead(models.target, models.shapes, config.num_speculative_tokens)


METHODS: dict[str, Callable[[SpeculativeConfig, Models], Method]] = {
    "ngram": lambda config, _: Ngram(config.prompt_lookup_min, config.prompt_lookup_max),
    "suffix": lambda config, _: Suffix(config.prompt_lookup_min, config.prompt_lookup_max),
    "draft_model": _draft_model,
    "eagle3": _draft_head,
    "mtp": _draft_head,
}


def make_speculator(config: EngineConfig, scheduler: Scheduler, models: Models) -> Speculator | None:
    """The speculator that the settings ask for; None: they ask for none."""
    given = config.speculative_config
    if given is None:
        return None
    method = METHODS[given.method](given, models)
    stages = models.target.num_stages
    budget = scheduler.budget  # a picture may need its room whole
    return Speculator(method, given.num_speculative_tokens, budget.most - budget.whole, stages)
