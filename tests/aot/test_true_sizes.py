"""Models at their published sizes on the devices that they are bought for, compiled ahead of time with the engine's own
buckets: what a token takes in the cache, what a step takes beside weights and cache, and how many tokens fit.

Weights, cache and memory are those of all layers. Programs are compiled with a few layers, which need the same
temporaries as all of them (`test_all_layers` compiles all), and their code is counted for all. No kernel runs here.
"""

import json
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from devices import devices_of
from flax.traverse_util import unflatten_dict
from test_expert_steps import copied_stacks, local
from test_steps import as_llama_quantize, cache_copies, copied_parameters, dequantized_copies, in_blocks

from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import num_groups, spans_hosts
from jaxserve.devices.sharded_ops import quant_block, quant_specs
from jaxserve.devices.targets import target_memory
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.execution import memory
from jaxserve.execution.buckets import step_shapes
from jaxserve.execution.cost import StepCost, prefill_chunk
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.memory import Budget, Needs, size
from jaxserve.execution.runner import ModelRunner, needs_of
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.quantized import STACKS, Rounding, arranged, is_quantizable, quantized_abstract
from jaxserve.models.weights import abstract_params
from jaxserve.models.wide_experts import as_in_files
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import Activations, BlockArray, QuantArray

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "intermediate_size": 2880, "num_hidden_layers": 36, "num_local_experts": 128,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
    "rope_theta": 150000, "swiglu_limit": 7.0, "attention_bias": True, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_27B = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
    "sliding_window": 1024, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B = QWEN3_235B | {
    "hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
}  # fmt: skip
GPT_OSS_20B = GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32}
SCOUT = {
    "architectures": ["Llama4ForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
    "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
    "attn_temperature_tuning": True, "use_qk_norm": True, "vocab_size": 202048, "max_position_embeddings": 10485760,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model on some devices, and bounds for what it needs there.

    Attributes:
      scheme: bf16, one of `quantized.FORMS` for all matrices of the layers, "experts KIND" for experts alone, or Q4_K_M
        (blocks of a GGUF file) for all matrices.
      few: changes of the config that leave few layers, of all kinds.
      parameters: of the published model, in billions; weights must have as many.
      row: bytes of the cache for a token and a layer; heads that are fewer than the devices are repeated.
      temporaries: most MiB of the largest step on a device.
      tokens: least number that fits the cache, in thousands, of requests of `longest` tokens.
      settings: further settings of the engine.
    """

    target: str
    scheme: str
    config: dict
    few: dict
    parameters: float
    row: int
    temporaries: int
    tokens: int
    longest: int = 32768
    settings: dict = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.target.startswith("h")


FORMS = QuantArray | BlockArray
SMALL = 64 << 20  # bytes that more layers may add to temporaries
TWO = {"num_hidden_layers": 2}
CASES = {
    "gpt-oss-120b": Case("h200x1", "experts mxfp4", GPT_OSS_120B, TWO, 116.8, 2 * 8 * 64 * 2, 1280, 1350),
    "deepseek-v3": Case(
        "h200x8", "fp8 blocks", DEEPSEEK_V3, TWO | {"first_k_dense_replace": 1}, 671.0, 576 * 2, 3072, 580
    ),
    "qwen3-235b": Case("h200x8", "bf16", QWEN3_235B, TWO, 235.1, 2 * 8 * 128 * 2, 1400, 1450),
    "qwen3-235b whole experts": Case(
        "h200x8", "bf16", QWEN3_235B, TWO, 235.1, 2 * 8 * 128 * 2, 1400, 1450, settings={"enable_expert_parallel": True}
    ),
    "deepseek-v3 shared cache": Case(
        "h200x8",
        "fp8 blocks",
        DEEPSEEK_V3,
        TWO | {"first_k_dense_replace": 1},
        671.0,
        576 * 2,
        3072,
        4600,
        settings={"decode_context_parallel_size": 8},
    ),
    "deepseek-v3 groups": Case(
        "h200x16",
        "fp8 blocks",
        DEEPSEEK_V3,
        TWO | {"first_k_dense_replace": 1},
        671.0,
        576 * 2,
        2200,
        990,
        settings={"data_parallel_size": 16, "enable_expert_parallel": True, "max_num_seqs": 112},
    ),
    "qwen3-235b groups": Case(
        "h200x8",
        "bf16",
        QWEN3_235B,
        TWO,
        235.1,
        2 * 4 * 128 * 2,
        1400,
        310,
        settings={"data_parallel_size": 8, "enable_expert_parallel": True, "max_num_seqs": 112},
    ),
    "qwen3-30b Q4_K_M": Case("h200x1", "Q4_K_M", QWEN3_30B, TWO, 30.5, 2 * 4 * 128 * 2, 1400, 1000),
    "mixtral": Case("h200x1", "bf16", MIXTRAL_8X7B, TWO, 46.7, 2 * 8 * 128 * 2, 2800, 280),
    "gemma3-27b": Case("h200x1", "bf16", GEMMA3_27B, {"num_hidden_layers": 6}, 27.0, 2 * 16 * 128 * 2, 1400, 340),
    "scout": Case(
        "h200x8", "bf16", SCOUT, {"num_hidden_layers": 4}, 107.8, 2 * 8 * 128 * 2, 450, 12000, longest=131072
    ),
    "scout int4": Case(
        "h200x1", "int4", SCOUT, {"num_hidden_layers": 4}, 107.8, 2 * 8 * 128 * 2, 1200, 1000, longest=131072
    ),
    "gpt-oss-120b v6e": Case("v6e-8", "experts mxfp4", GPT_OSS_120B, TWO, 116.8, 2 * 8 * 128 * 2, 300, 700),
    "qwen3-235b v6e": Case("v6e-8", "int4", QWEN3_235B, TWO, 235.1, 2 * 8 * 128 * 2, 600, 50),
    "mixtral v6e": Case("v6e-8", "bf16", MIXTRAL_8X7B, TWO, 46.7, 2 * 8 * 128 * 2, 128, 600),
    "gpt-oss-20b v6e": Case("v6e-8", "experts mxfp4", GPT_OSS_20B, TWO, 20.9, 2 * 8 * 128 * 2, 300, 2000),
    "qwen3-30b v6e": Case("v6e-8", "bf16", QWEN3_30B, TWO, 30.6, 2 * 8 * 128 * 2, 500, 300),
    "gemma3-27b v6e": Case("v6e-8", "bf16", GEMMA3_27B, {"num_hidden_layers": 6}, 27.0, 2 * 16 * 128 * 2, 300, 130),
    "scout v6e": Case(
        "v6e-8", "int4", SCOUT, {"num_hidden_layers": 4}, 107.8, 2 * 8 * 128 * 2, 300, 600, longest=131072
    ),
}


TOO_LARGE = {
    "qwen3-235b v6e": "beside the weights, the memory plan allows the code of 94 unrolled layers more than there is"
}


def named() -> list[Any]:
    """The cases by name, of which some fail for a known reason."""
    known = {name: [pytest.mark.xfail(strict=True, reason=reason)] for name, reason in TOO_LARGE.items()}
    return [pytest.param(name, marks=[pytest.mark.slow, *known.get(name, [])]) for name in CASES]


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


class Size:
    """A case with all its layers, and with the few that are compiled."""

    def __init__(self, folder, case: Case):
        self.case, self.devices = case, devices_of(case.target)
        groups = case.settings.get("data_parallel_size", 1)
        self.settings = EngineConfig(
            model=str(folder), load_format="dummy", tensor_parallel_size=len(self.devices) // groups,
            max_model_len=case.longest, max_num_batched_tokens=(8192 if case.on_gpu else 2048) // groups,
            **case.settings,
        )  # fmt: skip
        self.folder = folder
        self.plan, self.params = self._read(case.config)
        self.weights = sum(memory.bytes_by_dtype(self.params).values())
        tree = unflatten_dict(self.params, sep="/")
        self.cost = StepCost.of(tree, self.plan.model, self.devices[0], len(self.devices) // groups, self.plan.dtype)
        chunk = prefill_chunk(self.settings, self.cost)
        sizes = self.settings.max_num_seqs, memory.max_batched_tokens(self.settings), self.layout.page_size
        self.shapes = step_shapes(*sizes, num_groups=self.layout.groups.num_groups, cost=self.cost, chunk=chunk)

    def _read(self, config: dict) -> tuple[ModelPlan, dict[str, Any]]:
        (self.folder / "config.json").write_text(json.dumps(config))
        plan = ModelPlan.of(self.settings, self.devices)
        return plan, in_scheme(dict(abstract_params(plan.decoder, plan.mesh)), self.case.scheme, plan)

    @property
    def layout(self) -> CacheLayout:
        """With one page."""
        return self.plan.one_page

    def pages(self, needs: Needs, slots: int) -> int:
        """That fit beside these needs, as the engine reckons."""
        total = target_memory(self.devices[0])
        layout = self.layout
        budget = Budget(total, self.settings.memory_utilization, self.weights, slots, memory.RESERVE_BYTES, None, True)
        page = layout.page_size, layout.device_page_bytes(self.plan.mesh)
        return memory.plan_pages(self.settings, self.plan.longest, *page, budget, needs, layout.groups.windows)[0]

    def runner(self, config: dict, guess: int) -> tuple[ModelRunner, dict[str, Any]]:
        """Of a model with other layers, and a cache of so many pages."""
        plan, params = self._read(config)
        rows = self.settings.max_num_seqs, memory.penalty_rows(self.settings, plan.model)
        runner = ModelRunner(plan.decoder, unflatten_dict(params, sep="/"), plan.mesh, *rows)
        runner.set_cache_size(replace(plan.one_page, num_pages=guess), -(-plan.longest // plan.one_page.page_size))
        return runner, params


def in_scheme(plain: dict[str, Any], scheme: str, plan: ModelPlan) -> dict[str, Any]:
    """The weights' forms as shapes."""
    made = plain
    if scheme == "fp8 blocks":
        rounding = Rounding("auto", Device.of(plan.mesh.devices.flat[0]), plan.dtype)
        made = {path: rounding(path, in_blocks_of_fp8(x)) if is_quantizable(path) else x for path, x in plain.items()}
    elif scheme == "Q4_K_M":
        made = as_llama_quantize(plain, plan.model.num_kv_heads)
        made |= {"embed/table": in_blocks(plain["embed/table"], "Q4_K")}
        made |= {"head/kernel": in_blocks(plain["head/kernel"], "Q6_K")}
    elif scheme.startswith("experts "):
        quantized = quantized_abstract(plain, scheme.removeprefix("experts "))
        made = {path: quantized[path] if path.endswith(STACKS) else x for path, x in plain.items()}
    elif scheme != "bf16":
        made = quantized_abstract(plain, scheme)
    return arranged(made, plan.mesh, plan.dtype, "auto")


def in_blocks_of_fp8(plain: jax.ShapeDtypeStruct) -> QuantArray:
    """DeepSeek-V3's form, after fused matrices were given blocks in common: a scale for 128 inputs of an output."""
    spec = plain.sharding.spec
    mesh = plain.sharding.mesh
    *lead, out, inputs = plain.shape

    def form(block: int) -> QuantArray:
        scale = jax.ShapeDtypeStruct((*lead, out, -(-inputs // block)), jnp.float32)
        codes = jax.ShapeDtypeStruct(plain.shape, jnp.float8_e4m3fn)
        return QuantArray(codes, scale, block=(1, block), activations=Activations("float8_e4m3fn", block))

    made = form(quant_block(form(128), spec, mesh)[1])
    places = jax.tree.map(lambda axes: jax.sharding.NamedSharding(mesh, axes), quant_specs(made, spec, mesh))
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), made, places)


def exchanged(text: str) -> dict[str, tuple[int, int]]:
    """Kind of each operation by which devices exchange arrays -> (how often it is there, bytes of the largest)."""
    made: dict[str, tuple[int, int]] = {}
    pattern = r"= (\S.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
    for shapes, kind in re.findall(pattern, text):
        largest = 0
        for dtype, dims in re.findall(r"([a-z]+\d+\w*)\[([\d,]*)\]", shapes):
            bits = int(re.findall(r"\d+", dtype)[0])
            largest = max(largest, math.prod(map(int, filter(None, dims.split(",")))) * bits // 8)
        count, most = made.get(kind, (0, 0))
        made[kind] = count + 1, max(most, largest)
    return made


def check(runner: ModelRunner, compiled: Any, params: dict[str, Any], shape: StepShape) -> None:
    """No copy of the cache, no weight dequantized whole, no expert copied or gathered. Whether the
    host waits for a predicate is asked in test_command_buffers."""
    text = compiled.as_text()
    layers = runner.model.config.num_layers
    devices = runner.mesh.size
    layout = runner.layout
    cache = layout.num_pages * layout.device_page_bytes(runner.mesh)
    assert compiled.memory_analysis().alias_size_in_bytes >= cache
    assert cache_copies(text, cache // layers // 2) == []
    stacks = {path: w for path, w in params.items() if path.endswith(STACKS)}
    # On GPUs, steps of prompts dequantize one matrix at a time. A matrix with as many rows on a device as the step has
    # looks like an activation.
    matrices = {path: w for path, w in params.items() if isinstance(w, FORMS) and shape.rows not in local(w)}
    # Kernels read GGUF's blocks as they are.
    kept = {path for path, w in matrices.items() if shape.decode_only or path in stacks or isinstance(w, BlockArray)}
    quantized = {path: matrices[path] for path in kept}
    assert dequantized_copies(text, quantized) == []
    assert copied_stacks(text, stacks) == []
    assert copied_parameters(text) == []
    if devices > 1:
        whole = {tuple(sorted(shape)) for w in params.values() for shape in (w.shape, w.shape[-2:]) if len(shape) > 1}
        groups = num_groups(runner.mesh)
        hidden = runner.model.config.hidden_size
        if groups > 1:  # the tokens of all groups may be as many as a weight has rows
            whole -= {tuple(sorted((groups * shape.tokens, hidden)))}
        gathered = re.findall(r"= (?:\()?\w+\[([\d,]+)\]\S* all-gather", text)
        assert not whole & {tuple(sorted(map(int, dims.split(",")))) for dims in gathered}, "a weight is gathered"
        sent = exchanged(text)
        print("exchanged: " + ", ".join(f"{n} x {kind} {size(most)}" for kind, (n, most) in sent.items()), flush=True)
        allowed = {"all-reduce": 2 * layers + 8}
        if groups > 1:  # around experts: tokens to all groups, and sums back
            mixtures = sum(layer.mlp.experts is not None for layer in runner.model.config.layers)
            for_hosts = 3 if spans_hosts(runner.mesh) else 0  # tokens, their scores, and the experts' load
            allowed |= {
                "all-gather": 2 * mixtures + for_hosts,
                "reduce-scatter": mixtures,
                "all-to-all": 0,
                "collective-permute": 0,
            }
            assert all(most <= groups * shape.tokens * hidden * 2 for _, most in sent.values())
            if groups == devices:
                allowed["all-reduce"] = 0
        if runner.mesh.shape["sequence"] > 1:
            allowed |= {"all-gather": 2 * layers + 4, "reduce-scatter": layers}
        assert all(sent.get(kind, (0, 0))[0] <= most for kind, most in allowed.items()), sent


def compile_largest(found: Size, layers: dict, guess: int) -> tuple[Needs, ModelRunner]:
    """What all programs need, as the engine reckons from those that it compiles first, where these changes of the
    config leave some of the layers; asserts what the programs hold."""
    runner, params = found.runner(found.case.config | layers, guess)
    figures = {}
    for name in runner.programs.bounding(found.shapes):
        compiled = runner.lower(name).compile()
        check(runner, compiled, params, name.shape)
        figures[name] = said = compiled.memory_analysis()
        code = size(said.generated_code_size_in_bytes)
        print(f"{name}: temporaries {size(said.temp_size_in_bytes)}, code {code}", flush=True)
    return needs_of(runner.names(found.shapes), figures), runner


def needs_of_all(found: Size, layers: dict, guess: int) -> tuple[Needs, ModelRunner]:
    """What the programs of the whole model need. TPUs' programs grow by code with each layer, and by nothing else."""
    needs, runner = compile_largest(found, layers, guess)
    left = found.plan.model.num_layers - runner.model.config.num_layers
    if found.case.on_gpu or not left:
        return needs, runner
    some = layers["num_hidden_layers"]
    grown, _ = compile_largest(found, layers | {"num_hidden_layers": 2 * some}, guess)
    assert grown.temporaries < needs.temporaries + SMALL
    return replace(needs, code=needs.code + (grown.code - needs.code) * left // some), runner


def whole_model(folder, case: Case, layers: dict) -> None:
    """Checks the model's size, its largest steps with so many layers, and how many tokens fit beside all that."""
    found = Size(folder, case)
    in_files = abstract_params(as_in_files(found.plan.decoder), found.plan.mesh)
    numbers = sum(math.prod(w.shape) for w in in_files.values())
    assert numbers / 1e9 == pytest.approx(case.parameters, rel=0.005)
    layout = found.layout
    row = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layout.kind.pages(1, 1)))
    assert row == case.row
    assert layout.token_bytes >= found.plan.model.num_layers * row
    needs, runner = needs_of_all(found, layers, guess=found.pages(Needs(case.temporaries << 20), 0))
    pages = found.pages(needs, runner.slot_bytes)
    tokens = memory.fitting_tokens(found.settings, replace(layout, num_pages=pages), found.plan.longest)
    print(
        f"{case.target}: weights {size(found.weights)}, "
        f"{layout.device_token_bytes(runner.mesh)} bytes a token on each device, "
        f"temporaries {size(needs.temporaries)}, results {size(needs.results)}, "
        f"code {size(needs.code)}, slots {size(runner.slot_bytes)}, {tokens:,} tokens of requests of "
        f"{found.plan.longest:,}"
    )
    assert needs.temporaries < case.temporaries << 20
    assert tokens >= 1000 * case.tokens


@pytest.mark.parametrize("name", named())
def test_few_layers(name, tmp_path):
    whole_model(tmp_path, CASES[name], CASES[name].few)


@pytest.mark.parametrize("name", named())
@pytest.mark.timeout(3600)
def test_all_layers(name, tmp_path):
    whole_model(tmp_path, CASES[name], {})
