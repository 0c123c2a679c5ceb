"""The Mosaic GPU attention kernels: interpreted against float64 NumPy, and compiled ahead of time for H200."""

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

from pallas_kernels.paged_attention import mosaic_gpu
from pallas_kernels.registry import AttentionProblem, Device
from pallas_kernels.types import KVPages

HOPPER = Device("gpu", "NVIDIA H200", (9, 0))
PROBLEM = AttentionProblem(np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16), 8, 4, 128, 16)


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        (HOPPER, {}, None),
        (HOPPER, {"head_dim": 80, "group": 7, "page_size": 256}, None),
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


# --- the list of work items ---


@pytest.mark.parametrize(("window", "spare"), [(None, 66), (700, 5), (100, 66), (None, 0)])
def test_decode_items_cover_each_row_once(window, spare):
    lengths = [6400, 1, 0, 64, 65, 3000, 0, 128]
    items = jax.jit(mosaic_gpu.decode_items, static_argnums=(1, 2, 3))
    items, owner = jax.tree.map(np.asarray, items(jnp.asarray(lengths, jnp.int32), 64, window, spare))
    assert items.shape == (len(lengths) + spare, 8)
    for row, length in enumerate(lengths):
        mine = [items[row], *items[len(lengths) :][owner == row]]
        blocks = [b for item in mine for b in range(item[mosaic_gpu.FIRST], item[mosaic_gpu.LAST])]
        oldest = max(length - window, 0) if window else 0
        assert blocks == list(range(oldest // 64, -(-length // 64))), row
    unused = items[len(lengths) :][owner == len(lengths)]
    assert (unused[:, mosaic_gpu.FIRST] == unused[:, mosaic_gpu.LAST]).all()


@pytest.mark.parametrize("window", [None, 1, 130])
def test_only_blocks_that_all_tokens_see_in_full_are_left_unmasked(window):
    q_len, kv_len = [1, 1, 300, 0, 17, 40], [70, 200, 1000, 30, 17, 257]
    q_start = jnp.asarray(np.cumsum([0, *q_len]), jnp.int32)
    tile = mosaic_gpu.Tile(128, 4, 32, 64, 16, 128, None, None, 1.0, window, None, None)
    items = jax.jit(mosaic_gpu.prompt_items, static_argnums=(0, 1))
    items, before = items(tile, 400, q_start, jnp.asarray(kv_len, jnp.int32), jnp.int32(2))
    assert before[-1] == 10 + 1 + 2
    seen = []
    for row, token, position, length, first, full_first, full_last, last in np.asarray(items).tolist():
        if first == last:
            continue
        count = min(32, length - position)
        seen += range(token, token + count)
        position_of = kv_len[row] - q_len[row] + token - int(q_start[row])
        assert (position, length) == (position_of, kv_len[row])
        ranges = [(max(0, p - window + 1) if window else 0, p) for p in range(position, position + count)]
        for block in range(1000 // 128 + 2):
            keys = block * 128, block * 128 + 127
            needed = any(low <= keys[1] and keys[0] <= high for low, high in ranges)
            full = all(low <= keys[0] and keys[1] <= high for low, high in ranges)
            assert needed <= (first <= block < last)
            assert (full_first <= block < full_last) <= full
    assert sorted(seen) == list(range(2, 359))


# --- interpreted ---


@pytest.fixture
def short_ring(monkeypatch):
    """Two slots, so that a few blocks go round the ring."""
    monkeypatch.setattr(mosaic_gpu.Tile, "stages", 2)


def interpreted(config: Config, rows: list[tuple[int, int]], *, races: bool = False, **options) -> None:
    """Table entries that no row owns point nowhere; what no row owns, or lies beyond its length, is NaN."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2")
    config = replace(config, dtype="bfloat16")
    batch = make_batch(config, rows, 0)
    tables = batch.tables.copy()
    for table, length in zip(tables, [*batch.kv_len, *[0] * config.rows], strict=False):
        table[-(-length // config.page_size) :] = 1_000_000
    out = mosaic_gpu.paged_attention(
        jnp.asarray(batch.q),
        KVPages(jnp.asarray(batch.pages), None if batch.scale is None else jnp.asarray(batch.scale)),
        jnp.asarray(tables),
        jnp.asarray(batch.q_start(config.rows)),
        jnp.asarray([*batch.kv_len, *[0] * (config.rows - len(rows))], jnp.int32),
        jnp.asarray(batch.num_decodes, jnp.int32),
        scale=config.head_dim**-0.5,
        window=config.window,
        softcap=config.softcap,
        sinks=None if batch.sinks is None else jnp.asarray(batch.sinks),
        first_page=jnp.int32(config.first_page),
        interpret=plgpu.InterpretGPUParams(detect_races=races),
        **options,
    )
    assert out.dtype == batch.q.dtype
    out = np.asarray(out).astype(np.float64)
    assert np.isfinite(out).all(), "padding too must be finite"
    expected = gold(config, batch, config.head_dim**-0.5)
    np.testing.assert_allclose(out[: len(expected)], expected, rtol=4e-3, atol=1e-2)
    if races:
        from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

        assert not get_races().races_found


@pytest.mark.usefixtures("short_ring")
def test_decode_with_split_rows():
    # 641 tokens are 11 blocks, in parts of four: parts merge.
    config = Config(group=4, kv_heads=1, tokens=4, rows=4, max_pages=41)
    interpreted(config, [(1, 641), (1, 64), (1, 1)], races=True, decode_only=True)


@pytest.mark.usefixtures("short_ring")
def test_decode_with_window_softcap_and_sinks():
    config = Config(64, 80, group=7, kv_heads=2, tokens=3, rows=3, max_pages=5, window=70, softcap=3.0, sinks=True)
    interpreted(config, [(1, 300), (1, 50)], decode_only=True)


@pytest.mark.usefixtures("short_ring")
def test_mixed_rows():
    config = Config(group=7, kv_heads=1, tokens=32, rows=5, max_pages=10)
    interpreted(config, [(1, 150), (20, 140), (0, 0), (7, 7), (1, 17)])


@pytest.mark.usefixtures("short_ring")
def test_a_prompt_with_a_window_and_sinks():
    # Blocks of keys that some tokens of a tile see and others do not, on both sides; pages larger than a block.
    config = Config(256, 96, group=3, kv_heads=1, tokens=50, rows=1, max_pages=2, window=100, sinks=True)
    interpreted(config, [(50, 420)], races=True)


@pytest.mark.usefixtures("short_ring")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_decode_with_quantized_pages(kv_dtype):
    config = Config(group=4, kv_heads=1, tokens=4, rows=4, max_pages=41, kv_dtype=kv_dtype)
    interpreted(config, [(1, 641), (1, 64), (1, 1)], races=True, decode_only=True)


@pytest.mark.usefixtures("short_ring")
def test_quantized_pages_with_window_softcap_and_sinks():
    # Rows of 80 codes take no swizzle; the page's scales are copied in two parts.
    config = Config(128, 80, group=7, kv_heads=2, tokens=24, rows=3, max_pages=3, window=70, softcap=3.0, sinks=True)
    interpreted(replace(config, kv_dtype="fp8"), [(1, 300), (1, 50), (20, 140)], races=True)


@pytest.mark.usefixtures("short_ring")
def test_mixed_rows_with_quantized_pages():
    config = Config(8, 96, group=7, kv_heads=1, tokens=32, rows=5, max_pages=50, kv_dtype="int8")
    interpreted(config, [(1, 150), (20, 400), (0, 0), (7, 7), (1, 17)])


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
    assert "paged_decode" in text
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
