"""What only the CPU's attention does: pages of every type to the bit, sizes that fill no registers, the write, other
machines' instructions. `test_paged_attention.py` compares it with float64 on ragged batches."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.pallas_kernels import cpu, cpu_build, kv_write
from jaxserve.pallas_kernels.paged_attention import cpu as attention
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.selfcheck import check_attention
from jaxserve.pallas_kernels.selfcheck_cases import Rows
from jaxserve.pallas_kernels.types import KVPages

pytestmark = pytest.mark.skipif(not cpu.available(cpu_build.ATTENTION), reason="no C++ compiler")

FLOATS = (np.float32, ml_dtypes.bfloat16, np.float16)
CODES = (np.int8, ml_dtypes.float8_e4m3fn)
ROOT = Path(__file__).parents[2]


def every_value(dtype):
    """All finite values of a type of one or two bytes, to a multiple of 64, but float32's subnormal ones: XLA's threads
    take these for 0."""
    bits = np.arange(2 ** (8 * np.dtype(dtype).itemsize), dtype=f"u{np.dtype(dtype).itemsize}")
    values = bits.view(dtype)
    with np.errstate(invalid="ignore"):
        wide = np.abs(values.astype(np.float64))
    values = values[np.isfinite(wide) & ((wide == 0) | (wide >= 2.0**-126))]
    return np.append(values, np.zeros(-len(values) % 64, dtype)).astype(dtype)


def call(q, pages, tokens, **options):
    """Attention of one row, whose pages are all there are, in order."""
    arguments = jnp.arange(len(pages.data), dtype=jnp.int32)[None], jnp.array([0, len(q)]), jnp.array([tokens])
    return attention.paged_attention(q, pages, *arguments, jnp.int32(len(q) == 1), **{"scale": 1.0, **options})


@pytest.mark.parametrize("dtype", FLOATS[1:] + CODES)
@pytest.mark.parametrize("group", [1, 12], ids=["few", "many"])
def test_every_stored_value_widens_to_the_bit(dtype, group):
    """A row of one token sees its own value alone, whatever the scores are."""
    values = every_value(dtype).reshape(-1, 64)
    data = np.zeros((1, 2, len(values), 1, 64), dtype)
    data[0, 1, :, 0] = values
    scale = np.full(data.shape[:-1], 0.37, np.float32) if dtype in CODES else None
    out = call(jnp.zeros((1, len(values), group, 64)), KVPages(jnp.asarray(data), scale), 1)
    expected = values.astype(np.float32) * np.float32(1 if scale is None else 0.37)
    np.testing.assert_array_equal(out[0], np.broadcast_to(expected[:, None], out.shape[1:]))


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_results_are_rounded_to_the_nearest(dtype):
    rng = np.random.default_rng(0)
    values = np.float32(10) ** rng.uniform(-8, 4.5, (64, 64)).astype(np.float32) * rng.choice([-1, 1], (64, 64))
    values[0] = every_value(dtype)[:64]  # the smallest numbers, and ties between them
    values[1] = values[0] * 1.5
    values[2] = 1 + np.arange(64) * 2.0**-12
    data = np.zeros((1, 2, 64, 1, 64), np.float32)
    data[0, 1, :, 0] = values
    out = call(jnp.zeros((1, 64, 1, 64), dtype), KVPages(jnp.asarray(data)), 1)
    np.testing.assert_array_equal(np.asarray(out)[0, :, 0], values.astype(np.float32).astype(dtype))


@pytest.mark.parametrize("kv_dtype", FLOATS + CODES)
@pytest.mark.parametrize("q_dtype", FLOATS)
def test_every_pair_of_types(q_dtype, kv_dtype):
    for head_dim, group, softcap in ((64, 2, False), (40, 3, True), (13, 1, False), (80, 11, True)):
        types = np.dtype(q_dtype), np.dtype(kv_dtype)
        problem = AttentionProblem(*types, 2, group, head_dim, 16, kv_dtype in CODES, softcap, softcap)
        assert attention.why_not(Device("cpu", "cpu"), problem) is None
        rows = Rows((130, 1, 17), ((41, 100), (9, 0)))
        for finding in check_attention(attention.paged_attention, problem, rows=rows, repeats=1):
            assert finding.right, (head_dim, group, str(finding))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 9, 10, 16])
@pytest.mark.parametrize("tokens", [1, 15, 64, 65, 200])
def test_groups_on_both_sides_of_every_tile(group, tokens):
    rng = np.random.default_rng(group)
    data = rng.standard_normal((13, 2, 2, 16, 64)).astype(np.float32)
    q = rng.standard_normal((1, 2, group, 64)).astype(np.float32)
    out = call(jnp.asarray(q), KVPages(jnp.asarray(data)), tokens, scale=0.125, window=150)
    keys, values = np.moveaxis(data, 3, 1).reshape(-1, 2, 2, 64)[max(0, tokens - 150) : tokens].swapaxes(0, 1)
    scores = np.einsum("kgd,skd->kgs", q[0].astype(np.float64), keys) * 0.125
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("kgs,skd->kgd", weights / weights.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=2e-6)


def test_a_query_s_result_does_not_depend_on_how_its_prompt_was_cut():
    rng = np.random.default_rng(1)
    pages = KVPages(jnp.asarray(rng.standard_normal((20, 2, 2, 16, 64)), jnp.float32))
    q = jnp.asarray(rng.standard_normal((300, 2, 4, 64)), jnp.float32)
    whole = np.asarray(call(q, pages, 300, window=100))
    for first, end in ((0, 77), (77, 300), (150, 166)):
        np.testing.assert_array_equal(call(q[first:end], pages, end, window=100), whole[first:end])


def test_it_is_the_kernel_that_runs_and_no_table_is_copied():
    pages = KVPages(jnp.zeros((40, 2, 2, 16, 64), jnp.int8), jnp.ones((40, 2, 2, 16)))

    def step(pages, k, tables, first_page):
        pages = attention.write_kv(pages, k, k, jnp.arange(4), first_page)
        rest = tables, jnp.arange(5), jnp.full(4, 9), jnp.int32(4)
        return attention.paged_attention(k[:, :, None], pages, *rest, scale=1.0, first_page=first_page), pages

    arguments = pages, jnp.ones((4, 2, 64)), jnp.zeros((4, 7), jnp.int32), jnp.int32(3)
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    text = compiled.as_text()
    assert "jaxserve_paged_attention" in text
    assert "jaxserve_write_kv" in text
    assert "s32[4,7]{1,0} add" not in text
    assert "s8[40,2,2,16,64]{4,3,2,1,0} copy" not in text
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(pages))


# The write


@pytest.mark.parametrize("kv_dtype", FLOATS + CODES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("head_dim", "page_dim"), [(64, 64), (40, 64), (7, 7)])
def test_the_write_is_that_of_plain_xla(dtype, kv_dtype, head_dim, page_dim):
    rng = np.random.default_rng(head_dim)
    data = jnp.asarray(rng.standard_normal((9, 2, 3, 8, page_dim)) * 9, kv_dtype)
    scale = jnp.ones(data.shape[:-1]) if kv_dtype in CODES else None
    kv = np.float32(10) ** rng.uniform(-6, 3, (2, 500, 3, head_dim)) * rng.choice([-1, 1], (2, 500, 3, head_dim))
    kv[0, 1, 1] = 0  # a scale of 1
    kv[0, 2, 1] = 1e-34  # the same
    kv[1, 2] = 1e-3 * (1 + np.arange(head_dim) / 2)  # ties
    k = jnp.asarray(kv[0], dtype)
    v = jnp.asarray(kv[1], dtype)
    slots = jnp.asarray([*(8 + rng.permutation(40)), *[-1] * 460], jnp.int32)
    arguments = KVPages(data, scale), k, v, slots, jnp.int32(2)
    found = jax.jit(attention.write_kv)(*arguments)
    expected = jax.jit(kv_write.write_kv)(*arguments)
    for mine, plain, before in zip(found[:2], expected[:2], (data, scale), strict=True):
        if before is None:
            assert mine is None
            continue
        assert mine.dtype == before.dtype
        theirs = np.asarray(plain).copy()
        theirs[2, :, :, 0] = np.asarray(before)[2, :, :, 0]  # where plain XLA writes padding
        if scale is None:
            np.testing.assert_array_equal(np.asarray(mine), theirs)
            continue
        # XLA divides by multiplying: scales differ by a unit in the last place, and then a code in thousands does.
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=0.126, atol=1)
        assert (np.asarray(mine) != theirs).mean() < (1e-3 if mine is found.data else 1)
        if mine is found.scale:
            np.testing.assert_allclose(np.asarray(mine), theirs, rtol=2e-7)


# Other machines


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64")
@pytest.mark.parametrize("machine", ["x86-64-v3", "x86-64-v2"], ids=["avx2", "sse4.2"])
def test_with_fewer_instructions(machine, tmp_path):
    """All tests of the CPU's kernels but this one, in a process whose kernels are built for an older processor."""
    if "JAXSERVE_CXXFLAGS" in os.environ:
        pytest.skip("is itself such a process")
    files = [
        f"tests/kernels/{name}.py"
        for name in (
            "test_cpu_attention",
            "test_paged_attention",
            "test_latent_attention",
            "test_cpu_ops",
            "test_cpu_panels",
            "test_lora",
        )
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not reference", *files]
    env = os.environ | {"JAXSERVE_CXXFLAGS": f"-march={machine}", "JAXSERVE_CACHE": str(tmp_path)}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
    assert list(tmp_path.glob("cpu_attention-*.so")), "built for that machine"


def zig():
    """A compiler for other machines: python -m ziglang c++, from the package ziglang."""
    python = os.environ.get("JAXSERVE_ZIG_PYTHON", sys.executable)
    return [python, "-m", "ziglang", "c++"]


@pytest.mark.slow
@pytest.mark.parametrize("name", cpu_build.NAMES)
def test_compiles_for_arm(name, tmp_path):
    if subprocess.run([*zig(), "--version"], capture_output=True).returncode:
        pytest.skip("no ziglang (JAXSERVE_ZIG_PYTHON)")
    flags = [flag for flag in cpu_build.FLAGS if not flag.startswith(("-march", "-mcpu"))]
    source = cpu_build.FOLDER / f"{name}.cc"
    library = tmp_path / "kernels.so"
    command = [*zig(), "-target", "aarch64-linux-gnu", *flags, f"-I{jax.ffi.include_dir()}", str(source)]
    run = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int.from_bytes(library.read_bytes()[18:20], "little") == 183, "an ELF file for AArch64"


def test_the_reference_does_what_the_kernel_does_where_it_could_not_be_built(monkeypatch):
    monkeypatch.setattr(cpu, "available", lambda name=cpu_build.KERNELS: False)
    rng = np.random.default_rng(2)
    pages = KVPages(jnp.asarray(rng.standard_normal((4, 2, 2, 16, 64)), jnp.bfloat16))
    q = jnp.asarray(rng.standard_normal((20, 2, 4, 64)), jnp.bfloat16)
    rest = jnp.arange(4, dtype=jnp.int32)[None], jnp.array([0, 20]), jnp.array([50]), jnp.int32(0)
    options = {"scale": 0.1, "softcap": 4.0, "first_page": 0}
    expected = reference.paged_attention(q, pages, *rest, **options)
    np.testing.assert_array_equal(attention.paged_attention(q, pages, *rest, **options), expected)
