"""Which programs are compiled of the steps, and which of them runs a batch (host side).

The host knows what every row wants. On accelerators it therefore names a program by more than its bucket: what its
sampler can do (`Sampler`), how many tokens a call draws, and whether hidden states come back. None of them then has a
conditional, nor a loop whose length the compiler does not know; XLA:GPU makes the host wait in the middle of a step for
either. On CPU nothing is gained by that, and each program more delays the start: there is one per bucket, which decides
at run time.

Programs are bounded, since each costs seconds of compiling, and memory for its code. A sampler that can do more stands
in for one that is not compiled, and several tokens a call are for small batches: with more rows the devices take longer
for one token than the host takes for a call, which it prepares meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.config import MAX_TOKENS_PER_CALL
from jaxserve.execution.memory import available_host_bytes
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.sampler import Sampler

CPU_THREADS = 4  # that compile at a time
MOST_THREADS = 16  # that compile: beyond that Python, which traces one program at a time, cannot keep up
COMPILE_BYTES = 2**30  # of the host's memory for a program that is being compiled, with room to spare
LENGTHS = (1, 2, 4, 8)  # tokens that a row may draw in a call, where programs have fixed lengths
LOOPED_ROWS = 8  # of the largest batch that draws several
PLAIN_ROWS = 64  # from so many rows on, many passes over the logits for filters are worth a program without them


@dataclass(frozen=True)
class StepProgram:
    """A bucket as it is compiled: the arguments of `steps.run_step`.

    tokens_per_call: tokens that a row may draw; None: as many as the buffer says, at most MAX_TOKENS_PER_CALL.
    """

    shape: StepShape
    sampler: Sampler
    tokens_per_call: int | None
    keeps_hidden: bool

    def __str__(self) -> str:
        times = f" x {self.tokens_per_call}" if self.tokens_per_call and self.tokens_per_call > 1 else ""
        return f"{self.shape} {self.sampler.name.lower()}{times}{' with hidden states' if self.keeps_hidden else ''}"


class StepPrograms:
    """Chooses programs. `static`: they are fixed in all that the host knows, as accelerators want them. `most`: tokens
    that a call may draw per row, by the settings. `costly_filters`: they take many passes over the logits, not one or
    two in a kernel."""

    def __init__(self, *, static: bool, most: int = MAX_TOKENS_PER_CALL, costly_filters: bool = True):
        self.static, self._most, self._costly_filters = static, most, costly_filters

    def all(self, shapes: Sequence[StepShape]) -> list[StepProgram]:
        """All that `choose` can name for batches in these buckets, the last of which is the largest mixed one."""
        if not self.static:
            return [self.largest(shape) for shape in shapes]
        found = []
        for shape in shapes:
            found += [
                StepProgram(shape, sampler, length, keeps_hidden=False)
                for length in self._lengths(shape)
                for sampler in self._samplers(shape, length)
            ]
        scoring = [shape for shape in shapes if not shape.decode_only][-1:]  # see `step_buffer.split`
        return found + [StepProgram(shape, Sampler.FULL, 1, keeps_hidden=True) for shape in scoring]

    def largest(self, shape: StepShape) -> StepProgram:
        """The program of a bucket that needs the most memory."""
        if self.static:
            return StepProgram(shape, Sampler.FULL, 1, keeps_hidden=not shape.decode_only)
        return StepProgram(shape, Sampler.ANY, None, keeps_hidden=not shape.decode_only)

    def choose(self, shape: StepShape, sampler: Sampler, num_new: int, scores: bool) -> StepProgram:
        """The least program for rows that need `sampler` and draw up to `num_new` tokens; `scores`: the hidden states
        are wanted. `num_new` is at most what `max_tokens_per_call` allows."""
        if not self.static or scores:
            return self.largest(shape)
        length = next(length for length in self._lengths(shape) if length >= num_new)
        sampler = next(one for one in self._samplers(shape, length) if one >= sampler)
        return StepProgram(shape, sampler, length, keeps_hidden=False)

    def lengths(self, shapes: Sequence[StepShape], rows: int, sampler: Sampler) -> Sequence[int]:
        """How many tokens each of so many decoding rows may draw in one call, ascending."""
        decodes = [shape for shape in shapes if shape.decode_only]
        if not decodes:
            return (1,)
        if not self.static:
            return range(1, self._most + 1)
        shape = next((shape for shape in decodes if shape.rows >= rows), decodes[-1])
        return self._lengths(shape) if sampler < Sampler.FULL else (1,)

    def _lengths(self, shape: StepShape) -> Sequence[int]:
        if not shape.decode_only or shape.rows > LOOPED_ROWS:
            return (1,)
        return [length for length in LENGTHS if length <= self._most]

    def _samplers(self, shape: StepShape, tokens_per_call: int) -> list[Sampler]:
        """Those that are compiled of a bucket for calls of so many tokens, ascending."""
        found = [Sampler.GREEDY, Sampler.FILTERED]
        if self._costly_filters and shape.decode_only and shape.rows >= PLAIN_ROWS:
            found.insert(1, Sampler.PLAIN)
        return [*found, Sampler.FULL] if tokens_per_call == 1 else found


def compile_threads(programs: int, *, on_cpu: bool) -> int:
    """How many programs are compiled at a time: as the cores of this process and the free memory allow.

    For a CPU, XLA shares the code of each program out over all cores by itself, so that few at a time keep them busy.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = CPU_THREADS if on_cpu else MOST_THREADS
    return max(1, min(most, cores, available_host_bytes() // COMPILE_BYTES, programs))
