"""Which tokens of the running sequences the next step computes: decodes first, then prompts within the token budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.scheduling.micro_batches import MicroBatches
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows


@dataclass(frozen=True)
class TokenBudget:
    """How many tokens a step may compute in each group of devices."""

    most: int  # at least the number of slots, so that every decode fits in every step
    chunk: int | None = None  # limit for a step that computes prompts while others decode; None: `most`
    bursts: bool = True  # many prompts may use more than `chunk`
    stages: int = 1  # of a pipeline: so many steps share `most` tokens of prompts, so that all stages have work

    def for_prompts(self, decodes: int, prompts: int) -> int:
        """Tokens for prompts beside `decodes` rows; `prompts` is the number of other sequences, waiting ones included.
        Decodes count against the chunk, but prompts keep at least an eighth of it, or half of it with bursts. With
        bursts the chunk grows when prompts outnumber a quarter of the decodes."""
        if not decodes or (chunk := self.chunk) is None:
            return max(-(-self.most // self.stages), min(decodes + 1, self.most)) - decodes
        if self.bursts:
            chunk *= max(1, 4 * prompts // decodes)
        least = -(-chunk // (2 if self.bursts else 8))
        return min(self.most - decodes, max(chunk - decodes, least))


def choose_rows(
    running: RunningTable, tokens_per_call: int, budget: TokenBudget, num_waiting: int, turns: MicroBatches
) -> Rows:
    """The rows of the next step. A decoding row samples up to `tokens_per_call` tokens. turns: which of them decode."""
    lineup = running.lineup
    total, start = running.total[lineup.slot], running.computed[lineup.slot]
    left, spare = total - start, lineup.limit - total  # tokens to compute; tokens that may still be sampled
    decodes, prompts = _decodes_and_prompts(running, num_waiting, turns)
    num_new = np.minimum(spare, tokens_per_call)
    if tokens_per_call > 1 and (lineup.any_masked or lineup.any_beams):
        num_new[lineup.one_at_a_time] = np.minimum(spare, 1)[lineup.one_at_a_time]
    checks = running.proposes and bool(running.proposed[lineup.slot[decodes]].any())
    if decodes.all() and not checks:  # the usual case
        columns = lineup.slot, lineup.slot_generation, start, lineup.one, num_new, lineup.none
        return Rows(lineup.seqs, *columns, only_decodes=True)
    decoding = np.flatnonzero(decodes)
    one = lineup.one[decoding]
    if checks:  # the step samples a token after each proposal, and one after the row's last known token
        one = 1 + running.proposed[lineup.slot[decoding]]
    elif not prompts.any():
        return running.rows([lineup.seqs[i] for i in decoding.tolist()], one, num_new[decoding], only_decodes=True)
    most = np.minimum(left, running.ahead(lineup.slot))
    group, parts = running.group_of(lineup.slot), []
    for number in range(running.device_groups):
        here, decoded = group == number, one[group[decoding] == number]
        others = (
            np.count_nonzero(here) - len(decoded) - turns.held_back[number] + -(-num_waiting // running.device_groups)
        )
        room = budget.for_prompts(int(decoded.sum()), int(others))
        parts.append(_prompt_chunks(np.flatnonzero(prompts & here), left, most, spare, room))
    chunks, count, last = map(np.concatenate, zip(*parts, strict=True))
    seqs = [lineup.seqs[i] for i in np.concatenate([decoding, chunks]).tolist()]
    return running.rows(seqs, np.concatenate([one, count]), np.concatenate([one, last]))


def next_decodes(running: RunningTable, num_waiting: int, turns: MicroBatches) -> list[Sequence]:
    """The sequences that decode in the next step."""
    seqs, (decodes, _) = running.lineup.seqs, _decodes_and_prompts(running, num_waiting, turns)
    return [seqs[i] for i in np.flatnonzero(decodes).tolist()]


def _decodes_and_prompts(running: RunningTable, num_waiting: int, turns: MicroBatches) -> tuple[np.ndarray, np.ndarray]:
    """Which sequences of the lineup decode in the next step, and which have a prompt to compute; bool each."""
    lineup = running.lineup
    total, known = running.total[lineup.slot], running.known[lineup.slot]
    left = total - running.computed[lineup.slot]
    decodes = (left == 1) & (lineup.limit > total)
    if lineup.any_beams:  # a beam waits until all beams of its request have sampled and were rearranged
        decodes &= ~running.beams[lineup.slot] | (known == total)
    prompts = (left > 0) & ~decodes & (known == total)
    return turns.choose(running, decodes, may_wait=not num_waiting and not prompts.any()), prompts


def prompt_budgets(
    running: RunningTable, rows: Rows, budget: TokenBudget, turns: MicroBatches, num_waiting: int
) -> list[int]:
    """How many tokens of newcomers each group of devices may compute beside these rows."""
    group, budgets, groups = running.group_of(rows.slot), [], running.device_groups
    for number in range(groups):
        count = rows.count[group == number]
        decodes = int(np.count_nonzero(count == 1))
        others = running.num_running(number) - decodes - int(turns.held_back[number]) + -(-num_waiting // groups)
        budgets.append(budget.for_prompts(decodes, others) - (int(count.sum()) - decodes))
    return budgets


def _prompt_chunks(
    prompts: np.ndarray, left: np.ndarray, most: np.ndarray, spare: np.ndarray, budget: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spends the budget, in tokens, on `prompts` (indices) in their order. A prompt has `left` tokens to compute, of
    which this step may compute `most`, and `spare` tokens to sample.

    Returns the indices of the prompts that get part of the budget, how many tokens each computes, and how many it
    samples: 1 if the chunk ends its prompt, else 0.
    """
    left, most, spare = left[prompts], most[prompts], spare[prompts]
    count = np.clip(budget - (np.cumsum(most, dtype=np.int32) - most), 0, most)
    last = ((count == left) & (spare > 0)).astype(np.int32)
    some = count > 0
    return prompts[some], count[some], last[some]
