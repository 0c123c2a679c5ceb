"""The matrices of a checkpoint that are quantized: those of its layers and experts, whatever the family calls them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from jaxserve.checkpoints.load import Piece, Pieces, Stack
from jaxserve.checkpoints.safetensors import TensorInfo
from jaxserve.config import ConfigError
from jaxserve.models.quantized import is_quantizable
from jaxserve.models.sources import Names
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec


@dataclass(frozen=True)
class Product:
    """The place of a matrix in a layer's parameters. Matrices with equal places are multiplied with the same inputs.

    path: of the weight that the matrix is a part of, within the layer.
    expert: the matrix's member of the weight, if that is a stack of experts.
    """

    path: str
    expert: int | None = None


def of_layer(pieces: Mapping[str, Pieces], layer: int) -> dict[str, Pieces]:
    """The pieces of a layer's weights, by their paths within the layer."""
    prefix = f"layers_{layer}/"
    return {path.removeprefix(prefix): some for path, some in pieces.items() if path.startswith(prefix)}


def products(pieces: Mapping[str, Pieces]) -> dict[str, Product]:
    """Name -> place of each matrix that is quantized, of a layer's pieces by path. A fused tensor has its first place;
    its others have the same inputs."""
    made: dict[str, Product] = {}
    for path, some in pieces.items():
        if is_quantizable(f"layers_0/{path}"):
            for expert, piece in _members(some):
                made.setdefault(piece.name, Product(path, expert))
    return made


def _members(pieces: Pieces) -> Iterator[tuple[int | None, Piece]]:
    if isinstance(pieces, Stack):
        yield from ((expert, piece) for expert, member in enumerate(pieces.members) for piece in member)
    else:
        yield from ((None, piece) for piece in pieces)


def plain_modules(pieces: Mapping[str, Pieces], chosen: Collection[str]) -> list[str]:
    """The modules of a layer whose matrices stay floats: routers, gates of shared experts, projections up from
    latents. Other engines need their names, because they would take them for quantized ones."""
    names = dict.fromkeys(
        piece.name for some in pieces.values() for piece in some if len(piece.shape) == 2 and piece.name not in chosen
    )
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


WHILE_LOADING = "serve the model with --quantization int8, int4 or fp8, which quantizes while loading"


def check_files(model: ModelConfig, roles: Names, files: Collection[str], chosen: Mapping[str, TensorInfo]) -> None:
    """Raises ConfigError for matrices that no layout of quantized files has a place for. `files` are the names of the
    tensors in the files, `chosen` the tensors to quantize."""
    start = f"models of the family {model.family} are served, but their files are not quantized: "
    if any(role.endswith(".T") for role in roles):
        raise ConfigError(f"{start}their matrices are stored transposed")
    if any(layer.residual in ("shortcut", "memory") for layer in model.layers):
        raise ConfigError(f"{start}several of their layers have the same tensors; {WHILE_LOADING}")
    if stacked := next((name for name in chosen if name not in files), None):
        raise ConfigError(f"{start}they stack the matrices of all experts in one tensor ({stacked}); {WHILE_LOADING}")


def check_calibration(model: ModelConfig, method: str, roles: Names) -> None:
    """Raises ConfigError if a calibrated method does not know a model's kinds of layers, or its fused tensors."""
    for layer in model.layers:
        mlp = layer.mlp
        unknown = layer.recurrent or getattr(layer.attention, "chunk", None)
        unknown = unknown or layer.gated or getattr(layer.attention, "difference", None)
        unknown = unknown or layer.residual in (
            "scaled_sandwich", "altup", "hyper", "shortcut", "memory", "weighed_skip",
        )  # fmt: skip
        if unknown or mlp is None or (mlp.experts and (mlp.bias or mlp.experts.router.weighs_inputs)):
            raise ConfigError(f"{method} cannot measure the layers of the family {model.family}; use --method rtn")
    fused = {"qkv.weight", "qkv_grouped.weight", "gate_up.weight"} & roles.keys()
    if method == "awq" and (fused or not _is_like_llama(model)):
        raise ConfigError(
            "awq moves scales into the norm or the rows before a matrix, and knows these in layers like Llama's only, "
            f"not in those of {model.family}; use --method gptq or rtn"
        )


def _is_like_llama(model: ModelConfig) -> bool:
    """Whether all layers consist of the norms and matrices of Llama's, perhaps with biases and norms of heads."""
    kinds = {
        replace(layer, attention=replace(layer.attention, window=None))
        for layer in model.layers
        if isinstance(layer.attention, AttentionSpec)
    }
    if not all(isinstance(layer.attention, AttentionSpec) for layer in model.layers):
        return False
    plain = {
        LayerSpec(
            attention=AttentionSpec(
                num_heads=a.num_heads, num_kv_heads=a.num_kv_heads, head_dim=a.head_dim, rope=a.rope,
                qkv_bias=a.qkv_bias, out_bias=a.out_bias, qk_norm=a.qk_norm,
            ),
            mlp=MLPSpec(size=layer.mlp.size, activation=layer.mlp.activation, bias=layer.mlp.bias),
            norm=NormSpec(eps=layer.norm.eps),
        )
        for layer in kinds
        if layer.mlp is not None
        for a in [cast(AttentionSpec, layer.attention)]
    }  # fmt: skip
    return kinds == plain
