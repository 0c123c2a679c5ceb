"""Runs the one step of `verifying` on the devices at hand, and compares the bits of a row in different company.

Interpreters of kernels and compilers ahead of time cannot tell whether a device computes each row by itself. So an
engine that verifies tokens asks the device before it is ready.
"""

from __future__ import annotations

import logging

import numpy as np

from jaxserve.config import ConfigError
from jaxserve.execution.slots import encode_slot
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.verifying import VerifyingRunner
from jaxserve.scheduling.block_manager import chunk_of
from jaxserve.types import SamplingParams

log = logging.getLogger(__name__)

Part = tuple[int, int, int]  # of a slot's tokens: the slot, the number of the first one, and how many


def check_rows(runner: VerifyingRunner, shape: StepShape) -> None:
    """Computes a prompt alone and whole, then beside other rows and in parts, as a prompt and token by token. There
    must be no requests: the prompts are in pages from 1 on.

    Raises ConfigError if a hidden state or the log-probabilities behind the last token are not the same bits."""
    pages = runner.layout.num_pages - 1
    size = runner.layout.page_size
    groups = runner.layout.groups.num_groups
    slots = min(3, runner.num_slots)
    blocks = min(pages // (groups * slots), -(-shape.tokens // size))
    chunk = chunk_of(runner.layout.groups.windows) or shape.tokens
    count = min(shape.tokens * 5 // 8, blocks * size, runner.max_len - 1, chunk)
    if count < 4:
        return
    each = blocks * groups
    entries = [(slot, index, 1 + slot * each + index) for slot in range(slots) for index in range(each)]
    for at in range(0, len(entries), 256):
        runner.update_tables([], np.array(entries[at : at + 256], np.int32).T)
    others: list[Part] = [(slot, 0, min(3 * slot, count)) for slot in range(1, slots)]
    half = count // 2
    whole = _run(runner, shape, [[(0, 0, count)]])
    halves = _run(runner, shape, [[*others, (0, 0, half)], [(0, half, count - half)]])
    single = _run(runner, shape, [[(0, 0, count - 2)], [*others, (0, count - 2, 1)], [(0, count - 1, 1)]])
    for name, found in (("in halves", halves), ("token by token", single)):
        if differing := sum(int((a != b).sum()) for a, b in zip(whole, found, strict=True)):
            raise ConfigError(
                f"deterministic_mode must not be verify: on these devices, {differing} of {sum(x.size for x in whole)} "
                f"bytes differ between a prompt of {count} tokens that is computed alone, and beside others {name}"
            )
    log.info("a row of %s has the same bits in any company, for %d tokens", shape, count)


def _run(runner: VerifyingRunner, shape: StepShape, steps: list[list[Part]]) -> tuple[np.ndarray, np.ndarray]:
    """Runs steps one after the other. Returns the hidden states of slot 0, and the scores behind its last token, as
    bytes."""
    params = SamplingParams(temperature=0.0, logprobs=1)
    slots = sorted({slot for parts in steps for slot, *_ in parts})
    runner.set_slots([encode_slot(slot, params, 0, (), 1) for slot in slots])
    hidden = []
    scores = np.empty(0)
    for parts in steps:
        packed = shape.empty(runner.num_slots)
        field = {name: packed[at : at + size] for name, (at, size) in shape.fields.items()}
        counts = [count for *_, count in parts]
        ends = np.cumsum(counts)
        field["q_start"][1:] = ends[-1]
        field["q_start"][1 : len(parts) + 1] = ends
        field["tokens"][: ends[-1]] = np.concatenate([_tokens(runner, *part) for part in parts])
        field["slot"][: len(parts)] = [slot for slot, *_ in parts]
        field["num_new"][: len(parts)] = 1
        field["tokens_per_call"][0] = 1
        drawn, states = runner.step(runner.programs.largest(shape), packed)
        assert states is not None
        hidden.append(np.asarray(states)[ends[-1] - counts[-1] : ends[-1]].view(np.uint8))
        scores = np.asarray(drawn.scores)[0, len(parts) - 1]
    return np.concatenate(hidden), scores.view(np.uint8)


def _tokens(runner: VerifyingRunner, slot: int, first: int, count: int) -> np.ndarray:
    """Tokens of a slot's prompt, any but the same each time."""
    return (np.arange(first, first + count) * 7919 + 31 * slot) % runner.model.config.vocab_size
