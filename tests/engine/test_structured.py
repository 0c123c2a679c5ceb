"""Structured output: what finishes is of the form that was asked for, and nothing else about a request changes."""

import json
import re

import jsonschema
import pytest
from engines import bound, drain, make_engine, request, run_all
from json_schemas import PERSON, random_schema

from jaxserve import LLM, SamplingParams
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import Grammar

pytestmark = pytest.mark.compiles

CASE = "llama3_gqa"  # two end-of-sequence ids
JSON = Grammar("json", json.dumps(PERSON))


@pytest.fixture(scope="module")
def tokenizer(model_folders):
    return load_tokenizer(model_folders(CASE))


@pytest.fixture(scope="module")
def llm(model_folders):
    return LLM(str(model_folders(CASE)), max_num_seqs=16, kv_pages=600)


@pytest.fixture(scope="module")
def engine(model_folders):
    return make_engine(model_folders(CASE), rows=8)


def valid(tokenizer, completion, schema=PERSON):
    jsonschema.validate(json.loads(tokenizer.decode(completion.token_ids)), schema)
    return completion.finish_reason == "stop"


# What comes out


def check_schemas(llm, count):
    schemas = [random_schema(seed) for seed in range(count)]
    params = [
        SamplingParams(temperature=1.5, max_tokens=500, seed=i, grammar=Grammar("json", json.dumps(schema)))
        for i, schema in enumerate(schemas)
    ]
    outputs = llm.generate([[7 + i % 50] for i in range(count)], params, progress=False)
    finished = [(i, o.outputs[0].text) for i, o in enumerate(outputs) if o.outputs[0].finish_reason == "stop"]
    assert len(finished) >= 0.98 * count  # the others were cut by the length
    for i, text in finished:
        checker = jsonschema.Draft202012Validator(schemas[i], format_checker=jsonschema.FormatChecker())
        checker.validate(json.loads(text))


@pytest.mark.slow
def test_outputs_validate_against_their_schemas(llm):
    check_schemas(llm, 40)


@pytest.mark.slow
def test_outputs_validate_against_500_schemas(llm):
    check_schemas(llm, 500)


def test_every_kind(llm):
    kinds = {
        Grammar("json_object"): lambda text: isinstance(json.loads(text), dict),
        Grammar("choice", json.dumps(["yes", "no", 'a "b" \\ \n', "größer"])): lambda text: (
            text in {"yes", "no", 'a "b" \\ \n', "größer"}
        ),
        Grammar("regex", "[a-z]{3}-[0-9]{2,4}"): lambda text: re.fullmatch("[a-z]{3}-[0-9]{2,4}", text),
        Grammar("lark", 'start: "x" | "(" start ")"'): lambda text: (
            re.fullmatch(r"(\()*x(\))*", text) and text.count("(") == text.count(")")
        ),
        Grammar("lark", 'root ::= "a" | "b" root'): lambda text: re.fullmatch("b*a", text),  # GBNF
        Grammar("json", "true"): lambda text: json.loads(text) is not json,
    }
    params = [SamplingParams(temperature=1.5, max_tokens=450, seed=3, n=4, grammar=grammar) for grammar in kinds]
    for output, check in zip(llm.generate(["hello"] * len(kinds), params, progress=False), kinds.values(), strict=True):
        ended = [one.text for one in output.outputs if one.finish_reason == "stop"]
        assert ended
        for text in ended:
            assert check(text), text


@pytest.mark.slow
def test_the_end_is_allowed_only_where_the_grammar_accepts(engine, tokenizer):
    digits = Grammar("regex", "[0-9]{3,6}")
    ends = dict.fromkeys(engine.eos_token_ids, 100.0)  # the model wants nothing but to end
    one = run_all(engine, bound("a", digits, logit_bias=ends))["a", 0]
    assert len(tokenizer.decode(one.token_ids)) == 3
    assert one.token_ids[-1] in engine.eos_token_ids
    later = run_all(engine, bound("a", digits, logit_bias=ends, min_tokens=4))["a", 0]
    assert 3 < len(tokenizer.decode(later.token_ids)) <= 6
    never = run_all(engine, bound("a", digits, logit_bias=ends, ignore_eos=True))["a", 0]
    assert len(tokenizer.decode(never.token_ids)) == 6
    assert never.finish_reason == "stop"
    too_many = run_all(engine, bound("a", digits, min_tokens=40))["a", 0]  # the grammar wins
    assert (len(tokenizer.decode(too_many.token_ids)), too_many.finish_reason) == (6, "stop")


def test_cut_by_length(engine):
    one = run_all(engine, bound("a", JSON, max_tokens=5))["a", 0]
    assert (len(one.token_ids), one.finish_reason) == (5, "length")


# Together with everything else


# Any text, then the form: after a mark that is written out, and after one that is a token.
WRITTEN = Grammar("lark", "start: until_end @form", (("form", JSON),), (("end", "e"),))
TOKEN = Grammar("lark", "start: until_end @form", (("form", JSON),), (("end", "<|im_start|>"),))
VARIANTS = {
    "after a text": {"grammar": WRITTEN, "n": 2},
    "after a token": {"grammar": TOKEN, "n": 2, "logit_bias": {3: 4.0}},
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"top_p": 0.9, "top_k": 40},
    "penalties": {"frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "three": {"n": 3},
    "scored": {"logprobs": 3, "prompt_logprobs": 1},
    "long": {"prompt": list(range(40, 140))},
}


def everybody():
    """Requests with a grammar and without."""
    with_one = [bound(name, **{"grammar": JSON, **options}) for name, options in VARIANTS.items()]
    free = [request(f"free-{i}", [20 + i] * (5 + 9 * i), max_tokens=50, seed=i, temperature=0.8) for i in range(4)]
    return [one for pair in zip(with_one, free + [None] * 5, strict=True) for one in pair if one is not None]


@pytest.fixture(scope="module")
def alone(model_folders):
    """Each by itself, one step after the other."""
    engine = make_engine(model_folders(CASE), rows=8, async_scheduling=False, prefix_caching=False)
    results = {}
    for one in everybody():
        results |= run_all(engine, one)
    return results


def same(results, alone):
    assert results.keys() == alone.keys()
    for key, completion in results.items():
        assert completion.token_ids == alone[key].token_ids, key
        assert completion.finish_reason == alone[key].finish_reason
        found = [(entry.token_id, entry.rank) for entry in completion.logprobs]
        assert found == [(entry.token_id, entry.rank) for entry in alone[key].logprobs]
    return True


@pytest.mark.slow
def test_alone_they_are_valid(alone, tokenizer):
    others = ("free", "greedy", "after")
    assert all(valid(tokenizer, one) for (name, _), one in alone.items() if not name.startswith(others))
    for mark, name in (("e", "after a text"), ("<|im_start|>", "after a token")):
        for index in range(2):
            text = tokenizer.decode(alone[name, index].token_ids, skip_special_tokens=False)
            form = text.partition(mark)[2].removesuffix("</s>").removesuffix("<|im_end|>")
            jsonschema.validate(json.loads(form), PERSON)
    scored = alone["scored", 0]
    assert [entry.token_id for entry in scored.logprobs] == scored.token_ids
    assert max(entry.rank for entry in scored.logprobs) > 50  # raw: the model would have said something else


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"decode_steps": False},
        {"kv_pages": 34},  # preempts
        {"rows": 2},
        {"tokens": 16},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_batch(model_folders, alone, options):
    engine = make_engine(model_folders(CASE), **{"rows": 8, **options})
    assert same(run_all(engine, *everybody()), alone)
    assert bool(engine.scheduler.num_preemptions) == ("kv_pages" in options)
    if not options:
        assert same(run_all(engine, *everybody()), alone)  # with prefixes cached


def test_they_take_part_in_every_step(engine):
    """And the others in every step as well."""
    engine.add_request(bound("a", Grammar("regex", "[a-z]{400}"), max_tokens=30))
    engine.add_request(request("b", [9], max_tokens=30))
    while len(engine.constraints):  # until it is compiled
        engine.step()
    steps = engine.counters.steps
    drain(engine)
    assert engine.counters.steps - steps <= 33


def test_abort_frees_everything(engine):
    for name in ("compiling", "running"):
        engine.add_request(bound(name, JSON, n=3, max_tokens=200, ignore_eos=True))
        if name == "running":
            for _ in range(12):
                engine.step()
        engine.abort(name, 1)
        assert engine.has_work
        engine.abort(name)
        drain(engine)
    engine.add_request(bound("one of three", JSON, n=3))
    engine.abort("one of three", 1)
    assert {index for _, index in drain(engine)} == {0, 2}


def test_a_grammar_that_fails_later_fails_alone(engine, tokenizer):
    """2,001 alternatives at once are more than the parser follows; the first token is what they have in common."""
    rules = "\n".join(f'r{i}: "b" "{i}" | "c" r{i}' for i in range(2001))
    hard = Grammar("lark", "start: /a{30}/ (" + " | ".join(f"r{i}" for i in range(2001)) + ")\n" + rules)
    results = run_all(engine, bound("hard", hard), bound("easy", JSON))
    assert results["hard", 0].finish_reason == "error"
    assert valid(tokenizer, results["easy", 0])
