"""A step on one GPU is one command buffer: the host launches it at once, and waits for nothing in it.

The programs decide on the device which sampler rows need and how many tokens a call samples; their conditionals and
loops are inside the command buffer. Compiled for a device that is not here, by a target that names a driver.
"""

import math
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from command_buffers import compiled, moving
from test_expert_steps import GPT_OSS, QWEN3_30B
from test_host_free_steps import host_waits
from test_hybrid_steps import QWEN3_NEXT
from test_latent_steps import DEEPSEEK_V3
from test_speculative_steps import with_head
from test_steps import make_runner

from jaxserve.devices import command_buffers
from jaxserve.execution.adapter_stacks import AdapterStacks
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.adapter_targets import PoolSizes
from jaxserve.scheduling.step_plan import Sampler

pytest.importorskip("jax_triton", reason="jax-triton is not installed")
from jaxserve.pallas_kernels import triton_compat

if not triton_compat.is_typed():
    pytest.skip("this jaxlib has no typed call of Triton kernels", allow_module_level=True)

DECODE = StepShape.of(32, 32, 16, decode_only=True)
MIXED = StepShape.of(512, 64, 16, decode_only=False)
LATENT = DEEPSEEK_V3 | {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
                        "n_routed_experts": 64, "n_group": 1, "topk_group": 1}  # fmt: skip
SPARSE = LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"], "q_lora_rank": 512, "index_n_heads": 16, "index_head_dim": 128,
    "index_topk": 2048,
}  # fmt: skip
KINDS = {
    "bf16": {},
    "int4": {"scheme": "int4"},
    "int8": {"scheme": "int8"},
    "fp8": {"scheme": "fp8"},
    "fp8 inputs": {"scheme": "fp8-dynamic"},
    "blocks": {"scheme": "Q4_K_M"},
    "int8 cache": {"kv_dtype": jnp.int8},
    "Triton": {"backend": "triton"},
    "latent": LATENT,
    "experts": QWEN3_30B | {"scheme": "int4"},
    "experts in MXFP4": GPT_OSS | {"scheme": "mxfp4", "backend": "triton"},
    "hybrid": QWEN3_NEXT | {"layers": 4},
    "adapters": {"adapters": PoolSizes(32, 16, jnp.dtype(jnp.bfloat16))},
}
# At most so many recorded operations read the host's buffer, which may lie elsewhere in each call.
READERS = {DECODE: 8, MIXED: 18}
USUAL = ("bf16", "int4")  # the others run in the slow group


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    monkeypatch.setattr(AdapterStacks, "create", lambda self: self.abstract)  # there is no device for arrays
    jax.config.update("jax_enable_compilation_cache", False)


def runner_of(folder, backend="mosaic_gpu", layers=2, **changes):
    return make_runner(folder, "h200x1", backend, 16, layers, **changes)


def check_recorded(runner, name, folder) -> str:
    """Returns the program's HLO."""
    text, thunks = compiled(runner, name, folder)
    assert thunks == ["kCommandBuffer"], name
    assert "API_VERSION_STATUS_RETURNING" not in text, "a call of the old interface"
    return text


@pytest.mark.parametrize("shape", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in USUAL else [pytest.mark.slow]) for kind in KINDS]
)
def test_a_step_is_one_command_buffer(kind, shape, tmp_path):
    runner, _ = runner_of(tmp_path, **KINDS[kind])
    program = runner.programs.choose(shape, Sampler.FULL, 1, scores=False)
    assert program.sampler is Sampler.ANY
    assert str(program) == str(shape)
    text = check_recorded(runner, program, tmp_path)
    results, readers = moving(text)
    sizes = [math.prod(map(int, re.findall(r"\d+", result.partition("[")[2]))) for result in results]
    assert sum(sizes) < 50_000, results  # numbers; hidden states would be millions
    assert len(readers) <= READERS[shape], readers


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_steps_with_a_draft_head_are_command_buffers(tmp_path):
    plain, params = runner_of(tmp_path)
    runner = with_head(plain, params, "mosaic_gpu", 16)
    programs = runner.programs
    decode = programs.choose(DECODE, Sampler.FULL, 1, scores=False)
    names = [decode, programs.choose_checking(MIXED, Sampler.FULL), replace(decode, drafts=False)]
    for name in [*names, AuxProgram("propose", 32, Sampler.FILTERED, 3)]:
        check_recorded(runner, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [AuxProgram("sample_deferred", 64), AuxProgram("score_prompt", 1152)], ids=str)
def test_what_runs_between_steps_is_recorded_too(name, tmp_path):
    runner, _ = runner_of(tmp_path)
    check_recorded(runner, name, tmp_path)


@pytest.mark.slow
def test_updates_of_tables_are_too_few_kernels_to_be_recorded(tmp_path):
    """XLA records from five operations on. The loop's length is known, so the host waits for nothing."""
    text, thunks = compiled(runner_of(tmp_path)[0], AuxProgram("update_tables"), tmp_path)
    assert len(thunks) < 5
    assert host_waits(text) == []


def test_the_module_bears_the_program_s_name(tmp_path):
    runner, _ = runner_of(tmp_path)
    name = runner.programs.largest(DECODE)
    assert "module @jit_decode_32" in runner.lower(name).as_text()[:200]


@pytest.mark.parametrize(
    ("driver", "typed", "reason"),
    [
        (12030, True, None),
        (12020, True, "the driver is of CUDA 12.2"),
        (13000, False, "no typed call"),
        (None, True, None),  # no driver is here: the target has one
    ],
)
def test_where_nothing_can_be_recorded_the_host_chooses(driver, typed, reason, monkeypatch, tmp_path):
    monkeypatch.setattr(command_buffers, "driver_version", lambda: driver)
    monkeypatch.setattr(triton_compat, "is_typed", lambda: typed)
    runner, _ = runner_of(tmp_path)
    found = command_buffers.why_static(runner.mesh)
    assert (found is None) if reason is None else reason in str(found)
    assert runner.programs.static is (reason is not None)
    assert ("xla_gpu_enable_command_buffer" in command_buffers.compiler_options(runner.mesh)) is (reason is None)


@pytest.mark.parametrize(
    ("shape", "model"),
    [(DECODE, {}), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((MIXED, {}), (DECODE, SPARSE)))],
    ids=["decode", "mixed", "indexer"],
)
def test_devices_that_exchange_something_record_what_lies_between(shape, model, tmp_path):
    """The host launches what is exchanged and command buffers, and waits for no predicate. A call samples one token."""
    runner, _ = make_runner(tmp_path, "h200x2", "mosaic_gpu", 16, 2, **model)
    program = runner.programs.choose(shape, Sampler.FULL, 1, scores=False)
    assert program.sampler is Sampler.ANY
    assert program.tokens_per_call == 1
    assert list(runner.programs.lengths([shape], 1, Sampler.GREEDY)) == [1]
    text, thunks = compiled(runner, program, tmp_path)
    assert len(host_waits(text)) >= 4, "there are predicates"
    assert not {"kConditional", "kWhile"} & set(thunks), thunks
    print(shape, Counter(thunks))
