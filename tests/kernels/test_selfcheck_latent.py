"""The checks that a kernel for latent attention passes before a device may use it: right ones do, and each kind of
error is seen."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from latent_batches import DTYPES
from test_selfcheck import findings, is_right

from jaxserve.pallas_kernels.latent_attention import cpu, reference
from jaxserve.pallas_kernels.registry import Device, LatentProblem
from jaxserve.pallas_kernels.selfcheck import tolerance
from jaxserve.pallas_kernels.selfcheck_cases import LAYER, Rows
from jaxserve.pallas_kernels.selfcheck_latent import (
    STARTUP,
    check_latent,
    check_write_latent,
    make_latent_batch,
)

F32, BF16, F16, INT8, FP8 = (np.dtype(DTYPES[t]) for t in ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn"))
SMALL = LatentProblem(BF16, BF16, 4, 64, 16, 16)
CODES = replace(SMALL, kv_dtype=INT8, has_scale=True)
FEW = Rows((300, 1, 16, 65), ((41, 90), (9, 0), (1, 200)))


def test_the_batch_has_what_breaks_kernels():
    q_start = np.cumsum([0, *(new for new, _ in STARTUP.lengths)])
    assert set(q_start[len(STARTUP.decodes) : -1] % 8) == set(range(8)), "prompts begin at every offset"
    batch = make_latent_batch(SMALL, STARTUP)
    assert np.isnan(batch.pages[: LAYER + 1].astype(np.float32)).all(), "other layers, and the page that nobody owns"


@pytest.mark.parametrize("problem", [
    SMALL, CODES, replace(CODES, kv_dtype=FP8, width=96), replace(SMALL, q_dtype=F16, kv_dtype=F16, page_size=64),
    replace(SMALL, q_dtype=F32, kv_dtype=F32, rank=512, rope=64, heads=16),
])  # fmt: skip
def test_right_kernels_pass(problem):
    rows = STARTUP if problem.rank == 64 else FEW
    for backend in (reference, cpu):
        if backend.why_not(Device("cpu", "cpu"), problem) is None:
            worst = is_right(check_latent, backend.latent_attention, problem, rows=rows, repeats=1)
            assert 0 < worst < 0.75 * tolerance(problem.q_dtype)
            is_right(check_write_latent, backend.write_latent, problem, repeats=1)


def attend_with(change, q, pages, tables, q_start, kv_len, num_decodes, **options):
    """Plain attention of arguments that `change` has changed."""
    names = ("q", "pages", "tables", "q_start", "kv_len", "num_decodes")
    arguments = dict(zip(names, (q, pages, tables, q_start, kv_len, num_decodes), strict=True)) | options
    arguments |= change(arguments)
    positional = [arguments.pop(name) for name in names]
    return reference.latent_attention(*positional, **arguments)


def without_page(row, page, a):
    table = a["tables"][row]
    shorter = jnp.concatenate([table[:page], table[page + 1 :], table[:1]])
    return {"tables": a["tables"].at[row].set(shorter), "kv_len": a["kv_len"].at[row].add(-a["pages"].page_size)}


def one_scale(a):
    scale = a["pages"].scale
    return {"pages": a["pages"]._replace(scale=scale.at[:, 1].set(scale[:, 0]))}


CHANGES = {
    "a page of a decode row": (SMALL, partial(without_page, 0, 40)),
    "a page of a prompt's cached tokens": (SMALL, partial(without_page, 12, 3)),
    "the newest token of the longest row": (SMALL, lambda a: {"kv_len": a["kv_len"].at[0].add(-1)}),
    "a scale off by 2%": (SMALL, lambda a: {"scale": 1.02 * a["scale"]}),
    "no rotated keys": (SMALL, lambda a: {"q": a["q"].at[..., 64:].set(0)}),
    "the latent's scale for the rotated key": (CODES, one_scale),
    "another layer": (SMALL, lambda a: {"first_page": a["first_page"] - 1}),
    "a key beyond the row": (SMALL, lambda a: {"kv_len": jnp.where(a["kv_len"] == 17, 18, a["kv_len"])}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_attention_is_seen(name):
    problem, change = CHANGES[name]
    _, wrong = findings(check_latent, partial(attend_with, change), problem, repeats=0)
    assert wrong
    assert all(f.error > 1.1 * f.allowed for f in wrong)


def shifted(pages, rows, slots, first_page, *, rank, by):
    return reference.write_latent(pages, rows, jnp.where(slots < 0, slots, slots + by), first_page, rank=rank)


def wrong_rank(pages, rows, slots, first_page, *, rank):
    return reference.write_latent(pages, rows, slots, first_page, rank=rank - 1)


def padding_written(pages, rows, slots, first_page, *, rank):
    return reference.write_latent(pages, rows, jnp.where(slots < 0, 3 * pages.page_size, slots), first_page, rank=rank)


@pytest.mark.parametrize("problem", [SMALL, CODES])
@pytest.mark.parametrize(
    "write", [partial(shifted, by=1), padding_written, wrong_rank], ids=["place", "padding", "rank"]
)
def test_wrong_writes_are_seen(problem, write):
    if write is wrong_rank and not problem.has_scale:
        pytest.skip("without scales the rank does not matter")
    assert findings(check_write_latent, write, problem, repeats=0)[1]
