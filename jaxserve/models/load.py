"""From a model folder to a decoder with its parameters on the mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, Sharding

from jaxserve.checkpoints import orbax
from jaxserve.checkpoints.files import read_json
from jaxserve.checkpoints.hub import commit_of, resolve_model, resolve_tokenizer
from jaxserve.checkpoints.load import Host, Stack, load_weights, member_of, read_weight
from jaxserve.checkpoints.mistral_native import PARAMS, is_native, read_params
from jaxserve.checkpoints.mixed import by_type
from jaxserve.checkpoints.progress import show_done
from jaxserve.checkpoints.quantized import StoredRows
from jaxserve.checkpoints.quantized import dequantize as in_floats
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import is_split, num_groups, num_shards, padded_vocab
from jaxserve.devices.sharded_ops import (
    FusedSharded,
    embed_sharded,
    experts_sharded,
    gated_matmul_sharded,
    matmul_sharded,
    quant_matmul_sharded,
    segments_sharded,
)
from jaxserve.models.checkpoint import Checkpoint as Checkpoint
from jaxserve.models.config import HFConfig, take_token_ids
from jaxserve.models.decoder import Decoder
from jaxserve.models.drafter import Drafter
from jaxserve.models.expert_stacks import place_stack
from jaxserve.models.families import read_model_config
from jaxserve.models.layers import activation_of
from jaxserve.models.panels import Packing, is_matrix
from jaxserve.models.quantized import (
    FORMS,
    SCHEMES,
    STACKS,
    Rounding,
    abstract_like,
    arranged,
    as_blocks,
    keeps_blocks,
    place,
    rounded,
    splits_evenly,
)
from jaxserve.models.spec import (
    CompressedAttentionSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    ModelConfig,
    ShortConvSpec,
)
from jaxserve.models.splitting import sharded_kv_heads
from jaxserve.models.weights import abstract_params, dummy_forms, made_up
from jaxserve.models.wide_experts import as_in_files, filled, with_whole_groups
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.checked_ops import Trials, checked_matmul, on_trial, passing
from jaxserve.pallas_kernels.device_ops import choose_ops, gated_matmul_of, matmul_of, mixture_of, with_shape
from jaxserve.pallas_kernels.experts import as_codes
from jaxserve.pallas_kernels.ops import Ops, quant_matmul
from jaxserve.pallas_kernels.registry import (
    AttentionProblem,
    BackendError,
    Device,
    LatentProblem,
    MatmulProblem,
    RecurrentProblem,
    SegmentProblem,
)
from jaxserve.pallas_kernels.types import (
    BLOCK_KINDS,
    BlockArray,
    MixedArray,
    QuantArray,
    has_scale,
    stored_head_dim,
    stored_latent_width,
)

log = logging.getLogger(__name__)


def find_files(config: EngineConfig) -> tuple[Path, Path]:
    """(path of the model, path of its tokenizer). Both are downloaded if needed, and the log tells their commit."""
    where = config.download_dir
    weights = config.load_format != "dummy"
    folder = resolve_model(config.model, weights=weights, revision=config.revision, download_dir=where)
    tokenizer = resolve_tokenizer(config.tokenizer, folder, where)
    for name, found in {config.model: folder, config.tokenizer: tokenizer}.items():
        if name and (commit := commit_of(found)):
            log.info("%s is at commit %s", name, commit)
    if config.mmproj is not None:
        folder = _with_mmproj(config, folder, config.mmproj)
    return folder, tokenizer


def _with_mmproj(config: EngineConfig, path: Path, mmproj: str) -> Path:
    """The model's GGUF file, beside which its image encoder is found. Raises ConfigError or CheckpointError for an
    encoder that does not fit it."""
    from jaxserve.checkpoints.gguf_mmproj import with_mmproj  # not imported where no file is a GGUF file
    from jaxserve.checkpoints.gguf_model import open_gguf

    if path.suffix != ".gguf":
        raise ConfigError(f"mmproj must be None unless the model is a GGUF file, and {path} is none")
    if not Path(mmproj).is_file():
        raise ConfigError(f"mmproj must be a GGUF file with an image encoder; {mmproj} is no file")
    beside = with_mmproj(path, Path(mmproj))
    open_gguf(beside, config.ignore_config_keys, sees=True)
    return beside


def read_hf_config(path: Path, ignored: Collection[str] = ()) -> HFConfig:
    """The config of a folder, a GGUF file or Mistral's own files, in Hugging Face's keys. `ignored` keys are absent."""
    if path.suffix == ".gguf":
        from jaxserve.checkpoints.gguf_model import open_gguf  # not imported where no file is a GGUF file

        return HFConfig(open_gguf(path, ignored).config, str(path), ignored)
    if is_native(path):
        return HFConfig(read_params(path), str(path / PARAMS), ignored)
    return HFConfig.read(path, ignored)


def read_model(folder: Path, ignored: Collection[str] = (), *, sees: bool = True) -> ModelConfig:
    """The model's shape. Its end-of-sequence ids are those of config.json, then those of generation_config.json.
    sees: what it says of pictures is read."""
    hf = read_hf_config(folder, ignored)
    hf.sees = sees
    config = read_model_config(hf)
    path = folder / "generation_config.json"
    if path.exists():
        try:
            extra = take_token_ids(read_json(path).get("eos_token_id"))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} is not a valid generation config: {error}") from None
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + extra)))
    return config


def compute_dtype(config: EngineConfig, model: ModelConfig, platform: str) -> Any:
    """The dtype of activations, of weights that are neither quantized nor in panels (see `panels`), and by default of
    the cache: the operator's choice, or what suits the platform. One CPU with panels always computes in float32."""
    on_one = config.tensor_parallel_size * config.data_parallel_size == 1
    if platform == "cpu" and on_one and cpu_panels.available():
        return jnp.dtype("float32")
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    if platform == "cpu":
        return jnp.dtype("float32")
    return jnp.dtype(model.dtype if model.dtype in ("float16", "bfloat16") else "bfloat16")


def make_decoder(
    model: ModelConfig,
    mesh: Mesh,
    dtype: Any,
    *,
    page_size: int = 16,
    kv_dtype: Any = None,
    attention: str = "auto",
    matmul: str = "auto",
    checks: bool = False,
) -> Decoder:
    """The decoder for a mesh, with the kernels that its devices run. With `checks`, those of accelerators are on trial
    until `check_kernels` is called.

    Raises ConfigError for a backend that cannot serve this model on these devices."""
    shares = num_shards(mesh, "cached_tokens")
    dtype = np.dtype(dtype)
    sizes = num_shards(mesh, "kv_heads"), num_shards(mesh, "expert"), shares, num_groups(mesh)
    kv_heads = sharded_kv_heads(model, *sizes)
    device = Device.of(mesh.devices.flat[0])
    kv_dtype = dtype if kv_dtype is None else np.dtype(kv_dtype)
    problem = attention_problem(
        model, kv_heads, num_shards(mesh, "kv_heads"), device, dtype, kv_dtype, page_size // shares
    )
    if shares > 1:  # only plain XLA computes parts of a softmax
        if attention not in ("auto", "xla"):
            raise ConfigError(f"attention_backend must be auto with decode_context_parallel_size, got {attention!r}")
        attention = "xla"
    if isinstance(model.attention, CompressedAttentionSpec):  # only plain XLA computes it
        if attention not in ("auto", "xla"):
            raise ConfigError(f"attention_backend must be auto for compressed attention, got {attention!r}")
        attention = "xla"
    others = {
        attention_problem(
            model, kv_heads, num_shards(mesh, "kv_heads"), device, dtype, kv_dtype, page_size // shares, i
        )
        for i in range(1, len(model.attentions))
    } - {problem}
    if model.several_shapes and device.platform == "tpu":  # only this kernel reads heads in parts (`KeysAndValues`)
        if attention not in ("auto", "mosaic_tpu"):
            raise ConfigError(
                f"attention_backend must be auto or mosaic_tpu on TPUs for a model whose layers differ in their heads "
                f"of keys and values, got {attention!r}"
            )
        attention = "mosaic_tpu"
    try:
        ops = choose_ops(device, problem, backend=attention, partitioned=is_split(mesh))
        for other in sorted(others, key=str):
            ops = with_shape(ops, choose_ops(device, other, backend=attention, partitioned=is_split(mesh)), other)
        if checks and device.platform != "cpu" and mesh.devices.flat[0] in jax.devices():
            recurrent = recurrent_problem(model, num_shards(mesh, "kv_heads"), dtype)
            segments = segment_problem(model, num_shards(mesh, "kv_heads"), dtype)
            ops = on_trial(
                ops,
                problem,
                attention,
                windows=model.has_windows,
                vocab=model.vocab_size,
                recurrent=recurrent,
                segments=segments,
            )
    except BackendError as error:
        raise ConfigError(str(error)) from None
    if is_split(mesh):
        embed = partial(embed_sharded, mesh, dtype)
        split_matmul = partial(matmul_sharded, mesh)
        fused = None if ops.fused is None else FusedSharded(mesh, ops.fused)
        within = partial(segments_sharded, mesh, ops.segment_attention)
        ops = dataclasses.replace(ops, embed=embed, split_matmul=split_matmul, fused=fused, segment_attention=within)
    ops = _with_products(ops, device, mesh, matmul)
    model = with_whole_groups(model, mesh)
    return Decoder(model, kv_heads, padded_vocab(model.vocab_size, num_shards(mesh, "vocab")), dtype, ops)


def attention_problem(
    model: ModelConfig,
    kv_heads: int,
    devices: int,
    device: Device,
    dtype: Any,
    kv_dtype: Any,
    page_size: int,
    layer: int = 0,
) -> AttentionProblem | LatentProblem:
    """The attention of one of the model's attention layers as one device computes it, when `devices` devices share the
    heads. A model without attention has a single one that stands in (`ModelConfig.attention`)."""
    spec = model.attentions[layer] if model.attentions else model.attention
    scales = has_scale(kv_dtype)
    if isinstance(spec, LatentAttentionSpec):
        width = stored_latent_width(spec.rank + spec.rope_dim, device.platform)
        heads = spec.num_heads // devices
        return LatentProblem(dtype, kv_dtype, heads, spec.rank, spec.rope_dim, page_size, scales, width)
    if isinstance(spec, CompressedAttentionSpec):
        heads = spec.num_heads // devices
        return LatentProblem(dtype, kv_dtype, heads, spec.head_dim, spec.rope_dim, page_size, scales, spec.head_dim)
    if (spec.alibi is not None or spec.value_bias) and scales:
        kept = "positions that models with biases by distance (ALiBi) keep"
        if spec.value_bias:
            kept = "biases by values that Doge keeps"
        raise ConfigError(
            f"kv_cache_dtype {np.dtype(kv_dtype).name} cannot hold the {kept} beside keys; use auto or bf16"
        )
    head_dim = stored_head_dim(spec.cached_dim, device.platform)
    kv_heads = max(kv_heads, spec.num_kv_heads)
    group = max(spec.num_heads // kv_heads, 1)  # 1 where no layer has attention and devices share the model
    return AttentionProblem(dtype, kv_dtype, kv_heads // devices, group, head_dim, page_size, scales)


def recurrent_problem(model: ModelConfig, devices: int, dtype: Any) -> tuple[str, RecurrentProblem] | None:
    """The operation of the model's recurrent layers, and its problem as one of `devices` devices computes it. None: the
    model has no such layers."""
    spec = model.recurrent
    if isinstance(spec, GatedDeltaSpec):
        matrices = spec.key_heads // devices, spec.group, spec.key_dim, spec.value_dim
        silu = spec.activation == "silu"
        return "delta_net", RecurrentProblem(dtype, *matrices, spec.channels, spec.conv_width, silu)
    if isinstance(spec, Mamba2Spec):
        heads = spec.heads // devices
        matrices = heads, min(spec.per_group, heads), spec.head_dim, spec.state_dim
        silu = spec.activation == "silu"
        return "mamba2", RecurrentProblem(dtype, *matrices, spec.channels // devices, spec.conv_width, silu)
    if isinstance(spec, ShortConvSpec):
        return "short_conv", RecurrentProblem(dtype, 1, 0, 0, 0, spec.channels // devices, spec.width)
    return None


def segment_problem(model: ModelConfig, devices: int, dtype: Any) -> SegmentProblem | None:
    """The attention of the model's image encoder as one of `devices` devices computes it. None: it has none."""
    if model.vision is None or not model.vision.encoder.layers:
        return None
    attention = model.vision.encoder.layers[0].attention
    heads = attention.num_heads // devices if model.vision.encoder.divides(devices) else attention.num_heads
    return SegmentProblem(np.dtype(dtype), heads, attention.head_dim)


def ops_on(mesh: Mesh, ops: Ops) -> Ops:
    """The operations that `make_decoder` chose for several devices, on another mesh of these."""
    given: dict[str, Any] = {field.name: getattr(ops, field.name) for field in dataclasses.fields(ops)}
    moved: dict[str, Any] = {
        name: partial(op.func, mesh, *op.args[1:], **op.keywords)
        for name, op in given.items()
        if isinstance(op, partial) and op.args and isinstance(op.args[0], Mesh)
    }
    return dataclasses.replace(ops, **moved, fused=ops.fused and dataclasses.replace(ops.fused, mesh=mesh))


def _with_products(ops: Ops, device: Device, mesh: Mesh, backend: str) -> Ops:
    """The same operations, with `backend` for products with quantized weights and for mixtures of experts."""
    op = partial(quant_matmul, multiply=matmul_of(device, backend, partitioned=is_split(mesh)))
    mixture = mixture_of(device, backend, partitioned=is_split(mesh))
    gated = gated_matmul_of(device, backend, partitioned=is_split(mesh))
    if gated is not None:
        gated = partial(quant_matmul, multiply=gated)
    if is_split(mesh):
        op = partial(quant_matmul_sharded, mesh, op)
        mixture = partial(experts_sharded, mesh, mixture)
        gated = None if gated is None else partial(gated_matmul_sharded, mesh, gated)
    return dataclasses.replace(ops, quant_matmul=op, mixture=mixture, gated_matmul=gated)


D = TypeVar("D", Decoder, Drafter)


def check_kernels(decoder: D, params: Any, mesh: Mesh, backend: str, *, progress: bool = False) -> tuple[D, Any]:
    """(decoder, params) with kernels that were checked on this machine, products with weights of these forms included,
    and weights in the order that these kernels read. This waits for the checks, and begins those that have not begun.
    Raises ConfigError where a kernel that was asked for by name is wrong, or cannot multiply a weight."""
    chosen = checked_matmul_backend(decoder, params, mesh, backend, progress=progress)
    decoder = check_ops(decoder, progress=progress)
    if chosen == backend:
        return decoder, arranged(params, mesh, decoder.dtype, backend)
    return with_matmul(decoder, mesh, chosen), params


def check_ops(decoder: D, *, progress: bool = False) -> D:
    """The decoder after the checks of its kernels that have begun, for which this waits. Raises ConfigError where one
    that was asked for by name is wrong."""
    if decoder.ops.trials is None:
        return decoder
    _wait(decoder.ops.trials, progress)
    try:
        made = decoder.clone(ops=passing(decoder.ops))
    except BackendError as error:
        raise ConfigError(str(error)) from None
    decoder.ops.trials.tell()
    return made


def _wait(trials: Trials, progress: bool) -> None:
    results = [trial.result for trial in trials.all if not trial.known]
    if not all(result.done() for result in results):
        show_done("checking kernels", results, shown=progress)


def with_matmul(decoder: D, mesh: Mesh, backend: str) -> D:
    """The decoder with this backend for products with quantized weights."""
    return decoder.clone(ops=_with_products(decoder.ops, Device.of(mesh.devices.flat[0]), mesh, backend))


def checked_matmul_backend(
    decoder: Decoder | Drafter, params: Any, mesh: Mesh, backend: str, *, progress: bool = False
) -> str:
    """The backend to use for weights of these forms: `backend`, or another if its kernels are wrong on this machine.
    Raises ConfigError when a backend that was asked for by name cannot multiply one, or does it wrong."""
    trials = decoder.ops.trials or Trials()
    device = Device.of(mesh.devices.flat[0])
    products = _products(decoder, flatten_dict(params, sep="/"), mesh, backend)
    try:
        _begin_products(trials, device, products, backend)
        _wait(trials, progress)
        chosen = checked_matmul(trials, device, products.single, backend, products.grouped)
    except BackendError as error:
        raise ConfigError(str(error)) from None
    if decoder.ops.trials is None:
        trials.tell()
    return chosen


class Products(NamedTuple):
    """The products with some weights, each form once: those with quantized matrices, those with experts' weights, which
    may be floats, and those with matrices of any kind that the gate of an MLP follows."""

    single: list[MatmulProblem]
    grouped: list[MatmulProblem]
    gated: list[MatmulProblem]


def _products(decoder: Decoder | Drafter, flat: dict[str, Any], mesh: Mesh, backend: str) -> Products:
    """The products with these weights, given by path as arrays or shapes."""

    def local(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)

    def is_weight(x: Any) -> bool:
        return isinstance(x, QuantArray | BlockArray)

    x = jax.ShapeDtypeStruct((1, 1), decoder.dtype)
    given = [(path, w) for path, some in flat.items() for w in jax.tree.leaves(some, is_leaf=is_weight) if is_weight(w)]
    shapes = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), w) for _, w in given]
    single: dict[MatmulProblem, None] = {}
    grouped: dict[MatmulProblem, None] = {}
    gated: dict[MatmulProblem, None] = {}
    for (path, _), w in zip(given, arranged(shapes, mesh, decoder.dtype, backend), strict=True):
        problem = MatmulProblem.of(x, jax.tree.map(local, w), is_split(mesh))
        (single if len(w.shape) == 2 else grouped)[problem] = None
        activation = activation_of(decoder.config, path)
        if activation and isinstance(w, QuantArray) and w.activations is None:
            gated[dataclasses.replace(problem, activation=activation)] = None
    for path, w in flat.items():
        if not isinstance(w, jax.Array | jax.ShapeDtypeStruct) or w.dtype != decoder.dtype:
            continue
        if path.endswith(STACKS):
            grouped[MatmulProblem.of(x, jax.eval_shape(as_codes, local(w)))] = None
        elif activation := activation_of(decoder.config, path):
            problem = MatmulProblem.of(x, jax.eval_shape(as_codes, local(w)), is_split(mesh))
            gated[dataclasses.replace(problem, activation=activation)] = None
    return Products(list(single), list(grouped), list(gated))


def _begin_products(trials: Trials, device: Device, products: Products, backend: str) -> None:
    for problem in products.single:
        trials.products(device, problem, backend)
    for problem in products.grouped:
        trials.products(device, problem, backend, grouped=True)
    for problem in products.gated if device.platform == "gpu" else ():
        trials.begin_gates(device, problem, backend)


def _beginner(decoder: Decoder | Drafter, mesh: Mesh, backend: str) -> Callable[[str, Any], None]:
    """A function that begins the checks of the products with a weight, given its path and form. It does nothing if the
    decoder's kernels are not on trial. Errors are raised by `check_kernels`, which asks again."""
    trials = decoder.ops.trials
    device = Device.of(mesh.devices.flat[0])

    def begin(path: str, w: Any) -> None:
        if trials is not None:
            with contextlib.suppress(BackendError):
                _begin_products(trials, device, _products(decoder, {path: w}, mesh, backend), backend)

    return begin


def load_params(
    decoder: Decoder | Drafter,
    path: Path,
    mesh: Mesh,
    *,
    quantization: str = "auto",
    dequantize: bool = False,
    progress: bool = True,
    ignored_keys: Collection[str] = (),
    packing: Packing | None = None,
    blocks: bool = False,
    keep_mixed: bool = False,
    rounding: Callable[[str, Any], Any] = lambda path, w: w,
    source: Checkpoint | None = None,
    on_placed: Callable[[str, Any], None] = lambda path, w: None,
) -> dict[str, Any]:
    """Streams a folder's safetensors, a GGUF file or an Orbax checkpoint into sharded arrays.

    Args:
      quantization: one of SCHEMES quantizes matrices that the files hold as floats.
      dequantize: quantized weights become floats; otherwise they stay quantized.
      packing: on a CPU, matrices become panels.
      blocks, apart: matrices of GGUF's BLOCK_KINDS become BlockArrays; those of several forms become MixedArrays.
      rounding: see `models.quantized.Rounding`; by default each weight keeps what its format says of its inputs.
      source: the opened files; None: this opens them.
      on_placed: called with the path and the arrays of each weight that is on the devices, in any thread.

    Raises CheckpointError when files and config disagree, and the errors of `Checkpoint.open`.
    """
    source = source or Checkpoint.open(path, quantization, ignored_keys)
    targets = abstract_params(decoder, mesh)
    if orbax.is_saved(path):
        if jax.process_count() > 1:
            raise ConfigError(f"{path} is an Orbax checkpoint, which one host serves; several read safetensors or GGUF")
        if quantization != "auto":
            raise ConfigError(f"{path} is an Orbax checkpoint, which stays as it is; leave out --quantization")
        restored = {name: rounding(name, x) for name, x in _restore(path, targets).items()}
        return unflatten_dict(packing.pack_placed(restored, mesh) if packing else restored, sep="/")
    if source.reader:
        log.info("quantized weights: %s", source.reader.description)
    scheme = quantization if source.reader is None and quantization in SCHEMES else None
    pieces = source.pieces(decoder)
    ignored = source.ignored(decoder)
    in_files = as_in_files(decoder)
    abstract = packing.stored(targets, pieces, source.tensors) if packing else abstract_params(in_files, mesh)

    def as_asked(name: str, host: Any) -> Any:
        """The weight after `dequantize`, `quantization` and `rounding`."""
        if dequantize and isinstance(host, QuantArray):
            host = in_floats(host).astype(abstract[name].dtype)
        return rounding(name, rounded(name, host, scheme) if scheme else host)

    def put(name: str, host: Any, sharding: Sharding) -> Any:
        if isinstance(host, MixedArray):
            return dataclasses.replace(host, parts=tuple(put(name, part, sharding) for part in host.parts))
        host = as_asked(name, host)
        if packing and is_matrix(name) and (packed := packing.pack(host, mesh)) is not None:
            return packed
        if isinstance(host, StoredRows) and blocks and (kept := as_blocks(host, sharding)) is not None:
            return place(name, kept, sharding)
        if isinstance(host, StoredRows):  # rows that neither panels nor one BlockArray can hold
            if keep_mixed and (mixed := by_type(host)) is not None:
                return put(name, mixed, sharding)
            some = pieces[name]
            assert not isinstance(some, Stack)
            host = read_weight(some, source.tensors, abstract[name], source.reader)
        return place(name, filled(name, host, targets[name]), sharding)

    def put_stack(name: str, members: Iterator[Host], target: jax.ShapeDtypeStruct) -> Any:
        stack = pieces[name]
        one = member_of(target)
        assert isinstance(stack, Stack)

        def form(member: Host, number: int) -> Any:
            """The member as devices will hold it. Rows of a file that fit neither panels nor a BlockArray become a
            QuantArray."""
            if isinstance(member, StoredRows) and blocks and (kept := as_blocks(member, one.sharding)) is not None:
                return kept
            if isinstance(member, StoredRows) and (packing is None or packing.packed(member) is None):
                member = read_weight(stack.members[number], source.tensors, one, source.reader)
            return filled(name, as_asked(name, member), member_of(targets[name]))

        return place_stack(name, map(form, members, range(len(stack.members))), targets[name], packing)

    def reporting(place: Callable[[str, Any, Any], Any]) -> Callable[[str, Any, Any], Any]:
        def place_and_report(name: str, host: Any, where: Any) -> Any:
            placed = place(name, host, where)
            on_placed(name, placed)
            return placed

        return place_and_report

    kept = packing.types if packing else BLOCK_KINDS if blocks else ()
    as_stored = () if dequantize else kept
    keep_mixed = keep_mixed and not dequantize
    reading = source.reader, reporting(put), as_stored, keep_mixed, reporting(put_stack)
    flat = load_weights(source.tensors, abstract, pieces, ignored, progress, *reading)
    return unflatten_dict(flat, sep="/")


def _restore(path: Path, abstract: dict[str, Any]) -> dict[str, Any]:
    """Reads an Orbax checkpoint in the sharding of `abstract`. Raises ConfigError if devices would share a block."""
    for name, stored in orbax.describe(path).items():
        if "/experts_" in name and name in abstract and stored.shape != abstract[name].shape:
            raise ConfigError(f"{path}: on so many devices {name} is padded; serve it on fewer, or from safetensors")
        if isinstance(stored, QuantArray) and name in abstract:
            sharding = abstract[name].sharding
            if not splits_evenly(stored, sharding):
                raise ConfigError(
                    f"{path}: {name} has blocks of {stored.block}, which so many devices cannot share evenly; serve it "
                    "on fewer, or from safetensors"
                )
            abstract[name] = abstract_like(stored, sharding)
    return orbax.restore(path, abstract, {"embed/table", "head/kernel"})


def make_params(
    decoder: Decoder | Drafter,
    folder: Path,
    mesh: Mesh,
    config: EngineConfig,
    *,
    progress: bool,
    source: Checkpoint | None = None,
    stored: np.dtype | None = None,
) -> dict[str, Any]:
    """The parameters of an engine: read from `folder` (see `load_params`), or random with load_format="dummy".

    stored: the dtype of a CPU's float matrices where the settings leave it to the files; None: theirs.
    """
    packing = Packing.of(config, mesh)
    if packing is not None and packing.dtype is None:
        packing = dataclasses.replace(packing, dtype=stored)
    rounding = Rounding(config.rounding, Device.of(mesh.devices.flat[0]), decoder.dtype)
    begin = _beginner(decoder, mesh, config.matmul_backend)
    if config.load_format != "dummy":
        return load_params(
            decoder,
            folder,
            mesh,
            quantization=config.quantization,
            dequantize=config.dequantize,
            progress=progress,
            ignored_keys=config.ignore_config_keys,
            packing=packing,
            blocks=keeps_blocks(mesh),
            keep_mixed=True,
            rounding=rounding,
            source=source,
            on_placed=begin,
        )
    scheme = None if config.quantization == "auto" else config.quantization
    if scheme and scheme not in FORMS:
        raise ConfigError(f"dummy weights can be quantized to {', '.join(FORMS)}, not to {scheme!r}")
    forms = dummy_forms(decoder, mesh, None if config.dequantize else scheme)
    for name, form in forms.items():
        begin(name, rounding(name, form.abstract))
    flat = {name: rounding(name, w) for name, w in made_up(forms, config.seed, mesh).items()}
    return unflatten_dict(packing.pack_placed(flat, mesh, packing.dtype) if packing else flat, sep="/")
