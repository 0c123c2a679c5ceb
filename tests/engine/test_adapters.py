"""LoRA adapters through the engine's steps, against what transformers computes with PEFT's merged weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import Completion, generate, make_engine, request
from safetensors.numpy import load_file, save_file

from jaxserve.adapters.adapter import Adapter, load_adapter
from jaxserve.engine import in_flight
from jaxserve.execution import runner_commands
from jaxserve.execution.slots import encode_slot
from jaxserve.models.layers import Linear
from jaxserve.models.panels import Packing
from jaxserve.models.quantized import rounded
from jaxserve.pallas_kernels.lora.reference import add_adapters
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.ops import Ops

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens" / "adapters"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
LOGITS_ATOL = 1e-4
RANK = 8


def model_of(name: str) -> str:
    return json.loads((GOLDENS / name / "adapter_config.json").read_text())["base_model_name_or_path"]


SLOW = {"qwen3_next_groups"}  # its checkpoint takes most of a minute to compile
MODELS = [
    pytest.param(model, marks=pytest.mark.slow if model in SLOW else ())
    for model in sorted({model_of(name) for name in NAMES})
]


def adapted_engine(folder, monkeypatch, places: int, **options):
    """An engine whose requests say by their seed at which place their adapter is; seed 0: they have none."""

    def encode(slot, params, seed, *rest):
        return encode_slot(slot, params, seed, *rest[:4], adapter=(params.seed or 0) - 1)

    monkeypatch.setattr(in_flight, "encode_slot", encode)
    options = {"max_loras": places, "max_lora_rank": RANK, "prefix_caching": False, **options}
    return make_engine(folder, enable_lora=True, **options)


def upload(engine, place: int, path: Path) -> None:
    adapter = load_adapter(path, path.name, engine.runner.stacks.adapters, RANK)
    for write in engine.runner.adapter_uploads(place, adapter):
        write()


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_merged_weights(model, model_folders, monkeypatch):
    """All adapters of a checkpoint, and none, in one batch: logits and tokens of the merged weights."""
    names = [name for name in NAMES if model_of(name) == model]
    goldens = {name: np.load(GOLDENS / name / "golden.npz") for name in names}
    engine = adapted_engine(model_folders(model), monkeypatch, len(names), rows=2 * len(names) + 2)
    for place, name in enumerate(names):
        upload(engine, place, GOLDENS / name)
    asked = {
        f"{name} {k}": request(f"{name} {k}", golden[f"prompt_{k}"], max_tokens=16, seed=place + 1, logprobs=20)
        for place, (name, golden) in enumerate(goldens.items())
        for k in range(2)
    }
    prompts = [goldens[names[0]][f"prompt_{k}"] for k in range(2)]
    plain = [request(f"plain {k}", prompt, max_tokens=16, seed=0) for k, prompt in enumerate(prompts)]
    *made, first, second = generate(engine, *asked.values(), *plain)
    for (which, one), completion in zip(asked.items(), made, strict=True):
        name, k = which.split()
        assert completion.token_ids == goldens[name][f"tokens_{k}"].tolist(), which
        logits = goldens[name][f"logits_{k}"][-1].astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum())
        found = dict(completion.logprobs[0].top)
        assert len(found) == 20
        for token, logprob in found.items():
            assert abs(logprob - wanted[token]) <= LOGITS_ATOL * max(1, np.abs(logits).max()), (which, one)
    alone = make_engine(model_folders(model), rows=2, prefix_caching=False)
    unchanged = generate(alone, *[request(str(k), prompt, max_tokens=16) for k, prompt in enumerate(prompts)])
    assert [first.token_ids, second.token_ids] == [completion.token_ids for completion in unchanged]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_5_groups", "olmo_hybrid_still"])
def test_projections_of_recurrent_layers(case, tmp_path, model_folders, monkeypatch):
    """Several tensors of a file are one product here, and one of them lies in three parts of it."""
    rng = np.random.default_rng(2)
    weights = load_file(model_folders(case) / "model.safetensors")
    matrices = {}
    merged = dict(weights)
    for name, weight in weights.items():
        if "linear_attn" in name and "proj" in name:
            a = (rng.standard_normal((4, weight.shape[1])) / 2).astype(np.float32)
            b = (rng.standard_normal((weight.shape[0], 4)) / 10).astype(np.float32)
            stem = f"base_model.model.{name.removesuffix('weight')}"
            matrices |= {f"{stem}lora_A.weight": a, f"{stem}lora_B.weight": b}
            merged[name] = weight + b @ a
    modules = sorted({name.split(".")[-3] for name in matrices})
    (tmp_path / "adapter").mkdir()
    save_file(matrices, tmp_path / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "target_modules": modules}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"}))
    shutil.copytree(model_folders(case), tmp_path / "merged")
    save_file(merged, tmp_path / "merged" / "model.safetensors")
    engine = adapted_engine(model_folders(case), monkeypatch, 1)
    upload(engine, 0, tmp_path / "adapter")
    prompt = range(5, 60)
    asked = [request(str(seed), prompt, max_tokens=16, seed=seed, prompt_logprobs=0) for seed in (0, 1)]
    plain, changed = generate(engine, *asked)
    wanted = generate(make_engine(tmp_path / "merged"), request("merged", prompt, max_tokens=16, prompt_logprobs=0))[0]
    assert changed.token_ids == wanted.token_ids != plain.token_ids
    scores = [[entry.logprob for entry in one.prompt_logprobs[1:]] for one in (changed, wanted)]
    np.testing.assert_allclose(*scores, atol=2e-3)


@pytest.mark.slow
def test_many_adapters_without_compiling(model_folders, monkeypatch):
    """32 adapters in one batch, one of which takes the place of another between steps. Each row has the tokens that it
    has with its adapter alone. Nothing is compiled after the start."""
    rows = 32
    prompt = [7, 8, 9]
    engine = adapted_engine(model_folders("llama3_gqa"), monkeypatch, rows, rows=rows, forbid_compile=True)
    engine.compile()
    before = engine.runner.num_executables
    first = load_adapter(GOLDENS / "llama_all", "all", engine.runner.stacks.adapters, RANK)
    many = [scaled(first, 1 + 0.1 * i) for i in range(rows)]
    for place, adapter in enumerate(many):
        for write in engine.runner.adapter_uploads(place, adapter):
            write()
    asked = [request(str(i), prompt, max_tokens=6, seed=1 + i) for i in range(rows)]
    together = [one.token_ids for one in generate(engine, *asked)]
    assert len(set(map(tuple, together))) > 8
    for i in (0, 13, 31):
        for write in engine.runner.adapter_uploads(5, many[i]):
            write()
        (alone,) = generate(engine, request("alone", prompt, max_tokens=6, seed=6))
        assert alone.token_ids == together[i]
    for write in engine.runner.adapter_uploads(5, None):
        write()
    empty, none = generate(engine, *(request(str(n), prompt, max_tokens=6, seed=n) for n in (6, 0)))
    assert empty.token_ids == none.token_ids
    assert engine.runner.num_executables == before


def scaled(adapter: Adapter, factor: float) -> Adapter:
    matrices = {path: found._replace(b=found.b * np.float32(factor)) for path, found in adapter.matrices.items()}
    return Adapter(adapter.name, adapter.digest, adapter.rank, matrices)


def first_tokens(folder, name: str, monkeypatch, **options) -> list[Completion]:
    """What the model says with the adapter, and without."""
    engine = adapted_engine(folder, monkeypatch, 2, rows=2, decode_steps=False, **options)
    upload(engine, 1, GOLDENS / name)
    prompt = np.load(GOLDENS / name / "golden.npz")["prompt_1"]
    return generate(engine, *[request(str(n), prompt, max_tokens=4, seed=n, logprobs=20) for n in (2, 0)])


def distance(ours: Completion, theirs: Completion) -> float:
    """The largest difference of log-probabilities that both have of the first token."""
    wanted = dict(theirs.logprobs[0].top)
    far = [abs(value - wanted[token]) for token, value in ours.logprobs[0].top if token in wanted]
    assert len(far) > 10
    return max(far)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_all", "qwen3_moe_experts"])
def test_split_over_devices(name, model_folders, monkeypatch):
    folder = model_folders(model_of(name))
    split = first_tokens(folder, name, monkeypatch, tensor_parallel_size=2)
    for ours, theirs in zip(split, first_tokens(folder, name, monkeypatch), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert distance(ours, theirs) < 1e-4


@pytest.mark.parametrize("form", ["int8", "int8-dynamic", "panels"])
def test_quantized_bases(form):
    """What an adapter adds to a product with a quantized weight is exactly what it adds to one of floats: it reads the
    inputs before any rounding, and its result is added after the product."""
    rng = np.random.default_rng(8)
    places = np.array([1, -1, 0, 1, 1], np.int32)
    w = rng.normal(size=(96, 128)).astype(np.float32)
    x = rng.normal(size=(5, 128)).astype(np.float32)
    kernel: Any = rounded("layers_0/mlp/down/kernel", w, "int8" if form == "panels" else form)
    if form == "panels":
        kernel = Packing().packed(kernel)
        assert kernel is not None
    a = rng.normal(size=(2, RANK, 128)).astype(np.float32)
    b = rng.normal(size=(2, RANK, 96)).astype(np.float32)
    stack = AdapterStack(*map(jnp.asarray, (a, b, np.full((2, 3), RANK, np.int32))), (96,))
    ops = replace(Ops(), add_adapters=add_adapters)
    adapted = ops.adapted_by(jnp.asarray(places))
    layer = Linear((128,), (96,), ("embed", "mlp"))
    params = jax.tree.map(jnp.asarray, {"kernel": kernel, "lora": stack})
    with jax.default_matmul_precision("highest"):
        plain, made = (np.asarray(layer.apply({"params": params}, jnp.asarray(x), one)) for one in (ops, adapted))
    wanted = [np.zeros(96) if p < 0 else x[i].astype(np.float64) @ a[p].T @ b[p] for i, p in enumerate(places)]
    np.testing.assert_allclose(made - plain, wanted, atol=1e-3)
    assert np.abs(plain - x @ w.T).max() > 1e-3  # it was rounded


def test_uploads_as_commands(model_folders, monkeypatch):
    """Another runner that repeats the calls has the same adapters."""
    first, second = (adapted_engine(model_folders("llama3_gqa"), monkeypatch, 2, rows=2) for _ in range(2))
    first.runner.listener = lambda command: second.runner.run(runner_commands.decode(runner_commands.encode(command)))
    upload(first, 1, GOLDENS / "llama_all")
    first.runner.listener = None
    ours, theirs = (jax.tree.map(np.asarray, engine.runner.params) for engine in (first, second))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    stack = ours["layers_0"]["attention"]["qkv"]["lora"]
    assert (stack.ranks[1, :3] == 8).all()
    assert stack.a[1].any()
    assert not stack.a[0].any()
