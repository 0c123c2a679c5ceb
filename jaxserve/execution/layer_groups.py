"""Groups of layers, each with a block table of its own, so that windowed layers keep no more than their window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.scheduling.block_manager import Chunk, Windows

MOST_GROUPS = 16  # maximum of groups, since each costs a block table in every slot
TOLERANCE = 1.05  # up to this factor more memory is accepted for fewer groups


@dataclass(frozen=True)
class LayerGroups:
    """How a model's layers share the pages of the KV cache.

    Layers of a group see equally far back, so they keep the same tokens and share a block table. A page belongs to one
    group at a time and holds `page_size` tokens for each of the group's layers. All groups have the same depth, so that
    one pool of pages serves them all. A group with fewer layers leaves the rest of its pages unused.

    Attributes:
      windows: for each group, how far back a token sees.
      depth: layers that a page has room for.
      places: for each layer of the model, its group and its index within the group.
    """

    windows: Windows
    depth: int
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layer_windows: Sequence[int | Chunk | None], longest: int) -> LayerGroups:
        """Groups for layers with these windows, where no sequence has more than `longest` tokens.

        A window or chunk of at least `longest` tokens limits nothing and counts as None. The depth is chosen so that a
        sequence of `longest` tokens needs little memory: within TOLERANCE of the least, with as few groups as possible.
        """
        windows = [None if window is None or window >= longest else window for window in layer_windows]
        layers: dict[int | Chunk | None, list[int]] = {}
        for i, window in enumerate(windows):
            layers.setdefault(window, []).append(i)

        def num_groups(depth: int) -> int:
            return sum(-(-len(some) // depth) for some in layers.values())

        def memory(depth: int) -> int:
            """Tokens times layers that a sequence of `longest` tokens keeps, unused layers of pages included."""
            return sum(-(-len(some) // depth) * depth * (window or longest) for window, some in layers.items())

        depths = range(1, max(map(len, layers.values())) + 1)
        allowed = [depth for depth in depths if num_groups(depth) <= max(MOST_GROUPS, len(layers))]
        least = min(map(memory, allowed))
        depth = max(depth for depth in allowed if memory(depth) <= TOLERANCE * least)
        of_groups = [
            (window, some[at : at + depth]) for window, some in layers.items() for at in range(0, len(some), depth)
        ]
        places = {
            layer: (group, index) for group, (_, some) in enumerate(of_groups) for index, layer in enumerate(some)
        }
        return cls(tuple(window for window, _ in of_groups), depth, tuple(places[i] for i in range(len(layer_windows))))

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def of_stage(self, stage: range) -> LayerGroups:
        """The groups of a pipeline stage, which has these of the layers. There are as many groups as in the whole
        model, so that all stages use the same block tables. Of the layers that see equally far back, each stage deals
        its own out to all of these groups, so that they have about equally many in every stage."""
        windows = [self.windows[self.places[i][0]] for i in stage]
        groups = {window: [g for g, w in enumerate(self.windows) if w == window] for window in windows}
        counts = dict.fromkeys(range(self.num_groups), 0)
        places = []
        for window in windows:
            group = min(groups[window], key=lambda g: counts[g])
            places.append((group, counts[group]))
            counts[group] += 1
        return LayerGroups(self.windows, max(counts.values()), tuple(places))
