"""Writes a quantized checkpoint, one layer at a time.

Memory holds one layer, its statistics and the activations of one text. Each finished layer is a file of the output
folder, and an interrupted run continues after the last of them. Calibrated methods measure a layer on the outputs of
the quantized layers before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tqdm import tqdm

from jaxserve.checkpoints.export import (
    compress,
    copy_rest,
    quantization_config,
    write_index,
    write_json,
    write_shard,
)
from jaxserve.checkpoints.hub import resolve_model
from jaxserve.checkpoints.load import Pieces, check
from jaxserve.checkpoints.quantize import DYNAMIC, KINDS, Scheme, activations_of, awq_scales, clipped, gptq, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import read_folder, read_header
from jaxserve.config import ConfigError
from jaxserve.convert.calibration import Statistics, advance, begin, fuse, measure, measure_rows, read_windows
from jaxserve.convert.products import check_calibration, check_files, of_layer, plain_modules, products
from jaxserve.convert.settings import GROUP_SIZES, QuantizeConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import Checkpoint, read_model
from jaxserve.models.weights import abstract_params
from jaxserve.pallas_kernels.types import QuantArray
from jaxserve.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

RECIPE = "quantize.json"  # in an unfinished output folder: the settings of its layers
TEXT = "calibration.txt"  # in the model's folder: the default calibration text

# For AWQ, each matrix of a layer like Llama's: the roles of the tensors that it consists of, and the role that produces
# its inputs. AWQ divides the outputs of the latter by its scales.
LINEARS = (
    ("attention/qkv/kernel", ("q", "k", "v"), "attention_norm"),
    ("attention/out/kernel", ("o",), "v"),
    ("mlp/gate_up/kernel", ("gate", "up"), "mlp_norm"),
    ("mlp/down/kernel", ("down",), "up"),
)


def storage(config: QuantizeConfig, inputs: set[int], dtype: str) -> Scheme:
    """How weights with these numbers of inputs are stored. Raises ConfigError if groups do not divide them."""
    fitting = [size for size in GROUP_SIZES if not any(n % size for n in inputs)]
    size = config.group_size
    if size is None:
        if config.scheme == "int4" and not fitting:
            raise ConfigError(f"no groups of {GROUP_SIZES} divide inputs of {sorted(inputs)}; use group_size 0")
        size = fitting[0] if config.scheme == "int4" else 0
    if size and size not in fitting:
        raise ConfigError(f"group_size {size} does not divide inputs of {sorted(inputs)}; {[*fitting, 0]} do")
    dtype = "float16" if config.layout == "awq" else dtype
    return Scheme(config.scheme.removesuffix(DYNAMIC), size or None, config.symmetric, jnp.dtype(dtype))


def quantize_model(model: str, out: Path, config: QuantizeConfig, *, progress: bool = True) -> None:
    """Writes a quantized copy of a model's folder. Raises ConfigError or CheckpointError."""
    run = _Run(resolve_model(model), out, config)
    with jax.default_matmul_precision("highest"):
        run.begin()
        for layer in tqdm(range(run.model.num_layers), desc="quantizing", unit="layer", disable=not progress):
            if not run.file(layer).exists():
                run.layer(layer)
        run.finish()


class _Run:
    """One quantization of a model, from reading its folder to writing the output folder."""

    def __init__(self, folder: Path, out: Path, config: QuantizeConfig):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is a file; give the folder of a model that is not quantized")
        source = Checkpoint.open(folder)
        if source.reader is not None:
            raise ConfigError(f"{folder} is quantized already; quantize the model that it was made from")
        self.folder = folder
        self.out = out
        self.config = config
        self.values = source.hf.values
        self.model = read_model(folder)
        self.roles = source.family.roles(self.model, source.tensors.__contains__)
        self.tensors = source.tensors
        if self.calibrated:
            check_calibration(self.model, config.method, self.roles)
        self.decoder = Decoder(self.model, self.model.num_kv_heads, self.model.vocab_size)
        self.pieces = source.pieces(self.decoder)
        check(self.tensors, self.pieces, lambda name: True)
        chosen = {name: self.tensors[name] for i in range(self.model.num_layers) for name in products(self.of(i))}
        check_files(self.model, self.roles, read_folder(folder), chosen)
        self.scheme = storage(config, {tensor.shape[1] for tensor in chosen.values()}, self.model.dtype)
        self.shapes = abstract_params(self.decoder, make_mesh())
        self.head = self.roles["head.weight"] if config.quantize_head else None
        if self.head and (self.model.tie_embeddings or self.model.embed_size):
            raise ConfigError("the output head of this model is its embedding or has another size; it is not quantized")

    def file(self, layer: int) -> Path:
        """A layer's output file. The file of `layer` = num_layers holds the tensors outside of the layers."""
        return self.out / f"model-{layer + 1:05d}-of-{self.model.num_layers + 1:05d}.safetensors"

    def activations(self, layer: int) -> Path:
        return self.out / f"activations-{layer}.npy"

    def of(self, layer: int) -> dict[str, Pieces]:
        """The pieces of a layer, by their paths within it."""
        return of_layer(self.pieces, layer)

    def names(self, layer: int) -> dict[str, None]:
        """The names of a layer's tensors, as an ordered set."""
        return dict.fromkeys(piece.name for some in self.of(layer).values() for piece in some)

    def roles_of(self, layer: int) -> dict[str, str]:
        """Role -> name of the tensors of a layer like Llama's."""
        names = {role: name.format(i=layer, h=0, e=0) for role, name in self.roles.items() if "{i}" in name}
        return {role: name for role, name in names.items() if name in self.tensors}

    def params(self, prefixes: tuple[str, ...]) -> dict[str, jax.Array]:
        """Parameters outside of the layers whose paths begin with one of the prefixes."""
        pieces = {path: some for path, some in self.pieces.items() if path.startswith(prefixes)}
        return fuse(pieces, self.shapes, {piece.name: self.tensors[piece.name].read() for some in pieces.values()
                                          for piece in some})  # fmt: skip

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
            begin(self.decoder, self.params(("embed/", "positions/", "project_in/")), windows, self.activations(0))
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
        tensors = {name: self.tensors[name].read() for name in self.names(layer)}
        pieces = self.of(layer)
        shapes = {path: self.shapes[f"layers_{layer}/{path}"] for path in pieces}
        seen = None
        if self.calibrated:
            seen = measure(self.decoder, layer, fuse(pieces, shapes, tensors), self.activations(layer))
            if self.config.method == "awq":
                self._rescale(self.roles_of(layer), tensors, seen.statistics)
        weights = {
            name: self._quantize(tensors.pop(name), seen.of(product) if seen else None)
            for name, product in products(pieces).items()
        }
        del seen
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
        written = {name for layer in layers for name in self.names(layer)}
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
            tree = {"params": unflatten_dict(self.params(("norm/",)), sep="/")}
            inputs = self.activations(self.model.num_layers)
            seen = measure_rows(inputs, lambda x: self.decoder.apply(tree, jnp.asarray(x), None, method="finish"))
        return {self.head: self._quantize(self.tensors[self.head].read(), seen)}

    def _quantization_config(self) -> dict[str, Any]:
        dtype = np.dtype(KINDS[self.scheme.kind][2])
        by_layer = [products(self.of(i)) for i in range(self.model.num_layers)]
        names = [name for chosen in by_layer for name in chosen]
        weights = {}
        for name in [*names, *([self.head] if self.head else [])]:
            shape = self.tensors[name].shape
            size = self.scheme.group_size or shape[1]
            scale = jax.ShapeDtypeStruct((shape[0], shape[1] // size), self.scheme.scale_dtype)
            zero = None if self.scheme.symmetric else scale
            codes = jax.ShapeDtypeStruct(shape, dtype)
            form = {"block": (1, size), "activations": activations_of(self.config.scheme)}
            weights[name.removesuffix(".weight")] = QuantArray(codes, scale, zero, **form)  # type: ignore[arg-type]
        plain = [module for i, chosen in enumerate(by_layer) for module in plain_modules(self.of(i), chosen)]
        plain += plain_modules({path: some for path, some in self.pieces.items() if path.startswith("streams/")}, ())
        others = ["project_in.weight", "project_out.weight"] if self.model.embed_size else []
        plain += [self.roles[role].removesuffix(".weight") for role in [*others, *["head.weight"] * (not self.head)]]
        return quantization_config(weights, plain, self.config.layout)
