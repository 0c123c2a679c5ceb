"""The Mosaic GPU attention kernels: interpreted against float64 NumPy, and compiled ahead of time for H200."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from test_paged_attention import DTYPES, Config, gold, make_batch

from jaxserve.pallas_kernels.hopper_rules import interpreter
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu, mosaic_gpu_decode, mosaic_gpu_prompt, reference
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt_tile import PromptTile
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import KVPages
from jaxserve.pallas_kernels.work_lists import cut

HOPPER = Device("gpu", "NVIDIA H200", (9, 0))
PROBLEM = AttentionProblem(np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16), 8, 4, 128, 16)


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        (HOPPER, {}, None),
        (HOPPER, {"head_dim": 64, "group": 7, "page_size": 256}, None),
        (HOPPER, {"head_dim": 72}, "head_dim"),
        (HOPPER, {"group": 17}, "at most 16"),
        (HOPPER, {"page_size": 24}, "page_size"),
        (HOPPER, {"kv_dtype": np.dtype(np.int8), "has_scale": True}, None),
        (HOPPER, {"kv_dtype": np.dtype(jnp.float8_e4m3fn), "has_scale": True}, None),
        (HOPPER, {"kv_dtype": np.dtype(np.int8)}, "without scales must be bfloat16, not int8"),
        (HOPPER, {"has_scale": True}, "with scales must be int8 or float8_e4m3fn"),
        (HOPPER, {"kv_dtype": np.dtype(np.float16)}, "float16"),
        (HOPPER, {"q_dtype": np.dtype(np.float32)}, "float32"),
        (Device("gpu", "NVIDIA A100", (8, 0)), {}, "9.0"),
        (Device("gpu", "NVIDIA B200", (10, 0)), {}, "9.0"),
        (Device("cpu", "cpu"), {}, "GPU"),
    ],
)
def test_refusals_name_the_reason(device, changes, reason):
    answer = mosaic_gpu.why_not(device, replace(PROBLEM, **changes))
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize(("installed", "reason"), [(True, None), (False, "needs jax-triton")])
def test_other_head_dims_need_triton(installed, reason, monkeypatch):
    monkeypatch.setattr(mosaic_gpu.importlib.util, "find_spec", lambda name: installed or None)
    answer = mosaic_gpu.why_not(HOPPER, replace(PROBLEM, head_dim=96))
    assert answer is None if reason is None else reason in answer
    assert mosaic_gpu.why_not(HOPPER, PROBLEM) is None


# --- interpreted ---


@pytest.fixture
def short_ring(monkeypatch):
    """Two slots, so that a few blocks go round the ring."""
    monkeypatch.setattr(PromptTile, "stages", 2)


def attend(batch, config: Config, tables, kv_len, *, scale: float | None = None, races: bool = False, **options):
    """What the interpreted kernel makes of a batch; rules that it breaks raise RuleError."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2")
    with interpreter(detect_races=races) as interpret:
        out = mosaic_gpu.paged_attention(
            jnp.asarray(batch.q),
            KVPages(jnp.asarray(batch.pages), None if batch.scale is None else jnp.asarray(batch.scale)),
            jnp.asarray(tables),
            jnp.asarray(batch.q_start(config.rows)),
            jnp.asarray(kv_len, jnp.int32),
            jnp.asarray(batch.num_decodes, jnp.int32),
            scale=config.head_dim**-0.5 if scale is None else scale,
            window=config.window,
            softcap=config.softcap,
            sinks=None if batch.sinks is None else jnp.asarray(batch.sinks),
            first_page=jnp.int32(config.first_page),
            interpret=interpret,
            **options,
        )
        assert out.dtype == batch.q.dtype
        return np.asarray(out).astype(np.float64)


def interpreted(config: Config, rows: list[tuple[int, int]], *, scale: float | None = None, races=False, **options):
    """Table entries that no row owns point nowhere; what no row owns, or lies beyond its length, is NaN."""
    config = replace(config, dtype="bfloat16")
    batch = make_batch(config, rows, 0)
    tables = batch.tables.copy()
    for table, length in zip(tables, [*batch.kv_len, *[0] * config.rows], strict=False):
        table[-(-length // config.page_size) :] = 1_000_000
    kv_len = [*batch.kv_len, *[0] * (config.rows - len(rows))]
    scale = config.head_dim**-0.5 if scale is None else scale
    out = attend(batch, config, tables, kv_len, scale=scale, races=races, **options)
    assert np.isfinite(out).all(), "padding too must be finite"
    expected = gold(config, batch, scale)
    np.testing.assert_allclose(out[: len(expected)], expected, rtol=4e-3, atol=1e-2)
    if races:
        from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

        assert not get_races().races_found


@pytest.fixture
def plain_decode(monkeypatch):
    """Decode in plain XLA in place of Triton, which has an interpreter of its own (tests/kernels/test_triton.py)."""

    def decode(q, pages, tables, kv_len, num_decodes, *, decode_only, **options):
        q_start = jnp.arange(len(tables) + 1)
        tables = jnp.where(tables < len(pages.data), tables, 0)
        return reference.paged_attention(q, pages, tables, q_start, kv_len, num_decodes, decode_only=True, **options)

    monkeypatch.setattr(mosaic_gpu, "_decode_by_triton", decode)


@pytest.fixture
def one_program(monkeypatch):
    """All items in one program: its ring goes on across rows. The race detector knows no atomic additions, and takes
    what programs tell each other for races."""
    monkeypatch.setattr(mosaic_gpu_decode.DecodeTile, "slots", 2)
    monkeypatch.setattr(mosaic_gpu_decode, "programs_of", lambda tile, pairs: 1)


SPLIT = [(1, 641), (1, 64), (1, 1)]  # 641 tokens are 11 blocks, in three parts of four


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("group", [1, 4, 7])  # the queries of 7 heads begin anywhere, and are 16 with their neighbours
def test_decode_by_one_program(group):
    config = Config(group=group, kv_heads=2 if group < 7 else 1, tokens=8, rows=4, max_pages=41)
    interpreted(config, SPLIT, races=True, decode_only=True)


@pytest.mark.parametrize("config", [
    Config(group=4, kv_heads=2, tokens=4, rows=4, max_pages=41),
    Config(64, 64, group=8, kv_heads=3, tokens=4, rows=4, max_pages=11, softcap=3.0, sinks=True, first_page=7),
    Config(256, 256, group=12, kv_heads=2, tokens=4, rows=4, max_pages=3, window=300),
    Config(8, 192, group=3, kv_heads=1, tokens=4, rows=4, max_pages=81, sinks=True),  # too few queries: padded
], ids=str)  # fmt: skip
def test_decode_by_many_programs(config):
    interpreted(config, SPLIT, decode_only=True)


def test_a_decode_row_has_the_same_bits_in_any_company_and_bucket(monkeypatch):
    config = Config(group=4, kv_heads=1, tokens=8, rows=3, max_pages=64, dtype="bfloat16", first_page=7)
    batch = make_batch(config, [(1, 64), (1, 641), (1, 1000)], 0)
    among = attend(batch, config, batch.tables, [64, 641, 1000], decode_only=True)
    np.testing.assert_allclose(among[:3], gold(config, batch, config.head_dim**-0.5), rtol=4e-3, atol=1e-2)
    alone = attend(batch, config, batch.tables, [0, 641, 0], decode_only=True)
    np.testing.assert_array_equal(alone[1], among[1])
    # In a batch of eight rows, whose table is wider, dealt to two programs: the merge is another's.
    monkeypatch.setattr(mosaic_gpu_decode, "programs_of", lambda tile, pairs: 2)
    wide = np.zeros((8, 2 * config.max_pages), np.int32)
    wide[:3, : config.max_pages] = batch.tables
    larger = replace(config, rows=8)
    bucket = attend(batch, larger, wide, [64, 641, 1000, 0, 0, 0, 0, 0], decode_only=True)
    np.testing.assert_array_equal(bucket[:3], among[:3])


def test_parts_of_a_row_are_as_many_in_every_bucket():
    """Up to 512 rows of Llama-3-8B's shape; the workspace of partial results is bounded."""

    def most(rows, pages, kv_heads=8, **options):
        tile = mosaic_gpu_decode.DecodeTile(kv_heads, 4, 4, 128, 16, np.dtype(jnp.bfloat16), 1.0, None, None, None)
        return mosaic_gpu_decode.most_parts(tile, rows, pages, **options)

    assert {most(rows, 8192) for rows in (1, 8, 64, 256, 512)} == {16}
    assert most(2048, 8192) * 2048 * 8 * 128 * 8 * 4 <= mosaic_gpu_decode.WORKSPACE
    assert (most(1, 16), most(1, 128), most(1, 8192, parallel=264)) == (1, 8, 32)
    # The parts of a row do not depend on the table's width either: a row that fits has as many in a wider one.
    for pages, kv_heads in ((16, 8), (48, 40), (300, 8), (1024, 1)):
        lengths = jnp.arange(1, pages * 16, 37)
        parts = [cut(lengths, 64, None, most(1, width, kv_heads)).number for width in (pages, 8192)]
        np.testing.assert_array_equal(*parts)
    assert [most(1, 8192, kv_heads) for kv_heads in (1, 4, 32)] == [32, 32, 4]


@pytest.mark.usefixtures("short_ring")
def test_mixed_rows():
    config = Config(group=7, kv_heads=1, tokens=32, rows=5, max_pages=10)
    interpreted(config, [(1, 150), (20, 140), (0, 0), (7, 7), (1, 17)])


@pytest.mark.usefixtures("short_ring", "plain_decode")
def test_a_prompt_with_a_window_and_sinks():
    # Blocks of keys that some tokens of a tile see and others do not, on both sides; pages larger than a block.
    config = Config(256, 96, group=3, kv_heads=1, tokens=50, rows=1, max_pages=2, window=100, sinks=True)
    interpreted(config, [(50, 420)], races=True)


@pytest.mark.usefixtures("short_ring")
def test_keys_that_a_token_does_not_see_fill_blocks():
    # Tokens of a tile begin in other blocks. This head_dim's factor rounds such that masked keys would become infinite.
    config = Config(group=1, kv_heads=1, tokens=200, rows=1, max_pages=40, window=100)
    interpreted(config, [(200, 500)])


@pytest.mark.usefixtures("short_ring")
def test_a_part_of_which_a_token_sees_nothing():
    # The second of two parts begins at token 256, within a tile. A factor above 1 makes masked scores lower.
    config = Config(head_dim=256, group=1, kv_heads=1, tokens=304, rows=1, max_pages=32)
    interpreted(config, [(300, 512)], scale=1.0)


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_decode_with_quantized_pages_by_one_program(kv_dtype):
    config = Config(group=4, kv_heads=2, tokens=4, rows=4, max_pages=41, kv_dtype=kv_dtype)
    interpreted(config, SPLIT, races=True, decode_only=True)


@pytest.mark.parametrize("config", [
    Config(8, 64, group=7, kv_heads=2, tokens=4, rows=4, max_pages=81, softcap=3.0, sinks=True, kv_dtype="int8"),
    Config(256, 192, group=4, kv_heads=1, tokens=6, rows=4, max_pages=3, window=300, kv_dtype="fp8"),
], ids=str)  # fmt: skip
def test_decode_with_quantized_pages_by_many_programs(config):
    interpreted(config, SPLIT, decode_only=True)


@pytest.mark.usefixtures("short_ring", "plain_decode")
def test_quantized_pages_with_window_softcap_and_sinks():
    # Rows of 80 codes take no swizzle; the page's scales are copied in two parts.
    config = Config(128, 80, group=7, kv_heads=2, tokens=24, rows=3, max_pages=3, window=70, softcap=3.0, sinks=True)
    interpreted(replace(config, kv_dtype="fp8"), [(1, 300), (1, 50), (20, 140)], races=True)


@pytest.mark.slow
@pytest.mark.usefixtures("short_ring", "plain_decode")
def test_mixed_rows_with_quantized_pages():
    config = Config(8, 96, group=7, kv_heads=1, tokens=32, rows=5, max_pages=50, kv_dtype="int8")
    interpreted(config, [(1, 150), (20, 400), (0, 0), (7, 7), (1, 17)])


@pytest.mark.usefixtures("short_ring")
@pytest.mark.parametrize("group", [3, 7, pytest.param(12, marks=pytest.mark.slow)])
def test_prompts_that_begin_anywhere_in_the_batch(group):
    # Tiles of 42, 18 and 10 tokens, which begin at rows of all remainders of eight.
    config = Config(64, 64, group=group, kv_heads=1, tokens=91, rows=6, max_pages=5, first_page=3)
    interpreted(config, [(1, 150), (19, 140), (11, 11), (9, 200), (13, 13), (37, 61)])


@pytest.mark.usefixtures("short_ring")
@pytest.mark.parametrize(("kv_dtype", "most"), [(None, 32), ("int8", 4)])
def test_few_tokens_over_a_long_context_are_split(kv_dtype, most, monkeypatch):
    # 11 blocks in two parts, and 8, of which the second tile's tokens see all. Both ways to sum parts.
    monkeypatch.setattr(mosaic_gpu_prompt, "MOST_PARTS", most)
    config = Config(group=4, kv_heads=1, tokens=48, rows=3, max_pages=88, sinks=True, kv_dtype=kv_dtype)
    interpreted(config, [(1, 30), (5, 1_400), (33, 1_030)], races=True)


@pytest.mark.slow
@pytest.mark.usefixtures("short_ring")
def test_a_prompt_has_the_same_bits_wherever_it_begins_in_the_batch():
    config = Config(group=3, kv_heads=1, tokens=56, rows=2, max_pages=72, dtype="bfloat16")
    rows = [(11, 40), (9, 1_100)]
    batch = make_batch(config, rows, 0)
    there = attend(batch, config, batch.tables, batch.kv_len)
    np.testing.assert_allclose(there[:20], gold(config, batch, config.head_dim**-0.5), rtol=4e-3, atol=1e-2)
    for first in (0, 3):  # the second row alone, or after a first one of three tokens
        moved = replace(batch, q=np.roll(batch.q, first - 11, axis=0), q_len=[first, 9])
        here = attend(moved, config, batch.tables, [first, 1_100])
        np.testing.assert_array_equal(here[first : first + 9], there[11:20])


# --- what the interpreter runs, and what is compiled ---


def operations(jaxpr) -> Counter:
    """How often each primitive occurs in a program and in the programs within it, with the shapes of what it gives."""
    counts: Counter = Counter()
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name, tuple(str(var.aval) for var in eqn.outvars)] += 1
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                counts += operations(inner)
    return counts


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("window", [None, 100])
def test_the_compiled_program_differs_from_the_interpreted_one_in_operands_and_one_addition_alone(
    window, kv_dtype, monkeypatch
):
    """The interpreter has no operands in registers and no accumulators that begin with a value, so there the
    probabilities go through shared memory and the product is added; and it has no atomic addition. All else is the same
    program. The spans of decodes come from a Triton kernel, which needs a GPU to be traced: here both use XLA's."""
    monkeypatch.setattr(mosaic_gpu_decode, "spans_triton", None)
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2")
    pages = KVPages(jnp.zeros((9, 2, 1, 64, 128), DTYPES[kv_dtype] if kv_dtype else jnp.bfloat16))
    pages = pages._replace(scale=jnp.zeros(pages.data.shape[:-1]) if kv_dtype else None)
    arguments = jnp.zeros((64, 1, 4, 128), jnp.bfloat16), pages, jnp.zeros((2, 8), jnp.int32), jnp.zeros(3, jnp.int32)
    arguments += jnp.zeros(2, jnp.int32), jnp.int32(0)
    compiled, interpreted = (
        operations(
            jax.make_jaxpr(partial(mosaic_gpu.paged_attention, scale=1.0, window=window, interpret=interpret))(
                *arguments
            ).jaxpr
        )
        for interpret in (None, plgpu.InterpretGPUParams())
    )
    assert sum(n for (name, _), n in compiled.items() if name.startswith("wgmma_ref")) == sum(
        n for (name, _), n in interpreted.items() if name.startswith("wgmma_ref")
    )
    only_compiled = {name for name, _ in compiled - interpreted}
    only_interpreted = {name for name, _ in interpreted - compiled}
    assert {"run_state", "inline_mgpu_p"} <= only_compiled  # the latter: what the parts of a row are counted by
    assert only_compiled <= {"run_state", "inline_mgpu_p", "get", "layout_cast", "wgmma_accumulator_store_p"}
    assert sum(n for (name, _), n in compiled.items() if name == "inline_mgpu_p") == 1
    stores = sum(n for (name, _), n in compiled.items() if name == "wgmma_accumulator_store_p")
    assert stores == (4 if window else 3), "one for each loop of prompts, and one for the last block"
    assert {"swap", "commit_smem", "add"} <= only_interpreted
    allowed = {"swap", "commit_smem", "add", "get", "run_scoped", "wgmma_ref", "wgmma_accumulator_deref_p"}
    assert only_interpreted <= allowed


# --- compiled for H200 ---


def lowered(target: str, config: Config, *, kv_heads: int = 8, dtype=jnp.bfloat16, decode_only=False):
    """A `config` with kv_dtype has scales."""
    mesh = mesh_of(target)

    def spec(shape, *axes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    heads = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor")
    shape = 1009, 2, kv_heads, config.page_size, config.head_dim
    pages = KVPages(spec(shape, *heads[1], dtype=DTYPES[config.kv_dtype] if config.kv_dtype else dtype))
    if config.kv_dtype:
        pages = pages._replace(scale=spec(shape[:-1], *heads[1], dtype=jnp.float32))
    options = {"window": config.window, "softcap": config.softcap, "decode_only": decode_only}
    attend = partial(mosaic_gpu.paged_attention, scale=config.head_dim**-0.5, **options)
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads[0], heads[1], *[PartitionSpec()] * 4),
        out_specs=heads[0],
        check_vma=False,
    )
    arguments = (
        spec((config.tokens, kv_heads, config.group, config.head_dim), *heads[0], dtype=dtype),
        pages,
        spec((config.rows, config.max_pages)),
        spec((config.rows + 1,)),
        spec((config.rows,)),
        spec(()),
    )
    with jax.set_mesh(mesh):
        return jax.jit(attend if mesh.size == 1 else sharded).lower(*arguments)


@pytest.mark.parametrize(
    "config",
    [
        Config(8, 80, group=7, window=100, softcap=30.0),
        Config(256, 96, group=1),
        Config(128, 256, group=16, window=1000),
        Config(8, 80, group=7, window=100, softcap=30.0, kv_dtype="int8"),
        Config(256, 96, group=1, kv_dtype="fp8"),
        Config(128, 256, group=16, window=1000, kv_dtype="fp8"),
    ],
    ids=str,
)
def test_lowers_for_h200(config):
    text = lowered("h200x1", config, dtype=jnp.float16).as_text()
    assert ("triton" if config.head_dim % 64 else "paged_decode") in text
    assert ("paged_decode" in text) == (config.head_dim % 64 == 0)
    assert "paged_prompts" in text


# Alone, and one KV head on each of eight devices.
@pytest.mark.parametrize(
    ("target", "decode_only", "kv_dtype"),
    [("h200x1", True, None), ("h200x8", False, None), ("h200x1", False, "int8"), ("h200x8", False, "fp8")],
)
def test_compiles_for_h200_and_does_not_copy_the_cache(target, decode_only, kv_dtype):
    config = Config(64, 128, group=8, tokens=512, rows=8, max_pages=128, kv_dtype=kv_dtype)
    compiled = lowered(target, config, decode_only=decode_only).compile()
    text = compiled.as_text()
    assert "mosaic_gpu" in text
    assert not [line for line in text.splitlines() if "1009," in line and " copy(" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < 64 << 20
