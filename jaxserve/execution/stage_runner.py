"""The runner of one pipeline stage: its part of the weights, the cache and the slots, and its programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution import stage_steps, steps
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import AuxProgram, ProgramName, Signature, Signatures
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.stages import Stage
from jaxserve.scheduling.step_plan import Sampler

SAMPLES = ("count_tokens", "sample_deferred", "score_prompt")  # kinds of programs that only the last stage has


@dataclass(frozen=True)
class StageSignatures(Signatures):
    """The programs of a stage. A step takes one more argument, unless the stage is the first: x [tokens, hidden]."""

    def of(self, name: ProgramName) -> Signature:
        if not isinstance(name, AuxProgram) or not name.kind.startswith("take_"):
            return super().of(name)
        most = {"take_tokens": (1,), "take_checked": (1 + self.proposals,), "take_deferred": ()}[name.kind]
        tokens = jax.ShapeDtypeStruct((*most, name.size), jnp.int32, sharding=self._everywhere)
        arguments = self.slots, self._host(name.size), tokens
        return Signature(stage_steps.take_tokens, (0,), arguments, self._everywhere)

    def step(self, program: StepProgram) -> Signature:
        stage = self.model.stage
        assert isinstance(stage, Stage)
        made = super().step(program)
        size = self.model.config.hidden_size
        place = self._everywhere
        x = jax.ShapeDtypeStruct((program.shape.tokens, size), self.model.dtype, sharding=place)
        arguments = made.arguments if stage.is_first else (*made.arguments, x)
        if stage.is_last:
            return made._replace(arguments=arguments)
        options: Any = {"model": self.model, "shape": program.shape, "layout": self.layout, "mesh": self.mesh}
        run = self._with_params(partial(stage_steps.run_stage, **options))
        results: Any = stage_steps.StageResult(place, self._cache_sharding, place)  # type: ignore[arg-type]
        return Signature(run, made.donated, arguments, results)


class StageRunner(ModelRunner):
    """A `ModelRunner` of one stage. Only the last stage samples; the others return what the next one reads."""

    signatures_kind = StageSignatures

    @property
    def stage(self) -> Stage:
        stage = self.model.stage
        assert isinstance(stage, Stage)
        return stage

    def advance(self, shape: StepShape, packed: np.ndarray, x: jax.Array | None) -> jax.Array:
        """Runs a stage's part of a step, unless it is the last stage. x: from the stage before; None: there is none."""
        given = () if x is None else (x,)
        result = self._get(_part(shape))(self._arrays, self.cache, self.slots, packed, *given)
        self.cache = result.cache
        self.slots = result.slots
        return result.x

    def finish(self, program: StepProgram, packed: np.ndarray, x: jax.Array) -> tuple[Sampled, jax.Array | None]:
        """Runs the last stage's part of a step, as `step`."""
        result: steps.StepResult = self._get(program)(self._arrays, self.cache, self.slots, packed, x)
        self.cache = result.cache
        self.slots = result.slots
        self._hidden = result.hidden
        return result.drawn, result.hidden

    def take(self, kind: str, slot: np.ndarray, tokens: jax.Array) -> None:
        """Notes tokens of the last stage, see `stage_steps.take_tokens`. `kind`: which of its programs."""
        self.slots = self._get(AuxProgram(kind, len(slot)))(self.slots, slot, tokens)

    def returned(self, draws: np.ndarray, results: list[tuple[int, Sampled]]) -> Iterator[tuple[np.ndarray, jax.Array]]:
        """Of each call of `sample_deferred` the slots [n] of its draws, the padding slot for padding, and the
        tokens."""
        at = 0
        for count, one in results:
            slot = np.full(one.tokens.shape[0], self.padding_slot)
            slot[:count] = draws[at : at + count, 0]
            at += count
            yield slot, one.tokens

    def names(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        names = super().names(shapes)
        if self.stage.is_last:
            return names
        kept = [n for n in names if isinstance(n, AuxProgram) and n.kind not in SAMPLES]
        checking = {program.shape for program in self.programs.all(shapes) if program.proposals}
        for kind, some in (("take_tokens", shapes), ("take_checked", checking)):
            kept += [AuxProgram(kind, rows) for rows in sorted({shape.rows for shape in some})]
        kept += [AuxProgram("take_deferred", size) for size in self.deferred_sizes]
        return [*kept, *sorted(map(_part, shapes), key=lambda part: -part.shape.tokens)]

    def largest(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        if self.stage.is_last:
            return super().largest(shapes)
        found: list[ProgramName] = []
        for decodes in (True, False):
            some = [shape for shape in shapes if shape.decode_only is decodes]
            found += [_part(shape) for shape in some[-1:]]
        return found


def _part(shape: StepShape) -> StepProgram:
    """The one program of a bucket in a stage that samples nothing."""
    return StepProgram(shape, Sampler.NONE, 1, keeps_hidden=False)
