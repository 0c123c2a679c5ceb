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


Step = Joined | Normed | Projected | Gated


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
      patch_bias: whether their projection to `hidden_size` channels has a bias.
      patch_matrix: files have this projection as a matrix, not as a convolution.
      layers: as those of a decoder. A patch attends over all patches of its picture.
      windowed: the layers, by index, in which a patch attends over those of its window only.
      window: side of a window in patches.
      rope_theta: base of the angles by which queries and keys turn: one half of a head's pairs of channels by the
        patch's row, the other half by its column. None: they do not turn.
      columns_between: the frequencies of columns lie between those of rows; else they are the same.
      columns_first: the first half of the pairs turns by the column.
      interleaved: as in `RopeConfig`.
      table: side of a square table of learned position vectors, which is stretched to each picture's shape; None: there
        is none.
      interpolation: bilinear, where the first and the last patches are those of the table, or bicubic, where the edges
        of the picture are those of the table.
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
    patch_bias: bool = False
    patch_matrix: bool = False
    layers: tuple[LayerSpec, ...]
    windowed: tuple[int, ...] = ()
    window: int = 0
    rope_theta: float | None = None
    columns_between: bool = False
    columns_first: bool = False
    interleaved: bool = False
    table: int | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
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
        return {"default": RopeConfig(interleaved=self.interleaved)}

    @property
    def entries(self) -> int:
        """Rows of the table of positions."""
        return (self.table or 0) ** 2 + (self.class_token is not None)

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
        """Entries of the table between which a patch's position lies."""
        return 4 if self.interpolation == "bilinear" else 16

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


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """How a model sees.

    Attributes:
      encoder: the image encoder.
      tokens: how the tokens of pictures are found and numbered.
      names: role -> name of the encoder's tensors in files, as in `models.sources`. Those of the whole checkpoint begin
        with "model." in files that transformers 5 wrote.
    """

    encoder: EncoderConfig
    tokens: ImageTokens
    names: Names
