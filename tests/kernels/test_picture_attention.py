"""Attention whose tokens may see tokens behind them, against float64 NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_paged_attention import Config, make_batch

from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.types import KVPages

ROWS = [(1, 40), (70, 200), (20, 20), (5, 90)]  # new tokens, cached tokens with the new ones
PICTURES = [[], [(131, 140), (150, 190)], [(0, 20)], [(85, 89)]]  # of each row, by the positions of their tokens
CONFIGS = [
    Config(),
    Config(window=24, softcap=2.0, sinks=True, first_page=3),
    Config(page_size=8, max_pages=30, window=7),
]


def limits_of(config):
    limits = np.zeros(config.tokens, np.int32)
    at = 0
    for (new, length), pictures in zip(ROWS, PICTURES, strict=True):
        for begin, end in pictures:
            limits[at + begin - (length - new) : at + end - (length - new)] = end - 1
        at += new
    return limits


def gold(config, batch, limits):
    """One token at a time: it sees what the window shows up to its limit."""
    out = []
    for row, (new, length) in enumerate(ROWS):
        for position in range(length - new, length):
            seen = slice(0 if config.window is None else max(0, position + 1 - config.window), None)
            last = max(position, limits[len(out)]) + 1
            keys, values = (x[row][:last][seen] for x in (batch.keys, batch.values))
            scores = np.einsum("kgd,skd->kgs", batch.q[len(out)].astype(np.float64), keys) * config.head_dim**-0.5
            if config.softcap:
                scores = config.softcap * np.tanh(scores / config.softcap)
            weights = np.exp(scores)
            sinks = 0 if batch.sinks is None else np.exp(batch.sinks[..., None])
            out.append(np.einsum("kgs,skd->kgd", weights / (weights.sum(-1, keepdims=True) + sinks), values))
    return np.stack(out)


def arguments(config, batch):
    scale = None if batch.scale is None else jnp.asarray(batch.scale)
    rows = batch.tables, batch.q_start(config.rows), np.pad(batch.kv_len, (0, config.rows - len(ROWS)))
    positional = jnp.asarray(batch.q), KVPages(jnp.asarray(batch.pages), scale), *map(jnp.asarray, rows)
    options = {"window": config.window, "softcap": config.softcap, "first_page": config.first_page}
    options["sinks"] = None if batch.sinks is None else jnp.asarray(batch.sinks)
    return (*positional, jnp.int32(batch.num_decodes)), options | {"scale": config.head_dim**-0.5}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tokens_of_pictures_see_each_other(config):
    batch = make_batch(config, ROWS, 0)
    limits = limits_of(config)
    positional, options = arguments(config, batch)
    expected = gold(config, batch, limits)
    out = Ops().seeing(jnp.asarray(limits)).paged_attention(*positional, **options)
    np.testing.assert_allclose(out[: len(expected)], expected, rtol=0, atol=2e-5)


def test_steps_without_pictures_run_the_usual_kernel():
    config = CONFIGS[0]
    positional, options = arguments(config, make_batch(config, ROWS, 0))
    calls = []

    def usual(*args, **options):
        jax.debug.callback(partial(calls.append, 1))
        return reference.paged_attention(*args, **options)

    ops = Ops(paged_attention=usual)
    for limits in (np.zeros(config.tokens, np.int32), limits_of(config)):
        attend = partial(ops.seeing(jnp.asarray(limits)).paged_attention, **options)
        jax.block_until_ready(jax.jit(attend)(*positional))
    jax.effects_barrier()
    assert len(calls) == 1


def test_heads_in_parts():
    """The cache of a TPU may have several heads of 128 numbers for each head of a layer."""
    config = Config(head_dim=256, kv_heads=2)
    batch = make_batch(config, ROWS, 0)
    limits = jnp.asarray(limits_of(config))
    (q, pages, *rows), options = arguments(config, batch)
    whole = pages.data
    parts = whole.reshape(*whole.shape[:4], 2, 128).transpose(0, 1, 2, 4, 3, 5)
    split = KVPages(parts.reshape(len(whole), 2, 4, config.page_size, 128))
    expected = reference.paged_attention(q, pages, *rows, limits=limits, **options)
    found = reference.paged_attention(q, split, *rows, limits=limits, **options)
    count = sum(new for new, _ in ROWS)
    np.testing.assert_allclose(found[:count], expected[:count], rtol=1e-5, atol=1e-6)
