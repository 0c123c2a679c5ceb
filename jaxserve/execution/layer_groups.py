"""Groups of layers, each with a block table of its own, so that windowed layers keep no more than their window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.scheduling.block_manager import Chunk, Windows

MOST_GROUPS = 16  # maximum of groups, since each costs a block table in every slot
TOLERANCE = 1.05  # up to this factor more memory is accepted for fewer groups


@dataclass(frozen=True)
class LayerGroups:
    """How a model's layers share the pages of the KV cache.

    Layers of a group see equally far back, so they keep the same tokens and share a block table. A page belongs to one
    group at a time and holds `page_size` tokens for each of the group's layers. All groups have the same depth, so that
    one pool of pages serves them all. A group with fewer layers leaves the rest of its pages unused.

    A page has equal parts. If layers differ in their heads of keys and values, a part holds a number of layers of one
    shape, or another number of layers of another shape.

    Attributes:
      windows: for each group, how far back a token sees.
      depth: parts of a page.
      places: for each layer of the model, its group and its index within the group. A layer that shares the keys and
        values of another one has the other one's place.
      fits: for each group, how many of its layers a part holds.
    """

    windows: Windows
    depth: int
    places: tuple[tuple[int, int], ...]
    fits: tuple[int, ...]

    @classmethod
    def of(
        cls,
        layer_windows: Sequence[int | Chunk | None],
        longest: int,
        fits: Sequence[int] | None = None,
        sources: Sequence[int] | None = None,
    ) -> LayerGroups:
        """Groups for layers with these windows, where no sequence has more than `longest` tokens.

        A window or chunk of at least `longest` tokens limits nothing and counts as None. The depth is chosen so that a
        sequence of `longest` tokens needs little memory: within TOLERANCE of the least, with as few groups as possible.

        fits: for each layer, how many like it a part of a page holds; None: one.
        sources: for each layer, the one whose keys and values it reads; None: each layer reads its own.
        """
        windows = [None if window is None or window >= longest else window for window in layer_windows]
        fits = fits or [1] * len(windows)
        sources = sources or range(len(windows))
        layers: dict[tuple[int | Chunk | None, int], list[int]] = {}
        for i in sorted(set(sources)):
            layers.setdefault((windows[i], fits[i]), []).append(i)

        def groups_of(depth: int) -> dict[tuple[int | Chunk | None, int], int]:
            return {kind: -(-len(some) // (depth * kind[1])) for kind, some in layers.items()}

        def memory(depth: int) -> int:
            """Tokens times parts that a sequence of `longest` tokens keeps, unused parts of pages included."""
            return sum(count * depth * (window or longest) for (window, _), count in groups_of(depth).items())

        depths = range(1, max(-(-len(some) // fit) for (_, fit), some in layers.items()) + 1)
        allowed = [depth for depth in depths if sum(groups_of(depth).values()) <= max(MOST_GROUPS, len(layers))]
        least = min(map(memory, allowed))
        depth = max(depth for depth in allowed if memory(depth) <= TOLERANCE * least)
        of_groups = [
            (kind, some[at : at + depth * kind[1]])
            for kind, some in layers.items()
            for at in range(0, len(some), depth * kind[1])
        ]
        places = {
            layer: (group, index) for group, (_, some) in enumerate(of_groups) for index, layer in enumerate(some)
        }
        kinds = [kind for kind, _ in of_groups]
        return cls(
            tuple(window for window, _ in kinds),
            depth,
            tuple(places[source] for source in sources),
            tuple(fit for _, fit in kinds),
        )

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def of_stage(self, stage: range) -> LayerGroups:
        """The groups of a pipeline stage, which has these of the layers. There are as many groups as in the whole
        model, so that all stages use the same block tables. Of the layers that see equally far back, each stage deals
        its own out to all of these groups, so that they have about equally many in every stage."""
        kinds = list(zip(self.windows, self.fits, strict=True))
        counts = dict.fromkeys(range(self.num_groups), 0)
        places = []
        for i in stage:
            own = kinds[self.places[i][0]]
            group = min((g for g, kind in enumerate(kinds) if kind == own), key=lambda g: counts[g])
            places.append((group, counts[group]))
            counts[group] += 1
        depth = max(-(-count // self.fits[group]) for group, count in counts.items())
        return LayerGroups(self.windows, depth, tuple(places), self.fits)


class LayerPlace(NamedTuple):
    """Where a layer's part of the cache is.

    Attributes:
      array: the number of the array in the cache.
      group: the layer's group; None for a recurrent layer, which has states instead of pages.
      first: the index of the layer's first page or state in the array, counted in pages or states of this layer.
      beside: the place of the recurrent layer that runs beside attention, or of the layer's compressed entries; None:
        there is none.
    """

    array: int
    group: int | None
    first: int
    beside: LayerPlace | None = None

    @property
    def alone(self) -> bool:
        """Whether there is no array beside."""
        return self.beside is None or self.beside.array == self.array

    def taken(self, cache: Sequence[Any]) -> Any:
        """The array; two of them if there is one beside."""
        return cache[self.array] if self.beside is None or self.alone else (cache[self.array], cache[self.beside.array])

    def put(self, cache: list[Any], given: Any) -> None:
        """Replaces what `taken` has returned."""
        if self.beside is None or self.alone:
            cache[self.array] = given
        else:
            cache[self.array], cache[self.beside.array] = given
