"""Grammars of answers, by format of calls: what they let through is what the format's parser reads, and no more."""

from __future__ import annotations

import importlib
import json

import jsonschema
import numpy as np
import pytest
import tiny_models
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from jaxserve.grammars.grammar import Compiler, Matcher
from jaxserve.server.chat.forms import Functions, Thoughts, answer_grammar
from jaxserve.server.chat.output_parser import OutputParser
from jaxserve.server.plugins import names
from jaxserve.server.tools.choice import Function, Tool
from jaxserve.text.detokenizer import ChoiceDelta
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import Grammar

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
MARKS += ["<|tool_call|>", "<|python_start|>", "<|python_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]
MARKS += ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"]
MARKS += ["<|tool_call_argument_begin|>", "<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>"]
MARKS += ["</seed:tool_call>", "<|START_ACTION|>", "<|END_ACTION|>", "<function_calls>", "</function_calls>"]
MARKS += ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_start|>", "<|tools_prefix|>"]
MARKS += [
    "<|tools_suffix|>",
    "<｜tool_calls_begin｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_sep｜>",
    "<｜tool_call_end｜>",
]
MARKS += ["<｜tool_calls_end｜>", "<longcat_tool_call>", "</longcat_tool_call>", "<tool_calls:opensource>"]
MARKS += ["<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"]
MARKS += [
    f"<{end}arg_{name}{suffix}>" for end in ("", "/") for name in ("key", "value") for suffix in ("", ":opensource")
]
MARKS += [
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<tool_sep>",
    "<tool_call:opensource>",
    "</tool_call:opensource>",
    "</tool_calls:opensource>",
]
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"enum": [None, {"v": 1}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
TOOLS = [Tool(Function("go", parameters=NODE, strict=True)), Tool(Function("stay"))]
FORM = Grammar("json", '{"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": false}')
# A call of `go` in each format, what comes between two, whether text may stand before it, whether arguments are checked
CALLS = {
    "hermes": ('<tool_call>\n{"name": "go", "arguments": {"v": 1, "next": null}}\n</tool_call>', "\n", True, True),
    "llama3_json": ('{"name": "go", "parameters": {"v": 1, "next": null}}', "; ", False, True),
    "mistral": ('[TOOL_CALLS]go{"v": 1, "next": null}', "", True, True),
    "pythonic": ("[go(v=1, next=None)]", "", False, False),
    "qwen3_coder": (
        "<tool_call>\n<function=go>\n<parameter=v>\n1\n</parameter>\n<parameter=next>\nnull\n</parameter>\n"
        "</function>\n</tool_call>", "\n", True, True,
    ),
    "glm45": (
        "<tool_call>go\n<arg_key>v</arg_key>\n<arg_value>1</arg_value>\n<arg_key>next</arg_key>\n"
        "<arg_value>null</arg_value>\n</tool_call>", "\n", True, True,
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n"
        '{"v": 1, "next": null}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", True, True,
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>go<｜tool▁sep｜>{"v": 1, "next": null}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>", "", True, True,
    ),
    "granite": ('<|tool_call|>[{"name": "go", "arguments": {"v": 1, "next": null}}]', "", True, True),
    "phi4": ('functools[{"name": "go", "arguments": {"v": 1, "next": null}}]', "", True, True),
    "llama4_pythonic": ("[go(v=1, next=None)]", "", False, False),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.go:0<|tool_call_argument_begin|>"
        '{"v": 1, "next": null}<|tool_call_end|><|tool_calls_section_end|>', "", True, True,
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="go">\n<parameter name="v">1</parameter>\n'
        '<parameter name="next">null</parameter>\n</invoke>\n</minimax:tool_call>', "", True, True,
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=go>\n<parameter=v>1</parameter>\n<parameter=next>null</parameter>\n</function>\n"
        "</seed:tool_call>", "\n", True, True,
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "go", "parameters": {"v": 1, "next": null}}\n]'
        "<|END_ACTION|>", "", True, True,
    ),
    "hunyuan_a13b": (
        '<tool_calls>[{"name": "go", "arguments": {"v": 1, "next": null}}]</tool_calls>', "", True, True,
    ),
    "gemma4": ("<|tool_call>call:go{v:1,next:null}<tool_call|>", "", True, False),
    "olmo3": ("<function_calls>\ngo(v=1, next=null)\n</function_calls>", "", True, False),
    "lfm2": ("<|tool_call_start|>[go(v=1, next=null)]<|tool_call_end|>", "", True, False),
    "apertus": ('<|tools_prefix|>[{"go": {"v": 1, "next": null}}]<|tools_suffix|>', "", True, True),
    "nemotron_json": ('<TOOLCALL>[{"name": "go", "arguments": {"v": 1, "next": null}}]</TOOLCALL>', "", True, True),
    "mimo": (
        "<tool_call>\n<function=go>\n<parameter=v>1</parameter>\n<parameter=next>null</parameter>\n</function>\n"
        "</tool_call>", "", True, True,
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="go">\n<｜DSML｜parameter name="v" string="false">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="next" string="false">null</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>", "", True, True,
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="go">\n<｜DSML｜parameter name="v" string="false">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="next" string="false">null</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>", "", True, True,
    ),
    "step3": (
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="go">\n'
        '<steptml:parameter name="v">1</steptml:parameter>\n<steptml:parameter name="next">null</steptml:parameter>\n'
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>", "", True, True,
    ),
    "longcat": (
        "<longcat_tool_call>go\n<longcat_arg_key>v</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n"
        "<longcat_arg_key>next</longcat_arg_key>\n<longcat_arg_value>null</longcat_arg_value>\n</longcat_tool_call>",
        "\n", True, True,
    ),
    "hy_v3": (
        "<tool_calls:opensource>\n<tool_call:opensource>go<tool_sep:opensource>\n<arg_key:opensource>v"
        "</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n<arg_key:opensource>next"
        "</arg_key:opensource>\n<arg_value:opensource>null</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>", "", True, True,
    ),
    "hy_v3_preview": (
        "<tool_calls>\n<tool_call>go<tool_sep>\n<arg_key>v</arg_key>\n<arg_value>1</arg_value>\n<arg_key>next"
        "</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n</tool_calls>", "", True, True,
    ),
    "solar_open": (
        "<|tool_calls|><|tool_call:begin|>a2<|tool_call:name|>go<|tool_call:args|>"
        '{"v": 1, "next": null}<|tool_call:end|>', "", True, True,
    ),
}  # fmt: skip
# Two calls, where that is not one after the other.
TWO = {
    "lfm2": "<|tool_call_start|>[go(v=1, next={'v': 1}), stay()]<|tool_call_end|>",
    "apertus": '<|tools_prefix|>[{"stay": {}}, {"stay": {}}]<|tools_suffix|>',
    "nemotron_json": '<TOOLCALL>[{"name": "stay", "arguments": {}}, {"name": "stay", "arguments": {}}]</TOOLCALL>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="stay">\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="stay">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="stay">\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="stay">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "step3": "<｜tool_calls_begin｜>\n"
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="stay">\n</steptml:invoke><｜tool_call_end｜>\n'
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="stay">\n</steptml:invoke><｜tool_call_end｜>\n'
    "<｜tool_calls_end｜>",
    "hy_v3": "<tool_calls:opensource>\n<tool_call:opensource>stay<tool_sep:opensource>\n</tool_call:opensource>\n"
    "<tool_call:opensource>stay<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
    "hy_v3_preview": "<tool_calls>\n<tool_call>stay<tool_sep>\n</tool_call>\n<tool_call>stay<tool_sep>\n</tool_call>\n"
    "</tool_calls>",
    "solar_open": "<|tool_calls|><|tool_call:begin|>a2<|tool_call:name|>stay<|tool_call:args|>{}<|tool_call:end|>"
    "<|tool_call:begin|>b1<|tool_call:name|>stay<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    "pythonic": "[go(v=1, next={'v': 1}), stay()]",
    "llama4_pythonic": "[go(v=1, next={'v': 1}), stay()]",
    "kimi_k2": "<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.stay:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_call_begin|>functions.stay:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="stay">\n</invoke>\n<invoke name="stay">\n</invoke>\n'
    "</minimax:tool_call>",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "stay", "parameters": {}}, '
    '{"tool_name": "stay", "parameters": {}}]<|END_ACTION|>',
    "hunyuan_a13b": '<tool_calls>[{"name": "stay", "arguments": {}}, {"name": "stay", "arguments": {}}]</tool_calls>',
    "olmo3": "<function_calls>go(v=1, next={'v': 1})\nstay()</function_calls>",
    "granite": '<|tool_call|>[{"name": "stay", "arguments": {}}, {"name": "go", "arguments": {"v": 1, "next": null}}]',
    "phi4": 'functools[{"name": "stay", "arguments": {}}, {"name": "go", "arguments": {"v": 1, "next": null}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>stay\n```json\n{}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>stay\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stay<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>stay<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
NOT_ENFORCED = {"gemma"}  # three ways to write calls
LIKE_OTHERS = {"deepseek_v4", "hy_v3_preview", "mimo", "nemotron_json", "step3"}  # other marks, the same rules
FRAMED = {"harmony"}  # calls are messages: tests/server/test_harmony.py


def test_every_format_is_here():
    assert set(CALLS) | NOT_ENFORCED | FRAMED == set(names("jaxserve.server.tools.parsers"))
    for name in NOT_ENFORCED:
        assert not hasattr(importlib.import_module(f"jaxserve.server.tools.parsers.{name}"), "syntax")


@pytest.fixture(scope="module", params=["marks are tokens", "marks are text"])
def model(request, tmp_path_factory):
    """A tokenizer and a compiler for it."""
    marks = MARKS if request.param == "marks are tokens" else []
    folder = tiny_models.build_tokenizer(tmp_path_factory.mktemp("m"), 512, marks=marks)
    return load_tokenizer(folder), Compiler(folder, 512, (2, 4))


def reads(model, grammar: Grammar, text: str) -> str:
    """How the grammar takes a text: as "whole", as a "part" of one, or the text "before" what it does not let through,
    cut at a token."""
    tokenizer, compiler = model
    state = compiler.compile(grammar).future.result().deep_copy()
    ids = tokenizer.encode(text)
    for i, token in enumerate(ids):
        if not state.consume_token(token):
            return tokenizer.decode(ids[:i], skip_special_tokens=False)
    return "whole" if state.is_accepting() else "part"


def functions(name: str, mode="auto", *, many: bool = True, tools=TOOLS) -> Functions:
    return Functions(tools, mode, many, format=importlib.import_module(f"jaxserve.server.tools.parsers.{name}"))


def test_every_format_s_calls(model):
    for name, (call, *_) in CALLS.items():
        grammar = answer_grammar(FORM, functions(name), None)
        assert reads(model, grammar, call) == "whole", name
        assert reads(model, grammar, call.replace("go", "run")) not in ("whole", "part"), name


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("has_form", [True, False])
def test_calls_or_the_form_or_any_text(model, name, has_form):
    call, between, after_text, checked = CALLS[name]
    grammar = answer_grammar(FORM if has_form else None, functions(name), None)
    single = answer_grammar(FORM if has_form else None, functions(name, many=False), None)
    for one in (grammar, single):
        assert reads(model, one, call) == "whole"
        assert reads(model, one, call.replace("go", "run")) not in ("whole", "part")
        assert (reads(model, one, "Hello.\n\nThere.") == "whole") != has_form
        assert (reads(model, one, "Look:\n" + call) == "whole") == (not has_form)
        if checked:
            assert reads(model, one, call.replace("1", '"a"')) not in ("whole", "part")
        if after_text and not has_form:
            assert reads(model, one, "Look:\n" + call.replace("go", "run")) not in ("whole", "part")
    assert (reads(model, grammar, '{"x": true}') == "whole") == (has_form or name != "llama3_json")
    two = TWO.get(name, call + between + call)
    assert reads(model, grammar, two) == "whole"
    assert reads(model, single, two) not in ("whole", "part")


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name][3]])
def test_arguments_follow_the_schema_wherever_a_grammar_runs(model, name):
    """Also those of functions that are not strict. A schema without names allows any."""
    call = CALLS[name][0]
    for schema, is_bound in ((NODE, True), ({"type": "object"}, False)):
        tools = [Tool(Function("go", parameters=schema))]
        called = functions(name, tools=tools)
        single = functions(name, many=False, tools=tools)
        for grammar in (answer_grammar(FORM, called, None), answer_grammar(None, single, None)):
            assert reads(model, grammar, call) == "whole"
            wrong = reads(model, grammar, call.replace("1", '"a"').replace("null", '"b"'))
            assert (wrong == "whole") != is_bound


def test_gemma_4_s_arguments(model):
    """Their names, and values that are no lists and no objects."""
    text = {"type": "string"}
    properties = NODE["properties"] | {"text": text, "one": text | {"enum": ["a", "b, c"]}}
    tools = [Tool(Function("go", parameters={"type": "object", "properties": properties}, strict=True))]
    grammar = answer_grammar(None, functions("gemma4", tools=tools), None)
    call = '<|tool_call>call:go{one:<|"|>b, c<|"|>,text:<|"|>x}, {<|"|>,v:1,next:{v:1}}<tool_call|>'
    assert reads(model, grammar, call) == "whole"
    for right, wrong in (("b, c", "c"), ("v:1,", "v:12,"), ("v:1,", 'v:<|"|>1<|"|>,'), ("text:", "texts:")):
        assert reads(model, grammar, call.replace(right, wrong)) not in ("whole", "part")


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name][3]])
def test_definitions_that_a_schema_refers_to(model, name):
    """In the arguments as a whole, and in those that are written one by one."""
    digit = NODE["properties"]["v"]
    schema = {**NODE, "properties": NODE["properties"] | {"v": {"$ref": "#/$defs/digit"}}, "$defs": {"digit": digit}}
    call = CALLS[name][0]
    grammar = answer_grammar(None, functions(name, tools=[Tool(Function("go", parameters=schema, strict=True))]), None)
    assert reads(model, grammar, call) == "whole"
    assert reads(model, grammar, call.replace("1", "12")) not in ("whole", "part")


def test_schemas_that_are_too_large_to_enforce_are_no_reason_to_refuse(model):
    large = {**NODE, "description": "x" * 2**19}
    deep = {"type": "object"}
    for _ in range(70):
        deep = {"type": "object", "properties": {"n": deep}}
    for schema in (large, deep):
        tools = [Tool(Function("go", parameters=schema))]
        grammar = answer_grammar(FORM, functions("hermes", tools=tools), None)
        call = CALLS["hermes"][0]
        assert reads(model, grammar, call.replace("1", '"a"')) == "whole"
        assert reads(model, grammar, call.replace("go", "run")) not in ("whole", "part")
    both = [Tool(Function("stay", parameters=large)), TOOLS[0]]
    grammar = answer_grammar(FORM, functions("hermes", tools=both), None)
    assert reads(model, grammar, CALLS["hermes"][0].replace("1", '"a"')) not in ("whole", "part")


def test_llama_4_s_marks(model):
    grammar = answer_grammar(FORM, functions("llama4_pythonic"), None)
    assert reads(model, grammar, "<|python_start|>[go(v=1, next=None)]<|python_end|>") == "whole"
    assert reads(model, grammar, "<|python_start|>[run(v=1)]<|python_end|>") not in ("whole", "part")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in CALLS]
)
def test_what_is_drawn_is_what_the_parser_reads(model, name):
    """Random tokens among those that are allowed: calls that satisfy their schemas, or the form."""
    tokenizer, compiler = model
    called = functions(name, tools=[Tool(Function("go", parameters=NODE))])
    grammar = answer_grammar(FORM, called, Thoughts("<think>", "</think>", False))
    compiled = compiler.compile(grammar).future.result()
    chance = np.random.default_rng(3)
    seen = set()
    for _ in range(40):
        ids = []
        matcher = Matcher(compiled)
        mask = allocate_token_bitmask(1, 512)
        for _ in range(400):
            fill_next_token_bitmask(matcher.state, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            ends = np.isin(allowed, (2, 4)).any()
            ids.append(int(chance.choice(allowed)) if not ends else 4)
            assert matcher.state.consume_token(ids[-1])
            if matcher.ended:
                break
        if not matcher.ended or (text := tokenizer.decode(ids)).startswith("<think>"):
            continue
        piece = OutputParser(None, called.format.Parser({"go": NODE})).push(
            ChoiceDelta(index=0, text=text, token_ids=ids, finish_reason="stop")
        )
        seen.add(bool(piece.calls))
        for call in piece.calls:
            assert call.name == "go"
            if CALLS[name][3]:
                jsonschema.validate(json.loads(call.arguments), NODE)
        if not piece.calls:
            assert json.loads(piece.content).keys() <= {"x"}
        assert not (piece.calls and piece.content), text
    assert seen == {True, False}


@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_before_everything(model, is_open):
    thoughts = Thoughts("<think>", "</think>", is_open)
    form = answer_grammar(FORM, None, thoughts)
    assert reads(model, form, '<think>Hm,\n\n {"x": 1}</think>\n\n{"x": true}') == "whole"
    assert reads(model, form, '<think></think>{"x": true}') == "whole"
    assert (reads(model, form, 'Hm.</think>{"x": true}') == "whole") == is_open
    assert reads(model, form, '{"x": true}') == ("part" if is_open else "whole")
    assert reads(model, form, "<think>Hm.</think>\n\nNo form.") not in ("whole", "part")
    assert reads(model, form, "<think>Hm.</think>" + "\n" * 9) not in ("whole", "part")
    for mode, text in (
        ("required", '[{"name": "go", "parameters": {"v": 1, "next": null}}, {"name": "stay", "parameters": {}}]'),
        ("named", '{"v": 1, "next": null}'),
    ):
        forced = answer_grammar(FORM, functions("hermes", mode), thoughts)
        assert reads(model, forced, f"<think>Hm.</think>\n\n{text}") == "whole"
        assert reads(model, forced, f"<think>Hm.</think>\n\n{text}".replace("1", "99")) not in ("whole", "part")
        assert (reads(model, forced, text) == "whole") != is_open
    chosen = answer_grammar(None, functions("hermes", many=False), thoughts)
    call = CALLS["hermes"][0]
    for text in ("<think>Hm.</think>\n\nHello.", f"<think>Hm.</think>{call}", "<think>Hm, and no end"):
        assert reads(model, chosen, text) == "whole"
    assert reads(model, chosen, f"<think>Hm.</think>{call}{call}") not in ("whole", "part")


@pytest.mark.parametrize("name", CALLS)
def test_the_clients_own_stop_tokens_may_end_a_text(model, name):
    """An end token that the model's configuration leaves out is one of these."""
    called = functions(name, many=False)
    thoughts = Thoughts("<think>", "</think>", False)
    for given in (None, thoughts):
        assert reads(model, answer_grammar(None, called, given), "Hello.<|im_start|>") == "Hello."
        free = answer_grammar(None, called, given, (3, model[0].encode("x")[0]))
        for text in ("Hello.<|im_start|>", "Hello.", f"{CALLS[name][0]}<|im_start|>"):
            assert reads(model, free, text) == "whole"
        assert reads(model, free, "Hello.<|im_start|>.") == "Hello.<|im_start|>"


def test_nothing_is_bound_that_nobody_asked_for():
    free = Functions([Tool(Function("f"))], "auto", True, format=functions("hermes").format)
    assert answer_grammar(None, free, Thoughts("<think>", "</think>", True)) is None
    assert answer_grammar(None, None, Thoughts("<think>", "</think>", True)) is None
    assert answer_grammar(FORM, None, None) is FORM
