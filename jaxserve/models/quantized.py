"""Quantized weights of a model: their abstract form, random ones, and how they are placed on the mesh."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.checkpoints.formats.gguf_fields import block_array
from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.checkpoints.quantize import DYNAMIC, KINDS, Scheme, activations_of, rtn
from jaxserve.checkpoints.quantized import StoredRows, refine, with_bytes
from jaxserve.devices import layouts
from jaxserve.devices.mesh import is_split, num_parts, to_devices
from jaxserve.devices.sharded_ops import quant_block, quant_specs
from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.int4 import int4_of_bytes
from jaxserve.pallas_kernels.quant_matmul import fragments, w8a8, ways
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import BlockArray, MixedArray, PanelArray, QuantArray

log = logging.getLogger(__name__)

GROUP = 128  # inputs that share a scale of int4
STACKS = ("/experts_gate_up", "/experts_down")  # ends of the paths of experts' matrices

# Forms that jaxserve quantizes to: dtype of the codes, inputs in a block (None: all), dtype of the scale. With the
# suffix DYNAMIC, products also round their inputs to the dtype of the codes, with one scale per token.
SCHEMES: dict[str, tuple[Any, int | None, Any]] = {
    "int8": (jnp.int8, None, jnp.bfloat16),
    "int4": (jnp.int4, GROUP, jnp.bfloat16),
    "fp8": (jnp.float8_e4m3fn, None, jnp.float32),
    "int8-dynamic": (jnp.int8, None, jnp.float32),
    "fp8-dynamic": (jnp.float8_e4m3fn, None, jnp.float32),
}
# Also forms that are only read from files, or made of random numbers.
FORMS = SCHEMES | {
    "mxfp4": (jnp.float4_e2m1fn, 32, jnp.float8_e8m0fnu),
    "nvfp4": (jnp.float4_e2m1fn, 16, jnp.float8_e4m3fn),
}


def rounded(path: str, host: np.ndarray | QuantArray, scheme: str) -> np.ndarray | QuantArray:
    """A plain matrix of a layer, quantized by one of SCHEMES. Other weights are returned as they are."""
    if not is_quantizable(path) or isinstance(host, QuantArray):
        return host
    made = rtn(host, _scheme(scheme, host.shape[1]))
    return dataclasses.replace(made, activations=activations_of(scheme))


def rounded_form(path: str, shape: tuple[int, int], scheme: str) -> QuantArray | None:
    """What `rounded` makes of a matrix of this shape, with zeros that take no memory. None: it stays as it is."""
    if not is_quantizable(path):
        return None
    form = _scheme(scheme, shape[1])
    group = form.group_size or shape[1]
    codes, scale = np.zeros((), KINDS[form.kind][2]), np.zeros((), form.scale_dtype)
    return QuantArray(
        np.broadcast_to(codes, shape),
        np.broadcast_to(scale, (shape[0], shape[1] // group)),
        block=(1, group),
        activations=activations_of(scheme),
    )


def _scheme(name: str, inputs: int) -> Scheme:
    """One of SCHEMES for a matrix with this number of inputs."""
    return Scheme(name.removesuffix(DYNAMIC), _group(inputs) if name == "int4" else None)


class Rounding:
    """Decides for each weight whether its products round their inputs as its format says. The log tells if they do not.

    `requested`: "auto": inputs are rounded where the device has such products; "checkpoint": wherever the rounding can
    be computed at all; "none": nowhere.
    """

    def __init__(self, requested: str, device: Device, dtype: Any):
        self._requested = requested
        self._device = device
        self._dtype = dtype
        self._told: set[str] = set()

    def __call__(self, path: str, w: Any) -> Any:
        """The weight; without `activations` if its products do not round their inputs."""
        if isinstance(w, MixedArray):
            return dataclasses.replace(w, parts=tuple(self(path, part) for part in w.parts))
        if not isinstance(w, QuantArray) or w.activations is None:
            return w
        reason = self._why_not(path, w)
        if reason and (said := f"activations are not rounded to {w.activations}: {reason}") not in self._told:
            self._told.add(said)
            log.info("%s", said)
        return w8a8.ignored(w) if reason else w

    def _why_not(self, path: str, w: QuantArray) -> str | None:
        if path.endswith(STACKS):
            return "there are no such products by expert"
        if not path.endswith("/kernel"):
            return "the weight is a table"
        if self._requested == "none":
            return "asked for by --activation-quantization none, or a --matmul-backend by name"
        return w8a8.unreadable(w) if self._requested == "checkpoint" else w8a8.native(self._device, self._dtype, w)


def place(path: str, host: np.ndarray | QuantArray | BlockArray, sharding: Sharding, scheme: str | None = None) -> Any:
    """Brings a weight to the devices. `sharding` is the sharding of the same weight in plain form.

    With a `scheme` the weight is `rounded` first. The blocks of a quantized weight become small enough for every device
    to get whole blocks.
    """
    if scheme and not isinstance(host, BlockArray):
        host = rounded(path, host, scheme)
    if not isinstance(host, QuantArray | BlockArray):
        return to_devices(host, sharding)
    host = for_devices(host, sharding)
    return jax.tree.map(put, host, _shardings(host, sharding))


def keeps_blocks(mesh: Mesh) -> bool:
    """Whether GGUF's blocks of BLOCK_KINDS stay as they are on these devices. They do on GPUs with jax-triton, which
    have a kernel for them."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda") and importlib.util.find_spec("jax_triton") is not None


def as_blocks(rows: StoredRows, sharding: Sharding) -> BlockArray | None:
    """Rows of a file as a BlockArray. None if they are of several kinds, or if a device boundary would cut a block."""
    w, (spec, mesh) = block_array(rows), _split(sharding)
    inputs = (*spec, None, None)[1]
    blocks = rows.inputs // w.block[1] if w else 0
    return None if inputs is not None and blocks % num_parts(mesh, inputs) else w


def for_devices(host: QuantArray | BlockArray, sharding: Sharding) -> QuantArray | BlockArray:
    """The form that a weight has on the devices. Blocks are cut until each device gets whole ones. On CPU, which has no
    kernel for 4-bit floats, codes become bytes."""
    if isinstance(host, BlockArray):
        return host
    host = refine(host, quant_block(host, *_split(sharding)))
    return with_bytes(host) if _split(sharding)[1].devices.flat[0].platform == "cpu" else host


def put(host: np.ndarray | PackedInt4, sharding: NamedSharding) -> jax.Array:
    """Brings an array to the devices. A PackedInt4 is sent packed, and unpacked to int4 on the devices. It is unpacked
    on the host if a device boundary would cut a byte, or if a CPU lacks the kernel."""
    if not isinstance(host, PackedInt4):
        return to_devices(host, sharding)
    on_cpu = sharding.mesh.devices.flat[0].platform == "cpu"
    if sharding.shard_shape(host.shape)[-1] % 2 or (on_cpu and not cpu.available(cpu.QUANT_MATMUL)):
        return to_devices(np.asarray(host), sharding)
    return _unpacker(sharding, host.dtype)(to_devices(host.data, sharding))


@cache
def _unpacker(sharding: NamedSharding, dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that unpacks bytes with this sharding to 4-bit numbers of `dtype`."""
    spec = sharding.spec
    local = jax.shard_map(
        partial(int4_of_bytes, dtype=dtype), mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(local)


def splits_evenly(w: QuantArray, sharding: Sharding) -> bool:
    """Whether every device gets whole blocks of the weight as it is."""
    return quant_block(w, *_split(sharding)) == w.block


def abstract_like(host: QuantArray | BlockArray, sharding: Sharding) -> QuantArray | BlockArray:
    """The shapes and shardings of the weight that `place` would make."""
    host = for_devices(host, sharding)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), host, _shardings(host, sharding)
    )


def _group(inputs: int) -> int | None:
    """The largest usual group size that divides the number of inputs; None: one group for all inputs."""
    return next((size for size in (GROUP, GROUP // 2, GROUP // 4) if inputs % size == 0), None)


def arranged(params: Any, mesh: Mesh, x_dtype: Any, backend: str) -> Any:
    """The parameters, or their shapes, in the order in which the kernels of these devices read them. Arrays that are
    reordered are donated.

    On TPUs this is the order of large arrays' axes in memory (`layouts`). On Hopper, it is the order of codes
    (`fragments`) in the weights that its kernel multiplies with activations of `x_dtype`, unless others were measured
    to be faster (`ways`); sizes stay the same.
    """
    device = Device.of(mesh.devices.flat[0])
    x = jax.ShapeDtypeStruct((1, 1), x_dtype)

    def one(w: Any) -> Any:
        if not isinstance(w, QuantArray) or device.platform != "gpu":
            return w
        local = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), w)
        problem = MatmulProblem.of(x, local, is_split(mesh))
        if not fragments.suits(device, problem, backend):
            return w
        if backend == "auto" and len(w.shape) == 2 and ways.is_shuffled(device, problem) is False:
            return w
        abstract = isinstance(w.codes, jax.ShapeDtypeStruct)
        return dataclasses.replace(
            w, codes=w.codes if abstract else _shuffler(w.codes.sharding)(w.codes), shuffled=True
        )

    made = jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, QuantArray | PanelArray))
    return layouts.in_order_of_kernels(made)


@cache
def _shuffler(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that reorders codes with this sharding; each device reorders its own part."""
    spec = sharding.spec
    local = jax.shard_map(fragments.shuffled_codes, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(local, donate_argnums=0)


PLAIN = ("router/kernel", "shared_gate/kernel", "head_weights/kernel")


def is_quantizable(path: str) -> bool:
    """Whether a weight may be quantized: the matrices of layers and of experts. Embeddings, output head, routers, gates
    of norms and the weights of an indexer's heads stay floats, because they are few and matter more to the results."""
    if not path.startswith("layers_") or path.endswith(PLAIN) or "norm_gate/" in path:
        return False
    return path.endswith(("/kernel", *STACKS))


def quantized_abstract(abstract: Mapping[str, jax.ShapeDtypeStruct], scheme: str) -> dict[str, Any]:
    """The result of `weights.abstract_params`, with the matrices of layers in one of FORMS."""
    return {path: _quantized(a, scheme) if is_quantizable(path) else a for path, a in abstract.items()}


def random_weight(key: jax.Array, like: QuantArray) -> QuantArray:
    """A random weight with the shapes of `like`. Its products with standard normal inputs have about unit variance."""
    codes_key, scale_key = jax.random.split(key)
    if jnp.issubdtype(like.codes.dtype, jnp.integer):
        top = int(jnp.iinfo(like.codes.dtype).max)
        codes = jax.random.randint(codes_key, like.shape, -top, top + 1, jnp.int8).astype(like.codes.dtype)
        deviation = top / math.sqrt(3)
    else:
        codes = jax.random.normal(codes_key, like.shape).astype(like.codes.dtype)
        deviation = 1.0
    unit = 1 / (deviation * math.sqrt(like.shape[-1]))
    scale = jax.random.uniform(scale_key, like.scale.shape, minval=0.5, maxval=1.5)
    if like.gain is None:
        return dataclasses.replace(like, codes=codes, scale=(scale * unit).astype(like.scale.dtype))
    gain = jnp.full(like.gain.shape, unit, jnp.float32)
    return dataclasses.replace(like, codes=codes, scale=scale.astype(like.scale.dtype), gain=gain)


def _quantized(dense: jax.ShapeDtypeStruct, scheme: str) -> QuantArray:
    codes, group, scale = FORMS[scheme]
    *lead, out, inputs = dense.shape

    def form(group: int) -> QuantArray:
        blocks = (*lead, out, -(-inputs // group))
        shapes = jax.ShapeDtypeStruct(dense.shape, codes), jax.ShapeDtypeStruct(blocks, scale)
        gain = jax.ShapeDtypeStruct((*lead, out, 1), jnp.float32) if scheme == "nvfp4" else None
        return QuantArray(*shapes, block=(1, group), gain=gain, activations=activations_of(scheme))

    shape = form(min(group or inputs, inputs))
    shape = form(quant_block(shape, *_split(dense.sharding))[1])
    shardings = _shardings(shape, dense.sharding)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shape, shardings)


def _shardings(w: QuantArray | BlockArray, of_plain: Sharding) -> QuantArray | BlockArray:
    spec, mesh = _split(of_plain)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), quant_specs(w, spec, mesh))


def _split(sharding: Sharding) -> tuple[PartitionSpec, Mesh]:
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    return sharding.spec, sharding.mesh
