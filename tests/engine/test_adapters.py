"""LoRA adapters through the engine's steps, against what transformers computes with PEFT's merged weights."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_models
from engines import Completion, generate, make_engine, request
from safetensors.numpy import load_file, save_file

import jaxserve.engine.engine as engine_module
from jaxserve.adapters.adapter import Adapter, load_adapter
from jaxserve.checkpoints.quantize import Scheme, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.execution import commands
from jaxserve.execution.slots import encode_slot

GOLDENS = Path(__file__).parent.parent / "goldens" / "adapters"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
LOGITS_ATOL = 1e-4
RANK = 8


def model_of(name: str) -> str:
    return json.loads((GOLDENS / name / "adapter_config.json").read_text())["base_model_name_or_path"]


MODELS = sorted({model_of(name) for name in NAMES})


def adapted_engine(folder, monkeypatch, places: int, **options):
    """An engine whose requests say by their seed at which place their adapter is; seed 0: they have none."""

    def encode(slot, params, seed, *rest):
        return encode_slot(slot, params, seed, *rest[:4], adapter=(params.seed or 0) - 1)

    monkeypatch.setattr(engine_module, "encode_slot", encode)
    options = {"max_loras": places, "max_lora_rank": RANK, "prefix_caching": False, **options}
    return make_engine(folder, enable_lora=True, **options)


def upload(engine, place: int, path: Path) -> None:
    adapter = load_adapter(path, path.name, engine.runner.stacks.adapters, RANK)
    for write in engine.runner.adapter_uploads(place, adapter):
        write()


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


def test_many_adapters_without_compiling(model_folders, monkeypatch):
    """32 adapters in one batch, one of which takes the place of another between steps. Each row has the tokens that it
    has with its adapter alone. Nothing is compiled after the start."""
    rows, prompt = 32, [7, 8, 9]
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


@pytest.mark.parametrize("name", ["llama_all", "qwen3_moe_experts"])
def test_split_over_devices(name, model_folders, monkeypatch):
    folder = model_folders(model_of(name))
    split = first_tokens(folder, name, monkeypatch, tensor_parallel_size=2)
    for ours, theirs in zip(split, first_tokens(folder, name, monkeypatch), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert distance(ours, theirs) < 1e-4


@pytest.fixture
def as_int8(tmp_path):
    """A checkpoint whose matrices are products of int8 and a scale per row, so that quantizing loses nothing."""
    folder = tiny_models.build("llama3_gqa", tmp_path / "int8")
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = dequantize(rtn(tensor, Scheme("int8", None))).astype(np.float32)
    save_file(tensors, weights)
    return folder


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"quantization": "int8", "matmul_backend": "cpu"}, 1e-4),  # panels
        ({"quantization": "int8"}, 0.05),  # panels, whose products round their inputs
        ({"quantization": "int8-dynamic", "activation_quantization": "checkpoint"}, 0.05),
    ],
    ids=str,
)
def test_quantized_bases(options, bound, as_int8, monkeypatch):
    """As with the same values in floats. Where products round their inputs, the adapter changes no more than the model
    alone does."""
    quantized = first_tokens(as_int8, "llama_all", monkeypatch, **options)
    adapted, base = first_tokens(as_int8, "llama_all", monkeypatch)
    assert distance(quantized[0], adapted) < bound
    assert distance(quantized[1], base) < bound
    assert adapted.token_ids != base.token_ids


def test_uploads_as_commands(model_folders, monkeypatch):
    """Another runner that repeats the calls has the same adapters."""
    first, second = (adapted_engine(model_folders("llama3_gqa"), monkeypatch, 2, rows=2) for _ in range(2))
    first.runner.listener = lambda command: second.runner.run(commands.decode(commands.encode(command)))
    upload(first, 1, GOLDENS / "llama_all")
    first.runner.listener = None
    ours, theirs = (jax.tree.map(np.asarray, engine.runner.params) for engine in (first, second))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    stack = ours["layers_0"]["attention"]["qkv"]["lora"]
    assert (stack.ranks[1, :3] == 8).all()
    assert stack.a[1].any()
    assert not stack.a[0].any()
