"""The Triton kernel that draws tokens: interpreted against float64 NumPy, and compiled ahead of time. As in
`test_triton`, the interpreted tests run in a process of their own."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import test_triton
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from test_triton import INTERPRET, compiled, interpreted

from jaxserve.execution.sampling import draw_plainly
from jaxserve.pallas_kernels import draw_triton, selfcheck_draw, triton_compat
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import DrawSettings


@compiled
def test_interpreted():
    """Runs this file's interpreted tests where Triton interprets."""
    test_triton.run_interpreted(__file__)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if INTERPRET:
        monkeypatch.setattr(triton_compat, "call", test_triton.interpret)
        with jax.disable_jit(), np.errstate(all="ignore"):
            yield
    else:
        yield


@interpreted
@pytest.mark.parametrize("vocab", [257, 9001])
def test_draws_as_the_probabilities_say(vocab, monkeypatch):
    monkeypatch.setattr(selfcheck_draw, "REPEATS", 1)
    monkeypatch.setattr(selfcheck_draw, "DRAWS", 2)
    found = list(selfcheck_draw.check_draw(draw_triton.draw, vocab))
    assert len(found) == 2 * (len(selfcheck_draw.ROWS) + 1)
    assert [finding for finding in found if not finding.right] == []


MISTAKES = {
    "none": None,
    "a neighbour": lambda tokens: tokens.at[3].add(1),
    "no such token": lambda tokens: tokens.at[0].set(-1),
    "another of the kept": lambda tokens: tokens.at[7].set(tokens[2]),
}


@compiled
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees(mistake):
    """Mistakes in what a device draws; and plain operations have none."""

    def draw(logits, settings):
        if settings is None:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        return spoil(draw_plainly(logits, settings))

    def spoil(tokens):
        return tokens if mistake == "none" else MISTAKES[mistake](tokens)

    wrong = [finding.what for finding in selfcheck_draw.check_draw(draw, 4096) if not finding.right]
    assert bool(wrong) == (mistake != "none"), wrong


@compiled
def test_the_check_sees_draws_that_differ(monkeypatch):
    turns = itertools.count()

    def draw(logits, settings):
        if settings is None:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        flip = jax.experimental.io_callback(lambda: np.int32(next(turns) % 2), jax.ShapeDtypeStruct((), jnp.int32))
        return draw_plainly(logits, settings._replace(keys=settings.keys + flip.astype(jnp.uint32)))

    assert not all(finding.right for finding in selfcheck_draw.check_draw(draw, 2048))


def one(logits: np.ndarray, *, temperature=1.0, k=0, p=1.0, least=0.0, key=0, greedy=False) -> int:
    numbers = (jnp.array([x], jnp.float32) for x in (temperature, k, p, least))
    settings = DrawSettings(*numbers, jnp.array([[key, 7]], jnp.uint32))
    return int(draw_triton.draw(jnp.asarray(logits)[None], None if greedy else settings)[0])


KEYS = range(8)  # enough for both of two tokens to be drawn


@interpreted
@pytest.mark.parametrize("greedy", [False, True])
def test_the_first_of_the_most_likely(greedy):
    logits = np.zeros(1000, np.float32)
    logits[[130, 140, 777]] = 3.0
    assert one(logits, temperature=0.0, greedy=greedy) == 130


@interpreted
def test_ties_at_a_threshold_stay():
    logits = np.full(1000, -5.0, np.float32)
    logits[[3, 900]] = 1.0
    assert {one(logits, k=1, key=key) for key in KEYS} == {3, 900}
    assert {one(logits, p=0.3, key=key) for key in KEYS} == {3, 900}


@interpreted
def test_candidates_that_are_not_copied(monkeypatch):
    """The same tokens where the rounds pass over the row, and in flat rows, in which all tokens are candidates."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(5000).astype(np.float32)
    cases = [{"k": 30, "p": 0.9}, {"p": 0.9}, {"temperature": 3.0, "p": 0.7}]
    copied = [one(logits, key=key, **case) for case in cases for key in range(2)]
    monkeypatch.setattr(draw_triton, "CANDIDATES", 16)
    assert [one(logits, key=key, **case) for case in cases for key in range(2)] == copied
    flat = np.zeros(5000, np.float32)
    assert one(flat, p=0.5) == one(flat)  # they are all equal, so all stay


@interpreted
def test_what_is_excluded_is_never_drawn():
    """By masks and penalties: finite, and so much less likely that its weight is 0."""
    logits = np.full(1000, -1e30, np.float32)
    logits[[5, 999]] = [0.0, 1.0]
    for case in ({}, {"k": 10}, {"p": 0.99}, {"least": 1e-6}):
        assert {one(logits, key=key, **case) for key in KEYS} == {5, 999}


def test_devices():
    assert draw_triton.why_not(Device("gpu", "NVIDIA H200", (9, 0))) is None
    assert "8.0 or newer" in draw_triton.why_not(Device("gpu", "T4", (7, 5)))
    assert "NVIDIA" in draw_triton.why_not(Device("tpu", "TPU v5e"))


@compiled
@pytest.mark.parametrize(
    ("vocab", "greedy", "part"),
    [
        (128256, False, False),
        (128256, True, False),
        (151936, False, False),
        (50257, False, False),
        (32000, False, True),
    ],
)
def test_compiles_for_h200(vocab, greedy, part):
    rows = 256
    mesh = mesh_of("h200x1")

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    keys = array(rows, 2, dtype=jnp.uint32)
    ids = array(vocab, dtype=jnp.int32) if part else None
    settings = DrawSettings(array(rows), array(rows, dtype=jnp.int32), array(rows), array(rows), keys, ids)
    with jax.set_mesh(mesh):
        program = jax.jit(draw_triton.draw).lower(array(rows, vocab), None if greedy else settings).compile()
    assert len(re.findall(" custom-call", program.as_text())) == 1
    assert program.memory_analysis().temp_size_in_bytes <= rows * (3 * 4 * 2048 + 4 * draw_triton.CANDIDATES) + 2**16
