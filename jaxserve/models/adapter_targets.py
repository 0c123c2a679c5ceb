"""The products of a decoder that LoRA adapters may change: the names of their modules, their shapes, and the places of
adapters' matrices in the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoints.load import Piece, Stack, put_piece, row_sources
from jaxserve.devices.mesh import MeshAxes, is_split, spec
from jaxserve.models.changeable import Changeable, ExpertWeights, LowRank
from jaxserve.models.decoder import Decoder
from jaxserve.models.families import families
from jaxserve.models.quantized import STACKS
from jaxserve.models.sources import Names
from jaxserve.models.weights import abstract_params, weight_pieces
from jaxserve.pallas_kernels.checked_ops import adapters_on_trial
from jaxserve.pallas_kernels.device_ops import adapters_of
from jaxserve.pallas_kernels.registry import Device

TABLE = "embed/table"
HEAD = "head/kernel"
MOE_NAMES = ("block_sparse_moe", "mlp")  # Mixtral's experts in checkpoints, and as modules of transformers 5


def with_adapters(decoder: Decoder, mesh: Mesh) -> Decoder:
    """The decoder with operations that add what adapters change. Their kernel is on trial if the others are."""
    device = Device.of(mesh.devices.flat[0])
    ops = replace(decoder.ops, add_adapters=adapters_of(device, partitioned=is_split(mesh)))
    return decoder.clone(ops=ops if ops.trials is None else adapters_on_trial(ops, np.dtype(decoder.dtype)))


@dataclass(frozen=True)
class PoolSizes:
    """The pool of adapters on the devices: for how many it has places, their highest rank, the dtype of matrices."""

    places: int
    rank: int
    dtype: Any = jnp.float32


class Matrices(NamedTuple):
    """What an adapter adds to one product, in float32 on the host. Ranks are the adapter's own, see `AdapterStack`.

    a: [parts, rank, in]; of experts [experts, parts, rank, in]; of embeddings [vocab, rank].
    b: [rank, out], with the scaling; of experts [experts, rank, out].
    ranks: int32 [parts].
    """

    a: np.ndarray
    b: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class Target:
    """A product that adapters may change.

    Attributes:
      path: the path of its AdapterStack in the parameters.
      members: the tensors that make up its weight; for a mixture, those of each expert's weight.
      shape: the weight's shape, (out, in).
      axes: the axes of the mesh that split out and in; None: they are not split.
      widths: see `AdapterStack`.
      experts: the number of experts of a mixture; None: it is no mixture.
    """

    path: str
    members: tuple[list[Piece], ...]
    shape: tuple[int, int]
    axes: tuple[MeshAxes, MeshAxes]
    widths: tuple[int, ...]
    experts: int | None = None

    @property
    def is_table(self) -> bool:
        """Whether the product is the lookup of embeddings, whose a is looked up, too."""
        return self.path.startswith("embed/")

    def shapes(self, sizes: PoolSizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the stack's a and b."""
        (out, inputs), rank = self.shape, sizes.rank
        if self.is_table:
            return (sizes.places, out, rank), (sizes.places, rank, inputs)
        lead = (sizes.places,) if self.experts is None else (sizes.places, self.experts)
        return (*lead, len(self.widths) * rank, inputs), (*lead, rank, out)

    def shardings(self, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
        """How a and b are split over the mesh: inputs and outputs as those of the weight; embeddings are not split."""
        if self.is_table:
            return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec())
        lead, (out, inputs) = (None,) if self.experts is None else spec(None, "expert"), self.axes
        a = PartitionSpec(*lead, None, inputs)
        b = PartitionSpec(*lead, None, out)
        return NamedSharding(mesh, a), NamedSharding(mesh, b)

    def padded(self, a: np.ndarray, b: np.ndarray, sizes: PoolSizes) -> list[np.ndarray]:
        """Matrices as a place of the stack takes them: filled with zeros to the pool's rank, in its dtype."""
        made = [np.zeros(shape[1:], sizes.dtype) for shape in self.shapes(sizes)]
        of_parts = made[0]
        if not self.is_table:
            of_parts = of_parts.reshape(*of_parts.shape[:-2], len(self.widths), sizes.rank, self.shape[1])
        for to, given in ((of_parts, a), (made[1], b)):
            to[tuple(map(slice, given.shape))] = given
        return made

    def joined(self, given: Mapping[str, LowRank]) -> Matrices | None:
        """An adapter's matrices for this product, from those for the tensors that it has changed, by their names. None
        if it has changed none of this product's."""
        names = {piece.name for member in self.members for piece in member}
        found = {name: given[name] for name in names if name in given}
        if not found:
            return None
        rank = max(len(a) for a, _ in found.values())
        if self.is_table:
            low, looked_up = next(iter(found.values()))
            return Matrices(looked_up, low, np.array([rank], np.int32))
        made = [self._member(member, found, rank) for member in self.members]
        if self.experts is None:
            return made[0]
        a, b, ranks = (np.stack(some) for some in zip(*made, strict=True))
        return Matrices(a, b, ranks.max(0))

    def _member(self, pieces: list[Piece], found: Mapping[str, LowRank], rank: int) -> Matrices:
        (out, inputs), names = self.shape, _names(pieces)
        a = np.zeros((len(names), rank, inputs), np.float32)
        b = np.zeros((out, rank), np.float32)
        ranks = np.zeros(len(names), np.int32)
        for piece in pieces:
            if piece.name in found:
                down, up = found[piece.name]
                part = names.index(piece.name)
                a[part, : len(down), : down.shape[1]] = down
                ranks[part] = len(down)
                put_piece(b, piece, np.pad(up, ((0, 0), (0, rank - up.shape[1]))))
        return Matrices(a, np.ascontiguousarray(b.T), ranks)


@dataclass(frozen=True)
class AdapterTargets:
    """All products of a decoder that adapters may change. `head_dim`: see `ModelConfig`."""

    targets: tuple[Target, ...]
    roles: Names  # role -> name of the decoder's tensors; see `sources`
    head_dim: int

    @classmethod
    def of(cls, decoder: Decoder, mesh: Mesh) -> AdapterTargets:
        names = _roles(decoder)
        pieces = weight_pieces(decoder, names)
        if decoder.config.tie_embeddings:
            size = decoder.config.embed_size or decoder.config.hidden_size
            head = Piece(names.get("head.weight", "lm_head.weight"), (decoder.config.vocab_size, size), lambda t: t)
            pieces[HEAD] = [head]
        abstract = abstract_params(decoder, mesh)
        made = []
        for path, some in pieces.items():
            if path.endswith(("/kernel", *STACKS)) or path == TABLE:
                like = abstract[TABLE if path == HEAD and path not in abstract else path]
                members = some.members if isinstance(some, Stack) else (some,)
                out, inputs = like.shape[-2:]
                axes = (*like.sharding.spec, None, None, None)[len(like.shape) - 2 : len(like.shape)]
                widths = _widths(members[0], out) if path != TABLE else (out,)
                count = len(members) if isinstance(some, Stack) else None
                made.append(Target(_path(path), members, (out, inputs), axes, widths, count))
        return cls(tuple(made), names, decoder.config.head_dim)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name of a tensor -> its shape [out, in]."""
        found: dict[str, tuple[int, int]] = {}
        for target in self.targets:
            for member in target.members:
                found.update({piece.name: (piece.shape[0], piece.shape[1]) for piece in member})
        return found

    def changeable(self, max_rank: int) -> Changeable:
        """The same as plain data, for adapters of at most this rank."""
        modules: dict[str, str] = {}
        for name in self.shapes:
            module = name.removesuffix(".weight")
            for known in (module, module.replace(*MOE_NAMES)):
                modules.setdefault(known, name)
                modules.setdefault(known.partition(".")[2] or known, name)
        stacks: dict[int, list[ExpertWeights]] = defaultdict(list)
        for target in self.targets:
            if target.experts is not None:
                layer = int(target.path.partition("/")[0].removeprefix("layers_"))
                stacks[layer].append(ExpertWeights(target.shape, [_names(pieces) for pieces in target.members]))
        experts = {layer: (both[0], both[1]) for layer, both in stacks.items()}
        return Changeable(self.shapes, modules, experts, dict(self.roles), self.head_dim, max_rank)


def _roles(decoder: Decoder) -> Names:
    """Role -> name of the decoder's tensors. Matrices that files hold transposed have the roles of others, because the
    matrices of adapters are never transposed."""
    config = decoder.config
    family = next(family for family in families() if family.name == config.family)
    return {role.removesuffix(".T"): name for role, name in family.roles(config).items()}


def _path(weight: str) -> str:
    if weight.endswith(STACKS):
        return f"{weight}_lora"
    return f"{weight.rpartition('/')[0]}/lora"


def _names(pieces: list[Piece]) -> list[str]:
    return list(dict.fromkeys(piece.name for piece in pieces))


def _widths(pieces: list[Piece], out: int) -> tuple[int, ...]:
    """How many outputs of a weight belong to each of its tensors in turns."""
    names = _names(pieces)
    if len(names) == 1:
        return (out,)
    source = row_sources(pieces, [piece.shape[0] for piece in pieces], out)
    # Rows of zeros, which end a head, count to the piece before them.
    source = source[np.maximum.accumulate(np.where(source < 0, 0, np.arange(out)))]
    ends = np.cumsum([piece.shape[0] for piece in pieces])
    part = np.array([names.index(piece.name) for piece in pieces])[np.searchsorted(ends, source, side="right")]
    turn = next(n for n in range(1, out + 1) if out % n == 0 and (part.reshape(-1, n) == part[:n]).all())
    assert (np.diff(part[:turn]) >= 0).all(), "the parts of a fused weight alternate within a turn"
    return tuple(np.bincount(part[:turn], minlength=len(names)).tolist())
