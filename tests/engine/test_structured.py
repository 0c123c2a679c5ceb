"""Structured output: what finishes is of the form that was asked for, and nothing else about a request changes."""

import json
import re
import time

import jsonschema
import numpy as np
import pytest
from engines import drain, make_engine, request
from json_schemas import random_schema

from jaxserve import LLM, SamplingParams
from jaxserve.grammar import Compiler, read_vocabulary
from jaxserve.tokenizer import load_tokenizer
from jaxserve.types import MAX_GRAMMAR, Grammar, InvalidRequestError

CASE = "llama3_gqa"  # two end-of-sequence ids
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", "c"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
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


def bound(name, grammar=JSON, prompt=(7, 8, 9), **params):
    params = {"temperature": 1.5, "max_tokens": 300, "seed": 11, "ignore_eos": False, **params}
    return request(name, prompt, grammar=grammar, **params)


def run(engine, *requests):
    for one in requests:
        engine.add_request(one)
    return drain(engine)


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


def test_the_end_is_allowed_only_where_the_grammar_accepts(engine, tokenizer):
    digits = Grammar("regex", "[0-9]{3,6}")
    ends = dict.fromkeys(engine.eos_token_ids, 100.0)  # the model wants nothing but to end
    one = run(engine, bound("a", digits, logit_bias=ends))["a", 0]
    assert len(tokenizer.decode(one.token_ids)) == 3
    assert one.token_ids[-1] in engine.eos_token_ids
    later = run(engine, bound("a", digits, logit_bias=ends, min_tokens=4))["a", 0]
    assert 3 < len(tokenizer.decode(later.token_ids)) <= 6
    never = run(engine, bound("a", digits, logit_bias=ends, ignore_eos=True))["a", 0]
    assert len(tokenizer.decode(never.token_ids)) == 6
    assert never.finish_reason == "stop"
    too_many = run(engine, bound("a", digits, min_tokens=40))["a", 0]  # the grammar wins
    assert (len(tokenizer.decode(too_many.token_ids)), too_many.finish_reason) == (6, "stop")


def test_cut_by_length(engine):
    one = run(engine, bound("a", max_tokens=5))["a", 0]
    assert (len(one.token_ids), one.finish_reason) == (5, "length")


# Together with everything else


VARIANTS = {
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
    with_one = [bound(name, **options) for name, options in VARIANTS.items()]
    free = [request(f"free-{i}", [20 + i] * (5 + 9 * i), max_tokens=50, seed=i, temperature=0.8) for i in range(4)]
    return [one for pair in zip(with_one, free + [None] * 3, strict=True) for one in pair if one is not None]


@pytest.fixture(scope="module")
def alone(model_folders):
    """Each by itself, one step after the other."""
    engine = make_engine(model_folders(CASE), rows=8, async_scheduling=False, prefix_caching=False)
    results = {}
    for one in everybody():
        results |= run(engine, one)
    return results


def same(results, alone):
    assert results.keys() == alone.keys()
    for key, completion in results.items():
        assert completion.token_ids == alone[key].token_ids, key
        assert completion.finish_reason == alone[key].finish_reason
        found = [(entry.token_id, entry.rank) for entry in completion.logprobs]
        assert found == [(entry.token_id, entry.rank) for entry in alone[key].logprobs]
    return True


def test_alone_they_are_valid(alone, tokenizer):
    assert all(
        valid(tokenizer, one) for (name, _), one in alone.items() if not name.startswith("free") and name != "greedy"
    )
    scored = alone["scored", 0]
    assert [entry.token_id for entry in scored.logprobs] == scored.token_ids
    assert max(entry.rank for entry in scored.logprobs) > 50  # raw: the model would have said something else


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
    assert same(run(engine, *everybody()), alone)
    assert bool(engine.scheduler.num_preemptions) == ("kv_pages" in options)
    if not options:
        assert same(run(engine, *everybody()), alone)  # with prefixes cached


def test_they_take_part_in_every_step(engine):
    """And the others in every step as well."""
    engine.add_request(bound("a", Grammar("regex", "[a-z]{400}"), max_tokens=30))
    engine.add_request(request("b", [9], max_tokens=30))
    while len(engine.structured):  # until it is compiled
        engine.step()
    steps = engine.counters.steps
    drain(engine)
    assert engine.counters.steps - steps <= 33


def test_abort_frees_everything(engine):
    for name in ("compiling", "running"):
        engine.add_request(bound(name, n=3, max_tokens=200, ignore_eos=True))
        if name == "running":
            for _ in range(12):
                engine.step()
        engine.abort(name, 1)
        assert engine.has_work
        engine.abort(name)
        drain(engine)
    engine.add_request(bound("one of three", n=3))
    engine.abort("one of three", 1)
    assert {index for _, index in drain(engine)} == {0, 2}


def test_a_grammar_that_fails_later_fails_alone(engine, tokenizer):
    """2,001 alternatives at once are more than the parser follows; the first token is what they have in common."""
    rules = "\n".join(f'r{i}: "b" "{i}" | "c" r{i}' for i in range(2001))
    hard = Grammar("lark", "start: /a{30}/ (" + " | ".join(f"r{i}" for i in range(2001)) + ")\n" + rules)
    results = run(engine, bound("hard", hard), bound("easy"))
    assert results["hard", 0].finish_reason == "error"
    assert valid(tokenizer, results["easy", 0])


# Refusals


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "weird"}, "weird"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        (False, "nothing"),
    ],
    ids=str,
)
def test_schemas_that_cannot_be_served(llm, schema, why):
    params = SamplingParams(grammar=Grammar("json", json.dumps(schema)))
    with pytest.raises(InvalidRequestError, match=re.escape(why)) as caught:
        llm.generate("x", params, progress=False)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("xml", "", "must be one of"),
        ("json", "{", "not valid JSON"),
        ("json", "[1]", "must be an object"),
        ("json", "[" * 100_000, "not valid JSON"),
        ("json", '{"items":' * 65 + "{}" + "}" * 65, "nested deeper than 64"),
        ("choice", "[]", "1 to 1024"),
        ("choice", '["a", ""]', "not empty"),
        ("choice", json.dumps(["a"] * 1025), "1 to 1024"),
        ("regex", "", "empty"),
        ("regex", "a" * (MAX_GRAMMAR + 1), "at most"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_grammars_that_are_refused_at_once(kind, value, why):
    with pytest.raises(InvalidRequestError, match=why):
        Grammar(kind, value)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(" * 1000 + "a" + ")" * 1000),
        Grammar("regex", "(a"),
        Grammar("lark", "start: " + "(" * 1000 + '"a"' + ")" * 1000),
        Grammar("lark", "start: missing"),
        Grammar("lark", 'start: start "a"'),
        Grammar("lark", 'root ::= ("a"'),
    ],
    ids=lambda grammar: grammar.value[:20],
)
def test_grammars_that_do_not_compile(llm, grammar):
    with pytest.raises(InvalidRequestError, match="the grammar cannot be used"):
        llm.engine.grammars.check(grammar)


def test_rules_that_name_each_other_in_a_long_chain(llm):
    """The compiler descends into each: on a thread of usual size this would be the end of the process."""
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}, "type": "array", "minItems": 1} for i in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": chain | {"d3000": {"type": "integer"}}}
    llm.engine.grammars.check(Grammar("json", json.dumps(schema)))
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(12_000))
    llm.engine.grammars.check(Grammar("lark", f'start: r0\n{rules}\nr12000: "z"'))


def test_a_refusal_is_the_requests_only_update(engine, tokenizer):
    bad = Grammar("json", '{"type": "integer", "minimum": 5, "maximum": 3}')
    for one in (bound("bad", bad, n=2), bound("good")):
        engine.add_request(one)
    updates = [update for _ in range(1000) if engine.has_work for update in engine.step()]
    refused = [update for update in updates if update.request_id == "bad"]
    assert [(u.index, u.finish_reason, u.error_param) for u in refused] == [
        (0, "error", "grammar"),
        (1, "error", "grammar"),
    ]
    assert "minimum (5)" in refused[0].error
    assert [u.finish_reason for u in updates if u.request_id == "good"][-1] == "stop"


def test_compiling_has_a_time_limit_and_holds_nobody_up(engine, monkeypatch):
    monkeypatch.setattr("jaxserve.grammar.COMPILE_SECONDS", 0.3)
    monkeypatch.setattr("jaxserve.grammar._build", lambda vocabulary, grammar: time.sleep(1.5))
    engine.add_request(bound("slow", Grammar("regex", "slow")))
    engine.add_request(request("other", [5], max_tokens=4))
    start, ended = time.monotonic(), {}
    while engine.has_work:
        for update in engine.step():
            if update.finish_reason is not None:
                ended[update.request_id] = (time.monotonic() - start, update)
    assert ended["other"][0] < ended["slow"][0] < 1.2
    assert "within 0.3 s" in ended["slow"][1].error


# Tokens


@pytest.mark.parametrize("kind", ["tokenizer.json", "another kind"])
def test_the_vocabulary_has_the_bytes_of_the_tokenizer(model_folders, tmp_path, monkeypatch, kind):
    folder, tokenizer = model_folders(CASE), load_tokenizer(model_folders(CASE))
    if kind == "another kind":
        monkeypatch.setattr("jaxserve.grammar.load_tokenizer", lambda *_, **__: tokenizer)
        folder = tmp_path
    vocabulary = read_vocabulary(folder, 515, (2, 4))  # the model's own is padded
    assert (vocabulary.vocab_size, sorted(vocabulary.eos_tokens)) == (515, [2, 4])
    for token in set(range(512)) - tokenizer.special_ids:
        expected = tokenizer.token_bytes(token)
        assert vocabulary.decode_bytes([token]) == (b"" if expected == b"\xff" else expected)  # which no text holds
    assert all(vocabulary.is_special_token(token) for token in tokenizer.special_ids)


def test_special_tokens_by_name(model_folders, tokenizer):
    compiler = Compiler(model_folders(CASE), 512, (2, 4))
    matcher = compiler.compile(Grammar("lark", 'start: <|im_start|> "a"')).future.result().deep_copy()
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() == tokenizer.encode("<|im_start|>")
