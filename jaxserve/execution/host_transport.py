"""How arrays go between the stages of a pipeline on different hosts. Each host has a stage, or shares one with others.

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
from jaxserve.execution import steps
from jaxserve.execution.pipeline_runner import StageProgram, slots_of, taken_by
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.sampling import SCORE_WORDS, Sampled
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.step_plan import Sampler

Form = jax.ShapeDtypeStruct


@dataclass
class ExpectedTokens:
    """What the last stage has sampled and sends to this stage.

    Attributes:
      kind, slot: as in `pipeline_runner.InTransit`.
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
class ExpectedArray:
    """One of the arrays of `expected`. Reading it with NumPy waits for it."""

    expected: ExpectedTokens
    index: int
    take_all: Callable[[], None]

    def copy_to_host_async(self) -> None:
        """Does nothing: copies begin when the array is taken."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.expected.arrays is None:
            self.take_all()
        assert self.expected.arrays is not None
        return np.array(self.expected.arrays[self.index], copy=copy)


class HostTransport:
    """Runs the stage whose devices this process has, and moves arrays between it and the other hosts. Of the other
    stages it knows the shapes. See `pipeline_runner.Transport`. All hosts must run the same calls; what these return is
    there on the first stage's hosts.

    Attributes:
      take_everywhere: `PipelineRunner.take_all`, with which all hosts take what the last stage has sampled.
    """

    def __init__(self, stages: list[ModelRunner]):
        me = jax.process_index()
        self.here = [one for one in stages if any(device.process_index == me for device in one.mesh.devices.flat)]
        (self._own,) = self.here
        self.watcher: Callable[[jax.Array], None] | None = None
        self.take_everywhere: Callable[[], None] = self.take_all
        self._number = stages.index(self._own)
        self._num_stages = len(stages)
        self._last = stages[-1]
        self._onward = [MeshLink(one.mesh, after.mesh) for one, after in pairwise(stages)]
        self._back = [MeshLink(self._last.mesh, one.mesh) for one in stages[:-1]]
        self._expected: list[ExpectedTokens] = []
        self._steps = 0  # steps so far
        self._tokens = 0  # tokens of the latest one's bucket

    def freeze(self, frozen: bool) -> None:
        for link in self._onward + self._back:
            link.frozen = frozen

    def clear(self) -> None:
        self._take(self._steps)
        self._expected.clear()

    def least(self, numbers: list[int]) -> list[int]:
        return least_of_processes(numbers)

    # Dispatch

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]:
        own = self._number
        shape = program.shape
        slots, sampling = slots_of(shape, packed, self._last.padding_slot)
        self._return_tokens(slots)
        self._steps = self._steps + 1
        self._tokens = shape.tokens
        x: jax.Array | None = None
        hidden: Any = None
        if own > 0:
            (x,) = self._onward[own - 1].receive([self._passed(shape)])
        if self._own is self._last:
            assert x is not None
            drawn, hidden = self._own.step(program, packed, x)
        else:
            x = self._own.advance(shape, packed, x)
            self._take(self._steps - (self._num_stages - 1 - own))
            self._onward[own].send([x])
            drawn = None
            hidden = self._passed(shape) if program.keeps_hidden and not shape.decode_only else None
        return self._sampled(taken_by(program), sampling, self._drawn(program), drawn), hidden

    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]:
        self._take(self._steps)
        is_last = self._own is self._last
        results = []
        made = self._own.sample_deferred(draws, masks) if is_last else []
        groups = self._last.groups
        for number, (some, size) in enumerate(groups.deferred_calls(draws, self._own.deferred_sizes)):
            slot = groups.deferred_slots(draws, some, size)
            drawn = made[number][1] if is_last else None
            results.append((len(some[0]), self._sampled("take_deferred", slot, self._drawn_later(size), drawn)))
        return results

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None) -> jax.Array:
        self._take(self._steps)
        scores: Any = None
        if self._own is self._last:
            scores = self._own.score_prompt(rows, targets, places)
            self._back[0].send([scores])
        elif self._number == 0:
            (scores,) = self._back[0].receive([self._scores(self._tokens)])
        return scores

    def take_all(self) -> None:
        self._take(self._steps)

    def forget(self, slots: Sequence[int]) -> None:
        for some in self._expected:
            some.slot[np.isin(some.slot, slots)] = self._last.padding_slot
        self._expected = [some for some in self._expected if some.arrays is None or self._matters(some)]

    def _sampled(self, kind: str, slot: np.ndarray, forms: Sampled, drawn: Sampled | None) -> Sampled:
        """Sends what the last stage has `drawn` for the slots [n] to the other stages, or notes that it is expected."""
        leaves, structure = jax.tree.flatten(forms)
        if drawn is not None:
            made = jax.tree.leaves(drawn)
            assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in leaves]
            for number, link in enumerate(self._back):
                link.send(made if number == 0 else made[:1])
            self._show(made[0])
            return drawn
        expected = ExpectedTokens(kind, slot.astype(np.int32), self._steps, leaves if self._number == 0 else leaves[:1])
        self._expected.append(expected)
        return jax.tree.unflatten(
            structure, [ExpectedArray(expected, i, self.take_everywhere) for i in range(len(leaves))]
        )

    def _take(self, step: int) -> None:
        """Takes what is expected of this step and of those before it."""
        for some in self._expected:
            if some.arrays is None and some.step <= step:
                some.arrays = self._back[self._number].receive(some.forms)
                if self._number == 0:
                    for x in some.arrays:
                        x.copy_to_host_async()
                self._show(some.arrays[0])

    def _return_tokens(self, slot: np.ndarray) -> None:
        """As in `LocalTransport`, for this stage."""
        needed = [i for i, some in enumerate(self._expected) if np.isin(some.slot, slot).any()]
        count = needed[-1] + 1 if needed else 0
        if needed:
            self._take(self._expected[count - 1].step)
        for some in self._expected[:count]:
            if self._matters(some):
                assert some.arrays is not None
                self._own.take(some.kind, some.slot, some.arrays[0])
        del self._expected[:count]

    def _matters(self, some: ExpectedTokens) -> bool:
        """Whether tokens belong to a sequence that still has its slot."""
        return bool((some.slot < self._last.padding_slot).any())

    def _show(self, tokens: jax.Array) -> None:
        if self.watcher is not None:
            self.watcher(tokens)

    # What goes from stage to stage

    def jobs(self, names: Sequence[StageProgram]) -> list[Callable[[], Any]]:
        transfers = {one for name in names for one in self._transfers(*name) if one[0].is_here}
        own: list[Callable[[], Any]] = [partial(self._own._get, name) for stage, name in names if stage == self._number]
        return own + [partial(link.compile, forms) for link, forms in transfers]

    def _transfers(self, stage: int, name: Any) -> list[tuple[MeshLink, tuple[Form, ...]]]:
        """The transfers that follow this program of a stage, and the forms of their arrays."""
        if stage < self._num_stages - 1:
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
        most = 1 + program.proposals
        rows = program.shape.rows
        last = self._last.stage
        assert last is not None
        scores = Form((most, rows, SCORE_WORDS), jnp.int32) if program.sampler >= Sampler.FULL else None
        some_experts = any(self._last.model.config.layers[i].experts is not None for i in last.layers)
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
