"""The Triton kernels for latent attention: interpreted against float64 NumPy, and compiled ahead of time. As in
`test_triton`, the interpreted tests run in a process of their own."""

import os
import re
import subprocess
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from latent_batches import DTYPES, Config, make_batch, random_rows

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import test_triton
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from test_triton import INTERPRET, compiled, interpreted

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.latent_attention import reference
from jaxserve.pallas_kernels.latent_attention import triton_gpu as latent
from jaxserve.pallas_kernels.registry import Device, LatentProblem
from jaxserve.pallas_kernels.types import LatentPages

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2.5e-2}
H200, ADA, A100 = (triton_compat.Target(*sizes) for sizes in ((90, 132), (89, 142), (80, 108)))


@compiled
def test_interpreted():
    """Runs this file's interpreted tests where Triton interprets."""
    test_triton.run_interpreted(__file__)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if INTERPRET:
        test_triton.repair_interpreter(monkeypatch)
        monkeypatch.setattr(triton_compat, "call", test_triton.interpret)
        monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 1))
        with jax.disable_jit(), np.errstate(over="ignore"):
            yield
    else:
        yield


SMALL = Config(rank=32, rope=16, heads=3, tokens=40, rows=5, max_pages=8)
CASES = {
    "decode": (SMALL, [(1, 1), (1, 16), (1, 33)], {"decode_only": True}),
    "decode, padding": (replace(SMALL, tokens=7), [(1, 65), (1, 48)], {"decode_only": True}),
    "decode, split": (replace(SMALL, page_size=128, first_page=2), [(1, 1000), (1, 3)], {"decode_only": True}),
    "mixed, split": (replace(SMALL, page_size=128), [(1, 800), (9, 300), (0, 0), (20, 20)], {}),
    "70 heads": (replace(SMALL, heads=70, tokens=9, kv_dtype="int8"), [(1, 70), (7, 90)], {}),
    "prompts": (SMALL, [(12, 100), (0, 0), (9, 9), (19, 40)], {}),
    "odd sizes, padded rows": (
        replace(SMALL, rank=24, rope=6, width=40, page_size=48, first_page=3), [(1, 49), (1, 200), (30, 97)], {},
    ),
    "bfloat16": (replace(SMALL, dtype="bfloat16", rank=64), [(1, 70), (30, 120)], {}),
    "float16, int8": (replace(SMALL, dtype="float16", kv_dtype="int8", first_page=1), [(1, 70), (30, 120)], {}),
    "bfloat16, float8": (
        replace(SMALL, dtype="bfloat16", kv_dtype="float8_e4m3fn", page_size=64), [(1, 70), (1, 300), (30, 120)], {},
    ),
    "DeepSeek's sizes": (replace(SMALL, rank=512, rope=64, heads=16, dtype="bfloat16"), [(1, 100), (4, 30)], {}),
}  # fmt: skip


def attend(batch, **options) -> np.ndarray:
    config = batch.config
    options |= {"scale": config.scale, "rank": config.rank, "first_page": jnp.int32(config.first_page)}
    out = latent.latent_attention(*batch.arguments(), **options)
    assert out.dtype == batch.q.dtype
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    return out


@interpreted
@pytest.mark.parametrize("target", [H200, ADA], ids=["9.0", "8.9"])
@pytest.mark.parametrize("name", CASES)
def test_attention(name, target, monkeypatch):
    config, rows, options = CASES[name]
    monkeypatch.setattr(triton_compat, "target", lambda: target._replace(cores=4 if "split" in name else 1))
    batch = make_batch(config, rows, len(name))
    batch.q[sum(batch.q_len) :] = np.nan  # padding
    out = attend(batch, **options)
    gold = batch.gold()
    np.testing.assert_allclose(out[: len(gold)], gold, rtol=0, atol=TOLERANCE[config.dtype])


@interpreted
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, page_size=8, heads=5)], ids=str)
def test_mixed_batches(config):
    rng = np.random.default_rng(config.page_size)
    for seed in range(4):
        batch = make_batch(config, random_rows(config, rng, (64, 32)), seed)
        gold = batch.gold()
        np.testing.assert_allclose(attend(batch)[: len(gold)], gold, rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["same", "int8", "float8_e4m3fn"])
def test_write(dtype, kv_dtype):
    rng = np.random.default_rng(1)
    rank = 20
    width = 40
    size = 16
    has_scale = kv_dtype != "same"
    data = rng.standard_normal((5, size, width)).astype(DTYPES[kv_dtype if has_scale else dtype])
    scale = rng.uniform(1, 2, (5, 2, size)).astype(np.float32) if has_scale else None
    rows = rng.standard_normal((6, 29)).astype(DTYPES[dtype])
    rows[:, rank:] *= 20
    rows[1] = 0
    slots = np.array([16, 63, 31, 32, -1, -1], np.int32)  # page borders, padding; in the pages from 1 on
    pages = LatentPages(jnp.asarray(data), None if scale is None else jnp.asarray(scale))
    found = latent.write_latent(pages, jnp.asarray(rows), slots, 1, rank=rank)
    expected = reference.write_latent(pages, jnp.asarray(rows[:4]), jnp.asarray(slots[:4]), 1, rank=rank)
    assert found.data.dtype == data.dtype
    np.testing.assert_array_equal(np.asarray(found.data, np.float32), np.asarray(expected.data, np.float32))
    if has_scale:
        np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-6)
        untouched = np.ones((5, size), bool)
        untouched[1 + slots[:4] // size, slots[:4] % size] = False
        np.testing.assert_array_equal(*(np.moveaxis(np.asarray(x), 1, 2)[untouched] for x in (found.scale, scale)))


# --- compiled ahead of time ---


def test_why_not():
    bf16, f32, int8, fp8 = (np.dtype(DTYPES[t]) for t in ("bfloat16", "float32", "int8", "float8_e4m3fn"))
    gpu = Device("gpu", "NVIDIA H200", (9, 0))
    old = Device("gpu", "NVIDIA A100", (8, 0))
    problem = LatentProblem(bf16, bf16, 128, 512, 64, 64)
    assert latent.why_not(gpu, problem) is None
    assert latent.why_not(old, replace(problem, kv_dtype=int8, has_scale=True)) is None
    assert "cpu" in latent.why_not(Device("cpu", "cpu"), problem)
    assert "8.0 or newer" in latent.why_not(Device("gpu", "T4", (7, 5)), problem)
    assert "float32" in latent.why_not(gpu, replace(problem, kv_dtype=f32))
    assert "scales" in latent.why_not(gpu, replace(problem, kv_dtype=int8))
    assert "8.9" in latent.why_not(old, replace(problem, kv_dtype=fp8, has_scale=True))
    assert "1024" in latent.why_not(gpu, replace(problem, rank=1024))


@pytest.fixture
def compile_for(monkeypatch, tmp_path):
    """Compiles a function for an H200, or with its kernels for another GPU; has Triton's own assembler assemble each
    kernel, and returns the compiled program with what the assembler said."""
    mesh = mesh_of("h200x1")
    monkeypatch.setattr("jax_triton.triton_lib._JAX_TRITON_DUMP_DIR", str(tmp_path))
    assembler = os.environ["TRITON_PTXAS_BLACKWELL_PATH"]

    def compile(function, *arguments, target, donate=()):
        monkeypatch.setattr(triton_compat, "target", lambda: target)
        place = NamedSharding(mesh, PartitionSpec())
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
        with jax.set_mesh(mesh):
            lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
            program = lowered.compile() if target == H200 else None
        kernels = list(tmp_path.rglob("*.ptx"))
        said = ""
        assert kernels
        architecture = {90: "sm_90a", 89: "sm_89", 80: "sm_80"}[target.capability]
        most = {90: 232448, 89: 101376, 80: 166912}[target.capability]
        for kernel in kernels:
            command = [assembler, "-v", f"-arch={architecture}", str(kernel), "-o", os.devnull]
            said += subprocess.run(command, check=True, capture_output=True, text=True).stderr
            shared = int(kernel.with_suffix(".compile_info").read_text().split(":")[-1])
            said += f"shared {shared}\n"
            assert shared <= most
        return program, said

    return compile


COMPILED = [
    (H200, "bfloat16", None, 16, 64, True),
    (H200, "bfloat16", None, 128, 64, False),
    (H200, "bfloat16", "float8_e4m3fn", 128, 16, False),
    (H200, "float16", "int8", 16, 16, False),
    (H200, "float32", None, 16, 16, False),
    (ADA, "bfloat16", "float8_e4m3fn", 16, 16, False),
    (A100, "bfloat16", None, 128, 16, False),
]


@compiled
@pytest.mark.parametrize(("target", "dtype", "kv_dtype", "heads", "page", "decode_only"), COMPILED)
def test_compiles(compile_for, target, dtype, kv_dtype, heads, page, decode_only):
    like = jax.ShapeDtypeStruct
    tokens = 32
    rows = 32
    count = 7333
    data = like((count, page, 576), DTYPES[kv_dtype or dtype])
    pages = LatentPages(data, like((count, 2, page), np.float32) if kv_dtype else None)
    q = like((tokens, heads, 576), DTYPES[dtype])
    new = like((tokens, 576), DTYPES[dtype])
    numbers = [like(shape, np.int32) for shape in ((rows, 16), (rows + 1,), (rows,), ())]

    def step(pages, q, new, slots, first_page, *numbers):
        pages = latent.write_latent(pages, new, slots, first_page, rank=512)
        options = {"scale": 0.1, "rank": 512, "first_page": first_page, "decode_only": decode_only}
        return pages, latent.latent_attention(q, pages, *numbers, **options)

    arguments = pages, q, new, like((tokens,), np.int32), like((), np.int32), *numbers
    program, said = compile_for(step, *arguments, target=target, donate=0)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
    assert max(spilled) <= 256, said
    if program is not None:
        memory = program.memory_analysis()
        text = program.as_text()
        cache_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))
        assert memory.alias_size_in_bytes == cache_bytes
        assert not [line for line in text.splitlines() if " copy" in line and f"[{count}," in line]
        made = re.findall(rf"= s32\[{rows},16\]\S* (?!parameter|bitcast|get-tuple)[\w-]+\(", text)
        assert not made, "the tables are copied for the layer"
        assert text.count(" custom-call(") >= 2
