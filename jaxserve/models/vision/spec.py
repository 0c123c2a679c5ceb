"""The shapes of image encoders: layers as those of decoders, between patches and a projector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxserve.models.sources import Names
from jaxserve.models.spec import Activation, LayerSpec, NormSpec, RopeConfig
from jaxserve.types import ImageTokens


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A step of a projector: the channels of `count` rows that follow each other become those of one row."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """A step of a projector: the mean of `count` rows that follow each other, times `factor`.

    standard: the name of two vectors [size], of which the first is subtracted from that, and the other multiplied with
      it; "": there are none.
    """

    count: int
    factor: float = 1.0
    standard: str = ""
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Normed:
    """A step of a projector: a norm over `size` channels, then an activation; None: there is none."""

    name: str
    norm: NormSpec
    size: int
    activation: Activation | None = None


@dataclass(frozen=True, kw_only=True)
class Projected:
    """A step of a projector: a product with a matrix [outputs, inputs], then an activation; None: there is none.

    alternating: in files the channels of so many joined rows alternate.
    convolved: in files it is a convolution over the square of these rows.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: Activation | None = None
    alternating: int = 1
    convolved: bool = False


@dataclass(frozen=True, kw_only=True)
class Gated:
    """A step of a projector: activation(gate(x)) * up(x), products with matrices [outputs, inputs]."""

    gate: str
    up: str
    inputs: int
    outputs: int
    activation: Activation


Step = Joined | Pooled | Normed | Projected | Gated


@dataclass(frozen=True, kw_only=True)
class Tap:
    """Further features of a picture (DeepStack, Meng et al. 2024, arXiv:2406.04334): the projector `steps` reads what
    the encoder's layer `layer` has computed, and its result is added behind one of the language model's first layers.
    """

    layer: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the encoder reads the numbers of pixels, 0 to 255: (x * factor - mean) / std, for each colour.

    rounds: each step's result is rounded to bfloat16.
    """

    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    rounds: bool = False


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) and its projector.

    Attributes:
      patch_shape: colours, frames where a patch has several, height and width of a patch.
      scaling: of these numbers.
      centred: what this makes of them, x, becomes 2x - 1.
      colours_last: in files, the projection of patches has the colours of a pixel, then those of the next.
      patch_norm: of a patch's numbers before their projection; None: there is none.
      patch_bias: whether their projection to `hidden_size` channels has a bias.
      patch_matrix: files have this projection as a matrix, not as a convolution.
      layers: as those of a decoder. A patch attends over all patches of its picture.
      clipped: inputs and results of all products in layers are clipped (`clipped.ClippedLayer`).
      windowed: the layers, by index, in which a patch attends over those of its window only.
      window: side of a window in patches.
      rope_theta: base of the angles by which queries and keys turn: one half of a head's pairs of channels by the
        patch's row, the other half by its column. None: they do not turn.
      rope_halves: see `RopeConfig.halves`.
      columns_between: the frequencies of columns lie between those of rows; else they are the same.
      columns_first: the first half of the pairs turns by the column.
      interleaved: as in `RopeConfig`.
      columns_alternate: pairs that turn by the column alternate with those that turn by the row, beginning with the
        column, and in files the channels of a pair are neighbours.
      table: side of a square table of learned position vectors, which is stretched to each picture's shape; None: there
        is none.
      interpolation: bilinear, where the first and the last patches are those of the table, or bicubic, where the edges
        of the picture are those of the table, or antialiased, which is bilinear in the same way, but a patch gets a
        share of all entries that it covers, or the nearest entry before a patch. "sum": there is no square, but a
        vector for each of `table` columns and one for each of as many rows, and a patch gets the sum of both.
      in_pairs: files have both vectors of the first column and row, then those of the next.
      table_is_grid: in files it has rows and columns.
      class_token: each frame has a row more, of a learned vector, which all of its patches see and which has no
        feature. The table has an entry more, for this row, which files have before the others or behind them. None:
        there is no such row.
      before: the norm of patches before the first layer; None: there is none.
      table_last: position vectors are added behind this norm, not before it.
      side: side of the square of patches that become one embedding. They follow each other.
      projector: from the last layer's result to embeddings.
      taps: further features.
      newline: features of a picture's tiles are put together, with a learned vector behind each row (`images.area`).
      out_size: channels of an embedding, the language model's hidden size.
    """

    hidden_size: int
    patch_shape: tuple[int, ...]
    scaling: Scaling = Scaling()
    centred: bool = False
    colours_last: bool = False
    patch_norm: NormSpec | None = None
    patch_bias: bool = False
    patch_matrix: bool = False
    layers: tuple[LayerSpec, ...]
    clipped: bool = False
    windowed: tuple[int, ...] = ()
    window: int = 0
    rope_theta: float | None = None
    rope_halves: bool = False
    columns_between: bool = False
    columns_first: bool = False
    interleaved: bool = False
    columns_alternate: bool = False
    table: int | None = None
    interpolation: Literal["bilinear", "bicubic", "antialiased", "nearest", "sum"] = "bilinear"
    in_pairs: bool = False
    table_is_grid: bool = False
    class_token: Literal["first", "last"] | None = None
    before: NormSpec | None = None
    table_last: bool = False
    side: int
    projector: tuple[Step, ...]
    taps: tuple[Tap, ...] = ()
    newline: bool = False
    out_size: int

    @cached_property
    def ropes(self) -> Mapping[str, RopeConfig]:
        """As in `ModelConfig`, for the order of channels in files."""
        neighbours = self.interleaved or self.columns_alternate
        return {"default": RopeConfig(interleaved=neighbours, halves=self.rope_halves)}

    def divides(self, devices: int) -> bool:
        """Whether so many devices can share the heads and MLPs of all layers evenly."""
        sizes = ((layer.attention.num_heads, layer.mlp.size) for layer in self.layers)  # type: ignore[union-attr]
        return not any(heads % devices or size % devices for heads, size in sizes)

    @property
    def entries(self) -> int:
        """Rows of the table of positions."""
        table = self.table or 0
        return 2 * table if self.interpolation == "sum" else table**2 + (self.class_token is not None)

    @property
    def further(self) -> int:
        """Rows of a frame behind its patches: a square of them, of which the first is that of the class token."""
        return 0 if self.class_token is None else self.joined

    @property
    def reads_tiles(self) -> bool:
        """Whether pictures must be split into tiles, each as large as the table."""
        return self.class_token is not None or self.newline

    @property
    def corners(self) -> int:
        """Entries of the table between which a patch's position lies; 0: any."""
        return {"bilinear": 4, "bicubic": 16, "antialiased": 0, "nearest": 1, "sum": 2}[self.interpolation]

    @property
    def shares(self) -> int:
        """Numbers that tell a patch's shares of entries: of each, or of the rows and of the columns of the table."""
        return self.corners or 2 * (self.table or 0)

    @property
    def patch(self) -> int:
        """Numbers of a patch: all of one colour, then those of the next."""
        return math.prod(self.patch_shape)

    @property
    def width(self) -> int:
        """Channels of all features of a token."""
        return self.out_size * (1 + len(self.taps))

    @property
    def joined(self) -> int:
        """Patches that become one embedding."""
        return self.side**2


# Of files that transformers 5 wrote; of SigLIP's towers as published, and as versions of transformers 5 write these.
LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"": "model."},
    {"vision_tower.": "vision_tower.vision_model."},
    {"vision_tower.": "model.vision_tower.vision_model.", "": "model."},
)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """How a model sees.

    Attributes:
      encoder: the image encoder.
      tokens: how the tokens of pictures are found and numbered.
      names: role -> name of the encoder's tensors in files, as in `models.sources`.
      layouts: the beginnings that such names have instead in other files, as in `Family`.
      joint: the language model's layers, by index, in which a token of a picture sees all tokens of the same picture,
        also later ones. Windows hide earlier ones from it.
      padding: the token that layers with inputs of their own (`PerLayerInputs`) see in the place of a picture's.
    """

    encoder: EncoderConfig
    tokens: ImageTokens
    names: Names
    layouts: tuple[Mapping[str, str], ...] = LAYOUTS
    joint: tuple[int, ...] = ()
    padding: int = 0
