"""The steps of a Llama-3-8B shape, compiled ahead of time by the real compilers for devices that are not here.

What the compiled program says is asserted: the cache stays in place, temporaries are small, and under tensor
parallelism each layer costs two reductions and no weight is gathered. With two of the layers by default, with all of
them where slow tests run. No kernel runs here.
"""

import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from devices import devices_of
from flax.traverse_util import unflatten_dict

from jaxserve.devices.mesh import make_mesh
from jaxserve.execution.buckets import step_shapes
from jaxserve.execution.cost import StepCost
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.adapter_targets import PoolSizes, with_adapters
from jaxserve.models.config import HFConfig
from jaxserve.models.families import read_model_config
from jaxserve.models.load import make_decoder
from jaxserve.models.quantized import arranged, is_quantizable, quantized_abstract
from jaxserve.models.weights import abstract_params
from jaxserve.pallas_kernels.types import BLOCK_KINDS, BlockArray, MixedArray, QuantArray

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA_70B = {"hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672}
PASSIVE = ("parameter", "bitcast", "get-tuple-element")
# PAGES is prime; numbers that no dimension of a weight has, on any number of devices
PAGES = 1031
PROMPT_TOKENS = 1152
TARGETS = [
    ("h200x1", "mosaic_gpu", 16),
    ("h200x8", "mosaic_gpu", 16),
    ("h200x1", "triton", 16),
    ("v5e-4", "mosaic_tpu", 128),
    ("v5e-8", "mosaic_tpu", 128),
    ("v6e-4", "mosaic_tpu", 128),
]


USUAL = {  # the others run in the slow group
    ("h200x1", "mosaic_gpu", "bf16"),
    ("h200x8", "mosaic_gpu", "int4"),
    ("h200x1", "triton", "bf16"),
}


def make_runner(
    folder,
    target: str,
    backend: str,
    page_size: int,
    layers: int,
    scheme: str = "bf16",
    *,
    slots: int = 64,
    context: int = 8192,
    kv_dtype=jnp.bfloat16,
    snapshots=0,
    adapters: PoolSizes | None = None,
    static: bool | None = None,
    proposals: int = 0,
    **changes,
) -> tuple[ModelRunner, dict]:
    """A runner of the 8B shape with so many layers and `changes` of its config, and its weights' shapes."""
    devices = devices_of(target)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": layers} | changes))
    mesh = make_mesh(len(devices), devices)
    model = read_model_config(HFConfig.read(folder))
    backends = {"attention": backend, "matmul": backend if scheme in ("int8", "int4") else "auto"}
    decoder = make_decoder(model, mesh, jnp.bfloat16, page_size=page_size, kv_dtype=kv_dtype, **backends)
    decoder = decoder if adapters is None else with_adapters(decoder, mesh)
    params = abstract_params(decoder, mesh)
    if scheme == "Q4_K_M":
        params = as_llama_quantize(params, model.num_kv_heads)
    elif scheme in BLOCK_KINDS:
        params = {path: in_blocks(a, scheme) if is_quantizable(path) else a for path, a in params.items()}
    elif scheme != "bf16":
        params = quantized_abstract(params, scheme)
    params = arranged(params, mesh, jnp.bfloat16, backends["matmul"])
    options = {"adapters": adapters, "static": static, "proposals": proposals}
    runner = ModelRunner(decoder, unflatten_dict(params, sep="/"), mesh, slots, penalty_rows=64, **options)
    platform = devices[0].platform
    sizes = PAGES, page_size, kv_dtype, platform
    layout = CacheLayout.of(decoder.config, decoder.kv_heads, *sizes, num_slots=slots, snapshots=snapshots)
    runner.set_cache_size(layout, context // page_size)
    return runner, params


def in_blocks(plain: jax.ShapeDtypeStruct, kind: str) -> BlockArray:
    """The form of a weight in GGUF's blocks."""
    form, (*rows, inputs) = BLOCK_KINDS[kind], plain.shape
    dtypes = {"low": "uint8", "high": "uint8", "words": "int32", "factors": "float16"}

    def field(name: str) -> jax.ShapeDtypeStruct | None:
        size = inputs // form.block * getattr(form, name)
        return jax.ShapeDtypeStruct((*rows, size), dtypes[name], sharding=plain.sharding) if size else None

    return BlockArray(*map(field, dtypes), kind)


def as_llama_quantize(params: dict, kv_heads: int) -> dict:
    """Weights' shapes, with the matrices of layers as in Q4_K_M in those layers where values and the last matrices of
    MLPs are finer. Heads have 128 numbers."""

    def one(path: str, plain: jax.ShapeDtypeStruct) -> BlockArray | MixedArray:
        if "qkv" not in path:
            return in_blocks(plain, "Q6_K" if "down" in path else "Q4_K")
        (out, inputs), widths = plain.shape, (plain.shape[0] // kv_heads - 128, 128)

        def part(i: int, kind: str) -> BlockArray:
            rows = out * widths[i] // sum(widths)
            return in_blocks(jax.ShapeDtypeStruct((rows, inputs), plain.dtype, sharding=plain.sharding), kind)

        return MixedArray((part(0, "Q4_K"), part(1, "Q6_K")), widths)

    return {path: one(path, a) if is_quantizable(path) else a for path, a in params.items()}


def cache_copies(text: str, elements: int) -> list[str]:
    """Copies and transposes in a compiled program of arrays as large as one layer's cache."""
    found = []
    for line in text.splitlines():
        if match := re.search(r"= \w+\[([\d,]*)\]\S* (copy|copy-start|transpose)\(", line):
            dimensions = [int(dim) for dim in match[1].split(",") if dim]
            # An array holds a few layers' pages one after the other, so its first dimension is a multiple of PAGES.
            if math.prod(dimensions) >= elements // 2 and any(dim % PAGES == 0 for dim in dimensions):
                found.append(line.strip()[:200])
    return found


def copied_parameters(text: str, least: int = 1 << 20) -> list[str]:
    """Copies and transposes in a compiled step of weights that have at least so many bytes on a device. TPUs fetch
    weights ahead into their own memory, S(1), which is no copy in the device's."""
    entry = text[text.index("\nENTRY ") :]
    weights = set()
    found = []
    line_of = r"%(\S+) = \(?([a-z]+)(\d*)\w*\[([\d,]*)\](\S*) .*?([\w-]+)\(%([\w.-]+)"
    for line in entry.splitlines():
        if match := re.search(r'%(\S+) = .* parameter\(.*op_name="arrays\[', line):
            weights.add(match[1])
        elif (match := re.search(line_of, line)) and match[7] in weights:
            name, _, bits, dims, layout, operation, _ = match.groups()
            size = math.prod(int(dim) for dim in dims.split(",") if dim) * int(bits or 8) // 8
            if operation in ("bitcast", "get-tuple-element"):
                weights.add(name)
            elif "S(1)" not in layout and size >= least and re.match("copy|transpose", f"{operation} {name}"):
                found.append(line.strip()[:200])
    return found


def quantized_shapes(params: dict) -> list[tuple[int, ...]]:
    """Of each quantized weight what a device has."""
    return [w.codes.sharding.shard_shape(w.shape) for w in params.values() if isinstance(w, QuantArray)]


def dequantized_copies(text: str, params: dict) -> list[str]:
    """Instructions of a compiled program that make an array of the sizes, on a device, of a quantized weight, in any
    dtype. TPUs fetch weights ahead into their own memory, S(1), which is no copy in the device's."""
    kinds = QuantArray | BlockArray
    weights = [w for w in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds)) if isinstance(w, kinds)]
    shapes = {tuple(sorted(jax.tree.leaves(w)[0].sharding.shard_shape(w.shape))) for w in weights}
    found = []
    for line in text.splitlines():
        match = re.search(r"= \(?\w+\[([\d,]+)\](\S*) ([\w-]+)\(", line)
        if not match or match[3] in PASSIVE or "S(1)" in match[2]:
            continue
        if tuple(sorted(map(int, match[1].split(",")))) in shapes:
            found.append(line.strip()[:200])
    return found


def wide_reductions(text: str, hidden: int) -> list[str]:
    """Reductions over devices, in a compiled program, of float32 arrays with rows of the model's width."""
    lines = [line.strip()[:200] for line in text.splitlines() if re.search(r" all-reduce(?:-start)?\(", line)]
    return [line for line in lines if re.search(rf"f32\[\d+,{hidden}\]", line.split(" all-reduce")[0])]


def _is_widened(w: QuantArray) -> bool:
    """Whether steps of many tokens dequantize it beforehand."""
    return w.codes.dtype != jnp.float4_e2m1fn and w.activations is None


def check(runner: ModelRunner, shape: StepShape, layers: int, params: dict) -> None:
    compiled = runner.lower(shape).compile()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    devices = runner.mesh.size
    cache = runner.layout.num_pages * runner.layout.page_bytes // devices
    assert memory.alias_size_in_bytes >= cache
    assert cache_copies(text, cache // layers // 2) == []
    assert copied_parameters(text) == []
    copies = dequantized_copies(text, params)
    buffer = 0
    if runner.mesh.devices.flat[0].platform == "gpu" and not shape.decode_only:  # once a layer, see `dequantized`
        widened = {path: w for path, w in params.items() if getattr(w, "codes", None) is None or _is_widened(w)}
        buffer = max((2 * math.prod(shape) for shape in quantized_shapes(widened)), default=0)
        beforehand = [line for line in copies if "triton_kernel_call" in line]
        assert len(beforehand) == len(quantized_shapes(widened))
        copies = [line for line in copies if line not in beforehand]
    assert copies == []
    assert memory.temp_size_in_bytes < 2**30 + buffer
    reductions = len(re.findall(r" all-reduce(?:-start)?\(", text))
    gathered = re.findall(r"= (?:\()?(?:bf16|s8|s4|f8\w+)\[([\d,]+)\]\S* all-gather", text)
    if devices > 1:
        assert 2 * layers <= reductions <= 2 * layers + 8, "two in each layer, a few around them"
        weight = 4096 * 4096 // devices
        assert all(math.prod(map(int, dims.split(","))) < weight for dims in gathered), "a weight is gathered"
        assert wide_reductions(text, runner.model.config.hidden_size) == []
    else:
        assert not reductions


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def cases():
    """Some of each kind with two layers; in the slow group all schemes on all targets, and all layers."""
    for target in TARGETS:
        for scheme in ("bf16", "int8", "int4"):
            for layers in (2, 32):
                slow = layers == 32 or (*target[:2], scheme) not in USUAL
                yield pytest.param(*target, scheme, layers, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("target", "backend", "page_size", "scheme", "layers"), cases())
def test_steps_of_llama_8b(target, backend, page_size, scheme, layers, tmp_path):
    runner, params = make_runner(tmp_path, target, backend, page_size, layers, scheme)
    check(runner, StepShape.of(64, 64, page_size, decode_only=True), layers, params)
    check(runner, StepShape.of(PROMPT_TOKENS, 64, page_size, decode_only=False), layers, params)
    if scheme == "bf16":  # rows with a grammar draw apart from the step
        memory = runner.lower(AuxProgram("sample_deferred", 64)).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= runner.slot_bytes
        assert memory.temp_size_in_bytes < 2**29


@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_layers_are_dequantized_one_by_one(backend, tmp_path, monkeypatch):
    """Steps of many tokens need the memory of the largest weight's copy, not of several at a time, and no more than
    what a memory plan reads from the compiled program."""
    dequantized = pytest.importorskip(
        "jaxserve.pallas_kernels.quant_matmul.dequantized", reason="Triton is not installed"
    )
    with_copies, params = temporaries_of_prompts(tmp_path, backend)
    monkeypatch.setattr(dequantized, "pays", lambda *_: False)
    jax.clear_caches()
    without, _ = temporaries_of_prompts(tmp_path, backend)
    jax.clear_caches()
    sizes = sorted(2 * math.prod(shape) for shape in quantized_shapes(params))
    packing = 4 << 20  # bytes by which the compiler places the other arrays worse beside the copy
    assert sizes[-1] // 2 < with_copies - without <= sizes[-1] + packing


def temporaries_of_prompts(folder, backend: str) -> tuple[int, dict]:
    """Bytes, of a step with four layers in int4, and the parameters."""
    runner, params = make_runner(folder, "h200x1", backend, 16, 4, "int4")
    program = runner.lower(StepShape.of(PROMPT_TOKENS, 64, 16, decode_only=False)).compile()
    return program.memory_analysis().temp_size_in_bytes, params


@pytest.mark.parametrize(
    ("target", "scheme"),
    [
        ("h200x1", "mxfp4"),
        ("h200x8", "Q4_K"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("v6e-4", "mxfp4"),
                ("h200x8", "nvfp4"),
                ("h200x1", "Q4_K_M"),
                ("h200x8", "Q4_K_M"),
                ("h200x1", "Q6_K"),
                ("h200x1", "Q2_K"),
                ("v5e-8", "nvfp4"),
            )
        ),
    ],
)
def test_steps_of_narrow_weights(target, scheme, tmp_path):
    """4-bit floats and GGUF's blocks stay as narrow as they are, and `auto` finds their kernels."""
    backend, page_size = ("mosaic_gpu", 16) if target.startswith("h200") else ("mosaic_tpu", 64)
    runner, params = make_runner(tmp_path, target, backend, page_size, 2, scheme)
    check(runner, StepShape.of(64, 64, page_size, decode_only=True), 2, params)
    check(runner, StepShape.of(PROMPT_TOKENS, 64, page_size, decode_only=False), 2, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "layers"),
    [
        ("h200x1", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("h200x8", 2), ("h200x1", 80), ("h200x8", 80))),
    ],
)
def test_steps_of_llama_70b_in_int4(target, layers, tmp_path):
    runner, params = make_runner(tmp_path, target, "mosaic_gpu", 16, layers, "int4", **LLAMA_70B)
    check(runner, StepShape.of(64, 64, 16, decode_only=True), layers, params)
    check(runner, StepShape.of(PROMPT_TOKENS, 64, 16, decode_only=False), layers, params)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "backend", "page_size"), [TARGETS[0], TARGETS[2], TARGETS[4]])
def test_buckets_for_a_budget_that_is_no_multiple_of_8(target, backend, page_size, tmp_path):
    """What kernels refuse they refuse at lowering; buckets are rounded up, though kernels take any number."""
    runner, _ = make_runner(tmp_path, target, backend, page_size, 1)
    shapes = step_shapes(5, 1001, page_size, cost=StepCost(weights=3.5e-3, token=1.8e-5), chunk=300)
    assert max(shape.tokens for shape in shapes) == 1008
    for shape in shapes:
        runner.lower(shape)
    runner.lower(StepShape.of(1001, 5, page_size, decode_only=False))


def test_narrow_heads_on_tpu(tmp_path):
    """Heads of 64 numbers, as in Llama 3.2 1B, are stored as 128, so that the cache needs no copy."""
    small = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "vocab_size": 32000}
    runner, params = make_runner(tmp_path, "v5e-1", "mosaic_tpu", 128, 2, **small)
    assert runner.layout.kind.head_dim == 128
    check(runner, StepShape.of(16, 16, 128, decode_only=True), 2, params)
