"""Llama-3.1-405B in 8-bit floats on sixteen H200, as two pipeline stages of eight, compiled ahead of time with the
engine's own buckets: what the devices of a stage exchange, what goes to the next stage, and how many tokens fit.

Weights, cache and memory are those of all 126 layers. Steps are compiled with two and with four layers in each stage:
the difference is what a layer adds. No kernel runs here.
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import devices_of
from flax.traverse_util import unflatten_dict
from test_true_sizes import SMALL, check

from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.devices.mesh_links import MeshLink
from jaxserve.devices.targets import target_memory
from jaxserve.engine.model_plan import ModelPlan, decoder_and_page
from jaxserve.engine.pipeline import stages_of
from jaxserve.execution import memory
from jaxserve.execution.buckets import step_shapes
from jaxserve.execution.cost import StepCost, prefill_chunk
from jaxserve.execution.memory import Budget, Needs, size
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner, needs_of
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.quantized import arranged, quantized_abstract
from jaxserve.models.stages import Stage
from jaxserve.models.weights import abstract_params

pytestmark = pytest.mark.slow

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16384, "num_attention_heads": 128, "num_key_value_heads": 8,
    "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYERS = 126
HIDDEN = 16384
VOCAB = 128256
STAGES = 2
DEVICES = 8  # devices of a stage
SCHEME = "fp8-dynamic"  # a scale for each output; products round their inputs with one scale for each token
LONGEST = 32768
PAGES = 20011
BF16 = 2


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


@dataclass
class Made:
    """A stage with its runner, whose weights and cache exist as shapes only."""

    stage: Stage
    runner: ModelRunner
    params: dict[str, Any]


class Pipeline:
    """The model with so many layers, as `LoadedPipeline` makes it."""

    def __init__(self, folder: Any, layers: int, pages: int):
        (folder / "config.json").write_text(json.dumps(LLAMA_405B | {"num_hidden_layers": layers}))
        self.devices = devices_of("h200x16")
        self.settings = EngineConfig(
            model=str(folder), load_format="dummy", tensor_parallel_size=DEVICES, pipeline_parallel_size=STAGES,
            max_model_len=LONGEST, max_num_batched_tokens=8192,
        )  # fmt: skip
        self.plan = ModelPlan.of(self.settings, self.devices)
        whole = quantized_abstract(abstract_params(self.plan.decoder, self.plan.mesh), SCHEME)
        weights = {path: sum(memory.stored_bytes(x) for x in jax.tree.leaves(w)) for path, w in whole.items()}
        stages = stages_of(weights, layers, STAGES)
        self.made = [self._make(i, stage, pages) for i, stage in enumerate(stages)]

    def _make(self, number: int, stage: Stage, pages: int) -> Made:
        plan = self.plan
        settings = self.settings
        mesh = make_mesh(DEVICES, self.devices[number * DEVICES : (number + 1) * DEVICES])
        facts = settings, plan.model, mesh, plan.dtype, plan.longest, plan.one_page.page_size
        decoder = decoder_and_page(*facts)[0].clone(stage=stage)
        plain = quantized_abstract(abstract_params(decoder, mesh), SCHEME)
        params = arranged(plain, mesh, plan.dtype, "auto")
        rows = memory.penalty_rows(settings, plan.model) if stage.is_last else 0
        tree = unflatten_dict(params, sep="/")
        runner = ModelRunner(decoder, tree, mesh, settings.max_num_seqs, rows, max_tokens_per_call=1)
        layout = replace(plan.one_page, groups=plan.one_page.groups.of_stage(stage.layers), num_pages=pages)
        runner.set_cache_size(layout, -(-plan.longest // layout.page_size))
        return Made(stage, runner, params)

    @property
    def shapes(self) -> list[StepShape]:
        """The engine's buckets."""
        tree = unflatten_dict(self.made[0].params, sep="/")
        cost = StepCost.of(tree, self.plan.model, self.devices[0], DEVICES, self.plan.dtype)
        sizes = self.settings.max_num_seqs, memory.max_batched_tokens(self.settings), self.plan.one_page.page_size
        return step_shapes(*sizes, cost=cost, chunk=prefill_chunk(self.settings, cost))

    def pages(self, made: Made, needs: Needs, shapes: list[StepShape]) -> int:
        """That fit a stage, as the engine reckons: beside all else, arrays are on their way from the stage before."""
        one_page = made.runner.layout
        total = target_memory(self.devices[0])
        moving = (STAGES + 1) * max(shape.tokens for shape in shapes) * HIDDEN * BF16
        weights = sum(memory.bytes_by_dtype(made.params).values())
        slots = made.runner.slot_bytes + moving
        budget = Budget(total, self.settings.memory_utilization, weights, slots, memory.RESERVE_BYTES, None, True)
        page = one_page.page_size, one_page.device_page_bytes(made.runner.mesh)
        return memory.plan_pages(self.settings, self.plan.longest, *page, budget, needs, one_page.groups.windows)[0]


def exchanges(text: str) -> Counter[tuple[str, int]]:
    """(Operation by which devices exchange arrays, bytes of its result on a device) -> how often it is there."""
    found: Counter[tuple[str, int]] = Counter()
    pattern = r"= (\S.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(-start)?\("
    for shapes, kind, _ in re.findall(pattern, text):
        arrays = re.findall(r"([a-z]+)(\d+)\w*\[([\d,]*)\]", shapes)
        each = [math.prod(map(int, filter(None, dims.split(",")))) * int(bits) // 8 for _, bits, dims in arrays]
        found[kind, sum(each)] += 1
    return found


def in_entry(text: str, shape: str) -> tuple[int, int]:
    """How many arguments and how many results of a compiled program are arrays of this shape, as bf16[8,16]."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->(.*?)\}, allow_spmd", text)
    assert layout is not None
    return layout[1].count(shape + "{"), layout[2].count(shape + "{")


def compile_largest(made: Made, shapes: list[StepShape]) -> dict[Any, Any]:
    """The programs that need the most memory, by name; asserts what the steps among them exchange."""
    compiled = {name: made.runner.lower(name).compile() for name in made.runner.largest(shapes)}
    for name, one in compiled.items():
        if isinstance(name, StepProgram):
            check(made.runner, one, made.params, name.shape)
            check_exchanges(made.stage, name.shape, one.as_text())
    return compiled


def check_exchanges(stage: Stage, shape: StepShape, text: str) -> None:
    """Each layer takes two sums of [tokens, hidden], and the embedding one. Sampling takes rows of logits, and little
    beside them. One array of [tokens, hidden] comes from the stage before, or goes to the next one."""
    found = exchanges(text)
    moved = shape.tokens * HIDDEN * BF16
    print(f"layers {stage.begin} to {stage.end - 1}, {shape}: {dict(found)}", flush=True)
    assert found.pop(("all-reduce", moved)) == 2 * len(stage.layers) + stage.is_first
    arguments, results = in_entry(text, f"bf16[{shape.tokens},{HIDDEN}]")
    if stage.is_first:
        assert not found
        assert (arguments, results) == (0, 1)
        return
    assert arguments == 1
    logits, (small,) = found.pop(("all-to-all", 2 * shape.rows * VOCAB * 4 // DEVICES)), found  # as sent, and received
    assert (logits, found[small]) == (1, 1)
    assert small[0] == "all-gather"
    assert small[1] <= 200 * shape.rows


@pytest.mark.parametrize("tokens", [256, 8192])
def test_between_hosts(tokens):
    """From each device of one host to its counterpart on the next one, one array, and nothing else is exchanged."""
    devices = devices_of("h200x16")
    link = MeshLink(*(make_mesh(DEVICES, some) for some in (devices[:DEVICES], devices[DEVICES:])))
    text = link.compile([jax.ShapeDtypeStruct((tokens, HIDDEN), jnp.bfloat16)]).as_text()
    assert exchanges(text) == {("collective-permute", 2 * tokens * HIDDEN * BF16): 1}  # as sent, and received
    (pairs,) = re.findall(r"source_target_pairs=\{(\S*)\}", text)
    assert pairs == ",".join(f"{{{i},{i + DEVICES}}}" for i in range(DEVICES))


def test_what_a_layer_adds(tmp_path):
    """With twice the layers, the largest decode and the largest mixed step of each stage exchange as much more as these
    layers need, and their temporaries stay as they are."""
    temporaries = []
    for layers in (4, 8):
        pipeline = Pipeline(tmp_path, layers, PAGES)
        shapes = pipeline.shapes
        chosen = [max((s for s in shapes if s.decode_only is kind), key=lambda s: s.tokens) for kind in (True, False)]
        assert [(s.rows, s.tokens) for s in chosen] == [(256, 256), (256, 8192)]
        for made in pipeline.made:
            assert len(made.stage.layers) == layers // STAGES
            for shape in chosen:
                name = next(n for n in made.runner.largest(shapes) if getattr(n, "shape", None) == shape)
                compiled = made.runner.lower(name).compile()
                check_exchanges(made.stage, shape, compiled.as_text())
                temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert np.ptp(np.reshape(temporaries, (2, -1)), axis=0).max() < SMALL


def test_all_layers_fit(tmp_path):
    """The layers are halved. Beside 24 GiB of weights, each device has room for the cache of three million tokens."""
    few = Pipeline(tmp_path, 4, PAGES)
    whole = Pipeline(tmp_path, LAYERS, PAGES)
    shapes = few.shapes
    pages = []
    plain = abstract_params(whole.plan.decoder, whole.plan.mesh)
    assert sum(math.prod(w.shape) for w in plain.values()) / 1e9 == pytest.approx(405.9, rel=0.001)
    assert [list(made.stage.layers) for made in whole.made] == [list(range(63)), list(range(63, LAYERS))]
    for made, compiled in zip(whole.made, (compile_largest(one, shapes) for one in few.made), strict=True):
        figures = {name: one.memory_analysis() for name, one in compiled.items()}
        needs = needs_of(made.runner.names(shapes), figures)
        weights = sum(memory.bytes_by_dtype(made.params).values())
        layout = made.runner.layout
        token = layout.device_page_bytes(made.runner.mesh) // layout.page_size
        pages.append(whole.pages(made, needs, shapes))
        print(
            f"layers {made.stage.begin} to {made.stage.end - 1}: weights {size(weights)}, {token} bytes a token on "
            f"each device, temporaries {size(needs.temporaries)}, results {size(needs.results)}, code "
            f"{size(needs.code)}, slots {size(made.runner.slot_bytes)}, {pages[-1]} pages",
            flush=True,
        )
        assert 23.5 < weights / 2**30 < 24.5
        assert token == 63 * 2 * 128 * BF16
        assert needs.temporaries < 800 << 20
    tokens = memory.fitting_tokens(whole.settings, replace(whole.plan.one_page, num_pages=min(pages)), LONGEST)
    print(f"{tokens:,} tokens of requests of {LONGEST:,}")
    assert tokens >= 3_000_000
