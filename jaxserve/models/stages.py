"""Parts of a model: which layers, and which weights around them, a group of devices holds or a program runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_AT_FIRST = ("embed", "project_in", "positions")
_AT_LAST = ("norm", "head", "project_out")


@dataclass(frozen=True)
class Stage:
    """A part of a model: the layers from `begin` up to, not including, `end`. The first stage also embeds the tokens,
    and the last one has the last norm and the output head."""

    begin: int
    end: int
    num_layers: int  # of the whole model

    @property
    def layers(self) -> range:
        return range(self.begin, self.end)

    @property
    def is_first(self) -> bool:
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers

    def holds(self, path: str, *, tied: bool) -> bool:
        """Whether a parameter with this path, as "layers_3/mlp/up/kernel", is in this stage. tied: the embeddings are
        the output head, too, and then both the first and the last stage have them."""
        part = path.partition("/")[0]
        if (layer := layer_of(path)) is not None:
            return layer in self.layers
        assert part in _AT_FIRST + _AT_LAST, f"the stage of {path} is not known"
        return (part in _AT_FIRST and self.is_first) or (part in _AT_LAST + ("embed",) * tied and self.is_last)


@dataclass(frozen=True)
class Part:
    """Some layers of a model. `around`: with everything that is in no layer, such as embeddings and output head."""

    layers: range
    around: bool

    def holds(self, path: str, *, tied: bool) -> bool:
        """Whether a parameter with this path is in this part. See `Stage.holds`."""
        layer = layer_of(path)
        return self.around if layer is None else layer in self.layers


def layer_of(path: str) -> int | None:
    """The number of the layer that a parameter with this path belongs to; None: it is in no layer."""
    part = path.partition("/")[0]
    return int(part.removeprefix("layers_")) if part.startswith("layers_") else None


def split_layers(layers: Sequence[int], first: int, last: int, stages: int) -> list[Stage]:
    """Cuts layers of these costs into `stages` consecutive parts, each with at least one layer, so that the costliest
    part costs as little as possible, and the others are as equal as possible. `first` and `last` are the costs of what
    the first and the last part have beside layers. Any unit will do.
    """
    count = len(layers)
    assert 1 <= stages <= count
    sums = [0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def of(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (first if begin == 0 else 0) + (last if end == count else 0)

    # best[end]: (cost of the costliest part, sum of squares, where the parts begin) of the first `end` layers
    best: dict[int, tuple[int, int, tuple[int, ...]]]
    best = {end: (of(0, end), of(0, end) ** 2, (0,)) for end in range(1, count + 1)}
    for made in range(1, stages):
        best = {
            end: min(
                (max(best[at][0], of(at, end)), best[at][1] + of(at, end) ** 2, (*best[at][2], at))
                for at in range(made, end)
            )
            for end in range(made + 1, count + 1)
        }
    begins = best[count][2]
    return [Stage(begin, end, count) for begin, end in zip(begins, (*begins[1:], count), strict=True)]
