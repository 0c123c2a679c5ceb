"""What the copy engine demands, and what programs take of a multiprocessor, without one at hand."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from mosaic_resources import assembled_kernels, programs, traced_kernels

from jaxserve.pallas_kernels.hopper_rules import RuleError, Span, fetch, interpreter, store
from jaxserve.pallas_kernels.paged_attention import (
    mosaic_gpu,
    mosaic_gpu_decode,
    mosaic_gpu_prompt,
    mosaic_gpu_prompt_kernel,
)
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt_tile import heads_of_tile, tokens_of_tile
from jaxserve.pallas_kernels.quant_matmul import mosaic_gpu as matmul
from jaxserve.pallas_kernels.types import KVPages, QuantArray

TILED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def copying(window, place=(), *, shape=(64, 64), shared=(8, 64), dtype=jnp.bfloat16, layout=TILED, interpret=None):
    """A kernel that copies a part of an array [shape] into shared memory [shared] and from there to the same part of
    its output; `window` and `place` may be functions of the kernel's other argument, an int32 scalar."""

    def body(at, source, out, smem, arrived):
        there = [index(at[0]) if callable(index) else index for index in (window, place)]
        fetch(source, there[0], smem, there[1], arrived, interpret=interpret)
        plgpu.barrier_wait(arrived)
        store(smem, there[1], out, there[0], interpret=interpret)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(1,),
        grid_names=("program",),
        scratch_types={"smem": plgpu.SMEM(shared, dtype, transforms=layout), "arrived": plgpu.Barrier()},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return lambda at: kernel(jnp.asarray([at], jnp.int32), jnp.arange(np.prod(shape)).reshape(shape).astype(dtype))


@pytest.mark.parametrize(
    ("window", "options", "reason"),
    [
        ((Span(0, 8),), {}, None),
        ((Span(56, 8),), {}, None),
        ((lambda at: (Span(at * 8, 8, multiple=8),)), {}, None),
        ((lambda at: (at, Span(0, 8))), {"shape": (4, 16, 64)}, None),
        ((Span(0, 8),), {"layout": ()}, None),
        ((Span(3, 8),), {"layout": ()}, None),  # rows that are no tiles may begin anywhere
        # The rows of a prompt's queries, which begin anywhere in the batch.
        ((lambda at: (Span(at, 8),)), {}, "a multiple of 1, is no multiple of its tile of 8"),
        ((Span(3, 8),), {}, "offset 3 is no multiple of its tile of 8"),
        ((Span(57, 8),), {}, "57 to 65 of 64 is out of bounds"),
        ((Span(0, 8),), {"shape": (20, 64)}, "8 of 20 elements are not whole tiles"),
        ((Span(0, 8), Span(32, 64, 32)), {"shape": (64, 128)}, "offset 32 is no multiple of its tile of 64"),
        ((Span(0, 16),), {}, "(16, 64) elements of global memory, but (8, 64) of shared memory"),
        ((Span(0, 8), Span(0, 64), 0), {"shape": (8, 64, 2)}, "the last dimension of (8, 64, 2) must be a span"),
        ((Span(0, 8),), {"shape": (64, 60), "shared": (8, 60), "layout": ()}, "no multiple of 16 bytes"),
        ((Span(0, 512),), {"shape": (512, 64), "shared": (512, 64), "layout": ()}, "more than 256 elements"),
        ((0, 0, 0), {"shape": (2, 2, 2, 2, 8, 64), "shared": (2, 8, 64)}, None),
        ((), {"shape": (2, 2, 2, 16, 128), "shared": (2, 2, 2, 16, 128)}, "more than 5 dimensions"),
        ((Span(0, 8),), {"place": (1,), "shared": (2, 8, 64)}, None),
        ((Span(0, 8),), {"place": (Span(4, 8),), "shared": (16, 64)}, "offset 4 is no multiple of its tile"),
        ((Span(0, 8),), {"place": (0,), "shared": (2, 8, 40), "shape": (64, 40), "layout": ()}, None),
        ((Span(0, 1),), {"place": (lambda at: (at, Span(0, 1))), "shared": (2, 1, 40), "shape": (64, 40), "layout": ()},
         "offset 80 in shared memory is no multiple of 128 bytes"),
        ((Span(0, 2), Span(0, 64)), {"place": (Span(0, 2), Span(0, 64)), "shared": (2, 128), "shape": (64, 64),
                                     "layout": ()}, "is not one piece"),
    ],
)  # fmt: skip
def test_copies_that_the_engine_cannot_do_raise_as_they_are_traced(window, options, reason):
    kernel = copying(window, **options)
    if reason is None:
        jax.eval_shape(kernel, 0)
        return
    with pytest.raises(RuleError) as error:
        jax.eval_shape(kernel, 0)
    assert reason in str(error.value)


def test_a_part_of_shared_memory_is_an_index():
    def body(source, out, smem, arrived):
        fetch(source, (Span(0, 8),), smem.at[pl.ds(0, 8)], (), arrived)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((8, 64), jnp.bfloat16),
        grid=(1,),
        grid_names=("program",),
        scratch_types={"smem": plgpu.SMEM((16, 64), jnp.bfloat16, transforms=TILED), "arrived": plgpu.Barrier()},
    )
    with pytest.raises(RuleError, match="as a whole"):
        jax.eval_shape(kernel, jnp.zeros((64, 64), jnp.bfloat16))


needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2"
)


@needs_interpreter
@pytest.mark.parametrize(("at", "reason"), [(0, None), (48, None), (13, "13 is no multiple of 8"), (64, "64 to 72")])
def test_computed_offsets_are_checked_as_the_kernel_runs(at, reason):
    def run():
        with interpreter() as interpret:
            kernel = copying(lambda at: (Span(at, 8, multiple=8),), interpret=interpret)
            out = np.asarray(jax.jit(kernel)(at), np.float32)
        return out

    if reason:
        with pytest.raises(RuleError, match=reason):
            run()
    else:
        expected = np.asarray(jnp.arange(64 * 64).reshape(64, 64).astype(jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(run()[at : at + 8], expected[at : at + 8])


# --- what programs take ---


def attention_arguments(head_dim, page_size, codes, group=4, sharding=None):
    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    shape = 1009, 2, 8, page_size, head_dim
    pages = KVPages(array(shape, codes or jnp.bfloat16), array(shape[:-1], jnp.float32) if codes else None)
    q = array((512, 8, group, head_dim), jnp.bfloat16)
    return q, pages, array((8, 8192 // page_size)), array((9,)), array((8,)), array(())


@pytest.fixture(autouse=True)
def without_spans(monkeypatch):
    """Kernels are traced without saying for which GPU, which Triton would ask."""
    monkeypatch.setattr(mosaic_gpu_decode, "spans_triton", None)


@pytest.fixture
def without_triton(monkeypatch):
    """Sizes of heads whose decode is Triton's are traced without it."""
    monkeypatch.setattr(mosaic_gpu, "_decode_by_triton", lambda q, *_, **options: q)


@pytest.mark.parametrize("codes", [None, jnp.int8, jnp.float8_e4m3fn], ids=["bf16", "int8", "fp8"])
@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_shared_memory_of_attention(head_dim, codes, without_triton):
    attend = partial(mosaic_gpu.paged_attention.__wrapped__, scale=1.0)
    kernels = [
        traced_kernels(attend, *attention_arguments(head_dim, size, codes))
        for size in ((8, 16, 64, 256) if head_dim == 128 else (16,))
    ]
    assert all(kernel == kernels[0] for kernel in kernels)
    assert kernels[0]["paged_prompts"].shared_memory <= 232_448
    assert ("paged_decode" in kernels[0]) == (head_dim % 64 == 0)
    if head_dim % 64:
        return
    decode = kernels[0]["paged_decode"]
    assert programs(decode) >= (2 if head_dim <= 128 else 1)
    assert decode.shared_memory <= (115_712 if head_dim <= 128 else 232_448)


def test_tiles_reckon_as_jax_does(monkeypatch):
    """And have at least two blocks in flight, in decode three for the sizes that most models have."""
    tiles = []
    scratch = mosaic_gpu_decode._scratch
    monkeypatch.setattr(mosaic_gpu_decode, "_scratch", lambda tile: tiles.append(tile) or scratch(tile))
    for head_dim in (64, 128, 192, 256):
        for codes in (None, jnp.int8):
            for group in (4, 7):
                tiles.clear()
                arguments = attention_arguments(head_dim, 16, codes, group)
                kernels = traced_kernels(partial(mosaic_gpu.paged_attention.__wrapped__, scale=1.0), *arguments)
                (tile,) = tiles
                assert tile.shared_memory(tile.slots) == kernels["paged_decode"].shared_memory
                assert tile.slots >= (3 if head_dim <= 128 else 2)


@pytest.mark.parametrize("codes", [None, jnp.int8], ids=["bf16", "int8"])
@pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 192, 256])
def test_tiles_of_prompts_reckon_as_jax_does(head_dim, codes, monkeypatch, without_triton):
    tiles = []
    launch = mosaic_gpu_prompt_kernel.launch
    monkeypatch.setattr(mosaic_gpu_prompt, "launch", lambda tile, *rest: tiles.append(tile) or launch(tile, *rest))
    attend = partial(mosaic_gpu.paged_attention.__wrapped__, scale=1.0)
    kernels = traced_kernels(attend, *attention_arguments(head_dim, 16, codes))
    (tile,) = tiles
    assert tile.shared_memory(tile.stages, tile.slots) == kernels["paged_prompts"].shared_memory
    assert tile.stages >= 2
    assert tile.slots >= (2 if head_dim <= 128 or not codes else 1)


@pytest.mark.parametrize("group", range(1, 17))
def test_tiles_of_prompts_are_well_filled(group):
    heads = heads_of_tile(group)
    assert group % heads == 0
    assert tokens_of_tile(heads) % 8 == 0
    assert tokens_of_tile(heads) >= 16
    assert 112 <= heads * tokens_of_tile(heads) <= 128


@pytest.mark.parametrize("tokens", [1, 16, 64, 384])
@pytest.mark.parametrize(("codes", "bits", "group"), [(jnp.int8, 8, 4096), (jnp.int4, 4, 128), (jnp.int4, 4, 32)])
def test_shared_memory_of_products(tokens, codes, bits, group):
    w = QuantArray(
        jax.ShapeDtypeStruct((14336, 4096), codes),
        jax.ShapeDtypeStruct((14336, 4096 // group), jnp.bfloat16),
        block=(1, group),
    )
    kernels = traced_kernels(matmul.quant_matmul, jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16), w)
    kernel = kernels["quant_matmul"]
    if kernel.threads == 128:
        assert programs(kernel) >= (3 if tokens <= 64 else 2)
    else:  # several warpgroups share a tile of x; one more fetches for them
        assert kernel.threads // 128 - 1 >= 2
        assert programs(kernel) >= 1


@pytest.mark.parametrize(
    ("head_dim", "codes", "decode_spills", "prompt_spills"),
    [(128, None, 0, 16), (80, None, 0, 16), (128, jnp.int8, 0, 0), (256, None, 0, 16), (256, jnp.int8, 0, 80)],
    ids=str,
)
def test_registers_of_attention(head_dim, codes, decode_spills, prompt_spills, monkeypatch, capfd, without_triton):
    """Two programs of decode share a multiprocessor; spills, in bytes a thread, stay what they are known to be."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = mesh_of("h200x1")
    arguments = attention_arguments(head_dim, 16, codes, sharding=NamedSharding(mesh, PartitionSpec()))
    attend = jax.jit(partial(mosaic_gpu.paged_attention.__wrapped__, scale=1.0))
    with jax.set_mesh(mesh):
        attend.lower(*arguments).compile()
    kernels = traced_kernels(attend, *arguments)
    log = "".join(capfd.readouterr())
    # ptxas warns with C7510 to C7518 where it makes matrix products wait for each other.
    assert not re.findall(r"\(C751[0-8]\).*function 'paged_prompts\w+'", log)
    found = assembled_kernels(log)
    assert found.keys() == {"paged_prompts"} | ({"paged_decode"} if head_dim % 64 == 0 else set())
    assert programs(kernels["paged_prompts"], found["paged_prompts"].registers) >= 1
    assert found["paged_prompts"].registers * 3 == 504, "a warpgroup would wait for ever for registers beyond these"
    assert found["paged_prompts"].spilled <= prompt_spills
    if head_dim % 64 == 0:
        two = 2 if head_dim <= 128 else 1
        assert programs(kernels["paged_decode"], found["paged_decode"].registers) >= two
        assert found["paged_decode"].spilled <= decode_spills


@pytest.mark.parametrize(
    ("head_dim", "codes", "page_size", "group", "options"),
    [
        (64, None, 16, 8, {}),
        (64, jnp.float8_e4m3fn, 16, 8, {"window": 128}),
        (128, None, 16, 7, {"softcap": 30.0}),
        (128, jnp.float8_e4m3fn, 64, 4, {"softcap": 30.0}),
    ],
    ids=str,
)
def test_registers_of_decode(head_dim, codes, page_size, group, options, monkeypatch, capfd):
    """Two programs share a multiprocessor, and spill nothing, with what models have beside plain attention."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = mesh_of("h200x1")
    arguments = attention_arguments(head_dim, page_size, codes, group, NamedSharding(mesh, PartitionSpec()))
    attend = jax.jit(partial(mosaic_gpu.paged_attention, scale=1.0, decode_only=True, **options))
    with jax.set_mesh(mesh):
        attend.lower(*arguments).compile()
    kernel = traced_kernels(attend, *arguments)["paged_decode"]
    found = assembled_kernels("".join(capfd.readouterr()))["paged_decode"]
    assert programs(kernel, found.registers) >= 2
    assert found.spilled == 0
