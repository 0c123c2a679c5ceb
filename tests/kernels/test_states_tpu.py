"""The TPU kernels of recurrent layers: interpreted on CPU against the recurrence itself, and compiled ahead of time."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from state_steps import compare_forms, state_rows
from test_tpu_attention import interpreted

from jaxserve.pallas_kernels.delta_net import reference as delta_reference
from jaxserve.pallas_kernels.delta_net import tpu as delta
from jaxserve.pallas_kernels.mamba2 import reference as mamba_reference
from jaxserve.pallas_kernels.mamba2 import tpu as mamba
from jaxserve.pallas_kernels.operands import DeltaHeads, MambaInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import DeltaState, MambaState

V6E = Device("tpu", "TPU v6 lite")


def delta_case(like, tokens: int, states: int, heads: int, group: int):
    channels = 256 + 128 * group
    inputs = DeltaHeads(
        like(tokens, heads, channels), like(tokens, heads, group, sign=-1), like(tokens, heads, group, sign=1),
        like(heads, channels, 4),
    )  # fmt: skip
    last = like(states, heads, 3 * channels, kind="float32")
    state = DeltaState(like(states, heads, group, 128, 128, kind="float32"), last)
    return inputs, state, {"key_dim": 128, "activation": jax.nn.silu}


def mamba_case(like, tokens: int, states: int, heads: int, group: int, dim: int = 64):
    groups = heads // group
    shared = 256 * groups
    channels = heads * dim
    of_group = like(heads, kind="int32", value=np.arange(heads) // group)
    inputs = MambaInputs(
        like(tokens, channels), like(tokens, shared), like(tokens, heads, sign=1), like(heads, sign=-1),
        like(heads, kind="float32"), of_group, like(channels, 4), like(channels), like(shared, 4), None,
    )  # fmt: skip
    last = like(states, 3, channels, kind="float32"), like(states, 3, shared, kind="float32")
    state = MambaState(like(states, heads, dim, 128, kind="float32"), *last)
    return inputs, state, {"groups": groups, "per_group": group, "activation": jax.nn.silu}


CASES = {
    "delta": (delta_case, delta.delta_net, delta_reference.delta_net),
    "mamba": (mamba_case, mamba.mamba2, mamba_reference.mamba2),
}


@pytest.mark.parametrize("fresh", [[False, False, False], [True, False, True], [True, True, True]])
@pytest.mark.parametrize("case", CASES)
def test_decodes(case, fresh):
    """The last two of five rows are padding; one of the others keeps nothing."""
    rng = np.random.default_rng(3)
    make, ours, plain = CASES[case]

    def like(*shape, sign=0, kind="", value=None):
        x = rng.normal(size=shape) if value is None else value
        return jnp.asarray(sign * np.abs(x) if sign else x, kind or "float32")

    inputs, state, options = make(like, 5, 18, 4, 2)
    rows = state_rows([1, 1, 1, 0, 0], source=[5, 1, 3, 8, 8], fresh=[*fresh, True, True])
    rows = rows._replace(target=jnp.asarray([5, 8, 3, 8, 8], jnp.int32), row=jnp.arange(5, dtype=jnp.int32))
    options |= {"decode_only": True}
    call = jax.jit(partial(ours, **options))
    made, after = interpreted(call, inputs, state, rows, 9)
    expected, known = jax.jit(partial(plain, **options))(inputs, state, rows, 9)
    np.testing.assert_allclose(made[:3], expected[:3], rtol=0, atol=1e-5 * np.abs(expected[:3]).max())
    others = np.delete(np.arange(18), 17)  # all but the padding slot
    for own, theirs in zip(after, known, strict=True):
        np.testing.assert_allclose(own[others], theirs[others], rtol=0, atol=1e-5 * np.abs(theirs[others]).max())


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_plain(case):
    rng = np.random.default_rng(4)
    make, ours, plain = CASES[case]

    def like(*shape, sign=0, kind="", value=None):
        x = rng.normal(size=shape) if value is None else value
        return jnp.asarray(sign * np.abs(x) if sign else x, kind or "float32")

    inputs, state, options = make(like, 4, 9, 2, 1)
    rows = state_rows([1, 3], source=[0, 2], fresh=[False, True])
    compare_forms(ours, plain, inputs, state, rows, **options)


@pytest.mark.parametrize("target", ["v6e-1", pytest.param("v5e-1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("case", "sizes"), [("delta", (16, 2)), ("mamba", (48, 48)), ("mamba", (128, 16))])
def test_compiles(target, case, sizes):
    """One kernel, with the states in their places."""
    mesh = mesh_of(target)

    def like(*shape, sign=0, kind="", value=None):
        dtype = kind or ("float32" if sign else "bfloat16")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    make, ours, _ = CASES[case]
    inputs, state, options = make(like, 32, 70, *sizes)
    ints = {"source": like(32, kind="int32"), "target": like(32, kind="int32"), "row": like(32, kind="int32")}
    rows = StateRows(
        **ints, fresh=like(32, kind="bool"), q_start=like(33, kind="int32"), num_decodes=like(kind="int32")
    )

    def step(state, inputs, rows, first):
        return ours(inputs, state, rows, first, decode_only=True, **options)

    with jax.set_mesh(mesh):
        program = jax.jit(step, donate_argnums=0).lower(state, inputs, rows, like(kind="int32")).compile()
    assert len(re.findall("tpu_custom_call", program.as_text())) == 1
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(4 * x.size for x in jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < 2**22


def test_why_not():
    problem = RecurrentProblem(np.dtype(jnp.bfloat16), 16, 2, 128, 128, 512, 4)
    assert delta.why_not(V6E, problem) is None
    assert "multiples of 128 rows and columns, not 64 x 128" in delta.why_not(V6E, replace(problem, rows=64))
    assert "bytes; at most" in delta.why_not(V6E, replace(problem, heads=1600))
    assert "newer" in delta.why_not(Device("tpu", "TPU v4"), problem)
    granite = RecurrentProblem(np.dtype(jnp.bfloat16), 48, 48, 64, 128, 3072, 4)
    assert mamba.why_not(V6E, granite) is None
    assert "multiple of 128 columns, not 16" in mamba.why_not(V6E, replace(granite, columns=16))
    assert "48 heads of 96 numbers" in mamba.why_not(V6E, replace(granite, rows=96))
    assert "silu" in mamba.why_not(V6E, replace(granite, silu=False))
    assert "not float16" in mamba.why_not(V6E, replace(granite, dtype=np.dtype(np.float16)))
