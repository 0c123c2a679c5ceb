"""Heads that propose from the target's hidden states: EAGLE-3 drafts and heads for multi-token prediction."""

import itertools
import json
import math
from pathlib import Path

import draft_heads
import jax
import numpy as np
import pytest
import tiny_models
from engines import bound, make_engine, request, run_all
from test_speculation import outcome, requests

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub import resolve_model
from jaxserve.checkpoints.load import check
from jaxserve.config import ConfigError
from jaxserve.devices.mesh import make_mesh
from jaxserve.execution.cache_kinds import KeysAndValues
from jaxserve.models.config import HFConfig
from jaxserve.models.draft_files import open_eagle
from jaxserve.models.drafter import Drafter
from jaxserve.models.families import read_model_config
from jaxserve.models.weights import abstract_params
from jaxserve.speculation import speculator
from jaxserve.speculation.step_times import Curve, StepTimes
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import Grammar

pytestmark = pytest.mark.compiles

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "draft_heads.json").read_text())
OPTIONS = {"llama3_gqa": {}, "qwen3_untied": {"own_embed": True, "norm_before_residual": True, "speculators": True}}
RECURRENT = "qwen3_next_groups", "qwen3_next_odd", "qwen3_5_groups", "qwen3_5_moe_odd", "nemotron_h_experts"
MTP = ("deepseek_v3_groups", "glm4_moe_groups", "qwen3_5_whole", "qwen3_5_moe_whole", *RECURRENT)
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"type": "integer"}}}'
SETTINGS = {"rows": 4, "tokens": 32, "max_model_len": 96}


@pytest.fixture
def eager(monkeypatch):
    """As many proposals as can be."""
    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        monkeypatch.setattr(speculator, name, 0)


def with_head(case, model_folders, tmp_path, count=4, **options):
    """An engine whose case has a random head."""
    folder = model_folders(case)
    if case in MTP:
        folder = draft_heads.add_mtp(folder, tmp_path / "target")
        speculation = {"method": "mtp"}
    else:
        config = tiny_models.CASES[case].config
        draft = draft_heads.write_eagle(tmp_path / "draft", config, **OPTIONS.get(case, {}))
        speculation = {"method": "eagle3", "model": str(draft)}
    speculation["num_speculative_tokens"] = count
    engine = make_engine(folder, **{**SETTINGS, **options}, speculative_config=speculation)
    engine.speculator._method._shapes = engine.shapes  # few programs
    return engine


def proposals(engine, monkeypatch):
    """What the engine proposes, by the number of known tokens."""
    found = {}
    prepare = engine.speculator._method.prepare

    def listening(plan, running):
        prepare(plan, running)
        for slot, count in zip(plan.rows.slot, plan.rows.num_new - 1, strict=True):
            if running.proposes and count:
                known = running.known[slot]
                found[int(known)] = running.tokens[slot, known : known + count].tolist()

    monkeypatch.setattr(engine.speculator._method, "prepare", listening)
    return found


QUICK = (32, "qwen3_5_groups"), (8, "nemotron_h_experts")


@pytest.mark.parametrize(
    ("tokens", "case"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in itertools.product((32, 8), GOLDENS)],
)
def test_proposals_are_those_of_transformers(case, tokens, model_folders, tmp_path, monkeypatch, eager):
    """In one chunk and in several, of a prompt that is new and of one in the prefix cache."""
    golden = GOLDENS[case]
    options = {"tokens": tokens, "page_size": 16, "decode_steps": False, "async_scheduling": False}
    engine = with_head(case, model_folders, tmp_path, **options)
    prompt = golden["tokens"][:19]
    answer = golden["tokens"][19:]
    for i in range(2):
        found = proposals(engine, monkeypatch)
        (one,) = run_all(engine, request(f"r{i}", prompt, max_tokens=len(answer))).values()
        assert one.token_ids == answer
        assert one.num_cached == (0 if case in RECURRENT else 16 * i)  # a snapshot behind so few tokens does not pay
        assert len(found) >= 15
        for known, ours in found.items():
            assert ours == golden["proposals"][known - 20][: len(ours)], known


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama3_gqa", {}),
        pytest.param("llama3_gqa", {"static_steps": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_untied", {"kv_pages": 20}, marks=pytest.mark.slow),
        pytest.param("llama3_gqa", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_untied", {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss_sinks", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3_groups", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3_groups", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe_groups", {"kv_pages": 20}, marks=pytest.mark.slow),
        *(pytest.param(case, {"kv_pages": 20}, marks=pytest.mark.slow) for case in ("lfm2_tied", *RECURRENT)),
        pytest.param("qwen3_5_whole", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe_whole", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens(case, options, model_folders, tmp_path, eager):
    """With a head whose proposals are nearly all wrong."""
    plain = make_engine(model_folders(case), **SETTINGS, **options)
    quick = with_head(case, model_folders, tmp_path, **options)
    asked = [one for one in requests(2, 10) if not (plain.scheduler.recurrent and one.params.use_beam_search)]
    expected = run_all(plain, *asked)
    found = run_all(quick, *asked)
    assert outcome(found) == outcome(expected)
    for key, one in expected.items():
        ours = [entry.logprob for entry in found[key].logprobs]
        np.testing.assert_allclose(ours, [entry.logprob for entry in one.logprobs], atol=1e-3)
    assert quick.counters.spec_proposed > 100


@pytest.mark.slow
def test_proposals_end_where_block_tables_do(model_folders, tmp_path, monkeypatch, eager):
    """A sequence with room for fewer proposals than others in the call does not attend beyond its table, of which
    kernels would read no pages."""
    seen = []
    attend = KeysAndValues.attend

    def noting(kind, layer, ops, heads, pages, where, *rest):
        jax.debug.callback(lambda most: seen.append(int(most)), where[3].max() - where[1].shape[1] * pages.page_size)
        return attend(kind, layer, ops, heads, pages, where, *rest)

    monkeypatch.setattr(KeysAndValues, "attend", noting)
    engine = with_head("llama3_gqa", model_folders, tmp_path, count=8, page_size=16)
    longest = SETTINGS["max_model_len"]
    run_all(engine, request("end", list(range(3, longest - 5)), max_tokens=8), request("middle", [5, 6], max_tokens=20))
    assert engine.counters.spec_proposed > 10
    assert max(seen) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, pytest.param({"kv_pages": 24}, marks=pytest.mark.slow)])
def test_the_same_tokens_of_the_demo(options, eager):
    """With a head that was trained, whose proposals are often right, while it samples and follows grammars."""
    settings = {"rows": 4, "tokens": 64, "max_model_len": 160, **options}
    plain = make_engine("demo", **settings)
    speculation = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3}
    quick = make_engine("demo", **settings, speculative_config=speculation)
    quick.speculator._method._shapes = quick.shapes
    text = "def read(self, size):\n    return self._file.read(size)\n\n\ndef write(self, data):"
    prompt = load_tokenizer(resolve_model("demo")).encode(text)

    def asked():
        yield bound("json", Grammar("json", SCHEMA), prompt, max_tokens=60)
        for i, temperature in enumerate((0.0, 0.0, 0.7, 1.0)):
            yield request(f"r{i}", prompt[i:], temperature=temperature, seed=i, max_tokens=48, n=1 + i % 2)

    assert outcome(run_all(quick, *asked())) == outcome(run_all(plain, *asked()))
    assert quick.counters.spec_accepted >= 0.3 * quick.counters.spec_proposed


@pytest.mark.slow
def test_a_full_batch_is_not_read():
    """While more sequences run than may pay, their tokens are not read. They get no proposals later; others do."""
    settings = {"rows": 8, "tokens": 64, "max_model_len": 160}
    plain = make_engine("demo", **settings)
    speculation = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3}
    quick = make_engine("demo", **settings, speculative_config=speculation)
    quick.speculator._method._shapes = quick.shapes
    quick.speculator.set_times(StepTimes(Curve.of({3: 1.0, 8: 1.0}), Curve.of({4: 1.0, 64: 90.0})))
    prompt = load_tokenizer(resolve_model("demo")).encode("def read(self, size):\n    return self._file.read(size)\n\n")

    def checks(*asked):
        """How many proposals are checked while these requests are answered as without proposals."""
        before = quick.counters.spec_drafts
        assert outcome(run_all(quick, *asked)) == outcome(run_all(plain, *asked))
        return quick.counters.spec_drafts - before

    def asked(name, count, *lengths):
        options = {"ignore_eos": True, "temperature": 0.0}
        return [
            request(f"{name} {i}", prompt[i:], max_tokens=lengths[i % len(lengths)], **options) for i in range(count)
        ]

    assert checks(*asked("few", 2, 40)) > 10
    assert checks(*asked("many", 6, 8, 40)) == 0  # three of them run on when the others have ended
    assert checks(*asked("later", 2, 40)) > 10


# Published layouts: names and shapes of their files, on which nothing is computed.

PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": {  # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    },
    "Qwen/Qwen3-8B": {  # Tengyunw/qwen3_8b_eagle3
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "draft_vocab_size": 32000,
    },
    "openai/gpt-oss-20b": {  # configs/gpt-oss-20B-eagle3-dense.json of SpecForge
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]},
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initializer_range": 0.02,
        "intermediate_size": 17280,
        "num_local_experts": 16,
        "max_position_embeddings": 4096,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.3",
        "use_cache": True,
        "vocab_size": 201088,
        "experts_per_token": 4,
        "draft_vocab_size": 32000,
    },
}
READ = {
    "meta-llama/Llama-3.1-8B-Instruct": (2, 16, 29),
    "Qwen/Qwen3-8B": (2, 18, 33),
    "openai/gpt-oss-20b": (2, 12, 22),
}
MODELS = json.loads((Path(__file__).parents[1] / "published_configs.json").read_text()) | json.loads(
    (Path(__file__).parents[1] / "published_experts.json").read_text()
)


def write_empty(folder, shapes, dtypes):
    """A file of tensors that are zero, which takes no space on the disk, beside tensors that are given."""
    folder.mkdir(exist_ok=True)
    header = {}
    at = 0
    for name, shape in shapes.items():
        kind, size = dtypes(name)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at := at + math.prod(shape) * size]}
    raw = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)


@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts(name, speculators, tmp_path):
    """Each parameter of the draft has its tensor, of its shape, and none is left over. The layer that loads them is
    tested with small sizes above."""
    config = dict(PUBLISHED[name])
    target = read_model_config(HFConfig(dict(MODELS[name]), name))
    shapes = draft_heads.eagle_shapes(config, target_hidden=config["hidden_size"], own_embed=speculators)
    shapes |= {"d2t": (config["draft_vocab_size"],), "t2d": (config["vocab_size"],)}
    if speculators:
        shapes = {name.replace("midlayer.", "layers.0."): shape for name, shape in shapes.items()}
        config = draft_heads.as_speculators(config, config["hidden_size"], list(READ[name]))
    write_empty(tmp_path, shapes, lambda name: {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}.get(name, ("BF16", 2)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, spec, files = open_eagle(tmp_path, target)
    assert (spec.layers, spec.own_embed) == (READ[name], speculators)
    assert files.ids.tolist() == list(range(32000))
    drafter = Drafter(spec, shape, shape.num_kv_heads, shape.vocab_size, target.vocab_size, target.vocab_size)
    abstract = abstract_params(drafter, make_mesh(1))
    pieces = files.pieces(drafter)
    assert abstract.keys() == pieces.keys()
    check(files.tensors, pieces, files.ignored(drafter))
    used = {piece.name for some in pieces.values() for piece in some}
    assert files.tensors.keys() - used == {"d2t", "t2d"}
    for path, array in abstract.items():
        assert math.prod(array.shape) == sum(math.prod(piece.shape) for piece in pieces[path]), path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 500}, "a vocabulary of 500 tokens; the target has 2 layers"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, r"the inputs of layers \[2, 3, 4\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
        ({"parallel_drafting": True}, "settings that jaxserve does not understand: parallel_drafting=true"),
    ],
)
def test_drafts_that_do_not_fit(changes, message, model_folders, tmp_path):
    config = tiny_models.CASES["llama3_gqa"].config
    draft = draft_heads.write_eagle(tmp_path / "draft", config, **changes)
    speculation = {"method": "eagle3", "model": str(draft)}
    with pytest.raises(ConfigError, match=message):
        make_engine(model_folders("llama3_gqa"), **SETTINGS, speculative_config=speculation)


def test_models_that_are_no_drafts(model_folders):
    folder = model_folders("llama3_gqa")
    with pytest.raises(CheckpointError, match="is no EAGLE-3 draft"):
        make_engine(folder, **SETTINGS, speculative_config={"method": "eagle3", "model": str(folder)})
    with pytest.raises(ConfigError, match="mtp needs a model with a head for multi-token prediction"):
        make_engine(folder, **SETTINGS, speculative_config={"method": "mtp"})
