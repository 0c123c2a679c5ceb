"""Models with recurrent layers: a sequence's tokens depend on nothing but itself, though its state lies in a slot that
others had before, is updated in place, and cannot be shared."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import quantized_forms
from dense_models import ENDED
from engines import drain, generate, make_engine, request, run_all
from recurrent_models import RECURRENT_CASES
from safetensors.numpy import load_file, save_file
from test_speculation import Oracle
from tiny_models import EOS, tensors

from jaxserve.checkpoints.load import put_piece
from jaxserve.commands.model_report import describe_model
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.execution import memory
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.models.config import HFConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.delta_net import delta_sources
from jaxserve.models.families import read_model_config
from jaxserve.models.spec import GatedDeltaSpec, NormSpec
from jaxserve.models.weights import abstract_params
from jaxserve.pallas_kernels.types import QuantArray
from jaxserve.speculation import speculator
from jaxserve.speculation.speculator import Speculator
from jaxserve.types import InvalidRequestError

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens"
CASES = "qwen3_next_groups", "qwen3_next_odd", *RECURRENT_CASES
KINDS = [
    "lfm2_tied",
    "granite_hybrid_dense",
    "kimi_linear_types",
    "falcon_mamba_tied",
    "falcon_h1_norm_behind",
    "minimax_lightning_first",
    "qwen4_exp_whole",
]  # one for each kind of recurrent layer but plain gated delta nets
SPLIT = "qwen3_next_groups"  # two key heads, six value heads, two heads of keys and values
SPLITS = SPLIT, "qwen3_5_groups", "qwen3_5_moe_whole", "olmo_hybrid_still"


def golden(case):
    """Prompts of 1, 7, 37 and 130 tokens, and what transformers answers, 64 tokens each."""
    recorded = np.load(GOLDENS / f"{case}.npz")
    return [(recorded[f"prompt_{i}"].tolist(), recorded[f"tokens_{i}"].tolist()) for i in range(4)]


def check(engine, case, tag="", params=None):
    """All prompts at once, each twice."""
    pairs = golden(case) * 2
    requests = [request(f"{tag}{i}", prompt, max_tokens=64, **params or {}) for i, (prompt, _) in enumerate(pairs)]
    results = generate(engine, *requests)
    assert [result.token_ids for result in results] == [tokens for _, tokens in pairs]
    return [result.num_cached for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_chunked_in_used_slots(case, model_folders):
    """Prompts in pieces of 16 tokens and less, while others decode; then again in slots that hold states."""
    engine = make_engine(model_folders(case), tokens=16, rows=6, decode_steps=False)
    check(engine, case, "first-")
    assert check(engine, case, "again-") == [0, 0, 0, 128] * 2
    engine.reset_prefix_cache()
    assert check(engine, case, "without-")[:4] == [0, 0, 0, 0]


@pytest.mark.parametrize("static", [pytest.param(False, marks=pytest.mark.slow), True])
def test_several_tokens_a_call(static, model_folders):
    engine = make_engine(model_folders(SPLIT), rows=8, tokens=128, static_steps=static, latency_goal_ms=60_000.0)
    most = []
    step = engine.runner.step

    def watch(program, packed):
        at, _ = program.shape.fields["tokens_per_call"]
        most.append(int(packed[at]))
        return step(program, packed)

    engine.runner.step = watch
    check(engine, SPLIT)
    assert max(most) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "case"), [(1, KINDS[0]), (2, KINDS[0]), *((1, case) for case in KINDS[1:])])
def test_prompts_that_part(devices, case, model_folders):
    """The second prompt shows where others part from the first: its steps end there, and the third begins there. A
    sequence that begins from a snapshot says what it says without."""
    prompt, tokens = golden(case)[3]
    others = [prompt[:100] + [5 + i] * 20 for i in range(3)]
    options = {"rows": 4, "tokens": 32, "tensor_parallel_size": devices, "max_num_seqs": 4}

    def run(engine, tag):
        return [
            run_all(engine, request(f"{tag}{i}", one, max_tokens=20))[f"{tag}{i}", 0] for i, one in enumerate(others)
        ]

    plain = make_engine(model_folders(case), prefix_caching=False, **options)
    expected = [result.token_ids for result in run(plain, "plain")]
    assert plain.runner.layout.states.snapshots == 0
    engine = make_engine(model_folders(case), state_snapshots=3, **options)
    assert run_all(engine, request("first", prompt, max_tokens=64))["first", 0].token_ids == tokens
    results = run(engine, "")
    assert [result.token_ids for result in results] == expected
    assert [result.num_cached for result in results] == [0, 96, 96]
    # Three snapshots at most: those of the first prompt's end and of the place of parting were used last.
    again = run_all(engine, request("again", prompt, max_tokens=64))["again", 0]
    assert (again.num_cached, again.token_ids) == (128, tokens)


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("lfm2_tied", 1),
        *(pytest.param(case, 1, marks=pytest.mark.slow) for case in CASES if case != "lfm2_tied"),
        *(pytest.param(case, 2, marks=pytest.mark.slow) for case in (SPLIT, *KINDS)),
    ],
)
def test_proposals(case, devices, model_folders, monkeypatch):
    """Right and wrong proposals change no answer: of new prompts in chunks, of those that begin from a snapshot, and of
    sequences that were preempted."""
    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        monkeypatch.setattr(speculator, name, 0)  # as many proposals as can be
    monkeypatch.setattr(speculator, "FEW_ROWS", 8)
    method = {"method": "ngram", "num_speculative_tokens": 3}
    pages = 60 if case == "zaya_sliding" else 40  # with 40 its windows leave no room to keep a prefix
    settings = {"rows": 8, "tokens": 64, "kv_pages": pages, "max_model_len": 200, "tensor_parallel_size": devices}
    engine = make_engine(model_folders(case), speculative_config=method, **settings)
    engine.speculator = Speculator(Oracle([prompt + tokens for prompt, tokens in golden(case)], 0.3), 3, budget=64)
    check(engine, case, "first-")
    assert 128 in check(engine, case, "again-")
    assert engine.scheduler.num_preemptions > 0
    counters = engine.counters
    assert counters.spec_proposed > 400
    assert 0.3 < counters.spec_accepted / counters.spec_proposed < 0.9


def test_a_shared_system_prompt_is_computed_once(model_folders, tmp_path):
    """Of 1,728 tokens that requests share, the second computes at most an interval again, and the third none."""
    folder = shutil.copytree(model_folders("lfm2_tied"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    shared = np.random.default_rng(0).integers(5, 500, 1728).tolist()
    own = [[7 + i] * (20 + i) for i in range(4)]
    settings = {"rows": 8, "tokens": 512, "max_model_len": 2048, "decode_steps": False}
    engine = make_engine(folder, **settings)
    interval = engine.runner.layout.snapshot_interval(None)
    hits = []
    for i, tail in enumerate(own):
        before = engine.stats().prefix_hits
        run_all(engine, request(f"r{i}", shared + tail, max_tokens=2))
        hits.append(engine.stats().prefix_hits - before)
    page = engine.runner.layout.page_size
    assert hits == [0, 1728 // interval * interval, *[1728 // page * page] * 2]


@pytest.mark.parametrize(
    ("worth", "asked", "interval"), [(3, None, 512), (700, None, 1024), (99_999, None, 1024), (3, 50, 64), (3, 0, 0)]
)
def test_intervals_of_snapshots(worth, asked, interval):
    """By default a power of two of tokens, whose pages take as much memory as a state, within bounds."""
    layout: Any = SimpleNamespace(states=SimpleNamespace(slot_bytes=100 * worth), token_bytes=100, page_size=32)
    assert CacheLayout.snapshot_interval(layout, asked) == interval


@pytest.mark.parametrize("case", ["qwen4_exp_types", "qwen4_exp_whole"])
def test_ends_of_texts_within_a_prompt(case, model_folders):
    """n-grams do not reach across them, also where steps end between them. transformers computes the same with a cache
    as without one (`goldens/record.py`)."""
    recorded = np.load(GOLDENS / f"{case}.npz")
    prompt = recorded["prompt_3"].copy()
    prompt[ENDED] = EOS
    engine = make_engine(model_folders(case), tokens=21, rows=4)
    found = generate(engine, request("0", prompt.tolist(), max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    np.testing.assert_allclose([entry.logprob for entry in found[1:]], recorded["ended"], atol=2e-3)


@pytest.mark.slow
def test_no_place_for_snapshots(model_folders):
    engine = make_engine(model_folders(SPLIT), rows=4, tokens=64, state_snapshots=0)
    check(engine, SPLIT, "first-")
    assert not any(check(engine, SPLIT, "again-"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SPLITS, *KINDS])
def test_preempted(case, model_folders):
    engine = make_engine(model_folders(case), rows=8, tokens=64, kv_pages=30, max_model_len=200)
    check(engine, case)
    assert engine.stats().preemptions > 3


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLITS)
def test_two_devices(case, model_folders):
    engine = make_engine(model_folders(case), rows=8, tokens=64, tensor_parallel_size=2)
    check(engine, case)
    states = engine.runner.cache[-1]
    assert [x.addressable_shards[0].data.shape[1] for x in states] == [1, 1]
    kernel = engine.runner.params["layers_1"]["attention"]["qkvz"]["kernel"]
    assert kernel.addressable_shards[0].data.shape[0] == kernel.shape[0] // 2
    with pytest.raises(ConfigError, match="2 key heads of recurrent layers; this model allows"):
        make_engine(model_folders(case), tensor_parallel_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_fp8_in_blocks(devices, tmp_path):
    """As Qwen3.5 is published: blocks of 128 x 128, which end within heads. Projections that share a weight have a
    tensor each."""
    case = "qwen3_5_moe_whole"
    folders = tmp_path / "quantized", tmp_path / "plain"
    quantized_forms.write("fp8-blocks", RECURRENT_CASES[case].config, tensors(case), *folders)
    prompt, _ = golden(case)[3]
    found = []
    for folder in folders:
        options = {"matmul_backend": "cpu" if devices == 1 else "auto", "activation_quantization": "none"}
        engine = make_engine(folder, tensor_parallel_size=devices, **options)
        found.append(generate(engine, request("0", prompt, max_tokens=16, prompt_logprobs=0))[0])
        kernels = engine.runner.params["layers_0"]["attention"]
        kinds = {type(kernels[name]["kernel"]) for name in ("qkvz", "ba", "out")}
        assert (kinds == {QuantArray}) == (folder == folders[0])
    scores = [[entry.logprob for entry in result.prompt_logprobs[1:]] for result in found]
    np.testing.assert_allclose(*scores, atol=2e-3)
    assert found[0].token_ids == found[1].token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("lfm2_odd", 2),
        ("lfm2_tied", 4),
        ("granite_hybrid_dense", 2),
        ("bamba_groups", 4),
        ("nemotron_h_experts", 2),
        ("nemotron_h_latent_types", 4),
        ("kimi_linear_types", 4),
        ("bailing_hybrid_groups", 2),
        ("falcon_h1_norm_behind", 4),
        ("mamba2_tied", 2),
        ("mamba_tied", 4),
        ("jamba_dense", 4),
        ("minimax_by_turns", 4),
        ("zamba2_plain", 4),
        ("lara_mini_types", 2),
        ("qwen4_exp_whole", 2),
    ],
)
def test_shared_by_devices(case, devices, model_folders):
    engine = make_engine(model_folders(case), rows=8, tokens=64, tensor_parallel_size=devices)
    check(engine, case)
    layout = engine.runner.layout
    states = jax.tree.leaves(engine.runner.cache[layout.num_arrays :])
    held = sum(x.addressable_shards[0].data.nbytes for x in states)
    assert held == layout.state_bytes(engine.runner.mesh) < sum(x.nbytes for x in states)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "lfm2_moe_plain",
        "granite_hybrid_dense",
        "nemotron_h_experts",
        "bailing_hybrid_types",
        "zamba2_plain",
        "qwen4_exp_whole",
    ],
)
def test_in_bfloat16(case, model_folders):
    """Activations and weights are as narrow as this, states are not: no type is mixed up."""
    recorded = np.load(GOLDENS / f"{case}.npz")
    prompt = [*recorded["prompt_3"].tolist(), *recorded["tokens_3"].tolist()]
    engine = make_engine(model_folders(case), tokens=320, tensor_parallel_size=2, dtype="bfloat16")
    result = generate(engine, request("0", prompt, max_tokens=1, prompt_logprobs=0))[0]
    found = [entry.logprob for entry in result.prompt_logprobs[len(recorded["prompt_3"]) :]]
    assert np.median(np.abs(np.array(found) - recorded["logprobs_3"])) < 0.1


@pytest.mark.slow
def test_completions_of_one_prompt(model_folders):
    """Completion 0 is what n = 1 gives; the others differ, and repeat with the seed, also where they wait for slots."""
    engine = make_engine(model_folders(SPLIT), rows=4, tokens=64)
    prompt, tokens = golden(SPLIT)[3]
    greedy = run_all(engine, request("greedy", prompt, n=3, max_tokens=30))
    assert all(greedy["greedy", i].token_ids == tokens[:30] for i in range(3))

    def run(n, name):
        results = run_all(engine, request(name, prompt, n=n, max_tokens=30, temperature=1.0, seed=5))
        return [results[name, i].token_ids for i in range(n)]

    three = run(3, "three")
    assert three[:1] == run(1, "one")
    assert len({tuple(ids) for ids in three}) == 3
    assert run(9, "nine")[:3] == three


@pytest.mark.slow
def test_a_paused_request_goes_on(model_folders):
    engine = make_engine(model_folders(SPLIT), rows=2, tokens=64)
    prompt, tokens = golden(SPLIT)[2]
    engine.add_request(request("a", prompt, max_tokens=64))
    found = []
    while len(found) < 20:
        found += [token for update in engine.step() for token in update.token_ids]
    engine.scheduler.pause("a", True)
    while engine.in_flight:
        found += [token for update in engine.step() for token in update.token_ids]
    engine.scheduler.pause("a", False)
    assert found + drain(engine)["a", 0].token_ids == tokens


def test_beams_are_refused(model_folders):
    engine = make_engine(model_folders(SPLIT))
    with pytest.raises(InvalidRequestError, match="recurrent layers"):
        engine.add_request(request("beams", [7, 8, 9], n=2, max_tokens=4, use_beam_search=True))


@pytest.mark.slow
def test_nothing_compiles_late(model_folders):
    config = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "kv_pages": 40, "max_model_len": 220}
    engine = make_engine(model_folders(SPLIT), rows=2, tokens=32, forbid_compile=True, **config)
    engine.compile()
    check(engine, SPLIT)


@pytest.mark.parametrize("devices", [1, 2])
def test_states_are_counted(devices, model_folders):
    """A slot has a matrix of 16 x 24 numbers for each of 6 heads, and 3 inputs of 2 x 16 + 3 x 24 numbers for each of 2
    key heads, in each of 6 layers."""
    slot = 4 * 6 * (6 * 16 * 24 + 3 * 2 * (2 * 16 + 3 * 24))
    rows = 8
    engine = make_engine(model_folders(SPLIT), rows=rows, tensor_parallel_size=devices)
    layout = engine.runner.layout
    mesh = engine.runner.mesh
    assert layout.states.slot_bytes == slot
    assert layout.states.snapshots == 8
    assert layout.state_bytes(mesh) == (rows + 1 + 8) * slot // devices
    held = [sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(array)) for array in engine.runner.cache]
    assert len(held) == layout.num_arrays + 1
    assert held[-1] == layout.state_bytes(mesh)
    assert sum(held[:-1]) == layout.num_pages * layout.device_page_bytes(mesh)
    budget = engine._sizing.budget
    assert budget.states == layout.state_bytes(mesh)
    config = EngineConfig(model=str(model_folders(SPLIT)), max_num_seqs=rows, tensor_parallel_size=devices)
    report = "\n".join(describe_model(config))
    assert f"states of recurrent layers: {slot:,} bytes a sequence" in report
    taken = memory.size(8 * slot)
    assert f"8 snapshots of {memory.size(slot)} take {taken}; they are made at the ends of prompts" in report


def test_forms_of_the_projections():
    """The same weights in tensors by key heads, in one for queries, keys and values, in one for each of them, and in
    one for all."""
    spec = GatedDeltaSpec(key_heads=2, value_heads=6, key_dim=4, value_dim=5, conv_width=3, norm=NormSpec())
    rng = np.random.default_rng(3)
    sizes = {"qkv_q": 8, "qkv_k": 8, "qkv_v": 30, "z": 30, "b": 6, "a": 6}
    kinds = {name: rng.standard_normal((size, 7)).astype(np.float32) for name, size in sizes.items()}
    conv = {f"conv_{kind}": rng.standard_normal((sizes[f"qkv_{kind}"], 1, 3)).astype(np.float32) for kind in "qkv"}
    fused = {"conv": np.concatenate(list(conv.values()))}
    qkv = {"qkv": np.concatenate([kinds[f"qkv_{kind}"] for kind in "qkv"])}
    by_head = {name: x.reshape(2, -1, 7) for name, x in kinds.items()}
    qkvz = np.concatenate([by_head[name] for name in ("qkv_q", "qkv_k", "qkv_v", "z")], 1).reshape(-1, 7)
    ba = np.concatenate([by_head["b"], by_head["a"]], 1).reshape(-1, 7)
    few = {name: kinds[name] for name in ("z", "b", "a")}
    shapes = {"qkvz/kernel": (76, 7), "ba/kernel": (12, 7), "conv": (2, 23, 3)}
    made = []
    every = {"in": np.concatenate(list(kinds.values()))}
    for form in (fused | {"qkvz": qkvz, "ba": ba}, fused | qkv | few, conv | kinds, fused | every):
        names = {f"delta_{name}.weight": name for name in form}
        sources = delta_sources(spec, 7, names)
        hosts = {path: np.full(shape, np.nan, np.float32) for path, shape in shapes.items()}
        for path, host in hosts.items():
            for source in sources[path]:
                piece = source.piece(names, 0)
                assert form[piece.name].shape == piece.shape
                put_piece(host, piece, form[piece.name])
        made.append(hosts)
    for path in shapes:
        assert not np.isnan(made[0][path]).any()
        for other in made[1:]:
            np.testing.assert_array_equal(made[0][path], other[path])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "written", "published"),
    [
        ("olmo_hybrid_still", ".3.feedforward_layer_norm.", ".3.post_attention_layernorm."),
        ("kimi_linear_hub", ".0.block_sparse_moe.", ".0.mlp."),
    ],
)
def test_names_as_published(case, written, published, tmp_path, model_folders):
    """Layers of attention, or layers without experts, have another name for a module than transformers writes."""
    folder = model_folders(case)
    shutil.copytree(folder, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace(written, published): x for name, x in stored.items()}
    assert renamed.keys() != stored.keys()
    save_file(renamed, tmp_path / "model" / "model.safetensors")
    check(make_engine(tmp_path / "model", tokens=64), case)


def test_no_layer_has_attention(model_folders):
    """Pages hold two numbers for a key and two for a value, and nothing is kept in them."""
    folder = model_folders("mamba2_tied")
    report = "\n".join(describe_model(EngineConfig(model=str(folder), max_num_seqs=4)))
    assert "no attention" in report
    assert "KV cache per token: 16 bytes" in report
    with pytest.raises(ConfigError, match=r"does not divide 8 heads of Mamba; this model allows \[1, 2, 4, 8\]"):
        make_engine(folder, tensor_parallel_size=3)


def test_part_of_a_head_turns():
    """In MiniMax's published inference code, whose setting transformers does not read."""
    config = RECURRENT_CASES["minimax_by_turns"].config
    ropes = [read_model_config(HFConfig(config | more)).ropes["default"] for more in ({}, {"rotary_dim": 8})]
    assert [rope.rotary_dim for rope in ropes] == [None, 8]


def test_the_published_size():
    """Qwen3-Next-80B-A3B: 80 billion parameters, 12 layers of attention, states of 75.4 MiB a sequence."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_act": "silu",
        "full_attention_interval": 4, "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 5120,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "max_position_embeddings": 262144, "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_scaling": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 151936, "use_sliding_window": False,
    }  # fmt: skip
    model = read_model_config(HFConfig(config))
    assert (model.num_recurrent, len(model.attentions), model.ropes["default"].rotary_dim) == (36, 12, 64)
    params = abstract_params(Decoder(model, 2, model.vocab_size), make_mesh(1))
    assert 79.5e9 < sum(x.size for x in jax.tree.leaves(params)) < 80e9
    layout = CacheLayout.of(model, 2, 1, 16, "bfloat16", num_slots=256)
    assert layout.states is not None
    assert layout.states.slot_bytes == 36 * 4 * (32 * 128 * 128 + 3 * 8192) == 79036416
    assert layout.token_bytes == 12 * 2 * 2 * 256 * 2
