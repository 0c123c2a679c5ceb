"""Steps with recurrent layers, compiled ahead of time by the real compilers for devices that are not here: states are
changed in place, the host waits for nothing, and a layer takes few launches. No kernel runs."""

import re

import jax
import pytest
from test_host_free_steps import host_waits
from test_steps import make_runner

from jaxserve.devices import launches
from jaxserve.execution.kv_cache import STATE_COPIES
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.step_plan import Sampler

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_theta": 10000000.0,
    "vocab_size": 151936,
}
# bytes of a sequence's matrices in a layer
SLOTS = 67
ROWS = 32
STATE = 32 * 128 * 128 * 4


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


OTHERS = [(False, "h200x1", 16)] + [
    (kind, *others) for kind in (True, False) for others in (("h200x2", 16), ("v6e-4", 128))
]


@pytest.mark.parametrize(
    ("decode", "target", "page_size"),
    [(True, "h200x1", 16), *(pytest.param(*others, marks=pytest.mark.slow) for others in OTHERS)],
)
def test_states_stay_in_place(decode, target, page_size, tmp_path):
    runner, _ = make_runner(
        tmp_path,
        target,
        "auto",
        page_size,
        4,
        "bf16",
        slots=SLOTS,
        static=target.startswith("h200") or None,
        **QWEN3_NEXT,
    )
    shape = StepShape.of(*((ROWS, ROWS) if decode else (512, ROWS)), page_size, decode_only=decode)
    compiled = runner.lower(runner.programs.choose(shape, Sampler.GREEDY, 1, scores=False)).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    mesh = runner.mesh
    assert target.startswith("v") or host_waits(text) == []
    states = 3 * (SLOTS + 1)
    copies = [line for line in text.splitlines() if re.search(rf"= \(?f32\[{states},.*\bcopy(-start)?\(", line)]
    assert [line for line in copies if "S(1)" not in line] == []  # to a TPU's memory on the chip XLA may bring them
    assert runner.layout.state_bytes(mesh) > states * STATE / mesh.size
    assert memory.alias_size_in_bytes > runner.layout.state_bytes(mesh)
    # The rows' states twice in each layer; of a prompt's chunks what does not depend on the states.
    assert memory.temp_size_in_bytes < (6 if decode else 12) * ROWS * STATE / mesh.size + 2**29


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200x1", "h200x2", "v6e-4"])
def test_checked_states_stay_in_place(target, tmp_path):
    """A step that checks three proposals a row takes no memory for the states behind each."""
    page_size = 16 if target.startswith("h200") else 128
    static = target.startswith("h200") or None
    runner, _ = make_runner(
        tmp_path, target, "auto", page_size, 4, "bf16", slots=SLOTS, static=static, proposals=3, **QWEN3_NEXT
    )
    shape = StepShape.of(4 * ROWS, ROWS, page_size, decode_only=False)
    compiled = runner.lower(runner.programs.choose_checking(shape, Sampler.GREEDY)).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    assert target.startswith("v") or host_waits(text) == []
    states = 3 * (SLOTS + 1)
    copies = [line for line in text.splitlines() if re.search(rf"= \(?f32\[{states},.*\bcopy(-start)?\(", line)]
    assert [line for line in copies if "S(1)" not in line] == []
    assert memory.alias_size_in_bytes > runner.layout.state_bytes(runner.mesh)
    assert memory.temp_size_in_bytes < 12 * ROWS * STATE / runner.mesh.size + 2**29


_SMALL = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 65536}
OTHER_MODELS = {  # of four layers the second has attention
    "lfm2": _SMALL | {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12288,
        "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_bias": True, "hidden_act": None,
        "rms_norm_eps": None,
    },
    "granite": _SMALL | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 2048,
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 8192,
        "num_local_experts": 0, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("target", ["h200x1", "h200x2", "v6e-4"])
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_other_states_stay_in_place(model, target, decode, tmp_path):
    page_size = 16 if target.startswith("h200") else 128
    static = target.startswith("h200") or None
    runner, _ = make_runner(
        tmp_path, target, "auto", page_size, 4, "bf16", slots=SLOTS, static=static, **OTHER_MODELS[model]
    )
    shape = StepShape.of(*((ROWS, ROWS) if decode else (512, ROWS)), page_size, decode_only=decode)
    compiled = runner.lower(runner.programs.choose(shape, Sampler.GREEDY, 1, scores=False)).compile()
    text = compiled.as_text()
    assert target.startswith("v") or host_waits(text) == []
    states = 3 * (SLOTS + 1)
    copies = [line for line in text.splitlines() if re.search(rf"= \(?f32\[{states},.*\bcopy(-start)?\(", line)]
    left = [line for line in copies if "S(1)" not in line]
    if model == "granite" and target.startswith("v"):
        # XLA brings last inputs of the convolutions into another order, 15 KB of a state's 500 KB on each device.
        assert len(left) <= 2
        left = [line for line in left if f"f32[{states},3," not in line]
    assert left == []
    assert compiled.memory_analysis().alias_size_in_bytes > runner.layout.state_bytes(runner.mesh)


# (model, whether the step only decodes) -> at most so many launches in a recurrent layer on one H200. In prompts of
# Granite, XLA transposes two small projections and cuts three vectors out of those that layers keep in one array.
LAUNCHES = {
    ("qwen3_next", True): 14, ("qwen3_next", False): 15,
    ("granite", True): 16, ("granite", False): 22,
    ("lfm2", True): 11, ("lfm2", False): 13,
}  # fmt: skip
KINDS = {"qwen3_next": "linear_attention", "granite": "mamba", "lfm2": "conv"}


@pytest.mark.parametrize(
    ("model", "decode"),
    [pytest.param(*case, marks=[] if case == ("qwen3_next", True) else [pytest.mark.slow]) for case in LAUNCHES],
)
def test_launches(model, decode, tmp_path):
    """Of programs with two and with four recurrent layers, and one with attention."""
    config = OTHER_MODELS.get(model, QWEN3_NEXT | {"mlp_only_layers": [*range(5)]})
    texts = []
    for count in (2, 4):
        kinds = [KINDS[model], "full_attention" if model != "granite" else "attention", *[KINDS[model]] * (count - 1)]
        more = config | {"layer_types": kinds}
        runner, _ = make_runner(tmp_path, "h200x1", "auto", 16, len(kinds), slots=SLOTS, static=True, **more)
        shape = StepShape.of(*((ROWS, ROWS) if decode else (512, ROWS)), 16, decode_only=decode)
        texts.append(runner.lower(runner.programs.choose(shape, Sampler.GREEDY, 1, scores=False)).compile().as_text())
    found = launches.count(*texts, layers=2)
    print(f"\n{model}, {'decodes' if decode else 'prompts'}: {launches.describe(found)}")
    assert found.per_layer <= LAUNCHES[model, decode], launches.describe(found)


@pytest.mark.parametrize("target", ["h200x2", pytest.param("v6e-4", marks=pytest.mark.slow)])
def test_snapshots_are_copied_alone(target, tmp_path):
    """A copy between slots and snapshots moves these states, and leaves the arrays where they are."""
    runner, _ = make_runner(tmp_path, target, "auto", 128, 4, "bf16", slots=SLOTS, snapshots=8, **QWEN3_NEXT)
    memory = runner.lower(AuxProgram("copy_states")).compile().memory_analysis()
    assert runner.layout.states.places == SLOTS + 1 + 8
    assert memory.alias_size_in_bytes > runner.layout.state_bytes(runner.mesh)
    assert memory.temp_size_in_bytes < 2 * STATE_COPIES * runner.layout.states.slot_bytes / runner.mesh.size
