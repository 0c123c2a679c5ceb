"""Decoding ahead, and the one step whose results count: the device side of `deterministic_mode` "verify".

All keys and values that stay, all tokens and all log-probabilities of an engine come from one compiled step of one
fixed shape, in which all rows are computed by the kernels for prompts. What such a step computes for a token depends on
no other row and not on the row's place, if products and kernels compute each row by itself; `checking` chooses
operations that do.

Such a step for one token a row is slow where few rows run. So rows first decode some tokens by the usual programs for
decodes (`decode_ahead`), over their own pages and behind their lengths. These tokens are proposals. The step computes
them again, which replaces their keys and values, and keeps those that it draws itself (`verify`). "Fast decode, check
at a fixed shape, roll back" was described in arXiv:2601.17768.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.devices.mesh import num_devices
from jaxserve.devices.sharded_ops import ordered_sum
from jaxserve.execution import steps
from jaxserve.execution.kv_cache import CacheLayout, KVCache
from jaxserve.execution.logits import replicate
from jaxserve.execution.programs import StepProgram, StepPrograms
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import AuxProgram, ProgramName, Signature, Signatures
from jaxserve.execution.slots import SlotState
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.decoder import Decoder
from jaxserve.pallas_kernels.latent_attention import reference as latent
from jaxserve.scheduling.step_plan import Sampler


def checking(decoder: Decoder, mesh: Mesh) -> Decoder:
    """The decoder whose results count: each row's results are sums in an order that does not follow from other rows.

    Attention takes its one order where it has several. On a CPU latent attention is plain XLA, whose blocks follow from
    positions, and kernels that choose a way by the number of rows get all of them. Partial sums of more than two
    devices are added in the order of the devices; the sum of two is the same in both orders.
    """
    ops = decoder.ops
    if "one_order" in inspect.signature(ops.paged_attention).parameters:
        ops = replace(ops, paged_attention=partial(ops.paged_attention, one_order=True))
    if mesh.devices.flat[0].platform == "cpu":
        ops = replace(ops, latent_attention=latent.latent_attention)
        ops = replace(ops, matmul=_of_all_rows(ops.matmul), quant_matmul=_of_all_rows(ops.quant_matmul))
    if num_devices(mesh) > 2:
        names = "split_matmul", "quant_matmul", "mixture"
        found: Any = {name: partial(getattr(ops, name), total=ordered_sum) for name in names}
        fused = None if ops.fused is None else replace(ops.fused, total=ordered_sum)
        ops = replace(ops, fused=fused, **found)
    return decoder.clone(ops=ops)


def _of_all_rows(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The product without `count`, so that all rows matter."""
    return lambda *args, count=None, **options: multiply(*args, **options)


def decode_ahead(
    params: Any, cache: KVCache, slots: SlotState, packed: jax.Array, *, shape: StepShape, mesh: Mesh, **options: Any
) -> tuple[jax.Array, KVCache, SlotState]:
    """`steps.run_step` over a batch of decodes, of whose changes of the slots only the drawn tokens stay, as `ahead`.
    Returns the tokens, int32 [tokens per call, rows], the cache, in which keys and values behind the rows' lengths have
    changed, and the slots."""
    assert slots.ahead is not None
    made = steps.run_step(params, cache, slots, packed, shape=shape, mesh=mesh, **options)
    tokens = jnp.maximum(made.drawn.tokens[: slots.ahead.shape[1]], 0)  # behind a stop token any token will do
    at, size = shape.fields["slot"]
    ahead = slots.ahead.at[packed[at : at + size], : len(tokens)].set(tokens.T)
    return replicate(tokens, mesh), made.cache, slots._replace(ahead=ahead)


def check(
    params: Any, cache: KVCache, slots: SlotState, packed: jax.Array, *, shape: StepShape, **options: Any
) -> steps.StepResult:
    """`steps.run_step` over rows whose proposals are in their slots, with rows of one token computed like those of
    several."""
    at, _ = shape.fields["num_decodes"]
    packed = with_proposals(packed.at[at].set(0), slots, shape)
    return steps.run_step(params, cache, slots, packed, shape=shape, **options)


def with_proposals(packed: jax.Array, slots: SlotState, shape: StepShape) -> jax.Array:
    """A step's buffer with the tokens of `SlotState.ahead` as the proposals, which are the last tokens of rows."""
    assert slots.ahead is not None
    field = {name: packed[at : at + size] for name, (at, size) in shape.fields.items()}
    row = jnp.minimum(jnp.searchsorted(field["q_start"], jnp.arange(shape.tokens), side="right") - 1, shape.rows - 1)
    end = field["q_start"][row + 1]
    count = jnp.abs(field["num_new"][row]) - 1
    number = jnp.arange(shape.tokens) - (end - count)
    ahead = slots.ahead[field["slot"][row], jnp.clip(number, 0, slots.ahead.shape[1] - 1)]
    tokens = jnp.where((number >= 0) & (number < count), ahead, field["tokens"])
    at, size = shape.fields["tokens"]
    return packed.at[at : at + size].set(tokens)


class VerifyingPrograms(StepPrograms):
    """Chooses the one program of mixed steps for every batch. Buckets for decodes are for decoding ahead."""

    def all(self, shapes: Sequence[StepShape]) -> list[StepProgram]:
        return [self.largest(shape) for shape in self.of_steps(shapes)]

    def of_steps(self, shapes: Sequence[StepShape]) -> list[StepShape]:
        return [shape for shape in shapes if not shape.decode_only]

    def largest(self, shape: StepShape) -> StepProgram:
        sampler = Sampler.FULL if self.static else Sampler.ANY
        return StepProgram(shape, sampler, 1, keeps_hidden=True, proposals=self.proposals)

    def bounding(self, shapes: Sequence[StepShape]) -> list[StepProgram]:
        return self.all(shapes)

    def choose(
        self, shape: StepShape, sampler: Sampler, num_new: int, scores: bool, *, drafts: bool = True
    ) -> StepProgram:
        return self.largest(shape)

    def choose_checking(self, shape: StepShape, sampler: Sampler) -> StepProgram:
        return self.largest(shape)

    def lengths(self, shapes: Sequence[StepShape], rows: int, sampler: Sampler) -> Sequence[int]:
        return (1,)

    def ahead(self, shapes: Sequence[StepShape]) -> list[AuxProgram]:
        """The programs that decode ahead, the smallest first."""
        rows = sorted(shape.rows for shape in shapes if shape.decode_only)
        samplers = (Sampler.GREEDY, Sampler.FILTERED, Sampler.FULL) if self.static else (Sampler.ANY,)
        return [AuxProgram("propose", size, sampler, self.proposals) for size in rows for sampler in samplers]


@dataclass(frozen=True)
class VerifyingSignatures(Signatures):
    """`model` decodes ahead. What counts is computed by a decoder that `checking` makes of it. Every program that makes
    logits makes as many rows of them as the step has tokens."""

    @property
    def _that_count(self) -> Signatures:
        fields = {name: getattr(self, name) for name in Signatures.__dataclass_fields__}
        return Signatures(**fields | {"model": checking(self.model, self.mesh), "run": check})

    def step(self, program: StepProgram) -> Signature:
        return self._that_count.step(program)

    def propose(self, rows: int, sampler: Sampler, passes: int) -> Signature:
        """The signature of `decode_ahead`."""
        shape = ahead_shape(rows, self.layout)
        options: Any = {"model": self.model, "shape": shape, "layout": self.layout, "mesh": self.mesh}
        options |= {"sampler": sampler, "tokens_per_call": passes if self.static else None}
        arguments = self.params, self._cache, self.slots, self._host(shape.words)
        results: Any = self._everywhere, self._cache_sharding, self._everywhere
        return Signature(self._with_params(partial(decode_ahead, **options)), (1, 2), arguments, results)

    def sample_deferred(self, rows: int) -> Signature:
        return self._that_count.sample_deferred(rows)

    def score_prompt(self, tokens: int, each: int | None = None) -> Signature:
        return self._that_count.score_prompt(tokens, tokens)


def ahead_shape(rows: int, layout: CacheLayout) -> StepShape:
    """The bucket in which so many rows decode ahead."""
    return StepShape.of(rows, rows, layout.page_size, decode_only=True, num_groups=layout.groups.num_groups)


class VerifyingRunner(ModelRunner):
    """A runner whose steps are all of one shape. tokens: of this shape. `proposals` are the tokens that a row decodes
    ahead at most."""

    signatures_kind = VerifyingSignatures
    programs_kind = VerifyingPrograms
    programs: VerifyingPrograms
    decodes_ahead = True

    def __init__(self, *args: Any, tokens: int, **options: Any):
        super().__init__(*args, **options)
        self.tokens = tokens

    @property
    def deferred_sizes(self) -> list[int]:
        return [self.tokens]

    def draft_programs(self, shapes: Sequence[StepShape]) -> list[AuxProgram]:
        """The names of the programs that decode ahead."""
        return self.programs.ahead(shapes)

    def largest(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        return [*super().largest(shapes), self.draft_programs(shapes)[-1]]

    def decode_ahead(self, name: AuxProgram, slots: np.ndarray, tokens: np.ndarray, count: np.ndarray) -> jax.Array:
        """Samples up to `count` [n] tokens for each of these slots [n], whose last known tokens are `tokens` [n], with
        one of `draft_programs`. They are proposals of the next step, which finds them in the slots. Returns int32
        [tokens per call, rows], 0 behind the end of a row."""
        shape = ahead_shape(name.size, self.layout)
        n = len(slots)
        packed = shape.empty(self.num_slots)
        field = {key: packed[at : at + size] for key, (at, size) in shape.fields.items()}
        field["tokens"][:n] = tokens
        field["slot"][:n] = slots
        field["num_new"][:n] = count
        field["q_start"][:] = np.minimum(np.arange(name.size + 1), n)
        field["tokens_per_call"][0] = count.max()
        field["num_decodes"][0] = n
        ahead, self.cache, self.slots = self._get(name)(self._arrays, self.cache, self.slots, packed)
        return ahead
