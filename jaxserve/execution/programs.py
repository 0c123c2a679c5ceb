"""Chooses which programs are compiled for steps, and which of them runs a batch (host side).

A bucket has one program, which decides on the device what rows need, and for models with a draft head another one
without the head. Each additional program would delay the start, and take memory for its code.

That is different on GPUs where conditionals cannot be recorded in command buffers (`command_buffers.why_static`): XLA
would make the host wait for each predicate in the middle of a step, and for a loop whose length the compiler does not
know. But the host knows the needs of every row. There it chooses a `static` program by its bucket, its sampler
(`Sampler`), the tokens that a call samples, and whether hidden states are returned. A more capable sampler replaces one
that is not compiled. Only small batches have programs of several tokens a call: with more rows they take longer for one
token than the host takes to prepare the next call meanwhile.

GPUs that exchange something within a step decide on the device, too, but a call samples one token of a row: a loop of
calls could not be recorded. The two sums of each layer take longer than the host takes to prepare the next call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.config import MAX_TOKENS_PER_CALL
from jaxserve.execution.memory import available_host_bytes
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.step_plan import Sampler

CPU_THREADS = 4  # maximum of threads that compile for a CPU
MOST_THREADS = 16  # maximum of threads that compile: tracing, which is serial in Python, cannot feed more
COMPILE_BYTES = 2**30  # generous estimate of the host's memory for compiling one program
LENGTHS = (1, 2, 4, 8)  # possible numbers of tokens that a row samples in a call, for programs of fixed length
LOOPED_ROWS = 8  # rows of the largest batch that samples several tokens a call
PLAIN_ROWS = 64  # from this number of rows on, a program without costly filters pays


@dataclass(frozen=True)
class StepProgram:
    """A bucket as it is compiled, with the arguments of `steps.run_step`.

    tokens_per_call: tokens that a row may sample. None: the buffer says how many, at most MAX_TOKENS_PER_CALL.
    proposals: most proposed tokens of a row, which the step checks; 0: it checks none.
    part: of a step that is several programs, which of them this is, see `streamed_layers`; None: the last or only one.
    drafts: a draft head, if the model has one, reads the step's tokens.
    """

    shape: StepShape
    sampler: Sampler
    tokens_per_call: int | None
    keeps_hidden: bool
    proposals: int = 0
    part: int | None = None
    drafts: bool = True

    def __str__(self) -> str:
        """As profiles, dumps and logs name it. What a bucket's only program has is not said."""
        if self.part is not None:
            return f"{self.shape}_part_{self.part}"
        decides = self.sampler is Sampler.ANY
        said = {
            self.sampler.name.lower(): not decides and self.sampler is not Sampler.NONE,
            f"x{self.tokens_per_call}": (self.tokens_per_call or 1) > 1,
            f"verify_{self.proposals}": self.proposals > 0,
            "hidden": self.keeps_hidden and self.sampler is Sampler.FULL,
            "undrafted": not self.drafts,
        }
        return "_".join([str(self.shape), *(word for word, is_said in said.items() if is_said)])


class StepPrograms:
    """Chooses programs.

    Args:
      static: a program is specialised to everything that the host knows.
      most: tokens that a call may sample per row, by the settings.
      costly_filters: filters take many passes over the logits, instead of one or two in a kernel.
      pools: nothing is sampled, and every step returns pooled hidden states.
      proposals: most tokens that are proposed for a row; 0: there is no speculation.
      has_head: there is a draft head. Steps in which proposals would not pay have programs without it.
    """

    def __init__(
        self,
        *,
        static: bool,
        most: int = MAX_TOKENS_PER_CALL,
        costly_filters: bool = True,
        pools: bool = False,
        proposals: int = 0,
        has_head: bool = False,
    ):
        self.static = static
        self._most = most
        self._costly_filters = costly_filters
        self._pools = pools
        self.proposals = proposals
        self._has_head = has_head

    def all(self, shapes: Sequence[StepShape]) -> list[StepProgram]:
        """All programs that `choose` may return for these buckets. The last bucket must be the largest mixed one."""
        checking = [self._checking(shape, sampler) for shape in shapes for sampler in self._checkers(shape)]
        if not self.static or self._pools:
            return [one for shape in shapes for one in self._with_and_without_head(self.largest(shape))] + checking
        found = []
        for shape in shapes:
            found += [
                one
                for length in self._lengths(shape)
                for sampler in self._samplers(shape, length)
                for one in self._with_and_without_head(StepProgram(shape, sampler, length, keeps_hidden=False))
            ]
        scoring = [shape for shape in shapes if shape.scored]
        return found + [StepProgram(shape, Sampler.FULL, 1, keeps_hidden=True) for shape in scoring] + checking

    def largest(self, shape: StepShape) -> StepProgram:
        """The program of a bucket that needs the most memory."""
        if self._pools:
            return StepProgram(shape, Sampler.NONE, 1, keeps_hidden=True)
        if self.static:
            return StepProgram(shape, Sampler.FULL, 1, keeps_hidden=shape.scored)
        return StepProgram(shape, Sampler.ANY, None if self._most > 1 else 1, keeps_hidden=shape.scored)

    def bounding(self, shapes: Sequence[StepShape]) -> list[StepProgram]:
        """Programs whose figures tell what the others need at most (`bounds_code`). For decodes and for prompts: first
        the programs of the largest buckets, then smaller ones, which many are smaller than."""
        largest = []
        smaller = []
        programs = self.all(shapes)
        for decodes in (True, False):
            some = sorted((s for s in shapes if s.decode_only is decodes), key=lambda shape: shape.tokens)
            if some:
                largest.append(self.largest(some[-1]))
            if len(some) > 1:
                middle = some[(len(some) - 1) // 2]
                of_middle = [program for program in programs if program.shape == middle]
                looped = [p for p in programs if p.shape.decode_only is decodes and (p.tokens_per_call or 1) > 1]
                smaller.append(max(looped or of_middle, key=_extent))
        return largest + [program for program in smaller if program not in largest]

    def choose(
        self, shape: StepShape, sampler: Sampler, num_new: int, scores: bool, *, drafts: bool = True
    ) -> StepProgram:
        """The smallest program for rows that need `sampler` and sample up to `num_new` tokens. `scores`: hidden states
        are needed. `num_new` must be allowed by `lengths`. `drafts`: a draft head must read the tokens."""
        if (self.static and scores) or self._pools:
            return self.largest(shape)
        if not self.static:
            found = self.largest(shape)
        else:
            length = next(length for length in self._lengths(shape) if length >= num_new)
            sampler = next(one for one in self._samplers(shape, length) if one >= sampler)
            found = StepProgram(shape, sampler, length, keeps_hidden=False)
        return found if drafts else self._with_and_without_head(found)[-1]

    def _with_and_without_head(self, program: StepProgram) -> list[StepProgram]:
        """A program that a draft head reads with, and the same without the head, if that is compiled, too."""
        without = self._has_head and (not self.static or program.shape.rows > LOOPED_ROWS)
        return [program, replace(program, drafts=False)] if without else [program]

    def choose_checking(self, shape: StepShape, sampler: Sampler) -> StepProgram:
        """The smallest program that checks proposals for rows that need `sampler`."""
        return self._checking(shape, next(one for one in self._checkers(shape) if one >= sampler))

    def _checking(self, shape: StepShape, sampler: Sampler) -> StepProgram:
        return StepProgram(shape, sampler, 1, keeps_hidden=False, proposals=self.proposals)

    def _checkers(self, shape: StepShape) -> list[Sampler]:
        """The samplers of programs that check proposals, ascending."""
        if not self.proposals or shape.decode_only:
            return []
        return [Sampler.GREEDY, Sampler.FILTERED, Sampler.FULL] if self.static else [Sampler.ANY]

    def lengths(self, shapes: Sequence[StepShape], rows: int, sampler: Sampler) -> Sequence[int]:
        """Numbers of tokens that each of `rows` decoding rows may sample in one call, ascending."""
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
        """The samplers that are compiled for a bucket and this number of tokens per call, ascending."""
        found = [Sampler.GREEDY, Sampler.FILTERED]
        if self._costly_filters and shape.decode_only and shape.rows >= PLAIN_ROWS:
            found.insert(1, Sampler.PLAIN)
        return [*found, Sampler.FULL] if tokens_per_call == 1 else found


def _extent(program: StepProgram) -> tuple[int, int, int]:
    return program.shape.tokens, program.sampler, program.tokens_per_call or 1


def bounds_code(larger: StepProgram, program: StepProgram) -> bool:
    """Whether a program's code is expected to be no larger than that of `larger`: both are of the same kind, and it
    has no more of anything. A loop adds code on TPUs, and the sampler's code grows with the rows."""
    pairs = zip(_extent(larger), _extent(program), strict=True)
    same_kind = larger.shape.decode_only is program.shape.decode_only and larger.part == program.part
    return same_kind and all(a >= b for a, b in pairs)


def compile_threads(programs: int, *, on_cpu: bool) -> int:
    """How many programs to compile at a time, by the cores of this process and the free memory.

    For a CPU, XLA itself distributes the code of each program over all cores, so that a few programs keep them busy.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = CPU_THREADS if on_cpu else MOST_THREADS
    return max(1, min(most, cores, available_host_bytes() // COMPILE_BYTES, programs))
