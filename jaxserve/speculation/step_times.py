"""How long steps take on this machine, measured before serving: it decides how many proposals pay."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.config import MAX_TOKENS_PER_CALL
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.slots import encode_slot
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.step_plan import Sampler
from jaxserve.types import SamplingParams

CONTEXT = 512  # tokens before those of a step, which attention reads
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
REPEATS = 5
# tokens of a prompt that is timed
CPU_PROMPT = 32
PROMPT = 2048


@dataclass(frozen=True)
class Curve:
    """Seconds by size; between two measured sizes, those of the larger one."""

    sizes: np.ndarray  # int [n], ascending
    seconds: np.ndarray  # float [n], ascending

    @classmethod
    def of(cls, measured: dict[int, float]) -> Curve:
        """A step takes at most as long as a larger one, for which noise may have been less."""
        sizes = sorted(measured, reverse=True)
        return cls(np.array(sizes)[::-1], np.minimum.accumulate([measured[size] for size in sizes])[::-1])

    def __call__(self, size: np.ndarray | int) -> np.ndarray:
        """Seconds for sizes of any shape; beyond the largest measured size they are infinite."""
        return np.append(self.seconds, np.inf)[np.searchsorted(self.sizes, size)]


@dataclass(frozen=True)
class StepTimes:
    """decode: seconds in which each row samples a token, by the number of rows, in calls of as many tokens as settings
    allow. full: seconds of a step that checks proposals, by its tokens, proposals included, in rows of `each` tokens.
    row: seconds by which such a step is longer for each row more with the same tokens, because attention reads more."""

    decode: Curve
    full: Curve
    each: int = 1
    row: float = 0.0

    def check(self, rows: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of steps that check proposals, for these numbers of tokens [any], proposals included, in `rows` rows.
        They are no shorter than a step without proposals, which may have been measured while the machine was busier."""
        seconds = self.full(tokens) + self.row * np.maximum(rows - -(-tokens // self.each), 0)
        return np.maximum(seconds, self.decode(rows))

    @classmethod
    def measure(cls, runner: ModelRunner, shapes: Sequence[StepShape], proposals: int) -> StepTimes:
        """Runs steps with short sequences in the slots, which must be free. Their pages are the null page."""
        mixed = [shape for shape in shapes if not shape.decode_only]
        each = 1 + proposals

        def seconds(cut: list[int]) -> float:
            shape = next(shape for shape in mixed if shape.tokens >= sum(cut) and shape.rows >= len(cut))
            return least_seconds(runner, runner.programs.choose_checking(shape, Sampler.GREEDY), cut)

        def cut(tokens: int) -> list[int]:
            return [each] * (tokens // each) + ([tokens % each] if tokens % each else [])

        sizes = _up_to(min(mixed[-1].tokens, mixed[-1].rows * each))
        full = Curve.of({tokens: seconds(cut(tokens)) for tokens in sizes})
        most = min(mixed[-1].rows, mixed[-1].tokens, runner.num_slots)
        more = most - len(cut(most))
        row = max(seconds([1] * most) - seconds(cut(most)), 0.0) / more if more else 0.0
        return cls(decode_seconds(runner, shapes), full, each, row)


def decode_seconds(runner: ModelRunner, shapes: Sequence[StepShape], most: int = MAX_TOKENS_PER_CALL) -> Curve:
    """Seconds in which each row samples a token, by the number of rows, in calls of up to `most` tokens."""
    usable = [shape for shape in shapes if shape.decode_only] or list(shapes)
    measured = {}
    for rows in _up_to(min(usable[-1].rows, runner.num_slots)):
        shape = next(shape for shape in usable if shape.rows >= rows)
        lengths = runner.programs.lengths(shapes, rows, Sampler.GREEDY)
        length = max(length for length in lengths if length <= most)
        program = runner.programs.choose(shape, Sampler.GREEDY, length, False)
        measured[rows] = least_seconds(runner, program, [1] * rows, length) / length
    return Curve.of(measured)


def prompt_seconds(runner: ModelRunner, shapes: Sequence[StepShape]) -> float:
    """Seconds for each token of a step that computes a prompt, of as many tokens as a step does beside decodes on CPU,
    and of many elsewhere."""
    mixed = [shape for shape in shapes if not shape.decode_only]
    on_cpu = runner.mesh.devices.flat[0].platform == "cpu"
    tokens = min(CPU_PROMPT if on_cpu else PROMPT, mixed[-1].tokens, runner.max_len)
    shape = next(shape for shape in mixed if shape.tokens >= tokens)
    program = runner.programs.choose(shape, Sampler.GREEDY, 1, False)
    return least_seconds(runner, program, [tokens], checks=False) / tokens


def _up_to(most: int) -> Iterable[int]:
    return [size for size in SIZES if size < most] + [min(most, SIZES[-1])]


def least_seconds(
    runner: ModelRunner, program: StepProgram, counts: list[int], num_new: int = 1, *, checks: bool = True
) -> float:
    """The least time of a step whose row i has counts[i] tokens, of which all but one are proposals if it `checks`
    some. Rows of one token sample `num_new`."""
    shape = program.shape
    rows = len(counts)
    counts = sorted(counts)  # rows of one token come first
    packed = shape.empty(runner.num_slots)
    field = {name: packed[at : at + size] for name, (at, size) in shape.fields.items()}
    field["tokens"][: sum(counts)] = 0
    field["q_start"][1 : rows + 1] = np.cumsum(counts)
    field["q_start"][rows + 1 :] = sum(counts)
    field["slot"][:rows] = np.arange(rows)
    field["num_new"][:rows] = [num_new if count == 1 or not checks else count for count in counts]
    field["tokens_per_call"][0], field["num_decodes"][0] = num_new, counts.count(1)
    params = SamplingParams(temperature=0.0)
    best = np.inf
    length = max(min(CONTEXT, runner.max_len - max(*counts, num_new)), 0)
    for _ in range(1 + REPEATS):
        runner.set_slots([encode_slot(slot, params, 0, (), 1, length=length) for slot in range(rows)])
        start = time.perf_counter()
        np.asarray(runner.step(program, packed)[0].tokens)
        best = min(best, time.perf_counter() - start)
    return best
