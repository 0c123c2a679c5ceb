"""The TPU kernels for attention and the KV write: interpreted on CPU against float64, and compiled ahead of time.

What no row owns is NaN, table entries beyond a row's pages or behind its window point nowhere, and races fail.
"""

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from devices import mesh_of
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels import kv_write_tpu
from jaxserve.pallas_kernels.paged_attention import tpu, tpu_plan
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.tpu_dma import SMEM_RESERVED, checking
from jaxserve.pallas_kernels.types import KVPages

NOWHERE = 10**6
V5E = Device("tpu", "TPU v5 lite")


def interpreted(function, *args, **options):
    """The function's result in interpret mode; fails where two copies, or a copy and a read, race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    try:
        with pltpu.force_tpu_interpret_mode(params), checking():
            result = jax.block_until_ready(function(*args, **options))
    except Exception:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    assert interpreter.races is None or not interpreter.races.races_found
    return result


@dataclass(frozen=True)
class Config:
    head_dim: int = 64
    page_dim: int | None = None
    parts: int = 1  # heads of the pages that are a head together
    group: int = 4
    kv_heads: int = 1
    page_size: int = 16
    q_dtype: type = np.float32
    kv_dtype: type = np.float32
    has_scale: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    width: int = 4
    tokens: int = 32
    lengths: tuple = ((1, 37), (1, 16), (0, 0), (5, 20), (0, 0), (20, 47), (1, 17), (0, 0))  # query tokens, cached
    num_decodes: int = 2
    rows: int = 16  # of the tables, when compiled
    first_page: int = 0

    def __str__(self) -> str:
        names = f"dim{self.head_dim}-group{self.group}x{self.kv_heads}-page{self.page_size}-{self.kv_dtype.__name__}"
        options = "".join(f"-{name}" for name in ("window", "softcap", "sinks", "first_page") if getattr(self, name))
        parts = f"-parts{self.parts}" if self.parts > 1 else ""
        return names + parts + options + ("-decode" if self.decode_only else "")

    @property
    def decode_only(self) -> bool:
        return all(new == 0 for new, _ in self.lengths[self.num_decodes :])


DECODES = ((1, 1), (1, 300), (1, 256), (1, 257), (0, 0))
LONG = ((1, 300), (3, 140), (0, 0), (2, 2))
FAR = ((1, 4100), (1, 2060), (0, 0), (17, 2071), (1, 1))
CONFIGS = [
    Config(),
    Config(head_dim=80, group=7, kv_heads=2, window=5, sinks=True, first_page=5),
    Config(head_dim=192, page_dim=256, parts=2, kv_heads=2, group=3, page_size=32, sinks=True, first_page=2),
    Config(head_dim=64, page_dim=128, group=1, softcap=5.0, q_dtype=ml_dtypes.bfloat16, kv_dtype=ml_dtypes.bfloat16),
    Config(
        head_dim=128,
        group=8,
        page_size=128,
        kv_dtype=np.int8,
        has_scale=True,
        width=3,
        tokens=8,
        lengths=LONG,
        num_decodes=1,
    ),
    Config(head_dim=96, group=3, page_size=32, kv_dtype=ml_dtypes.float8_e4m3fn, width=10, lengths=LONG, num_decodes=0),
    Config(
        head_dim=256,
        group=2,
        kv_heads=3,
        width=40,
        tokens=5,
        lengths=DECODES,
        num_decodes=4,
        sinks=True,
        first_page=40,
    ),
    Config(head_dim=32, group=1, width=300, tokens=20, lengths=FAR, num_decodes=2),  # tables of three chunks
    Config(head_dim=32, group=1, width=260, tokens=20, lengths=FAR, num_decodes=2, window=140, first_page=2),
    Config(head_dim=64, group=7, width=40, page_size=64, tokens=9, lengths=DECODES, num_decodes=4, window=130),
    Config(width=1, tokens=3, lengths=((1, 0), (0, 0)), num_decodes=1),
]


class Batch:
    """Host arrays as the kernel takes them; kv: float64 [2, kv_heads, cached, head_dim] of each row."""

    def __init__(self, config: Config, seed: int):
        rng = np.random.default_rng(seed)
        self.config = config
        c = config
        size = c.page_size
        shape = (2, c.kv_heads)
        needed = [-(-cached // size) for _, cached in c.lengths]
        dim = c.page_dim or c.head_dim
        free = iter(rng.permutation(np.arange(1, 2 + sum(needed))))
        data = np.full(
            (c.first_page + 2 + sum(needed), *shape, size, dim), np.nan if c.kv_dtype != np.int8 else 99, np.float64
        )
        scale = np.full(data.shape[:-1], np.nan, np.float32)
        self.tables = np.full((len(c.lengths), c.width), NOWHERE, np.int32)
        self.kv = []
        for row, (new, cached) in enumerate(c.lengths):
            kv = rng.standard_normal((*shape, cached, dim)) * (30 if c.has_scale else 1)
            kv[..., c.head_dim :] = 0
            kv = (np.round(kv) if c.kv_dtype == np.int8 else kv).astype(c.kv_dtype).astype(np.float64)
            factor = rng.uniform(0.01, 0.1, kv.shape[:-1]).astype(np.float32) if c.has_scale else 1.0
            oldest = max(cached - new + 1 - c.window, 0) if c.window else 0
            for page in range(oldest // size, needed[row]):
                self.tables[row, page] = chosen = next(free)
                part = slice(page * size, min((page + 1) * size, cached))
                chosen += c.first_page
                data[chosen, :, :, : part.stop - part.start] = kv[:, :, part]
                if c.has_scale:
                    scale[chosen, :, :, : part.stop - part.start] = factor[:, :, part]
            self.kv.append(kv[..., : c.head_dim] * (factor[..., None] if c.has_scale else 1.0))
        data = data.reshape(*data.shape[:-1], c.parts, -1).swapaxes(3, 4)  # the parts before the tokens
        data = data.reshape(len(data), 2, -1, size, dim // c.parts)
        self.pages = KVPages(jnp.asarray(data.astype(c.kv_dtype)), jnp.asarray(scale) if c.has_scale else None)
        q = rng.standard_normal((c.tokens, c.kv_heads, c.group, c.head_dim))
        self.q = q.astype(c.q_dtype)
        self.sinks = rng.standard_normal((c.kv_heads, c.group)).astype(np.float32) if c.sinks else None
        self.q_start = np.cumsum([0, *(new for new, _ in c.lengths)]).astype(np.int32)
        self.kv_len = np.array([cached for _, cached in c.lengths], np.int32)

    def expected(self) -> np.ndarray:
        """float64 [real tokens, kv_heads, group, head_dim]."""
        c = self.config
        out = []
        for row, (new, cached) in enumerate(c.lengths):
            for i in range(new):
                end = cached - new + i + 1
                begin = max(end - c.window, 0) if c.window else 0
                k, v = self.kv[row][:, :, begin:end]
                q = self.q[self.q_start[row] + i].astype(np.float64)
                scores = np.einsum("hgd,hkd->hgk", q, k) * c.head_dim**-0.5
                scores = c.softcap * np.tanh(scores / c.softcap) if c.softcap else scores
                p = np.exp(scores)
                total = np.maximum(p.sum(-1) + (np.exp(self.sinks) if c.sinks else 0), 1e-300)
                out.append(np.einsum("hgk,hkd->hgd", p / total[..., None], v))
        return np.array(out).reshape(-1, c.kv_heads, c.group, c.head_dim)

    def attend(self) -> np.ndarray:
        c = self.config
        options = {"window": c.window, "softcap": c.softcap, "sinks": self.sinks, "decode_only": c.decode_only}
        options["first_page"] = np.int32(c.first_page)
        arrays = (self.q, self.pages, self.tables, self.q_start, self.kv_len, np.int32(c.num_decodes))
        out = interpreted(tpu.paged_attention, *arrays, scale=c.head_dim**-0.5, **options)
        assert out.dtype == self.q.dtype
        return np.asarray(out, np.float64)

    def write_and_attend(self, skipped: int | None = None) -> tuple[np.ndarray, KVPages, KVPages]:
        """The result where each row's new tokens are not in the pages before; the pages after, and as they should be
        but for the rounding of codes. `skipped`: a row whose tokens are not kept."""
        c = self.config
        kept = np.concatenate([np.full(new, row != skipped) for row, (new, _) in enumerate(c.lengths)])
        kept = np.pad(kept, (0, c.tokens - len(kept)))
        kv = np.zeros((c.tokens, 2, c.kv_heads, c.head_dim))
        slots = np.full(c.tokens, -1, np.int32)
        for row, (new, cached) in enumerate(c.lengths):
            at = slice(self.q_start[row], self.q_start[row] + new)
            position = np.arange(cached - new, cached)
            kv[at] = np.moveaxis(self.kv[row][:, :, cached - new :], 2, 0)
            slots[at] = self.tables[row, position // c.page_size] * c.page_size + position % c.page_size
        where = c.first_page + slots[kept] // c.page_size, slice(None), slice(None), slots[kept] % c.page_size
        before = KVPages(*(None if x is None else np.array(x) for x in self.pages))
        before.data[where] = 99 if c.kv_dtype == np.int8 else np.nan
        if c.has_scale:
            before.scale[where] = np.nan
        k, v = np.moveaxis(kv.astype(c.q_dtype), 1, 0)
        rows = (self.tables, self.q_start, self.kv_len, np.int32(c.num_decodes))
        options = {"window": c.window, "softcap": c.softcap, "sinks": self.sinks, "decode_only": c.decode_only}
        arrays = (self.q, k, v, jax.tree.map(jnp.asarray, before), np.where(kept, slots, -1).astype(np.int32), *rows)
        out, after = interpreted(
            tpu.write_and_attend, *arrays, scale=c.head_dim**-0.5, first_page=np.int32(c.first_page), **options
        )
        return np.asarray(out, np.float64), after, self.pages


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_attention_equals_float64(config, monkeypatch):
    monkeypatch.setattr(tpu_plan, "TILE", 16)  # several tiles, tiles of several rows, several blocks
    monkeypatch.setattr(tpu_plan, "BLOCK", 256)
    tpu.paged_attention.clear_cache()
    batch = Batch(config, seed=len(str(config)))
    out = batch.attend()
    expected = batch.expected()
    assert np.isfinite(out).all()
    tolerance = 2e-5 if config.q_dtype == config.kv_dtype == np.float32 else 2e-2
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(out[: len(expected)] / scale, expected / scale, atol=tolerance)


WRITING = [*CONFIGS[:-1], Config(head_dim=128, kv_dtype=ml_dtypes.bfloat16, q_dtype=ml_dtypes.bfloat16, width=70,
                                 tokens=6, lengths=((1, 1), (1, 17), (1, 256), (1, 513), (1, 1024), (1, 700)),
                                 num_decodes=6, kv_heads=2),
           Config(head_dim=128, page_size=128, kv_dtype=np.int8, has_scale=True, width=5, tokens=5, kv_heads=2,
                  lengths=((1, 1), (1, 128), (1, 129), (1, 600), (0, 0)), num_decodes=4, first_page=3),
           Config(head_dim=128, page_size=128, kv_dtype=ml_dtypes.float8_e4m3fn, has_scale=True, width=5, tokens=3,
                  lengths=((1, 260), (1, 500), (1, 150)), num_decodes=3, window=130)]  # fmt: skip


@pytest.mark.parametrize("skipped", [None, 0])
@pytest.mark.parametrize("config", WRITING, ids=str)
def test_write_and_attend_equals_float64(config, skipped, monkeypatch):
    """What decodes write is seen by themselves, lands in their page and nowhere else, and is neither read nor
    overwritten while it travels; a row that is not kept leaves the pages alone."""
    if skipped is not None and (config.num_decodes < 2 or config.head_dim not in (64, 128)):
        pytest.skip("rows that are not kept are tested with decodes of some of the configurations")
    monkeypatch.setattr(tpu_plan, "TILE", 16)
    monkeypatch.setattr(tpu_plan, "BLOCK", 256)
    tpu.write_and_attend.clear_cache()
    batch = Batch(config, seed=len(str(config)))
    out, after, pages = batch.write_and_attend(skipped)
    expected = batch.expected()
    first = 0 if skipped is None else int(batch.q_start[skipped + 1])
    assert np.isfinite(out[first:]).all()
    tolerance = 2e-5 if config.q_dtype == config.kv_dtype == np.float32 else 2e-2
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(out[first : len(expected)] / scale, expected[first:] / scale, atol=tolerance)
    places = np.zeros(pages.data.shape[:1] + pages.data.shape[3:4], bool)  # of new tokens
    for row, (new, cached) in enumerate(config.lengths):
        position = np.arange(cached - new, cached)
        if row != skipped:
            page = config.first_page + batch.tables[row, position // config.page_size]
            places[page, position % config.page_size] = True
    untouched = ~places
    if skipped is not None:  # whatever was there
        position = config.lengths[skipped][1] - 1
        page = config.first_page + batch.tables[skipped, position // config.page_size]
        untouched[page, position % config.page_size] = False
    for found, exact in zip(after[:2], pages[:2], strict=True):
        if found is None:
            continue
        found, exact = (np.moveaxis(np.asarray(x), 3, 1) for x in (found, exact))
        assert found[untouched].tobytes() == exact[untouched].tobytes(), "what nobody wrote to has changed"
    found, exact = (
        np.moveaxis(np.asarray(x.data, np.float64) * (np.asarray(x.scale)[..., None] if config.has_scale else 1), 3, 1)
        for x in (after, pages)
    )
    found = found[places][..., : config.head_dim]
    exact = exact[places][..., : config.head_dim]
    peak = np.abs(exact).max(-1, keepdims=True)
    step = {1: 0.51 / 127 if config.kv_dtype == np.int8 else 2**-4, 2: 0, 4: 0}[np.dtype(config.kv_dtype).itemsize]
    assert (np.abs(found - exact) <= step * peak).all()


WRITES = [
    (np.float32, 16, 80, 80, False),
    (ml_dtypes.bfloat16, 16, 64, 128, False),
    (np.int8, 128, 64, 64, True),
    (ml_dtypes.float8_e4m3fn, 128, 128, 128, True),
]


@pytest.mark.parametrize("chunk", [8, 128])
@pytest.mark.parametrize(("dtype", "page_size", "head_dim", "page_dim", "has_scale"), WRITES)
def test_write_changes_the_slots_and_nothing_else(dtype, page_size, head_dim, page_dim, has_scale, chunk, monkeypatch):
    """A prompt across a page border, one of several tiles, decodes out of order, two tokens in one tile far apart,
    padding between them. In small chunks: groups that wait for their place, and tiles that two chunks share."""
    for name, value in {"CHUNK": chunk, "RING": 3, "AHEAD": 2}.items():
        monkeypatch.setattr(kv_write_tpu, name, value)
    kv_write_tpu.write_kv.clear_cache()
    rng = np.random.default_rng(page_size)
    slots = [4 * page_size - 3 + i for i in range(7)]
    slots += [-1, 17 * page_size + 1, 2 * page_size, -1, 16 * page_size - 1, 17 * page_size, -1, 2 * page_size + 15]
    slots += [(17 + i) * page_size + 3 for i in range(7)] + [0, -1]
    slots += [5 * page_size + 5 + i for i in range(75)]
    slots = np.array(slots, np.int32)
    old = rng.standard_normal((26, 2, 2, page_size, page_dim)).astype(dtype)
    old_scale = rng.uniform(1, 2, old.shape[:-1]).astype(np.float32) if has_scale else None
    kv = rng.standard_normal((2, len(slots), 2, head_dim)).astype(np.float32)
    kv[0, 0] = 0
    pages = KVPages(jnp.asarray(old), old_scale if old_scale is None else jnp.asarray(old_scale))
    data, scale, _ = interpreted(kv_write_tpu.write_kv, pages, kv[0], kv[1], slots, np.int32(1))

    assert data.dtype == dtype
    data = np.array(data, np.float64)
    old = old.astype(np.float64)
    real = slots >= 0
    page = 1 + slots[real] // page_size
    offset = slots[real] % page_size
    new = kv[:, real].transpose(1, 0, 2, 3)
    written = data[page, :, :, offset]
    if has_scale:
        scale = np.array(scale)
        largest = 127 if dtype == np.int8 else 448
        peak = np.abs(new).max(-1)
        factor = scale[page, :, :, offset]
        np.testing.assert_allclose(factor, np.where(peak > 0, peak / largest, 1), rtol=1e-6)
        error = 0.501 if dtype == np.int8 else 16.1
        assert (np.abs(written / largest - new / factor[..., None] / largest).max()) <= error / largest
        scale[page, :, :, offset] = old_scale[page, :, :, offset]
        np.testing.assert_array_equal(scale, old_scale)
    else:
        np.testing.assert_array_equal(written[..., :head_dim], new.astype(dtype))
        assert not written[..., head_dim:].any()
    data[page, :, :, offset] = old[page, :, :, offset]
    np.testing.assert_array_equal(data, old)


def test_write_of_padding_only_changes_nothing():
    old = np.arange(2 * 2 * 16 * 64, dtype=np.float32).reshape(2, 2, 1, 16, 64)
    new = np.ones((3, 1, 64), np.float32)
    data, *_ = interpreted(kv_write_tpu.write_kv, KVPages(jnp.asarray(old)), new, new, np.full(3, -1, np.int32))
    np.testing.assert_array_equal(np.asarray(data), old)


PROBLEM = AttentionProblem(np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.bfloat16), 8, 4, 128, 16)
REFUSED = [
    (Device("gpu", "NVIDIA H200", (9, 0)), {}, "TPU"),
    (V5E, {"q_dtype": np.dtype(np.float16)}, "float16"),
    (V5E, {"kv_dtype": np.dtype(np.float16)}, "float16"),
    (V5E, {"page_size": 24}, "24"),
    (V5E, {"kv_dtype": np.dtype(np.int8)}, "at least 32"),
    (V5E, {"kv_dtype": np.dtype(np.int8), "page_size": 32, "has_scale": True}, "at least 128, .* take --page-size 128"),
    (Device("tpu", "TPU v4"), {"kv_heads": 32, "page_size": 256, "head_dim": 256}, "VMEM"),
]


@pytest.mark.parametrize(("device", "change", "reason"), REFUSED)
def test_refusals_name_the_reason(device, change, reason):
    assert re.search(reason, tpu.why_not(device, replace(PROBLEM, **change)))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_usual_shapes_are_accepted(head_dim, page_size, group):
    problem = replace(PROBLEM, head_dim=head_dim, page_size=page_size, group=group)
    for kind in ("TPU v5 lite", "TPU v6 lite", "TPU v5", "TPU7x"):
        assert tpu.why_not(Device("tpu", kind), problem) is None


def test_tables_that_do_not_fit_smem_are_refused():
    """A row of a million pages; one of 1,024 is taken for any number of rows."""

    def attend(rows, width):
        def shape(*size, dtype=jnp.int32):
            return jax.ShapeDtypeStruct(size, dtype)

        arrays = (shape(8, 1, 4, 64, dtype=jnp.float32), KVPages(shape(9, 2, 1, 16, 64, dtype=jnp.float32)))
        rest = shape(rows, width), shape(rows + 1), shape(rows), shape()
        jax.eval_shape(lambda *a: tpu.paged_attention(*a, scale=1.0), *arrays, *rest)

    with pytest.raises(ValueError, match="SMEM"):
        attend(1, 10**6)
    attend(2048, 1024)


def test_caches_may_have_more_elements_than_32_bits_count():
    """A copy of a part of a tile from or to one of the cache's arrays would raise."""

    def shape(*size, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(size, dtype)

    rows = 4
    count = (1 << 32) // (2 * 8 * 128 * 128) + 1
    pages = KVPages(shape(count, 2, 8, 128, 128, dtype=jnp.int8), shape(count, 2, 8, 128, dtype=jnp.float32))
    q = shape(64, 8, 4, 128, dtype=jnp.bfloat16)
    kv = shape(64, 8, 128, dtype=jnp.bfloat16)
    rest = shape(64), shape(rows, 8), shape(rows + 1), shape(rows), shape()
    jax.eval_shape(lambda *a: tpu.write_and_attend(*a, scale=1.0), q, kv, kv, pages, *rest)


def compile_for(target: str, config: Config, pages: int = 4001, *, fused: bool = False):
    """One layer, the write and the attention, `fused` or not, heads split over the devices of a machine that is not
    here."""
    mesh = mesh_of(target)
    c = config
    rows = config.rows
    heads = c.kv_heads * mesh.size

    def array(size, dtype, axis=None):
        spec = P(*(None,) * axis, "tensor") if axis is not None else P()
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))

    dim = c.page_dim or c.head_dim
    cache = KVPages(
        array((pages, 2, heads * c.parts, c.page_size, dim // c.parts), c.kv_dtype, 2),
        array((pages, 2, heads, c.page_size), jnp.float32, 2) if c.has_scale else None,
    )
    q = array((c.tokens, heads, c.group, c.head_dim), c.q_dtype, 1)
    kv = array((c.tokens, heads, c.head_dim), c.q_dtype, 1)
    sinks = array((heads, c.group), jnp.float32, 0) if c.sinks else None
    integers = [array(size, jnp.int32) for size in ((c.tokens,), (rows, c.width), (rows + 1,), (rows,), (), ())]

    def layer(cache, q, k, v, sinks, slots, *rest):
        first_page = rest[-1]
        options = {"window": c.window, "softcap": c.softcap, "sinks": sinks, "decode_only": c.decode_only}
        options["first_page"] = first_page
        rest = rest[:-1]
        if fused:
            return tpu.write_and_attend(q, k, v, cache, slots, *rest, scale=0.1, **options)
        cache = tpu.write_kv(cache, k, v, slots, first_page)
        return tpu.paged_attention(q, cache, *rest, scale=0.1, **options), cache

    by_head = P(None, "tensor")
    pages_spec = P(None, None, "tensor")
    inputs = (pages_spec, by_head, by_head, by_head, P("tensor"), *(P(),) * 6)
    split = jax.shard_map(layer, mesh=mesh, in_specs=inputs, out_specs=(by_head, pages_spec), check_vma=False)
    with jax.set_mesh(mesh):
        return jax.jit(split, donate_argnums=0).lower(cache, q, kv, kv, sinks, *integers).compile()


BF16 = ml_dtypes.bfloat16
MIXED = {"q_dtype": BF16, "kv_heads": 2, "tokens": 32}
MANY = {"q_dtype": BF16, "kv_heads": 2, "tokens": 256, "width": 8192, "rows": 256}
CODES = {"page_size": 128, "has_scale": True, "lengths": ((1, 9),) * 32, "num_decodes": 32}
COMPILED = [
    ("v5e-1", Config(head_dim=128, kv_dtype=np.int8, **CODES, **MIXED)),
    ("v6e-1", Config(head_dim=256, kv_dtype=ml_dtypes.float8_e4m3fn, **CODES, **MIXED)),
    ("v5e-8", Config(head_dim=128, kv_dtype=ml_dtypes.float8_e4m3fn, **CODES, **MIXED)),
    ("v5e-1", Config(head_dim=64, page_dim=128, group=7, kv_dtype=BF16, **MIXED)),
    (
        "v6e-4",
        Config(head_dim=128, page_size=128, kv_dtype=np.int8, has_scale=True, window=99, sinks=True, **MIXED),
    ),
    ("v6e-4", Config(head_dim=512, parts=4, group=8, page_size=128, kv_dtype=BF16, **MIXED)),
    ("v6e-1", Config(head_dim=256, page_size=64, kv_heads=1, softcap=9.0, lengths=DECODES, num_decodes=4)),
    # 256 rows of 131,072 tokens in pages of 16
    ("v5e-4", Config(head_dim=128, kv_dtype=BF16, **MANY)),
    ("v6e-4", Config(head_dim=128, kv_dtype=BF16, **MANY, lengths=((1, 9),) * 256, num_decodes=256)),
    ("v5p-1", Config(head_dim=128, kv_dtype=BF16, page_size=128, **MIXED)),
    ("tpu7x-1", Config(head_dim=128, kv_dtype=ml_dtypes.float8_e4m3fn, page_size=128, has_scale=True, **MIXED)),
]


@pytest.fixture
def no_disk_cache():
    """Without the cache on disk, which cannot keep what is compiled for a machine that is not here."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.usefixtures("no_disk_cache")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("target", "config"), COMPILED, ids=str)
def test_compiles_ahead_of_time_with_the_cache_in_place(target, config, fused):
    pages = 4001  # no other dimension is
    compiled = compile_for(target, config, pages, fused=fused)
    stats = compiled.memory_analysis()
    text = compiled.as_text()
    page_bytes = 2 * config.kv_heads * config.page_size * (config.page_dim or config.head_dim)
    cache_bytes = pages * page_bytes * np.dtype(config.kv_dtype).itemsize
    assert stats.alias_size_in_bytes >= cache_bytes
    assert stats.temp_size_in_bytes < cache_bytes / 20
    launches = text.count('custom_call_target="tpu_custom_call"')
    write = 2 if config.has_scale else 1
    assert launches == (1 if config.decode_only else 2) + (0 if fused and config.decode_only else write)
    assert not re.search(rf"\[{pages},[^ ]* (copy|copy-start|transpose|fusion)\(", text)


WIDEST = 78000  # pages in a table that fits by a hair


@pytest.mark.usefixtures("no_disk_cache")
def test_the_estimate_of_smem_is_the_compilers(monkeypatch):
    """The widest tables that the plan takes compile; of wider ones the compiler counts what the plan does, and less
    than is kept in reserve beside it."""
    config = Config(
        head_dim=128, kv_dtype=BF16, q_dtype=BF16, tokens=16, width=WIDEST, lengths=((1, 9),) * 16, num_decodes=16
    )
    compile_for("v5e-1", config)
    with pytest.raises(ValueError, match="SMEM"):
        compile_for("v5e-1", replace(config, width=83000))
    monkeypatch.setattr(tpu_plan, "SMEM_RESERVED", -(1 << 20))
    with pytest.raises(jax.errors.JaxRuntimeError, match="smem") as refused:
        compile_for("v5e-1", replace(config, width=87040))
    beyond = re.search(r"Exceeded smem capacity by ([\d.]+)([BK])", str(refused.value))
    used = (1 << 20) + float(beyond[1]) * {"B": 1, "K": 1024}[beyond[2]]
    problem = AttentionProblem(np.dtype(BF16), np.dtype(BF16), 1, 4, 128, 16)
    plan = tpu_plan.make_plan(problem, 1, 87040, scale=1.0, window=None, softcap=None)
    assert plan.smem_bytes(16, 16) <= used <= plan.smem_bytes(16, 16) + SMEM_RESERVED
