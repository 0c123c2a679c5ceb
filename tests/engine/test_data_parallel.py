"""Groups of devices with sequences of their own, which share only the experts: the tokens of one device."""

import re
from collections import Counter

import numpy as np
import pytest
from engines import drain, generate, make_engine, request, run_all
from flax.traverse_util import flatten_dict

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.programs import StepProgram
from jaxserve.types import Grammar, InvalidRequestError

pytestmark = pytest.mark.compiles

EXPERTS = "qwen3_moe_plain"
LATENT = "deepseek_v3_groups"
DENSE = "llama3_gqa"
PROMPTS = [list(range(5 + i, 25 + 13 * i)) for i in range(4)] + [[7, 8, 9] * 10]
slow = pytest.mark.slow


def requests():
    """Requests of every kind that groups serve. Several of them begin with the same tokens."""
    shared = list(range(40, 80))
    yield request("plain", shared + [3], max_tokens=12)
    yield request("long", list(range(2, 90)), max_tokens=9)
    yield request("siblings", shared + [4, 5], max_tokens=8, n=3, temperature=1.0, seed=5)
    yield request("penalties", [9, 8, 7] * 5, max_tokens=14, presence_penalty=1.5, repetition_penalty=1.3)
    yield request("scores", shared, max_tokens=6, logprobs=2, prompt_logprobs=1)
    yield request("drawn", PROMPTS[1], max_tokens=10, temperature=0.9, top_p=0.8, top_k=20, seed=77, min_p=0.01)
    yield request("stops", PROMPTS[2], max_tokens=30, temperature=1.2, seed=3, stop_token_ids=list(range(0, 48, 3)))
    yield request("biased", PROMPTS[0], max_tokens=7, logit_bias={5: 3.0, 9: -100.0}, min_tokens=3)
    yield request("masked", PROMPTS[3], max_tokens=9, allowed_token_ids=[11, 12, 13, 40, 41], temperature=1.0, seed=1)
    yield request("more penalties", shared[:20], max_tokens=11, frequency_penalty=0.7, n=2, temperature=0.7, seed=8)
    yield request("nothing", shared, max_tokens=0, prompt_logprobs=0)
    for i in range(5):
        yield request(f"again {i}", shared + [100 + i], max_tokens=5 + i)
    for i in range(6):
        yield request(f"grows {i}", [20 + i, 3, 4], max_tokens=60)


def completions(engine):
    """Results by request and index: tokens, why they end, and log-probabilities."""
    found = run_all(engine, *requests())
    return {key: (one.token_ids, one.finish_reason) for key, one in found.items()}, found


def assert_same(folder, options):
    """The same requests give the same tokens in groups as on one device, and log-probabilities that are close."""
    alone, scores = completions(make_engine(folder))
    engine = make_engine(folder, **options)
    split, others = completions(engine)
    assert split == alone
    for key, one in scores.items():
        for mine, other in zip(
            [*one.logprobs, *(one.prompt_logprobs or [])],
            [*others[key].logprobs, *(others[key].prompt_logprobs or [])],
            strict=True,
        ):
            assert (mine is None) == (other is None)
            if mine is not None:
                np.testing.assert_allclose(mine.logprob, other.logprob, atol=1e-3)
    return engine


def sizes_of(groups, devices=1, whole=False):
    return {"data_parallel_size": groups, "tensor_parallel_size": devices, "enable_expert_parallel": whole}


FEW_PAGES = {"kv_pages": 14, "page_size": 8, "max_model_len": 104, "prefill_chunk": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (LATENT, sizes_of(2, 1, True) | FEW_PAGES),
        pytest.param(LATENT, sizes_of(2, 1, True) | FEW_PAGES | {"static_steps": True}, marks=slow),
        pytest.param(LATENT, sizes_of(2, 4) | {"decode_context_parallel_size": 2}, marks=slow),
        *(
            pytest.param(
                case, sizes_of(2, 4, True) | {"decode_context_parallel_size": shares, "page_size": 16}, marks=slow
            )
            for case, shares in ((LATENT, 4), (EXPERTS, 2))
        ),
        pytest.param(EXPERTS, sizes_of(8, 1, True), marks=slow),
        pytest.param(DENSE, sizes_of(4), marks=slow),
        pytest.param(DENSE, sizes_of(2, 2) | FEW_PAGES, marks=slow),
        *(
            pytest.param(case, sizes_of(*shape, whole), marks=slow)
            for case in (EXPERTS, LATENT)
            for whole in (False, True)
            for shape in ((2, 1), (4, 1), (2, 2), (4, 2))
        ),
        *(
            pytest.param(EXPERTS, sizes_of(2, 1, True) | options, marks=slow)
            for options in (
                {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
                {"async_scheduling": False, "decode_steps": 1},
                {"prefix_caching": False, "tokens": 16},
            )
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else ",".join(map(str, given.values())),
)
def test_the_same_tokens(case, options, model_folders):
    engine = assert_same(model_folders(case), options)
    stats = engine.stats()
    groups = options["data_parallel_size"]
    assert stats.pages_total == groups * (engine.runner.layout.num_pages - 1)
    if groups < 8:  # requests of the same prefix, which come at the same time, meet in a group
        assert bool(stats.prefix_hits) == options.get("prefix_caching", True)
    assert bool(stats.preemptions) == ("kv_pages" in options)
    stacks = [w for path, w in flatten_dict(engine.runner.params, sep="/").items() if path.endswith("/experts_down")]
    for stack in stacks:  # no device has more than its share
        assert {part.data.size for part in stack.addressable_shards} == {stack.size // engine.runner.mesh.size}
    check_exchanges(engine)


def check_exchanges(engine):
    """Nothing goes from group to group but around experts: three arrays to all groups, and one back."""
    each = engine.config.tensor_parallel_size
    mixtures = sum(layer.mlp.experts is not None for layer in layers(engine))
    for name, compiled in engine.runner.executables.items():
        crossing = [line for line in compiled.as_text().splitlines() if any(crosses(line, each))]
        is_step = isinstance(name, StepProgram)
        assert all("experts_sharded" in line or "/mlp/" in line for line in crossing), crossing
        kinds = Counter(re.search(r" (all-gather|reduce-scatter)(-start)?\(", line)[1] for line in crossing)
        assert kinds["reduce-scatter"] == mixtures * is_step
        assert mixtures * is_step <= kinds["all-gather"] <= 3 * mixtures * is_step


def layers(engine):
    return engine.runner.model.config.layers


def crosses(line, each):
    """For each set of devices that exchange arrays in an instruction, whether they are of several groups."""
    if (given := re.search(r"replica_groups=(\{\{[\d,{}]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", line)) is None:
        return
    if given[1].startswith("{"):
        sets = [list(map(int, some.split(","))) for some in re.findall(r"\{([\d,]+)\}", given[1])]
    else:
        shape, dims, order = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", given[1]).groups()
        shape, dims, order = (None if x is None else list(map(int, x.split(","))) for x in (shape, dims, order))
        sets = np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    for some in sets:
        yield len({number // each for number in some}) > 1


@slow
def test_quantized(model_folders):
    """As on two devices that share each expert, where groups of weights are cut in the same way."""
    alone, _ = completions(make_engine(model_folders(EXPERTS), tensor_parallel_size=2, quantization="int8"))
    split, _ = completions(make_engine(model_folders(EXPERTS), **sizes_of(2), quantization="int8"))
    assert split == alone


@pytest.mark.slow
def test_grammars_and_no_compilation(model_folders):
    """Masks of rows in both groups are computed while the devices run; nothing compiles after the start."""
    folder = model_folders(EXPERTS)
    asked = [request(str(i), [5 + i, 9, 11], max_tokens=6 + i) for i in range(3)]
    asked += [
        request(
            f"bound {i}", [7, 8, 9 + i], temperature=1.5, max_tokens=12, seed=i, grammar=Grammar("regex", "[a-f]{4,9}")
        )
        for i in range(3)
    ]
    alone = [one.token_ids for one in generate(make_engine(folder), *asked)]
    engine = make_engine(folder, **sizes_of(2, 2, True), forbid_compile=True)
    engine.compile()
    assert [one.token_ids for one in generate(engine, *asked)] == alone
    check_exchanges(engine)


def test_a_failed_step_ends_one_request(model_folders, monkeypatch):
    """The others continue, in whichever group they are."""
    engine = make_engine(model_folders(DENSE), **sizes_of(2))
    expected = [
        one.token_ids for one in generate(engine, *(request(str(i), p, max_tokens=8) for i, p in enumerate(PROMPTS)))
    ]
    step = engine.runner.step

    def fail(program, packed):
        at, size = program.shape.fields["tokens"]
        if 111 in packed[:, at : at + size]:
            raise RuntimeError("a step of the poisoned request")
        return step(program, packed)

    monkeypatch.setattr(engine.runner, "step", fail)
    asked = [request(str(i), p, max_tokens=8) for i, p in enumerate(PROMPTS)]
    for one in [*asked[:3], request("poisoned", [111, 5, 6], max_tokens=8), *asked[3:]]:
        engine.add_request(one)
    results = drain(engine)
    assert results["poisoned", 0].finish_reason == "error"
    assert [results[str(i), 0].token_ids for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (
            EXPERTS,
            {"pipeline_parallel_size": 2, "num_hosts": 2, "coordinator": "127.0.0.1:1"},
            "pipeline_parallel_size 2 x data_parallel_size 2 must be on one host, but num_hosts is 2",
        ),
        (EXPERTS, {"enable_lora": True}, "cannot be combined with enable_lora"),
        (EXPERTS, {"kv_offload_gib": 1.0}, "cannot be combined with kv_offload_gib"),
        (EXPERTS, {"deterministic": True}, "cannot be combined with deterministic"),
        (EXPERTS, {"speculative_config": {"method": "draft_model", "model": "x"}}, "speculation by 'draft_model'"),
        (EXPERTS, {"tensor_parallel_size": 8}, "data_parallel_size 2 x tensor_parallel_size 8 needs 16 devices"),
        (EXPERTS, {"tensor_parallel_size": 3}, "data_parallel_size 2 x tensor_parallel_size 3 does not divide"),
        ("qwen3_next_groups", {}, "data_parallel_size must be 1 for models that have recurrent layers"),
        (EXPERTS, {"data_parallel_size": 0}, "data_parallel_size must be between"),
    ],
)
def test_refusals(case, options, message, model_folders):
    with pytest.raises(ConfigError, match=message):
        Engine.load(EngineConfig(**{"model": str(model_folders(case)), "data_parallel_size": 2, **options}))


def test_beams_are_refused(model_folders):
    engine = make_engine(model_folders(DENSE), **sizes_of(2))
    with pytest.raises(InvalidRequestError, match="beam search is not served with --data-parallel-size"):
        engine.add_request(request("beams", [5, 6], n=2, use_beam_search=True, max_tokens=4))
