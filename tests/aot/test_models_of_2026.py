"""Models of 2026 at their published sizes: on which devices they fit, what a layer launches, and how many programs a
start compiles.

Weights, states and pages are those of all layers, by the arithmetic of `jaxserve plan`. Steps are compiled with one
period of the pattern of layers, which need the temporaries of all layers, and on GPUs with more layers to see what
these launch. No kernel runs here.
"""

import json
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import pytest
from devices import devices_of
from flax.traverse_util import unflatten_dict
from test_host_free_steps import host_waits
from test_steps import PAGES, cache_copies, copied_parameters
from test_true_sizes import in_scheme

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.launches import count, describe
from jaxserve.engine.loading import buckets
from jaxserve.execution import memory
from jaxserve.execution.cache_kinds import cache_kind
from jaxserve.execution.cost import StepCost
from jaxserve.execution.memory import size
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import AuxProgram
from jaxserve.models.config import HFConfig
from jaxserve.models.drafter import Drafter, DraftSpec
from jaxserve.models.families import last_attention
from jaxserve.models.load import make_decoder
from jaxserve.models.weights import abstract_params
from jaxserve.plan.deployment import Deployment, make_budget, make_runner, model_plan, of_layers, plan_devices
from jaxserve.scheduling.step_plan import Sampler

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))

from startup import is_forward

ROOT = Path(__file__).parent.parent.parent
PUBLISHED = {
    name: config
    for file in ("published_dense", "published_experts")
    for name, config in json.loads((ROOT / "tests" / f"{file}.json").read_text()).items()
}
LONGEST = 32768
TARGETS = ("h200x1", "h200x8", "v6e-1", "v6e-4", "v6e-8")
KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
      name: the repository on the hub.
      scheme: the form of its layers' matrices, see `in_scheme`.
      few, more: the layers, by number, that are compiled, and those to compare them with.
      fits: the targets of TARGETS that hold it, with the default settings.
    """

    name: str
    scheme: str
    few: range
    more: range
    fits: tuple[str, ...]


MODELS = {
    "qwen3.5-27b": Model("Qwen/Qwen3.5-27B", "bf16", range(4), range(8), ("h200x1", "h200x8", "v6e-8")),
    "qwen3.5-35b": Model(
        "Qwen/Qwen3.5-35B-A3B", "fp8 blocks", range(4), range(8), ("h200x1", "h200x8", "v6e-4", "v6e-8")
    ),
    "glm-5": Model("zai-org/GLM-5", "fp8 blocks", range(2, 4), range(2, 5), ("h200x8",)),
    "gemma-4-31b": Model("google/gemma-4-31B-it", "bf16", range(6), range(12), ("h200x1", "h200x8", "v6e-4", "v6e-8")),
    "nemotron-3-nano": Model(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "bf16",
        range(7),
        range(14),
        ("h200x1", "h200x8", "v6e-4", "v6e-8"),
    ),
}


@dataclass(frozen=True)
class Case:
    """Where the steps of a model are compiled, and bounds for them.

    Attributes:
      decode, mixed: at most so many launches in a layer, on average, of a step that only decodes, and of one with
        prompts. On TPUs kernels count alone.
      temporaries: most MiB of the largest step on a device.
      tokens: least number that fits the cache, in thousands, of requests of LONGEST tokens.
      settings: of the engine, beside the default ones.
    """

    target: str
    decode: float
    mixed: float
    temporaries: int
    tokens: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.target.startswith("h")


CASES = [
    ("qwen3.5-27b", Case("h200x1", 12.5, 13.5, 950, 440)),
    ("qwen3.5-27b", Case("v6e-4", 1, 1, 700, 360, {"max_num_seqs": 64})),
    ("qwen3.5-35b", Case("h200x1", 41, 44, 850, 3600)),
    ("gemma-4-31b", Case("h200x1", 17, 17, 1150, 225)),
    ("gemma-4-31b", Case("v6e-4", 1, 3, 420, 175)),
    ("nemotron-3-nano", Case("h200x1", 18, 19, 850, 8000)),
    ("nemotron-3-nano", Case("v6e-4", 2, 2, 1500, 780)),
    ("glm-5", Case("h200x8", 130, 180, 2300, 300)),
]

PROPOSALS = 3
MOST = 16  # programs of a start that run the model or its head


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def deployed(folder: Path, model: Model, target: str, **settings: Any) -> Deployment:
    """As `Deployment.of`, with weights in the model's scheme."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED[model.name]))
    devices = plan_devices(target)
    settings |= {"tensor_parallel_size": len(devices), "max_model_len": LONGEST}
    config, plan = model_plan(EngineConfig(model=str(folder), load_format="dummy", **settings), devices)
    params = in_scheme(dict(abstract_params(plan.decoder, plan.mesh)), model.scheme, plan)
    runner = make_runner(config, plan, params)
    cost = StepCost.of(unflatten_dict(params, sep="/"), plan.model, devices[0], len(devices), plan.dtype)
    shapes = buckets(config, plan, cost)
    return Deployment(target, config, plan, params, runner, cost, shapes, make_budget(config, plan, runner))


def with_layers(found: Deployment, layers: range) -> ModelRunner:
    """A runner of these layers alone, whose cache has so many pages that a copy of it is recognized."""
    plan = found.plan.with_layers(found.config, layers)
    runner = make_runner(found.config, plan, of_layers(found.params, list(layers)))
    runner.set_cache_size(replace(plan.one_page, num_pages=PAGES), -(-plan.longest // plan.one_page.page_size))
    return runner


def with_own_head(found: Deployment, layers: range) -> ModelRunner:
    """The same with the model's own head for further tokens, which is a layer of its last kind of attention."""
    plain = with_layers(found, layers)
    mesh, layout, target = plain.mesh, plain.layout, plain.model
    shape = replace(target.config, layers=(last_attention(target.config, HFConfig({})),))
    like = make_decoder(shape, mesh, target.dtype, page_size=layout.page_size, kv_dtype=layout.dtype)
    spec = DraftSpec((), shape.hidden_size, normed=True)
    sizes = like.kv_heads, like.vocab_rows, shape.vocab_size, target.vocab_rows
    drafter = Drafter(spec, like.config, *sizes, like.dtype, like.ops)
    own = {path: x for path, x in abstract_params(drafter, mesh).items() if not path.startswith(("embed/", "head/"))}
    params = of_layers(found.params, list(layers)) | {f"draft/{path}": x for path, x in own.items()}
    slots = plain.num_slots, memory.penalty_rows(found.config, found.plan.model)
    made = ModelRunner(target, unflatten_dict(params, sep="/"), mesh, *slots, proposals=PROPOSALS, drafter=drafter)
    kind = cache_kind(shape, drafter.kv_heads, layout.dtype, mesh.devices.flat[0].platform)
    made.set_cache_size(replace(layout, draft=kind), -(-found.plan.longest // layout.page_size))
    return made


def copied_states(runner: ModelRunner, text: str) -> list[str]:
    """Copies of the matrices of all recurrent states of an array; a TPU may bring them to its memory on the chip."""
    states = runner.layout.states
    if states is None:
        return []
    matrix = jax.tree.leaves(states.array)[0]
    place = jax.tree.leaves(states.shardings(runner.mesh))[0]
    shape = ",".join(map(str, place.shard_shape(matrix.shape)))
    lines = [line for line in text.splitlines() if re.search(rf"= \(?f32\[{shape}\]\S* copy(-start)?\(", line)]
    return [line for line in lines if "S(1)" not in line]


def check(runner: ModelRunner, compiled: Any) -> str:
    """Cache and states are changed in place, no weight is copied, and no call is of the interface that cannot be
    recorded. Returns the program's HLO."""
    text = compiled.as_text()
    layout = runner.layout
    cache = layout.num_pages * layout.device_page_bytes(runner.mesh)
    held = cache + layout.state_bytes(runner.mesh)
    assert compiled.memory_analysis().alias_size_in_bytes >= held
    assert cache_copies(text, cache // layout.groups.depth // 16) == []  # an indexer keeps little of a token
    assert copied_states(runner, text) == []
    assert copied_parameters(text) == []
    assert "API_VERSION_STATUS_RETURNING" not in text
    return text


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_where_it_fits(name, tmp_path):
    """By arithmetic, with the default settings and requests of LONGEST tokens."""
    fits = []
    for target in TARGETS:
        try:
            found = deployed(tmp_path, MODELS[name], target)
            pages, longest = found.pages(found.estimated_needs())
        except ConfigError as error:
            print(f"{name} on {target}: {error}")
            continue
        tokens = memory.fitting_tokens(found.config, replace(found.plan.one_page, num_pages=pages), longest)
        held = found.budget
        print(f"{name} on {target}: weights {size(held.weights)}, states {size(held.states)}, {tokens:,} tokens")
        if longest == LONGEST:
            fits.append(target)
    assert tuple(fits) == MODELS[name].fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name in MODELS for target in MODELS[name].fits if target != "h200x8" or name == "glm-5"],
)
def test_programs_of_a_start(name, target, tmp_path):
    devices_of(target)
    found = deployed(tmp_path, MODELS[name], target)
    programs = sum(map(is_forward, found.runner.names(found.shapes)))
    print(f"{name} on {target}: {programs} programs")
    assert programs <= MOST


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda x: x if isinstance(x, str) else x.target)
def test_steps(name, case, tmp_path):
    devices_of(case.target)
    model = MODELS[name]
    found = deployed(tmp_path, model, case.target, **case.settings)
    few = with_layers(found, model.few)
    more = with_layers(found, model.more) if case.on_gpu else None
    needs = found.estimated_needs()
    temporaries = results = 0
    *_, largest_decode = (shape for shape in found.shapes if shape.decode_only)
    for shape, most in ((largest_decode, case.decode), (found.shapes[-1], case.mixed)):
        program = few.programs.largest(shape)
        compiled = few.compiled(few.lower(program))
        said = compiled.memory_analysis()
        text = check(few, compiled)
        temporaries = max(temporaries, said.temp_size_in_bytes)
        results = max(results, said.output_size_in_bytes - said.alias_size_in_bytes)
        what = f"{name} on {case.target}, {program}: temporaries {size(said.temp_size_in_bytes)}"
        if more is None:
            launched = text.count(KERNEL) / len(model.few)
            print(f"{what}, {launched:.1f} kernels a layer", flush=True)
        else:
            others = more.compiled(more.lower(program)).as_text()
            counted = count(text, others, layers=len(model.more) - len(model.few))
            launched = counted.per_layer
            print(f"{what}, {describe(counted)}", flush=True)
        assert launched <= most, what
    needs = replace(needs, temporaries=temporaries, results=memory.STEPS_IN_FLIGHT * results)
    pages, longest = found.pages(needs)
    tokens = memory.fitting_tokens(found.config, replace(found.plan.one_page, num_pages=pages), longest)
    held = found.budget
    print(
        f"{name} on {case.target}: weights {size(held.weights)}, states {size(held.states)}, temporaries "
        f"{size(temporaries)}, results {size(needs.results)}, {tokens:,} tokens of requests of {longest:,}"
    )
    assert longest == LONGEST
    assert temporaries <= case.temporaries << 20
    assert tokens >= 1000 * case.tokens


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("target", "settings"), [("h200x1", {}), ("h200x8", {}), ("v6e-4", {"max_num_seqs": 64})])
def test_drafting(target, settings, tmp_path):
    """Qwen3.5 with its own head: a step that checks proposals, one that decodes, and a call that proposes."""
    devices_of(target)
    model = MODELS["qwen3.5-27b"]
    found = deployed(tmp_path, model, target, **settings)
    runner = with_own_head(found, model.few)
    *_, decode = (shape for shape in found.shapes if shape.decode_only)
    programs = runner.programs
    names = [
        programs.choose_checking(found.shapes[-1], Sampler.GREEDY),
        programs.choose(decode, Sampler.GREEDY, 1, scores=False),
        AuxProgram("propose", found.config.max_num_seqs, Sampler.GREEDY, PROPOSALS),
    ]
    for name in names:
        compiled = runner.compiled(runner.lower(name))
        text = compiled.as_text()
        print(f"{name} on {target}: temporaries {size(compiled.memory_analysis().temp_size_in_bytes)}", flush=True)
        if isinstance(name, AuxProgram):
            assert cache_copies(text, runner.layout.device_page_bytes(runner.mesh) * PAGES // 16) == []
        else:
            check(runner, compiled)
        if target.startswith("h200") and programs.static:  # others choose samplers on the device
            assert host_waits(text) == [], name
