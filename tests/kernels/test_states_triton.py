"""The Triton kernels of recurrent layers: interpreted in the tests of the operations, and compiled ahead of time. As in
`test_triton`, the interpreted tests run in a process of their own."""

import os
import re
import subprocess
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import test_delta_net
import test_mamba2
import test_triton
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from test_triton import INTERPRET, compiled, interpreted

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.delta_net import triton_gpu as delta
from jaxserve.pallas_kernels.mamba2 import triton_gpu as mamba
from jaxserve.pallas_kernels.operands import ConvInputs, DeltaHeads, MambaInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.selfcheck_recurrent import check_recurrent
from jaxserve.pallas_kernels.short_conv import triton_gpu as conv
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import ConvState, DeltaState, MambaState

SPILLED = {"_mixed": 512}  # at most so many bytes of a thread, by the kernel


@compiled
@pytest.mark.parametrize("group", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(group):
    """Runs this file's interpreted tests where Triton interprets."""
    test_triton.run_interpreted(__file__, group)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if INTERPRET:
        test_triton.repair_interpreter(monkeypatch)
        monkeypatch.setattr(triton_compat, "call", test_triton.interpret)
        monkeypatch.setitem(test_delta_net.FORMS, "triton", delta.delta_net)
        monkeypatch.setitem(test_mamba2.FORMS, "triton", mamba.mamba2)
        with jax.disable_jit(), np.errstate(over="ignore", invalid="ignore"):
            yield
    else:
        yield


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("module", [test_delta_net, test_mamba2])
def test_decodes_one_by_one(module):
    module.test_decodes_one_by_one("triton")


@interpreted
@pytest.mark.parametrize("module", [test_delta_net, test_mamba2])
@pytest.mark.parametrize("lengths", [[1], [2, 35], pytest.param([32, 1, 65], marks=pytest.mark.slow)])
def test_whole_prompts(lengths, module):
    module.test_whole_prompts(lengths, "triton")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("module", [test_delta_net, test_mamba2])
def test_states_beside_the_rows(module):
    module.test_rows_that_keep_nothing_change_no_state("triton")


@interpreted
@pytest.mark.slow
def test_hard_numbers():
    test_delta_net.test_tokens_that_resemble_each_other("triton")
    test_delta_net.test_chunks_forget_at_once("triton")
    test_mamba2.test_chunks_forget_at_once("triton")


@interpreted
@pytest.mark.parametrize("with_bias", [False, True])
def test_short_convolutions(with_bias):
    test_mamba2.test_short_convolutions(conv.short_conv, with_bias)


def steps(dtype: str, decode_only: bool, like) -> list:
    """Functions of a state and further arguments, and these arguments, of the shapes of Qwen3-Next, Granite 4 and
    LFM2. `like` makes an argument."""
    tokens, rows, states = (32, 32, 70) if decode_only else (512, 8, 70)
    ints = {name: like((rows,), "int32") for name in ("source", "target")}
    where = StateRows(
        **ints, fresh=like((rows,), "bool"), q_start=like((rows + 1,), "int32"), num_decodes=like((), "int32"),
        row=like((tokens,), "int32"),
    )  # fmt: skip
    options = {"activation": jax.nn.silu, "decode_only": decode_only}
    key_heads, group, channels = 16, 2, 512
    heads = DeltaHeads(
        like((tokens, key_heads, channels), dtype), *[like((tokens, key_heads, group), "float32")] * 2,
        like((key_heads, channels, 4), dtype),
    )  # fmt: skip
    matrices = DeltaState(
        like((states, key_heads, group, 128, 128), "float32"), like((states, key_heads, 3 * channels), "float32")
    )
    of_heads = like((48,), "float32")
    bias = like((3072,), dtype), like((256,), dtype)
    inputs = MambaInputs(
        like((tokens, 3072), dtype), like((tokens, 256), dtype), like((tokens, 48), "float32"), of_heads, of_heads,
        like((48,), "int32"), like((3072, 4), dtype), bias[0], like((256, 4), dtype), bias[1],
    )  # fmt: skip
    last = like((states, 3, 3072), "float32"), like((states, 3, 256), "float32")
    mamba_state = MambaState(like((states, 48, 64, 128), "float32"), *last)
    short = ConvInputs(like((tokens, 2048), dtype), like((2048, 3), dtype), None)
    conv_state = ConvState(like((states, 2, 2048), "float32"))
    return [
        (partial(delta.delta_net, key_dim=128, **options), matrices, heads, where),
        (partial(mamba.mamba2, groups=1, per_group=48, **options), mamba_state, inputs, where),
        (partial(conv.short_conv, decode_only=decode_only), conv_state, short, where),
    ]


@compiled
@pytest.mark.parametrize("decode_only", [True, False])
def test_compiles_for_h200(decode_only, tmp_path, monkeypatch):
    """States are changed in place, in as few launches as the modules say; kernels of decodes spill no registers."""
    monkeypatch.setattr("jax_triton.triton_lib._JAX_TRITON_DUMP_DIR", str(tmp_path))
    mesh = mesh_of("h200x1")

    def like(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    for (operation, state, inputs, rows), launches in zip(
        steps("bfloat16", decode_only, like), (1, 2, 1) if decode_only else (2, 3, 1), strict=True
    ):

        def step(state, inputs, rows, first, operation=operation):
            return operation(inputs, state, rows, first)

        with jax.set_mesh(mesh):
            program = jax.jit(step, donate_argnums=0).lower(state, inputs, rows, like((), "int32")).compile()
        assert program.as_text().count(" custom-call(") == launches
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == sum(4 * x.size for x in jax.tree.leaves(state))
    kernels = list(tmp_path.rglob("*.ptx"))
    assert kernels
    for kernel in kernels:
        assembler = [os.environ["TRITON_PTXAS_BLACKWELL_PATH"], "-v", "-arch=sm_90a", kernel, "-o", os.devnull]
        said = subprocess.run(assembler, check=True, capture_output=True, text=True).stderr
        (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
        assert int(spilled) <= SPILLED.get(kernel.name.removesuffix(".ptx"), 0), kernel.name


def test_why_not():
    problem = RecurrentProblem(np.dtype(jnp.bfloat16), 16, 2, 128, 128, 512, 4)
    h200 = Device("gpu", "NVIDIA H200", (9, 0))
    for module in (delta, mamba, conv):
        assert "compute capability 8.0" in module.why_not(Device("gpu", "T4", (7, 5)), problem)
        assert "must be one of 2, 3, 4, not 5" in module.why_not(h200, replace(problem, width=5))
    assert "followed by silu" in delta.why_not(h200, replace(problem, silu=False))
    assert "at most 32768 numbers, not 256 x 129" in delta.why_not(h200, replace(problem, rows=256, columns=129))
    assert delta.why_not(h200, problem) is None
    assert conv.why_not(h200, replace(problem, heads=1, group=0, rows=0, columns=0)) is None


@interpreted
@pytest.mark.parametrize("steps", ["decodes", pytest.param("prompts", marks=pytest.mark.slow)])
@pytest.mark.parametrize("module", [delta, mamba])
def test_the_check_of_a_device(module, steps):
    operation = "delta_net" if module is delta else "mamba2"
    sizes: Any = (2, 2, 12, 20, 64, 4) if module is delta else (4, 2, 8, 20, 32, 4)
    problem = RecurrentProblem(np.dtype(np.float32), *sizes)
    found = check_recurrent(operation, getattr(module, operation), problem, repeats=1, steps=(steps,))
    assert [str(finding) for finding in found if not finding.right] == []
