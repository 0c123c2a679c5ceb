"""A pipeline whose stages belong to different hosts. Each host has a stage, or shares one with other hosts.

All hosts get the same calls, and each runs those of its own stage. Between stages, arrays go by transfers (`MeshLink`).
A device runs its programs in order, and a transfer waits for both of its ends. So a stage must not be told too early to
take the tokens of the last stage: it would wait for them while it could compute. A stage takes a step's tokens as many
steps later as stages follow it, after its computation and before it sends the result on. When the stages take equally
long, the tokens have just been sampled then. They are taken earlier if a step reads them, and all at once, on all
hosts, before a call that is no step of the pipeline or when the first host reads tokens.

Hence no transfers wait for each other in a circle. Say that stage s computes step n at the time n + s. Then every stage
has its transfers in the order of the time at which the last of both ends is ready: sending from s at n + s + 1, tokens
of step n at n + the number of stages, before what is sent at that time. Where tokens are taken earlier, this waits only
for steps that all hosts have been told already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.devices.mesh_links import MeshLink, least_of_processes
from jaxserve.execution import commands, steps
from jaxserve.execution.aux_programs import deferred_calls
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.pipeline_runner import PipelineRunner, StageProgram, taken_by
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.sampling import SCORE_WORDS, Sampled
from jaxserve.execution.stage_runner import StageRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.step_plan import Sampler

Form = jax.ShapeDtypeStruct


@dataclass
class Due:
    """What the last stage has sampled and sends to this stage.

    Attributes:
      kind, slot: as in `pipeline_runner.Returning`.
      step: how many steps had been dispatched when it was sampled.
      forms: of the arrays that this stage gets: the tokens; in the first stage also the rest of `Sampled`.
      arrays: None until they are taken.
    """

    kind: str
    slot: np.ndarray
    step: int
    forms: Sequence[Form]
    arrays: list[jax.Array] | None = None


@dataclass(frozen=True)
class Awaited:
    """One of the arrays of `due`. Reading it with NumPy waits for it."""

    due: Due
    index: int
    take_all: Callable[[], None]

    def copy_to_host_async(self) -> None:
        """Does nothing: copies begin when the array is taken."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.due.arrays is None:
            self.take_all()
        assert self.due.arrays is not None
        return np.array(self.due.arrays[self.index], copy=copy)


class HostPipelineRunner(PipelineRunner):
    """A `PipelineRunner` that runs the stage whose devices this process has. Of the other stages it knows the shapes.

    Other hosts must run every command that its listener gets. What its methods return is there on the first stage's
    hosts.

    Attributes:
      sizing_of: makes what chooses the number of pages for buckets of these shapes; only on hosts that are told when.
    """

    sizing_of: Callable[[list[StepShape]], Any]

    def __init__(self, stages: list[StageRunner], one_page: CacheLayout):
        super().__init__(stages, one_page)
        me = jax.process_index()
        self.here = [one for one in stages if any(device.process_index == me for device in one.mesh.devices.flat)]
        (self._own,) = self.here
        self._number = stages.index(self._own)
        self._onward = [MeshLink(one.mesh, after.mesh) for one, after in pairwise(stages)]
        self._back = [MeshLink(self._last.mesh, one.mesh) for one in self._others]
        self._steps = 0  # steps so far
        self._tokens = 0  # tokens of the latest one's bucket

    @property
    def frozen(self) -> bool:
        return self._own.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._own.frozen = frozen
        for link in self._onward + self._back:
            link.frozen = frozen

    def allocate(self) -> None:
        self._take(self._steps)
        super().allocate()

    def release(self) -> None:
        self._take(self._steps)
        super().release()

    def restore(self) -> None:
        if not self.is_whole():
            self.allocate()

    def begin_pages(self, shapes: list[StepShape]) -> None:
        self._sizing = self.sizing_of(shapes)
        self._sizing.begin()

    def finish_pages(self, shapes: list[StepShape]) -> None:
        self._sizing.finish(shapes)

    def least(self, numbers: list[int]) -> list[int]:
        return least_of_processes(numbers)

    # Dispatch

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]:
        """As `ModelRunner.step`. Hidden states are only a shape, unless this is the last stage."""
        self.tell(commands.Step, program, packed)
        own = self._number
        shape = program.shape
        slots, sampling = self._slots_of(shape, packed)
        self._return_tokens(slots)
        self._steps = self._steps + 1
        self._tokens = shape.tokens
        x: jax.Array | None = None
        hidden: Any = None
        if own > 0:
            (x,) = self._onward[own - 1].receive([self._passed(shape)])
        if self._own is self._last:
            assert x is not None
            drawn, hidden = self._own.finish(program, packed, x)
        else:
            x = self._own.advance(shape, packed, x)
            self._take(self._steps - (len(self.stages) - 1 - own))
            self._onward[own].send([x])
            drawn = None
            hidden = self._passed(shape) if program.keeps_hidden and not shape.decode_only else None
        return self._sampled(taken_by(program), sampling, self._drawn(program), drawn), hidden

    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]:
        self.tell(commands.SampleDeferred, draws, masks)
        self._take(self._steps)
        is_last = self._own is self._last
        results = []
        made = self._own.sample_deferred(draws, masks) if is_last else []
        for number, (at, end, size) in enumerate(deferred_calls(draws, self._own.deferred_sizes)):
            slot = np.full(size, self._last.num_slots)
            slot[: end - at] = draws[at:end, 0]
            drawn = made[number][1] if is_last else None
            results.append((end - at, self._sampled("take_deferred", slot, self._drawn_later(size), drawn)))
        return results

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None = None) -> jax.Array:
        self.tell(commands.ScorePrompt, rows, targets, places)
        self._take(self._steps)
        scores: Any = None
        if self._own is self._last:
            scores = self._own.score_prompt(rows, targets, places)
            self._back[0].send([scores])
        elif self._number == 0:
            (scores,) = self._back[0].receive([self._scores(self._tokens)])
        return scores

    def take_all(self) -> None:
        """Takes everything that the last stage has sampled, on all hosts."""
        self.tell(commands.TakeAll)
        self._take(self._steps)

    def _sampled(self, kind: str, slot: np.ndarray, forms: Sampled, drawn: Sampled | None) -> Sampled:
        """Sends what the last stage has `drawn` for the slots [n] to the other stages, or notes that it is due."""
        leaves, structure = jax.tree.flatten(forms)
        if drawn is not None:
            arrays = jax.tree.leaves(drawn)
            assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in leaves]
            for number, link in enumerate(self._back):
                link.send(arrays if number == 0 else arrays[:1])
            self._show(arrays[0])
            return drawn
        due = Due(kind, slot.astype(np.int32), self._steps, leaves if self._number == 0 else leaves[:1])
        self._returning.append(due)
        return jax.tree.unflatten(structure, [Awaited(due, i, self.take_all) for i in range(len(leaves))])

    def _take(self, step: int) -> None:
        """Takes what is due of this step and of those before it."""
        for due in self._returning:
            if due.arrays is None and due.step <= step:
                due.arrays = self._back[self._number].receive(due.forms)
                if self._number == 0:
                    for x in due.arrays:
                        x.copy_to_host_async()
                self._show(due.arrays[0])

    def _return_tokens(self, slot: np.ndarray) -> None:
        """As in `PipelineRunner`, for this stage."""
        needed = [i for i, due in enumerate(self._returning) if np.isin(due.slot, slot).any()]
        count = needed[-1] + 1 if needed else 0
        if needed:
            self._take(self._returning[count - 1].step)
        for due in self._returning[:count]:
            if super()._matters(due):
                assert due.arrays is not None
                self._own.take(due.kind, due.slot, due.arrays[0])
        del self._returning[:count]

    def _matters(self, sampled: Any) -> bool:
        return sampled.arrays is None or super()._matters(sampled)

    def _show(self, tokens: jax.Array) -> None:
        if self.watcher is not None:
            self.watcher(tokens)

    # What goes from stage to stage

    def _jobs(self, names: Sequence[StageProgram]) -> list[Callable[[], Any]]:
        transfers = {one for name in names for one in self._transfers(*name) if one[0].is_here}
        own = [name for name in names if name[0] == self._number]
        return super()._jobs(own) + [partial(link.compile, forms) for link, forms in transfers]

    def _transfers(self, stage: int, name: Any) -> list[tuple[MeshLink, tuple[Form, ...]]]:
        """The transfers that follow this program of a stage, and the forms of their arrays."""
        if stage < len(self._others):
            return [(self._onward[stage], (self._passed(name.shape),))] if isinstance(name, StepProgram) else []
        if isinstance(name, StepProgram):
            forms = tuple(jax.tree.leaves(self._drawn(name)))
        elif name.kind == "sample_deferred":
            forms = tuple(jax.tree.leaves(self._drawn_later(name.size)))
        else:
            return [(self._back[0], (self._scores(name.size),))] if name.kind == "score_prompt" else []
        return [(link, forms if number == 0 else forms[:1]) for number, link in enumerate(self._back)]

    def _passed(self, shape: StepShape) -> Form:
        """What a stage passes on to the next one."""
        return Form((shape.tokens, self._own.model.config.hidden_size), self._own.model.dtype)

    def _drawn(self, program: StepProgram) -> Sampled:
        """What the last stage's part of a step samples."""
        (most, rows), last = (1 + program.proposals, program.shape.rows), self._last.stage
        scores = Form((most, rows, SCORE_WORDS), jnp.int32) if program.sampler >= Sampler.FULL else None
        some_experts = any(self._last.model.config.layers[i].mlp.experts is not None for i in last.layers)
        load = Form((1, 3), jnp.int32) if some_experts else None
        forms: Any = Form((most, rows), jnp.int32), scores, load
        return Sampled(*forms)

    def _drawn_later(self, size: int) -> Sampled:
        """What one call of `sample_deferred` samples."""
        forms: Any = Form((size,), jnp.int32), Form((size, SCORE_WORDS), jnp.int32)
        return Sampled(*forms)

    def _scores(self, tokens: int) -> Form:
        """The result of `score_prompt` for hidden states of so many tokens."""
        return Form((steps.scored_words(tokens, self._own._on_cpu)[0], SCORE_WORDS), jnp.int32)
