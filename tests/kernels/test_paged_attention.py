"""Paged attention against float64 NumPy. What no row owns is poisoned with NaN.

The shape of the arrays is fixed per configuration, so that each compiles once or twice; what a batch holds is random.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.pallas_kernels.kv_write import quantize, write_kv
from jaxserve.pallas_kernels.paged_attention import cpu, reference
from jaxserve.pallas_kernels.paged_attention.reference import KV_BLOCK, TILE
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import KVPages

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "fp8": ml_dtypes.float8_e4m3fn,
}


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def attend(request, monkeypatch):
    """Every test runs with the reference, and with the kernel of this machine where there is one."""
    monkeypatch.setattr("test_paged_attention.backend", {"reference": reference, "cpu": cpu}[request.param])


backend = reference


@dataclass(frozen=True)
class Config:
    page_size: int = 16
    head_dim: int = 64
    group: int = 4
    kv_heads: int = 2
    window: int | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None  # None: as the queries
    softcap: float | None = None
    sinks: bool = False
    tokens: int = 96
    rows: int = 9  # one more than the kernel takes at once
    max_pages: int = 24
    first_page: int = 0

    def __str__(self) -> str:
        window = f"-window{self.window}" if self.window else ""
        rest = "".join(f"-{x}" for x in (self.kv_dtype, self.softcap and "softcap", self.sinks and "sinks") if x)
        shape = f"page{self.page_size}-dim{self.head_dim}-group{self.group}-table{self.max_pages}"
        return f"{shape}{window}-{self.dtype}{rest}"

    @property
    def problem(self) -> AttentionProblem:
        q, kv = (np.dtype(DTYPES[name]) for name in (self.dtype, self.kv_dtype or self.dtype))
        sizes = (self.kv_heads, self.group, self.head_dim, self.page_size)
        return AttentionProblem(q, kv, *sizes, self.kv_dtype is not None, self.softcap is not None, self.sinks)


CONFIGS = [
    Config(),
    Config(page_size=8, head_dim=80, group=1, max_pages=40),  # 320 tokens: more than one block of keys, no multiple
    Config(page_size=64, head_dim=96, group=7, kv_heads=1, max_pages=7),  # 448
    Config(page_size=16, head_dim=128, group=1, kv_heads=3, dtype="bfloat16", max_pages=33),
    Config(page_size=64, head_dim=256, group=4, kv_heads=1, max_pages=3),  # a table narrower than a block of keys
    Config(page_size=8, head_dim=64, group=7, kv_heads=1, max_pages=5, dtype="bfloat16", tokens=40),
    Config(page_size=16, head_dim=80, group=4, window=5, max_pages=40),
    Config(page_size=8, head_dim=128, group=1, window=KV_BLOCK + 1, max_pages=80),
    Config(page_size=64, head_dim=64, group=7, kv_heads=1, window=70, max_pages=9, dtype="bfloat16"),
    Config(tokens=7, rows=3, max_pages=20),  # fewer tokens than a tile, fewer rows than a block
    Config(softcap=3.0, sinks=True, first_page=9),
    Config(head_dim=128, group=7, window=40, sinks=True, kv_dtype="int8", first_page=1),
    Config(page_size=32, head_dim=96, kv_dtype="fp8", dtype="bfloat16", softcap=2.0),
]


@dataclass
class Batch:
    """Host arrays as the kernel takes them, and each row's own keys and values in float64."""

    q: np.ndarray
    pages: np.ndarray  # as KVPages.data
    scale: np.ndarray | None  # as KVPages.scale
    sinks: np.ndarray | None
    tables: np.ndarray
    q_len: list[int]
    kv_len: list[int]
    num_decodes: int
    keys: list[np.ndarray]
    values: list[np.ndarray]

    def q_start(self, rows: int) -> np.ndarray:
        starts = np.cumsum([0, *self.q_len])
        return np.append(starts, np.full(rows + 1 - len(starts), starts[-1])).astype(np.int32)


def make_batch(config: Config, rows: list[tuple[int, int]], seed: int) -> Batch:
    """rows: (new tokens, cached tokens with the new ones); those of one token first are the decodes."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[config.dtype]
    assert sum(new for new, _ in rows) <= config.tokens
    assert len(rows) <= config.rows
    num_decodes = next((i for i, (new, _) in enumerate(rows) if new != 1), len(rows))
    needed = [-(-length // config.page_size) for _, length in rows]
    num_pages = config.first_page + sum(needed) + 5
    owned = rng.permutation(np.arange(config.first_page + 1, num_pages)).tolist()  # the first is nobody's
    kv_dtype = DTYPES[config.kv_dtype or config.dtype]
    shape = (num_pages, 2, config.kv_heads, config.page_size, config.head_dim)
    pages = np.full(shape, 77 if kv_dtype == np.int8 else np.nan, kv_dtype)
    scale = np.full(shape[:-1], np.nan, np.float32) if config.kv_dtype else None
    # Entries beyond a row's pages are stale: they point at pages of others, at poisoned ones, or nowhere.
    tables = rng.integers(0, num_pages, (config.rows, config.max_pages)).astype(np.int32)
    keys = []
    values = []
    for i, (new, length) in enumerate(rows):
        kv = rng.standard_normal((length, 2, config.kv_heads, config.head_dim))
        own = np.abs(kv).max(-1) / 127 if config.kv_dtype else np.ones(kv.shape[:-1])
        codes = (kv / own[..., None]).astype(kv_dtype)
        kv = codes.astype(np.float64) * own.astype(np.float32)[..., None]
        mine = [owned.pop() for _ in range(needed[i])]
        tables[i, : len(mine)] = mine
        behind = 0 if config.window is None else max(length - new - config.window + 1, 0) // config.page_size
        for position in range(behind * config.page_size, length):  # a page behind the window may be another row's
            page = mine[position // config.page_size]
            offset = position % config.page_size
            pages[page, :, :, offset] = codes[position]
            if scale is not None:
                scale[page, :, :, offset] = own[position]
        keys.append(kv[:, 0])
        values.append(kv[:, 1])
    tables -= config.first_page
    q = rng.standard_normal((config.tokens, config.kv_heads, config.group, config.head_dim)).astype(dtype)
    sinks = rng.standard_normal((config.kv_heads, config.group)).astype(np.float32) * 2 if config.sinks else None
    lengths = [n for n, _ in rows], [n for _, n in rows]
    return Batch(q, pages, scale, sinks, tables, *lengths, num_decodes, keys, values)


def gold(config: Config, batch: Batch, scale: float) -> np.ndarray:
    """Each real token's attention over its row's keys, one token and head at a time."""
    out = []
    for row, (new, length) in enumerate(zip(batch.q_len, batch.kv_len, strict=True)):
        for position in range(length - new, length):
            first = 0 if config.window is None else max(0, position + 1 - config.window)
            q = batch.q[len(out)].astype(np.float64)
            scores = np.einsum("kgd,skd->kgs", q, batch.keys[row][first : position + 1]) * scale
            if config.softcap:
                scores = config.softcap * np.tanh(scores / config.softcap)
            peak = scores.max(-1, keepdims=True)
            weights = np.exp(scores - peak)
            sink = 0 if batch.sinks is None else np.exp(batch.sinks[..., None] - peak)
            weights /= weights.sum(-1, keepdims=True) + sink
            out.append(np.einsum("kgs,skd->kgd", weights, batch.values[row][first : position + 1]))
    return np.stack(out)


def run(config: Config, batch: Batch, scale: float, *, decode_only: bool = False) -> np.ndarray:
    if (reason := backend.why_not(Device("cpu", "cpu"), config.problem)) is not None:
        pytest.skip(reason)
    kv_len = np.zeros(config.rows, np.int32)
    kv_len[: len(batch.kv_len)] = batch.kv_len
    most = config.first_page + config.rows * config.max_pages + 6

    def padded(x: np.ndarray) -> jax.Array:
        poison = 77 if x.dtype == np.int8 else np.nan
        return jnp.asarray(np.concatenate([x, np.full((most - len(x), *x.shape[1:]), poison, x.dtype)]))

    out = backend.paged_attention(
        jnp.asarray(batch.q),
        KVPages(padded(batch.pages), None if batch.scale is None else padded(batch.scale)),
        jnp.asarray(batch.tables),
        jnp.asarray(batch.q_start(config.rows)),
        jnp.asarray(kv_len),
        jnp.asarray(batch.num_decodes, jnp.int32),
        scale=scale,
        window=config.window,
        softcap=config.softcap,
        sinks=None if batch.sinks is None else jnp.asarray(batch.sinks),
        first_page=jnp.int32(config.first_page),
        decode_only=decode_only,
    )
    assert out.dtype == batch.q.dtype
    return np.asarray(out).astype(np.float64)


def check(config: Config, rows: list[tuple[int, int]], seed: int = 0, *, decode_only: bool = False) -> None:
    batch = make_batch(config, rows, seed)
    scale = config.head_dim**-0.5
    out = run(config, batch, scale, decode_only=decode_only)
    assert np.isfinite(out).all(), "padding too must be finite"
    expected = gold(config, batch, scale)
    np.testing.assert_allclose(out[: len(expected)], expected, rtol=0, atol=TOLERANCE[config.dtype])


def random_rows(config: Config, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Decodes, then chunks of prompts; lengths near the borders of pages and blocks more often than not."""
    limit = config.page_size * config.max_pages
    borders = np.array([1, config.page_size, TILE, KV_BLOCK, limit])

    def length() -> int:
        near = int(rng.choice(borders)) + int(rng.integers(-1, 2))
        return min(max(near if rng.random() < 0.6 else int(rng.integers(1, limit + 1)), 1), limit)

    count = int(rng.integers(1, config.rows + 1))
    rows = [(1, length()) for _ in range(int(rng.integers(0, count + 1)))]
    room = config.tokens - len(rows)
    while len(rows) < count and room > 0:
        total = length()
        new = min(total, room, int(rng.integers(1, config.tokens + 1)))
        rows.append((new, total))
        room -= new
    decodes = sum(new == 1 for new, _ in rows)
    return sorted(rows, key=lambda row: row[0] > 1) if decodes else rows


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_mixed_batches(config):
    rng = np.random.default_rng(config.head_dim + config.page_size)
    for seed in range(12):
        check(config, random_rows(config, rng), seed)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_decode_steps(config):
    rng = np.random.default_rng(config.head_dim + config.page_size)
    config = Config(**{**config.__dict__, "tokens": config.rows})
    limit = config.page_size * config.max_pages
    for count in (1, config.rows - 1, config.rows):
        rows = [(1, int(n)) for n in rng.integers(1, limit + 1, count)]
        rows[0] = (1, [1, config.page_size, limit][count % 3])
        check(config, rows, count, decode_only=True)


CASES = {
    "one token": [(1, 1)],
    "a whole prompt": [(96, 96)],
    "a tile and one more": [(TILE + 1, TILE + 1)],
    "two tiles' border": [(TILE, TILE), (32, 32)],
    "prompts of a page": [(16, 16), (16, 16), (15, 15), (17, 17)],
    "a late chunk": [(40, 384)],
    "a chunk over the border of a block": [(20, KV_BLOCK + 10)],
    "a chunk that begins at a block": [(10, KV_BLOCK + 10)],
    "decodes before prompts": [(1, 300), (1, 1), (1, 16), (1, 17), (50, 60), (30, 30)],
    "as many decodes as a block has rows": [(1, 10 + i) for i in range(8)] + [(80, 100)],
    "one more": [(1, 10 + i) for i in range(9)],
    "an empty row between": [(1, 20), (5, 5), (0, 0), (7, 30)],
    "empty rows first": [(0, 0), (0, 0), (7, 30)],
    "an empty row with a cache": [(5, 5), (0, 40), (6, 6)],
    "prompts of one token behind longer ones": [(3, 3), (1, 1), (1, 50)],
}


@pytest.mark.parametrize("name", CASES)
def test_borders(name):
    check(CONFIGS[0], CASES[name])


@pytest.mark.parametrize("window", [1, 17, 256, 10_000])
def test_windows(window):
    config = Config(window=window)
    check(config, [(1, 300), (1, 16), (1, 1), (1, 384), (60, 380), (30, 30)])


def test_an_empty_batch_is_finite():
    batch = make_batch(CONFIGS[0], [(0, 0)], 0)
    assert np.isfinite(run(CONFIGS[0], batch, 1.0)).all()
    assert np.isfinite(run(CONFIGS[0], batch, 1.0, decode_only=True)).all()


def test_large_scores_do_not_overflow():
    batch = make_batch(CONFIGS[0], [(1, 300), (50, 330)], 0)
    out = run(CONFIGS[0], batch, 100.0)  # scores of thousands: the softmax picks one key
    expected = gold(CONFIGS[0], batch, 100.0)
    np.testing.assert_allclose(out[: len(expected)], expected, atol=1e-2)


def test_a_row_s_result_does_not_depend_on_its_neighbours():
    alone = make_batch(CONFIGS[0], [(1, 100)], 3)
    together = make_batch(CONFIGS[0], [(1, 100), (1, 384), (50, 300)], 3)
    together.q[0] = alone.q[0]
    together.pages[together.tables[0, :7]] = alone.pages[alone.tables[0, :7]]
    np.testing.assert_array_equal(run(CONFIGS[0], alone, 0.1)[0], run(CONFIGS[0], together, 0.1)[0])


@pytest.mark.parametrize("first_page", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(dtype, first_page):
    rng = np.random.default_rng(0)
    before = (10 * rng.standard_normal((7, 2, 3, 8, 16))).astype(DTYPES[dtype])
    scale = np.ones(before.shape[:-1], np.float32) if dtype in ("int8", "fp8") else None
    k, v = rng.standard_normal((2, 10, 3, 16)).astype(np.float32)
    k[1, 1] = 0  # its scale must not be 0
    slots = np.array([*rng.permutation(np.arange(8, 40))[:8], -1, -1], np.int32)  # the last two are padding
    after = jax.jit(write_kv)(KVPages(before, scale), *map(jnp.asarray, (k, v, slots)), jnp.int32(first_page))
    assert after.data.dtype == before.dtype
    data = np.asarray(after.data)
    new_scale = None if scale is None else np.asarray(after.scale)
    written = np.zeros(before.shape[:-1], bool)
    for i, slot in enumerate(slots[:8]):
        where = (first_page + slot // 8, slice(None), slice(None), slot % 8)
        written[where] = True
        kv = np.stack([k[i], v[i]])
        if scale is None:
            np.testing.assert_array_equal(data[where], kv.astype(DTYPES[dtype]))
        else:
            read = data[where].astype(np.float64) * new_scale[where][..., None]
            steps = 254 if dtype == "int8" else 16  # half a step of the grid, or of three bits of mantissa
            assert (np.abs(read - kv) <= np.abs(kv).max(-1, keepdims=True) / steps + 1e-6).all()
    written[first_page, :, :, 0] = True  # padding writes at the null page's first place only
    np.testing.assert_array_equal(data[~written], before[~written])


def test_codes_of_tiny_numbers_are_numbers():
    """A scale of 1e-36 / 448 would be subnormal, which a device may replace by 0."""
    codes, scale = jax.jit(quantize, static_argnums=1)(jnp.array([[0.0, 1e-36]]), jnp.float8_e4m3fn)
    assert np.isfinite(np.asarray(codes, np.float32)).all()
    assert scale > 0
