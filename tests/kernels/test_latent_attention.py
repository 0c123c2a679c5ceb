"""Latent attention against float64 NumPy: the reference, and the CPU's kernel; and the form with expanded keys."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from latent_batches import DTYPES, TOLERANCE, Config, make_batch, random_rows
from test_tpu_attention import no_disk_cache

from jaxserve.pallas_kernels import cpu as host
from jaxserve.pallas_kernels import cpu_build
from jaxserve.pallas_kernels.latent_attention import cpu, expanded, reference
from jaxserve.pallas_kernels.registry import Device, LatentProblem, choose, explain, load
from jaxserve.pallas_kernels.types import LatentPages, stored_latent_width

__all__ = ["no_disk_cache"]

HERE = Device("cpu", "cpu")
BORDERS = (reference.KV_BLOCK, reference.TILE)
BACKENDS = {"reference": reference, "cpu": cpu}

CONFIGS = [
    Config(),
    Config(rank=512, rope=64, heads=16, tokens=40),  # DeepSeek's, under tensor parallelism of 8
    Config(rank=96, rope=24, heads=7, page_size=8, width=128, max_pages=40, first_page=5),  # padded rows
    Config(rank=40, rope=10, heads=3, page_size=64, max_pages=3, tokens=64),  # a table narrower than a block
    Config(dtype="bfloat16", heads=5, max_pages=33, first_page=2),
    Config(rank=128, rope=32, kv_dtype="int8", page_size=32, max_pages=11, first_page=1),
    Config(rank=128, rope=32, heads=20, dtype="bfloat16", kv_dtype="float8_e4m3fn", width=192),
    Config(dtype="float16", kv_dtype="int8", heads=1, rows=3, tokens=7),  # fewer tokens than a tile
]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def run(backend, batch, *, decode_only=False, scale=None) -> np.ndarray:
    config = batch.config
    if (reason := backend.why_not(HERE, config.problem)) is not None:
        pytest.skip(reason)
    options = {"scale": scale or config.scale, "rank": config.rank, "first_page": jnp.int32(config.first_page)}
    out = backend.latent_attention(*batch.arguments(), **options, decode_only=decode_only)
    assert out.dtype == batch.q.dtype
    assert out.shape == (*batch.q.shape[:2], config.rank)
    out = np.asarray(out).astype(np.float64)
    assert np.isfinite(out).all(), "padding too must be finite"
    return out


def check(backend, config, rows, seed=0, *, decode_only=False) -> None:
    batch = make_batch(config, rows, seed)
    out = run(backend, batch, decode_only=decode_only)
    gold = batch.gold()
    np.testing.assert_allclose(out[: len(gold)], gold, rtol=0, atol=TOLERANCE[config.dtype])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_mixed_batches(backend, config):
    rng = np.random.default_rng(config.rank + config.page_size)
    for seed in range(8):
        check(backend, config, random_rows(config, rng, BORDERS), seed)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_decode_steps(backend, config):
    rng = np.random.default_rng(config.heads)
    config = replace(config, tokens=config.rows)
    limit = config.page_size * config.max_pages
    for count in (1, config.rows - 1, config.rows):
        rows = [(1, int(n)) for n in rng.integers(1, limit + 1, count)]
        rows[0] = (1, [1, config.page_size, limit][count % 3])
        check(backend, config, rows, count, decode_only=True)


CASES = {
    "one token": [(1, 1)],
    "a whole prompt": [(96, 96)],
    "two tiles' border": [(32, 32), (33, 33)],
    "a late chunk": [(40, 384)],
    "a chunk over the border of a block": [(20, 138)],
    "decodes before prompts": [(1, 300), (1, 1), (1, 16), (1, 17), (50, 60), (30, 30)],
    "as many decodes as a block has rows": [(1, 10 + i) for i in range(8)] + [(80, 100)],
    "one more": [(1, 10 + i) for i in range(9)],
    "an empty row between": [(1, 20), (5, 5), (0, 0), (7, 30)],
    "an empty row with a cache": [(5, 5), (0, 40), (6, 6)],
    "prompts of one token behind longer ones": [(3, 3), (1, 1), (1, 50)],
}


@pytest.mark.parametrize("name", CASES)
def test_borders(backend, name):
    check(backend, CONFIGS[0], CASES[name])


def test_an_empty_batch_is_finite(backend):
    batch = make_batch(CONFIGS[0], [(0, 0)], 0)
    run(backend, batch)
    run(backend, batch, decode_only=True)


def test_large_scores_do_not_overflow(backend):
    batch = make_batch(replace(CONFIGS[0]), [(1, 300), (50, 330)], 0)
    object.__setattr__(batch, "q", batch.q * 1000)  # the softmax picks one token
    gold = batch.gold()
    np.testing.assert_allclose(run(backend, batch)[: len(gold)], gold, atol=1e-2)


def test_a_row_s_result_does_not_depend_on_its_neighbours(backend):
    alone = make_batch(CONFIGS[0], [(1, 100)], 3)
    together = make_batch(CONFIGS[0], [(1, 100), (1, 384), (50, 300)], 3)
    together.q[0] = alone.q[0]
    together.pages[together.tables[0, :7]] = alone.pages[alone.tables[0, :7]]
    np.testing.assert_array_equal(run(backend, alone)[0], run(backend, together)[0])


@pytest.mark.parametrize("first_page", [0, 2])
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_write(backend, kv_dtype, first_page):
    rng = np.random.default_rng(0)
    rank = 40
    rope = 12
    width = 60
    dtype = DTYPES[kv_dtype]
    before = (10 * rng.standard_normal((7, 8, width))).astype(dtype)
    scale = np.ones((7, 2, 8), np.float32) if kv_dtype in ("int8", "float8_e4m3fn") else None
    rows = rng.standard_normal((10, rank + rope)).astype(np.float32)
    rows[:, rank:] *= 50
    rows[1] = 0  # its scales must not be 0
    slots = np.array([*rng.permutation(np.arange(8, 40))[:8], -1, -1], np.int32)  # the last two are padding
    pages = LatentPages(jnp.asarray(before), None if scale is None else jnp.asarray(scale))
    write = jax.jit(backend.write_latent, static_argnames="rank")
    after = write(pages, jnp.asarray(rows), jnp.asarray(slots), jnp.int32(first_page), rank=rank)
    assert after.data.dtype == before.dtype
    page = first_page + slots[:8] // 8
    offset = slots[:8] % 8
    found = np.asarray(after.data)[page, offset].astype(np.float64)
    assert not found[:, rank + rope :].any()
    if scale is None:
        np.testing.assert_array_equal(found[:, : rank + rope], rows[:8].astype(dtype).astype(np.float64))
    else:
        own = np.asarray(after.scale)[page, :, offset]
        steps = 253 if kv_dtype == "int8" else 16  # half a step of the grid, or of three bits of mantissa
        for part, factor in ((slice(0, rank), own[:, 0]), (slice(rank, rank + rope), own[:, 1])):
            exact = rows[:8, part]
            error = np.abs(found[:, part] * factor[:, None] - exact)
            assert (error <= np.abs(exact).max(-1, keepdims=True) / steps + 1e-6).all()
    kept = np.ones(before.shape[:2], bool)
    kept[page, offset] = False
    kept[first_page, 0] = False  # where padding may go
    np.testing.assert_array_equal(np.asarray(after.data)[kept], before[kept])
    if scale is not None:
        np.testing.assert_array_equal(np.moveaxis(np.asarray(after.scale), 1, 2)[kept], 1.0)


# --- the other form ---


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[5]], ids=str)
@pytest.mark.parametrize(("tile", "block"), [(16, 128), (512, 128), (512, 1024)])
def test_expanded_keys_and_values_give_the_same(config, tile, block, monkeypatch):
    monkeypatch.setattr(expanded, "TILE", tile)
    expanded.expanded_attention.clear_cache()
    rng = np.random.default_rng(3)
    nope = 24
    v_dim = 20
    k_up = rng.standard_normal((config.heads, nope, config.rank)).astype(np.float32) / config.rank**0.5
    v_up = rng.standard_normal((config.heads, v_dim, config.rank)).astype(np.float32)
    for rows in ([(1, 300), (1, 5), (50, 60), (30, 90)], [(96, 250)], [(0, 0), (1, 40), (17, 17)]):
        batch = make_batch(config, rows, len(rows))
        q = rng.standard_normal((config.tokens, config.heads, nope + config.rope)).astype(np.float32)
        batch.q = np.asarray(expanded.absorb(jnp.asarray(q), jnp.asarray(k_up)))
        np.testing.assert_allclose(
            batch.q[..., : config.rank], np.einsum("thn,hnr->thr", q[..., :nope], k_up), atol=1e-4
        )
        gold = np.einsum("thr,hvr->thv", batch.gold(), v_up.astype(np.float64))
        options = {"scale": config.scale, "first_page": jnp.int32(config.first_page)}
        _, *rest = batch.arguments()
        out = expanded.expanded_attention(jnp.asarray(q), rest[0], k_up, v_up, *rest[1:], block=block, **options)
        assert np.isfinite(np.asarray(out)).all()
        first = batch.num_decodes
        np.testing.assert_allclose(np.asarray(out)[first : len(gold)], gold[first:], rtol=0, atol=2e-4)
        absorbed = reference.latent_attention(*batch.arguments(), rank=config.rank, **options)
        projected = expanded.project_values(absorbed, jnp.asarray(v_up))
        np.testing.assert_allclose(np.asarray(projected)[: len(gold)], gold, rtol=0, atol=2e-4)


@pytest.mark.parametrize("rows", [[(1, 300), (1, 5), (50, 60), (30, 90)], [(1, 40), (1, 9)], [(60, 90)]])
@pytest.mark.parametrize("expand", [False, True])
def test_from_heads_queries_to_heads_results(backend, expand, rows):
    config = CONFIGS[2]
    rng = np.random.default_rng(5)
    k_up = rng.standard_normal((config.heads, 24, config.rank)).astype(np.float32) / config.rank**0.5
    v_up = rng.standard_normal((config.heads, 20, config.rank)).astype(np.float32)
    batch = make_batch(config, rows, 1)
    q = rng.standard_normal((config.tokens, config.heads, 24 + config.rope)).astype(np.float32)
    batch.q = np.concatenate([np.einsum("thn,hnr->thr", q[..., :24], k_up), q[..., 24:]], axis=-1)
    gold = np.einsum("thr,hvr->thv", batch.gold(), v_up.astype(np.float64))
    _, pages, *arrays = batch.arguments()
    options = {"scale": config.scale, "first_page": jnp.int32(config.first_page), "expand": expand}
    options["decode_only"] = all(new == 1 for new, _ in rows)
    call = jax.jit(lambda *a: expanded.attention_of_heads(backend.latent_attention, *a, **options))
    out = np.asarray(call(jnp.asarray(q), pages, k_up, v_up, *arrays))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[: len(gold)], gold, rtol=0, atol=2e-4)
    program = call.lower(jnp.asarray(q), pages, k_up, v_up, *arrays).as_text()
    assert ("expanded_attention" in program) == (expand and not options["decode_only"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_disk_cache")
@pytest.mark.parametrize("target", ["h200x1", "v5e-1", "v6e-1"])
def test_the_expanded_form_compiles_with_blocks_alone_expanded(target):
    """DeepSeek-V3 under tensor parallelism of 8: no copy of the cache, and temporaries of a block's scores."""
    place = NamedSharding(mesh_of(target), PartitionSpec())
    # no other dimension is 2001
    tokens = 1024
    rows = 8
    count = 2001
    heads = 16
    block = 1024

    def array(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    pages = LatentPages(array((count, 64, 640 if target.startswith("v") else 576)))
    weights = array((heads, 128, 512)), array((heads, 128, 512))
    numbers = [array(shape, jnp.int32) for shape in ((rows, 64), (rows + 1,), (rows,), (), ())]

    def attend(q, pages, k_up, v_up, *numbers):
        options = {"scale": 0.1, "first_page": numbers[-1], "compute_dtype": jnp.bfloat16, "block": block}
        return expanded.expanded_attention(q, pages, k_up, v_up, *numbers[:-1], **options)

    compiled = jax.jit(attend).lower(array((tokens, heads, 192)), pages, *weights, *numbers).compile()
    assert f"[{count}," in compiled.as_text()
    assert not re.search(rf"\[{count},[^ ]* (copy|copy-start|transpose|convert|fusion)\(", compiled.as_text())
    scores = heads * expanded.TILE * block * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * scores


def test_which_form_is_cheaper():
    """Operations of DeepSeek-V3's heads, counted by hand; a decode is never cheaper expanded, a long prompt always."""
    one = expanded.form_operations(1, 1000, 128)
    assert one["absorbed"] == 128 * (2 * 512 * 256 + 1000 * 2176)
    assert one["expanded"] == 128 * 1000 * (640 + 262144)
    prompt = expanded.form_operations(512, 512, 16)
    pairs = 512 * 513 / 2
    assert prompt["absorbed"] == 16 * (512 * 262144 + pairs * 2176)
    assert prompt["expanded"] == 16 * (512 * 262144 + pairs * 640)
    two_tiles = expanded.form_operations(1024, 3000, 1)
    assert two_tiles["expanded"] == (2488 + 3000) * 262144 + 640 * sum(range(1977, 3001))
    for context in (1, 100, 100_000):
        assert expanded.cheaper_form(1, context, 128) == "absorbed" or context == 1
    assert expanded.cheaper_form(2048, 2048, 128) == "expanded"
    assert expanded.cheaper_form(160, 100_000, 16) == "absorbed"
    assert expanded.cheaper_form(190, 100_000, 16) == "expanded"
    # A matrix unit of 64 rows: 33 tokens of 16 heads fill it, 33 tokens of each head fill half of it.
    few = expanded.form_operations(33, 1000, 16, unit=64)
    assert few["absorbed"] - expanded.form_operations(33, 1000, 16)["absorbed"] == (48 * 984) * 2176
    assert expanded.cheaper_form(33, 1000, 16, unit=64) == "absorbed"


# --- the registry ---


def test_the_registry_knows_latent_attention():
    problem = LatentProblem(np.dtype(np.float32), np.dtype(np.float32), 16, 512, 64, 16)
    assert problem.row_width == 576
    reasons = explain("latent", HERE, problem)
    assert reasons["xla"] is None
    assert load("latent", choose("latent", HERE, problem)) in (cpu, reference)
    assert stored_latent_width(576, "tpu") == 640
    assert stored_latent_width(576, "gpu") == 576


# --- what only the CPU's kernel does ---


CPU_INFO = Path("/proc/cpuinfo")
HAS_AVX512 = CPU_INFO.exists() and "avx512f" in CPU_INFO.read_text()
needs_kernel = pytest.mark.skipif(not host.available(cpu_build.LATENT), reason="no C++ compiler")
FLOATS = ("float32", "bfloat16", "float16")
CODES = ("int8", "float8_e4m3fn")


@needs_kernel
@pytest.mark.parametrize("kv_dtype", FLOATS + CODES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pair_of_types_and_sizes_that_fill_no_registers(dtype, kv_dtype):
    for rank, rope, heads in ((64, 16, 2), (37, 5, 3), (80, 24, 70)):
        config = Config(rank, rope, heads, dtype=dtype, kv_dtype=kv_dtype if kv_dtype in CODES else None, tokens=30)
        if kv_dtype in FLOATS and kv_dtype != dtype:
            batch = make_batch(replace(config, dtype=kv_dtype), [(1, 130), (20, 77)], rank)
            batch.config, batch.q = config, batch.q.astype(DTYPES[dtype])
            gold = batch.gold()
            np.testing.assert_allclose(run(cpu, batch)[: len(gold)], gold, rtol=0, atol=TOLERANCE[dtype])
        else:
            check(cpu, config, [(1, 130), (20, 77)], rank)


@needs_kernel
def test_a_query_s_result_does_not_depend_on_how_its_prompt_was_cut():
    """Nor on whether the threads share its parts: one token alone has few tiles, all tokens together have many."""
    rng = np.random.default_rng(1)
    pages = LatentPages(jnp.asarray(rng.standard_normal((90, 16, 80)), jnp.float32))
    q = jnp.asarray(rng.standard_normal((1300, 7, 80)), jnp.float32)

    def call(first, end):
        rest = jnp.arange(90, dtype=jnp.int32)[None], jnp.array([0, end - first]), jnp.array([end])
        return cpu.latent_attention(q[first:end], pages, *rest, jnp.int32(end - first == 1), scale=0.1, rank=64)

    whole = np.asarray(call(0, 1300))
    for first, end in ((0, 77), (77, 300), (150, 166), (299, 300), (1299, 1300), (1020, 1030), (500, 1300)):
        if HAS_AVX512:
            np.testing.assert_array_equal(call(first, end), whole[first:end])
        else:  # the compiler's code for eight numbers at a time rounds single sums otherwise, in the last bit
            np.testing.assert_allclose(call(first, end), whole[first:end], rtol=2e-6, atol=2e-8)


@needs_kernel
@pytest.mark.parametrize("length", [511, 512, 513, 1025, 2000])
def test_parts_of_long_rows(length):
    config = Config(heads=9, max_pages=130, tokens=30)
    check(cpu, config, [(1, length)], length, decode_only=True)
    check(cpu, config, [(1, length), (29, length)], length)


@needs_kernel
def test_it_is_the_kernel_that_runs_in_place():
    pages = LatentPages(jnp.zeros((40, 16, 80), jnp.int8), jnp.ones((40, 2, 16)))

    def step(pages, rows, tables, first_page):
        pages = cpu.write_latent(pages, rows, jnp.arange(4), first_page, rank=64)
        rest = tables, jnp.arange(5), jnp.full(4, 9), jnp.int32(4)
        q = jnp.stack([rows, rows], 1)
        return cpu.latent_attention(q, pages, *rest, scale=1.0, rank=64, first_page=first_page), pages

    arguments = pages, jnp.ones((4, 80)), jnp.zeros((4, 7), jnp.int32), jnp.int32(3)
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    text = compiled.as_text()
    assert "jaxserve_latent_attention" in text
    assert "jaxserve_write_latent" in text
    assert "s32[4,7]{1,0} add" not in text
    assert "s8[40,16,80]{2,1,0} copy" not in text
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(pages))


@needs_kernel
@pytest.mark.parametrize("kv_dtype", CODES)
def test_the_write_gives_the_codes_of_plain_xla(kv_dtype):
    rng = np.random.default_rng(2)
    rows = np.float32(10) ** rng.uniform(-6, 3, (40, 77)) * rng.choice([-1, 1], (40, 77))
    rows[3] = 1e-3 * (1 + np.arange(77) / 2)  # ties
    pages = LatentPages(jnp.zeros((6, 8, 80), DTYPES[kv_dtype]), jnp.ones((6, 2, 8)))
    arguments = pages, jnp.asarray(rows, jnp.float32), jnp.asarray(8 + rng.permutation(40)[:40], jnp.int32)
    found = jax.jit(cpu.write_latent, static_argnames="rank")(*arguments, rank=60)
    expected = jax.jit(reference.write_latent, static_argnames="rank")(*arguments, rank=60)
    np.testing.assert_allclose(np.asarray(found.scale), np.asarray(expected.scale), rtol=2e-7)
    # XLA divides by multiplying: scales differ by a unit in the last place, and then a code in thousands does.
    codes = [np.asarray(x.data, np.float32) for x in (found, expected)]
    np.testing.assert_allclose(*codes, rtol=0.126, atol=1)
    assert (codes[0] != codes[1]).mean() < 1e-3


def test_the_reference_does_what_the_kernel_does_where_it_could_not_be_built(monkeypatch):
    monkeypatch.setattr(host, "available", lambda name=cpu_build.KERNELS: False)
    batch = make_batch(CONFIGS[4], [(1, 50), (20, 40)], 2)
    options = {"scale": 0.1, "rank": 64, "first_page": 2}
    expected = reference.latent_attention(*batch.arguments(), **options)
    np.testing.assert_array_equal(cpu.latent_attention(*batch.arguments(), **options), expected)


def test_which_steps_expand_prompts():
    """The fewest tokens of the rule are where operations of the two forms cross, whatever is cached."""
    for sizes in (expanded.DEEPSEEK_V3, expanded.LatentSizes(256, 32, 64, 64), expanded.LatentSizes(48, 8, 12, 16)):
        least = expanded.least_new_tokens(sizes)
        for context in (expanded.TILE, 10**6):
            assert expanded.cheaper_form(least, context, 1, sizes) == "expanded"
        assert expanded.cheaper_form(least - 1, 10**6, 1, sizes) == "absorbed"
    assert expanded.least_new_tokens(expanded.DEEPSEEK_V3) == 171
    assert expanded.least_new_tokens(expanded.LatentSizes(32, 16, 40, 24)) is None  # keys as wide as latents
    assert expanded.expands_prompts(512, 2, expanded.DEEPSEEK_V3, plain=True)
    assert not expanded.expands_prompts(512, 4, expanded.DEEPSEEK_V3, plain=True)  # 128 tokens for each row
    assert not expanded.expands_prompts(8192, 1, expanded.DEEPSEEK_V3, plain=False)
