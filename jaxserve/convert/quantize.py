"""Writes a quantized checkpoint, one layer at a time.

Memory holds one layer, its statistics and the activations of one text. Each finished layer is a file of the output
folder, and an interrupted run continues after the last of them. Calibrated methods measure a layer on the outputs of
the quantized layers before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxserve.checkpoints.export import (
    LAYOUTS,
    compress,
    copy_rest,
    quantization_config,
    write_index,
    write_json,
    write_shard,
)
from jaxserve.checkpoints.hub import resolve_model
from jaxserve.checkpoints.load import check
from jaxserve.checkpoints.quantize import DYNAMIC, KINDS, Scheme, activations_of, awq_scales, clipped, gptq, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import read_header
from jaxserve.config import ConfigError
from jaxserve.convert.calibration import Statistics, advance, embed, fuse, measure, measure_rows, read_windows
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import Checkpoint, read_model
from jaxserve.models.spec import (
    AttentionSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
)
from jaxserve.models.weights import abstract_params, weight_pieces
from jaxserve.pallas_kernels.ops import rms_norm
from jaxserve.pallas_kernels.types import QuantArray
from jaxserve.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

SCHEMES = (*KINDS, "int8-dynamic", "fp8-dynamic")
METHODS = ("rtn", "gptq", "awq")
GROUP_SIZES = (128, 64, 32)
RECIPE = "quantize.json"  # in an unfinished output folder: the settings of its layers
TEXT = "calibration.txt"  # in the model's folder: the default calibration text

# Each matrix of a decoder layer: the roles of the tensors that it consists of, and the role that produces its inputs.
# AWQ divides the outputs of the latter by its scales.
LINEARS = (
    ("attention/qkv/kernel", ("q", "k", "v"), "attention_norm"),
    ("attention/out/kernel", ("o",), "v"),
    ("mlp/gate_up/kernel", ("gate", "up"), "mlp_norm"),
    ("mlp/down/kernel", ("down",), "up"),
)


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Settings of a quantization.

    Attributes:
      scheme: type of the weights: int8, int4 or fp8 (e4m3fn). int8-dynamic and fp8-dynamic (W8A8) also round the inputs
        of products, with a scale per token.
      method: rtn rounds to nearest; gptq and awq calibrate with the layers' inputs on a text.
      group_size: inputs that share a scale; 0: all of an output channel. None: for int4 the largest of GROUP_SIZES that
        divides all inputs, else 0.
      symmetric: without zero points.
      layout: layout of the files, see `jaxserve.checkpoints.export`.
      act_order: gptq rounds columns with large inputs first.
      quantize_head: quantize the output head too; not possible where it is the embedding.
      calibration: a text file or JSON lines with a "text" each; None: calibration.txt of the model's folder.
      samples, length: most pieces of the text, and the tokens of each.
    """

    scheme: str = "int4"
    method: str = "rtn"
    group_size: int | None = None
    symmetric: bool = True
    layout: str = LAYOUTS[0]
    act_order: bool = True
    quantize_head: bool = False
    calibration: str | None = None
    samples: int = 128
    length: int = 512

    def __post_init__(self) -> None:
        for name, allowed in (("scheme", SCHEMES), ("method", METHODS), ("layout", LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.group_size not in (None, 0, *GROUP_SIZES):
            raise ConfigError(f"group_size must be 0 or one of {GROUP_SIZES}, got {self.group_size}")
        if (self.scheme == "fp8" or self.scheme in SCHEMES[-2:]) and (self.group_size or not self.symmetric):
            raise ConfigError(f"{self.scheme} has one scale per output channel: leave out group_size and zero points")
        if self.layout == "awq" and self.scheme != "int4":
            raise ConfigError(f"the awq layout holds int4 only, not {self.scheme}; use {LAYOUTS[0]}")
        if self.samples < 1 or self.length < 1:
            raise ConfigError(f"samples and length must be positive, got {self.samples} and {self.length}")

    def storage(self, model: ModelConfig) -> Scheme:
        """How the weights are stored. Raises ConfigError for groups that do not divide the model's inputs."""
        inputs = {model.hidden_size, model.num_heads * model.head_dim, *(layer.mlp.size for layer in model.layers)}
        fitting = [size for size in GROUP_SIZES if not any(n % size for n in inputs)]
        size = self.group_size
        if size is None:
            if self.scheme == "int4" and not fitting:
                raise ConfigError(f"no groups of {GROUP_SIZES} divide inputs of {sorted(inputs)}; use group_size 0")
            size = fitting[0] if self.scheme == "int4" else 0
        if size and size not in fitting:
            raise ConfigError(f"group_size {size} does not divide inputs of {sorted(inputs)}; {[*fitting, 0]} do")
        dtype = "float16" if self.layout == "awq" else model.dtype
        return Scheme(self.scheme.removesuffix(DYNAMIC), size or None, self.symmetric, jnp.dtype(dtype))


def quantize_model(model: str, out: Path, config: QuantizeConfig, *, progress: bool = True) -> None:
    """Writes a quantized copy of a model's folder. Raises ConfigError or CheckpointError."""
    run = _Run(resolve_model(model), out, config)
    with jax.default_matmul_precision("highest"):
        run.begin()
        for layer in tqdm(range(run.model.num_layers), desc="quantizing", unit="layer", disable=not progress):
            if not run.file(layer).exists():
                run.layer(layer)
        run.finish()


def _check_layers(model: ModelConfig) -> None:
    """Raises ConfigError for kinds of layers that cannot be quantized: LINEARS does not list their products."""
    kinds = {replace(layer, attention=replace(layer.attention, window=None)) for layer in model.layers}
    refusal = ConfigError(
        f"models of the family {model.family} are served, but not quantized yet: their layers differ from Llama's"
    )
    if any(isinstance(layer.attention, LatentAttentionSpec | GatedDeltaSpec) for layer in kinds):
        raise refusal
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
        for a in [cast(AttentionSpec, layer.attention)]
    }  # fmt: skip
    turned = any(rope.interleaved or rope.rotary_dim is not None for rope in model.ropes.values())
    qk_norms = {layer.attention.qk_norm for layer in kinds if isinstance(layer.attention, AttentionSpec)}
    odd_norms = any(norm is not None and (not norm.fused or norm.norm.offset) for norm in qk_norms)
    if kinds != plain or turned or odd_norms or model.embed_scale != 1.0 or model.learned_positions is not None:
        raise refusal


class _Run:
    """One quantization of a model, from reading its folder to writing the output folder."""

    def __init__(self, folder: Path, out: Path, config: QuantizeConfig):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is a file; give the folder of a model that is not quantized")
        source = Checkpoint.open(folder)
        if source.reader is not None:
            raise ConfigError(f"{folder} is quantized already; quantize the model that it was made from")
        self.folder, self.out, self.config, self.values = folder, out, config, source.hf.values
        self.model = read_model(folder)
        if any(layer.mlp.experts for layer in self.model.layers):
            raise ConfigError(
                f"{folder} has experts, which are not quantized to files yet; serve it with --quantization int8, int4 "
                "or fp8, which quantizes while loading"
            )
        self.scheme = config.storage(self.model)
        _check_layers(self.model)
        self.roles, self.tensors = source.family.roles(self.model, source.tensors.__contains__), source.tensors
        self.decoder = Decoder(self.model, self.model.num_kv_heads, self.model.vocab_size)
        self.pieces = weight_pieces(self.decoder, self.roles)
        check(self.tensors, self.pieces, lambda name: True)
        self.shapes = abstract_params(self.decoder, make_mesh())
        self.head = self.roles["head.weight"] if config.quantize_head else None
        if self.head and self.model.tie_embeddings:
            raise ConfigError("the output head of this model is its embedding, which is not quantized")

    def file(self, layer: int) -> Path:
        """A layer's output file. The file of `layer` = num_layers holds the tensors outside of the layers."""
        return self.out / f"model-{layer + 1:05d}-of-{self.model.num_layers + 1:05d}.safetensors"

    def activations(self, layer: int) -> Path:
        return self.out / f"activations-{layer}.npy"

    def names(self, layer: int) -> dict[str, str]:
        """Role -> name of the layer's tensor."""
        names = {role: name.format(i=layer) for role, name in self.roles.items() if "{i}" in name}
        return {role: name for role, name in names.items() if name in self.tensors}

    @property
    def calibrated(self) -> bool:
        return self.config.method != "rtn"

    def begin(self) -> None:
        """Creates the folder, or checks that an interrupted run with the same settings has created it."""
        windows = self._windows() if self.calibrated else np.zeros((0, 0), np.int32)
        files = sorted({info.path for info in self.tensors.values()})
        recipe = asdict(self.config) | {
            "model": str(self.folder),
            "weights": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
            "calibration": hashlib.sha256(windows.tobytes()).hexdigest() if self.calibrated else None,
        }
        path = self.out / RECIPE
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if changed := [name for name in recipe if recipe[name] != before.get(name)]:
                what = ", ".join(f"{name}: {before.get(name)!r:.80}, now {recipe[name]!r:.80}" for name in changed)
                raise ConfigError(
                    f"{self.out} was begun with other settings ({what}); remove it, or choose another folder"
                )
            return
        if self.out.exists() and any(self.out.iterdir()):
            raise ConfigError(f"{self.out} is not empty, and holds no {RECIPE} of an interrupted run")
        self.out.mkdir(parents=True, exist_ok=True)
        if self.calibrated:
            embed(self.tensors[self.roles["embed.weight"]].read(), windows, self.activations(0))
        write_json(path, recipe)

    def _windows(self) -> np.ndarray:
        text = Path(self.config.calibration or self.folder / TEXT)
        if self.config.calibration is None and not text.exists():
            raise ConfigError(
                f"{self.config.method} looks at what the layers see on a text, and {self.folder} brings none: "
                "name a file with --calibration, or use --method rtn"
            )
        length = min(self.config.length, self.model.max_position)
        return read_windows(text, load_tokenizer(self.folder), self.config.samples, length)

    def layer(self, layer: int) -> None:
        """Writes a layer's file. The next layer's inputs are written first, as the file marks the layer as finished."""
        names = self.names(layer)
        tensors = {name: self.tensors[name].read() for name in names.values()}
        prefix = f"layers_{layer}/"
        pieces = {path: parts for path, parts in self.pieces.items() if path.startswith(prefix)}
        shapes = {path.removeprefix(prefix): self.shapes[path] for path in pieces}
        pieces = {path.removeprefix(prefix): parts for path, parts in pieces.items()}
        seen: dict[str, Statistics] = {}
        if self.calibrated:
            seen = measure(self.decoder, layer, fuse(pieces, shapes, tensors), self.activations(layer))
        if self.config.method == "awq":
            self._rescale(names, tensors, seen)
        weights = {
            name: self._quantize(tensors.pop(name), seen.get(path))
            for path, roles, _ in LINEARS
            for name in (names[f"{role}.weight"] for role in roles)
        }
        if self.calibrated:
            values = tensors | {name: dequantize(w) for name, w in weights.items()}
            params = fuse(pieces, shapes, values)
            advance(self.decoder, layer, params, self.activations(layer), self.activations(layer + 1))
        self._write(layer, tensors, weights)
        self.activations(layer).unlink(missing_ok=True)

    def _quantize(self, weight: np.ndarray, seen: Statistics | None) -> QuantArray:
        return replace(self._weight(weight, seen), activations=activations_of(self.config.scheme))

    def _weight(self, weight: np.ndarray, seen: Statistics | None) -> QuantArray:
        if seen is None:
            return rtn(weight, self.scheme)
        if self.config.method == "awq":
            return clipped(weight, seen.hessian, self.scheme)
        return gptq(weight, seen.hessian, self.scheme, act_order=self.config.act_order)

    def _rescale(self, names: dict[str, str], tensors: dict[str, np.ndarray], seen: dict[str, Statistics]) -> None:
        """Multiplies columns by AWQ's scales, and divides the norm or the rows that produce their inputs."""
        for path, roles, producer in LINEARS:
            consumers = [names[f"{role}.weight"] for role in roles]
            hessian, magnitude = seen[path]
            heads = (1, 1, -1)
            if producer == "v":  # the query heads of a group share a value head, so their scales must be equal
                heads = (self.model.num_kv_heads, self.model.num_heads // self.model.num_kv_heads, -1)
            by_head = np.asarray(magnitude).reshape(heads)
            alike = np.broadcast_to(by_head.mean(1, keepdims=True), by_head.shape).ravel()
            scales = awq_scales([tensors[name] for name in consumers], hessian, alike, self.scheme)
            rows = scales.reshape(heads)[:, 0].ravel()
            for kind in ("weight", "bias"):
                if (name := names.get(f"{producer}.{kind}")) is None:
                    continue
                old = tensors[name]
                if old.ndim == 2:
                    tensors[name] = old.astype(np.float32) / rows[:, None]
                    continue
                tensors[name] = new = (old / rows).astype(old.dtype)
                if producer.endswith("norm"):  # the norm is rounded to its dtype: use the quotient that remains
                    scales = np.divide(old, new, dtype=np.float32, out=scales, where=new != 0, casting="unsafe")
            for name in consumers:
                tensors[name] = tensors[name].astype(np.float32) * scales
            seen[path] = Statistics(hessian / jnp.outer(jnp.asarray(scales), jnp.asarray(scales)), magnitude)

    def _write(self, layer: int, tensors: dict[str, np.ndarray], weights: dict[str, QuantArray]) -> None:
        for name, weight in weights.items():
            tensors |= compress(name.removesuffix(".weight"), weight, self.config.layout)
        write_shard(self.file(layer), tensors)

    def finish(self) -> None:
        """Writes embeddings, norms and head, then the index, the tokenizer and config.json."""
        layers = range(self.model.num_layers)
        written = {name for layer in layers for name in self.names(layer).values()}
        rest = {name: info.read() for name, info in self.tensors.items() if name not in written | {self.head}}
        self._write(len(layers), rest, self._quantized_head())
        files = [self.file(layer) for layer in range(len(layers) + 1)]
        write_index(self.out, {f.name: {name: info.nbytes for name, info in read_header(f).items()} for f in files})
        copy_rest(self.folder, self.out)
        self.activations(len(layers)).unlink(missing_ok=True)
        write_json(self.out / "config.json", self.values | {"quantization_config": self._quantization_config()})
        (self.out / RECIPE).unlink()

    def _quantized_head(self) -> dict[str, QuantArray]:
        if self.head is None:
            return {}
        seen = None
        if self.calibrated:
            norm = jnp.asarray(self.tensors[self.roles["norm.weight"]].read(), jnp.float32)
            inputs = self.activations(self.model.num_layers)
            seen = measure_rows(inputs, lambda x: rms_norm(jnp.asarray(x), norm, self.model.norm_eps))
        return {self.head: self._quantize(self.tensors[self.head].read(), seen)}

    def _quantization_config(self) -> dict[str, Any]:
        dtype = np.dtype(KINDS[self.scheme.kind][2])
        names = [self.names(i)[f"{role}.weight"] for i in range(self.model.num_layers) for _, roles, _ in LINEARS
                 for role in roles]  # fmt: skip
        weights = {}
        for name in [*names, *([self.head] if self.head else [])]:
            shape = self.tensors[name].shape
            size = self.scheme.group_size or shape[1]
            scale = jax.ShapeDtypeStruct((shape[0], shape[1] // size), self.scheme.scale_dtype)
            zero = None if self.scheme.symmetric else scale
            codes = jax.ShapeDtypeStruct(shape, dtype)
            form = {"block": (1, size), "activations": activations_of(self.config.scheme)}
            weights[name.removesuffix(".weight")] = QuantArray(codes, scale, zero, **form)  # type: ignore[arg-type]
        plain = [] if self.head else [self.roles["head.weight"].removesuffix(".weight")]
        return quantization_config(weights, plain, self.config.layout)
