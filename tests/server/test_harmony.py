"""gpt-oss's messages in channels: grammars, histories, and answers through every endpoint."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import tiny_models
import tokenizers_for_tests as kinds
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from serving import SMALL, running_server

from jaxserve.commands import cli
from jaxserve.grammars.grammar import Compiler, Matcher
from jaxserve.server.chat.forms import Frame, Functions, answer_grammar
from jaxserve.server.chat.histories import one_call_each
from jaxserve.server.chat.output_parser import OutputParser
from jaxserve.server.plugins import choices, find
from jaxserve.server.tools.choice import Function, Tool
from jaxserve.text.detokenizer import ChoiceDelta
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import Grammar, SamplingParams

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"]
NODE = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"], "additionalProperties": False}
TOOLS = [Tool(Function("go", parameters=NODE, strict=True)), Tool(Function("stay"))]
FORM = Grammar("json", '{"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": false}')
THOUGHT = "<|channel|>analysis<|message|>Hm,\n\n{.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
GO = '<|channel|>commentary to=functions.go <|constrain|>json<|message|>{"v": 1}'
GO_FIRST = ' to=functions.go<|channel|>commentary json<|message|>{"v": 1}'
STAY = "<|channel|>commentary to=functions.stay<|message|>{}"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
MODULE = importlib.import_module("jaxserve.server.tools.parsers.harmony")
MODEL = "test-model"


@pytest.fixture(scope="module", params=["marks are special", "marks are tokens", "marks are text"])
def model(request, tmp_path_factory):
    """A tokenizer and a compiler for it."""
    marks = [] if request.param == "marks are text" else MARKS
    folder = tiny_models.build_tokenizer(tmp_path_factory.mktemp("m"), 512, marks=marks)
    if request.param == "marks are special":
        make_special(folder / "tokenizer.json")
    return load_tokenizer(folder), Compiler(folder, 512, (2, 4))


def make_special(file: Path) -> None:
    """Makes the marks special tokens, as they are in gpt-oss's tokenizer."""
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["special"] |= token["content"] in MARKS
    file.write_text(json.dumps(content))


def reads(model, grammar: Grammar, text: str) -> bool:
    tokenizer, compiler = model
    state = compiler.compile(grammar).future.result().deep_copy()
    return all(state.consume_token(token) for token in tokenizer.encode(text)) and state.is_accepting()


def functions(mode="auto", *, many: bool = True, tools=TOOLS) -> Functions:
    return Functions(tools, mode, many, format=MODULE)


@pytest.mark.parametrize("reasons", [True, False])
def test_a_form_is_the_text_of_the_last_message(model, reasons):
    grammar = answer_grammar(FORM, None, Frame(reasons))
    for header in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
        assert reads(model, grammar, header + '{"x": true}')
        assert reads(model, grammar, THOUGHT + THOUGHT + header + '{"x": true}') == reasons
        assert not reads(model, grammar, header + '{"x": 1}')
    for text in ('{"x": true}', "<|channel|>analysis<|message|>Hm", PREAMBLE + FINAL + '{"x": true}', GO):
        assert not reads(model, grammar, text)


@pytest.mark.parametrize("reasons", [True, False])
def test_forced_calls(model, reasons):
    required = answer_grammar(FORM, functions("required"), Frame(reasons))
    named = answer_grammar(None, functions("named", tools=TOOLS[:1]), Frame(reasons))
    single = answer_grammar(None, functions("required", many=False), Frame(reasons))
    for grammar in (required, named, single):
        for call in (GO, GO_FIRST):
            assert reads(model, grammar, call)
            assert reads(model, grammar, THOUGHT + PREAMBLE + call) == reasons
            assert not reads(model, grammar, call.replace("1", '"a"'))
            assert not reads(model, grammar, call.replace("go", "run"))
        assert not reads(model, grammar, FINAL + "Four.")
        assert not reads(model, grammar, FINAL + '{"x": true}')
        assert reads(model, grammar, STAY) == (grammar is not named)
        assert not reads(model, grammar, STAY.replace("{}", '{"any": 1}'))
    assert reads(model, required, GO + NEXT + GO_FIRST)
    assert not reads(model, single, GO + NEXT + GO)


def test_calls_or_the_form_or_any_text(model):
    with_form = answer_grammar(FORM, functions(), Frame(True))
    bound = answer_grammar(None, functions(many=False), Frame(True), (3,))
    for grammar in (with_form, bound):
        for text in (GO, THOUGHT + GO_FIRST, THOUGHT + PREAMBLE + THOUGHT + STAY):
            assert reads(model, grammar, text)
        assert not reads(model, grammar, GO.replace("1", "true"))
        assert not reads(model, grammar, STAY.replace("{}", '{"any": 1}'))
        assert reads(model, grammar, THOUGHT + FINAL + "Four.") == (grammar is bound)
        assert reads(model, grammar, THOUGHT + FINAL + '{"x": true}')
        assert not reads(model, grammar, "Four.")
    assert reads(model, bound, FINAL + "Four.<|im_start|>")
    assert reads(model, with_form, GO + NEXT + GO)
    assert not reads(model, bound, GO + NEXT + GO)


def test_nothing_is_bound_that_nobody_asked_for(model):
    free = Functions([Tool(Function("f"))], "auto", True, format=MODULE)
    assert answer_grammar(None, free, Frame(True)) is None
    assert answer_grammar(None, None, Frame(True)) is None
    after = answer_grammar(None, free, Frame(False))  # after reasoning that was closed by force
    assert reads(model, after, FINAL + "Four.")
    assert reads(model, after, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": []}')
    assert not reads(model, after, THOUGHT + FINAL + "Four.")


def test_what_is_drawn_is_what_the_parser_reads(model):
    """Random tokens among those that are allowed: calls that satisfy their schemas, or the form."""
    tokenizer, compiler = model
    splitter = importlib.import_module("jaxserve.server.reasoning.harmony").splitter
    compiled = compiler.compile(answer_grammar(FORM, functions(tools=TOOLS[:1]), Frame(False))).future.result()
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
        if not matcher.ended:
            continue
        text = tokenizer.decode([token for token in ids if token != 4], skip_special_tokens=False)
        delta = ChoiceDelta(index=0, text=text, token_ids=ids, finish_reason="stop")
        piece = OutputParser(splitter("<|start|>assistant"), MODULE.Parser({"go": NODE})).push(delta)
        seen.add(bool(piece.calls))
        assert bool(piece.calls) != bool(piece.content)
        for call in piece.calls:
            assert isinstance(json.loads(call.arguments)["v"], int)
        if piece.content:
            assert json.loads(piece.content).keys() <= {"x"}
    assert seen == {True, False}


def test_names_of_other_engines():
    for package, names in (
        ("jaxserve.server.tools.parsers", ("harmony", "openai", "gpt_oss")),
        ("jaxserve.server.reasoning", ("harmony", "openai_gptoss", "gpt_oss")),
    ):
        for name in names:
            assert name in choices(package)
            assert find(package, name, None).__name__ == f"{package}.harmony"


# histories


def call(name: str, id: str = "") -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}


def result(text: str, id: str | None = None) -> dict:
    return {"role": "tool", "content": text} | ({"tool_call_id": id} if id else {})


def test_one_call_for_each_message():
    user = {"role": "user", "content": "Hi"}
    both = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [call("a", "1"), call("b", "2")],
    }
    first = both | {"thinking": "Hm.", "tool_calls": [call("a", "1")]}
    second = {"role": "assistant", "content": "", "tool_calls": [call("b", "2")]}
    history = [user, both, result("B", "2"), result("A", "1"), user]
    assert one_call_each(history) == [user, first, result("A", "1"), second, result("B", "2"), user]
    assert one_call_each([user, both]) == [user, first, second]
    unnamed = {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]}
    parts = [unnamed | {"tool_calls": [one]} for one in unnamed["tool_calls"]]
    extra = result("C")
    assert one_call_each([unnamed, result("A"), result("B"), extra]) == [
        parts[0], result("A"), parts[1], result("B"), extra,
    ]  # fmt: skip
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call("a", "1")]}
    (joined,) = one_call_each([said])
    assert (joined["thinking"], joined["content"]) == ("Hm.\n\nI look.", "")
    assert said["content"] == "I look."
    assert one_call_each([user]) == [user]


# answers

# What matters of gpt-oss's template: the roles that it knows, where reasoning and calls go, and what it refuses.
TEMPLATE = """{%- set effort = reasoning_effort if reasoning_effort is defined else "medium" -%}
{{- "<|start|>system<|message|>Reasoning: " + effort + "<|end|>" -}}
{%- set rest = messages -%}
{%- if messages[0].role in ("developer", "system") -%}
  {{- "<|start|>developer<|message|>" + messages[0].content + "<|end|>" -}}{%- set rest = messages[1:] -%}
{%- endif -%}
{%- if tools -%}{{- "<|start|>developer<|message|>" + tools | tojson + "<|end|>" -}}{%- endif -%}
{%- set name = namespace(last=none) -%}
{%- for message in rest -%}
  {%- if message.role == "assistant" and "tool_calls" in message -%}
    {%- if message.content and message.thinking -%}{{- raise_exception("both content and thinking") -}}{%- endif -%}
    {%- set thought = message.content or message.thinking -%}
    {%- if thought -%}{{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" -}}{%- endif -%}
    {%- set one = message.tool_calls[0].function -%}{%- set name.last = one.name -%}
    {{- "<|start|>assistant to=functions." + one.name + "<|channel|>commentary json<|message|>" -}}
    {{- one.arguments | tojson + "<|call|>" -}}
  {%- elif message.role == "assistant" -%}
    {{- "<|start|>assistant<|channel|>final<|message|>" + message.content -}}
    {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" -}}
  {%- elif message.role == "tool" -%}
    {{- "<|start|>functions." + name.last + " to=assistant<|channel|>commentary<|message|>" -}}
    {{- message.content | tojson + "<|end|>" -}}
  {%- elif message.role == "user" -%}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" -}}{%- endif -%}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ANSWER = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four."
CALL = (
    "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Köln"}<|call|>'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose engine says what the prompt tells it to."""
    folder = tmp_path_factory.mktemp("harmony")
    kinds.save_byte_level(folder, TEMPLATE)
    tokens = [*MARKS, "<|return|>", "<|call|>"]
    kinds.add_special_tokens(folder, tokens)
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = {"reasoning_parser": "openai_gptoss", "tool_call_parser": "openai"}
    config = {"max_model_len": 4096}
    with running_server(folder, log, engine="ScriptEngine", config=config, **options) as started:
        yield started


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": f"SAY({text})SAY"}]


def ask(server, text: str, **options):
    return server.openai().chat.completions.create(model=MODEL, messages=say(text), **options)


def streamed(server, text: str, **options) -> tuple[str, str, list, str]:
    """Reasoning, content, calls and finish reason that the chunks add up to."""
    reasoning = content = reason = ""
    calls: list = []
    for chunk in ask(server, text, stream=True, **options):
        choice = chunk.choices[0]
        assert "<|" not in (choice.delta.content or "")
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for one in choice.delta.tool_calls or []:
            if one.function.name:
                calls.append([one.function.name, ""])
            calls[one.index][1] += one.function.arguments or ""
        reason = choice.finish_reason or reason
    return reasoning, content, calls, reason


@pytest.mark.slow
def test_chat(server):
    whole = ask(server, ANSWER)
    message = whole.choices[0].message
    assert (message.reasoning, message.content, whole.choices[0].finish_reason) == ("Two and two.", "Four.", "stop")
    assert whole.choices[0].stop_reason is None
    assert 5 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
    assert streamed(server, ANSWER) == ("Two and two.", "Four.", [], "stop")
    hidden = ask(server, ANSWER, extra_body={"include_reasoning": False}).choices[0].message
    assert (getattr(hidden, "reasoning", None), hidden.content) == (None, "Four.")
    cut = ask(server, ANSWER, max_tokens=8).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_chat_with_calls(server, choice):
    options = {"tools": [WEATHER], "tool_choice": choice}
    whole = ask(server, CALL + "never reached", **options).choices[0]
    (one,) = whole.message.tool_calls
    assert (whole.message.reasoning, whole.message.content, whole.finish_reason) == (
        "Weather.",
        "I look.",
        "tool_calls",
    )
    assert whole.stop_reason is None
    assert (one.function.name, json.loads(one.function.arguments)) == ("get_weather", {"city": "Köln"})
    calls = [["get_weather", '{"city": "Köln"}']]
    assert streamed(server, CALL, **options) == ("Weather.", "I look.", calls, "tool_calls")


def test_calls_of_no_function_are_text(server):
    text = "<|channel|>analysis to=python code<|message|>print(2 + 2)<|call|>"
    choice = ask(server, text, tools=[WEATHER]).choices[0]
    assert (choice.message.reasoning, choice.message.tool_calls, choice.finish_reason) == ("print(2 + 2)", None, "stop")
    none = ask(server, CALL, tools=[WEATHER], tool_choice="none").choices[0]
    assert (none.message.content, none.message.tool_calls) == ('I look.\n\n{"city": "Köln"}', None)


def test_return_ends_an_answer(server):
    choice = ask(server, ANSWER + "<|return|><|start|>user<|message|>And").choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("Four.", "stop", None)


def test_a_budget_of_reasoning(server):
    text = ANSWER.replace("Two and two.", "one two three four five six") + "|THEN|<|channel|>final<|message|>Four."
    choice = ask(server, text, extra_body={"thinking_token_budget": 6}).choices[0]
    assert 0 < len(choice.message.reasoning) < len("one two three four five six")
    assert "one two three four five six".startswith(choice.message.reasoning)
    assert choice.message.content == "Four."


def test_stop_strings(server):
    """They are looked for in what a client sees as content, not in reasoning, headers or calls."""
    text = ANSWER.replace("Four.", "One. Two. assistant")
    for stop, content, reason in (
        ([" Two."], "One.", " Two."),
        (["Two", "final", "analysis"], "One. ", "Two"),
        (["assistant", "channel", "<|end|>"], "One. Two. ", "assistant"),
        (["and two"], "One. Two. assistant", None),
    ):
        choice = ask(server, text, stop=stop).choices[0]
        message = choice.message
        assert (message.reasoning, message.content, choice.stop_reason) == ("Two and two.", content, reason)
        assert streamed(server, text, stop=stop) == ("Two and two.", content, [], "stop")
    included = ask(server, text, stop=[" Two."], extra_body={"include_stop_str_in_output": True}).choices[0]
    assert included.message.content == "One. Two."
    called = ask(server, CALL, tools=[WEATHER], stop=["city", "Weather"]).choices[0]
    assert called.message.tool_calls[0].function.arguments == '{"city": "Köln"}'


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        (CALL + "<|start|>assistant<|channel|>final<|message|>One <|x. Two", "x. T", "One <|"),
        (ANSWER, "r.", "Fou"),
        ("plain Two", "Two", "plain "),
        (ANSWER, "Two", "Four."),
        (CALL, "city", "<|call|>"),
    ],
)
def test_stop_strings_in_pieces(text, stop, shown):
    """However a text is cut, all of it comes up to the stop string, if that is in the content. `shown`: its end."""
    splitter = importlib.import_module("jaxserve.server.reasoning.harmony").splitter("<|start|>assistant")
    chance = np.random.default_rng(7)
    for skipped in (0, 0, 2):
        for _ in range(50):
            places = sorted(chance.integers(0, len(text), 5))
            pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
            matcher = splitter.stop_strings([stop]).matcher(False)
            read = "".join(map(matcher.skip, pieces[:skipped]))
            matched = None
            for piece in pieces[skipped:]:
                more, matched = matcher.push(piece)
                read += more
                if matched:
                    break
            read += "" if matched else matcher.flush()
            assert text.startswith(read)
            if matched or not skipped:
                assert read.endswith(shown)
            else:
                assert read == text


def test_a_final_message_that_continues(server):
    messages = [
        *say(" and more."),
        {"role": "assistant", "content": "The answer that has begun with many words is this"},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    choice = server.openai().chat.completions.create(model=MODEL, messages=messages, extra_body=extra).choices[0]
    assert (choice.message.content, getattr(choice.message, "reasoning", None)) == (" and more.", None)


def prompt_of(server, **body) -> str:
    ids = server.http().post("/tokenize", json=body).json()["tokens"]
    return server.http().post("/detokenize", json={"tokens": ids}).json()["prompt"]


def test_prompts(server):
    """Effort, developer messages and a history with calls reach the template."""
    calls = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": "{}"}} for i, name in enumerate("ab")
    ]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "B"},
        {"role": "tool", "tool_call_id": "0", "content": "A"},
    ]
    assert prompt_of(server, messages=messages, chat_template_kwargs={"reasoning_effort": "high"}) == (
        "<|start|>system<|message|>Reasoning: high<|end|><|start|>developer<|message|>Be kind.\n\nBe brief.<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        "<|start|>assistant to=functions.a<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.a to=assistant<|channel|>commentary<|message|>"A"<|end|>'
        "<|start|>assistant to=functions.b<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.b to=assistant<|channel|>commentary<|message|>"B"<|end|><|start|>assistant'
    )


def test_responses(server):
    client = server.openai()
    tool = {"type": "function", **WEATHER["function"]}
    response = client.responses.create(model=MODEL, input=say(CALL), tools=[tool], reasoning={"effort": "low"})
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[0].content[0].text == "Weather."
    assert response.output_text == "I look."
    assert json.loads(response.output[2].arguments) == {"city": "Köln"}
    events = list(client.responses.create(model=MODEL, input=say(ANSWER), stream=True))
    texts = {
        kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text")
    }
    assert texts == {"reasoning_text": "Two and two.", "output_text": "Four."}
    output = {"type": "function_call_output", "call_id": response.output[2].call_id, "output": "SAY(" + ANSWER + ")SAY"}
    again = client.responses.create(model=MODEL, input=[output], previous_response_id=response.id)
    assert again.output_text == "Four."


def test_messages(server):
    client = server.anthropic()
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    options = {"model": MODEL, "max_tokens": 999, "messages": say(CALL), "tools": [tool]}
    message = client.messages.create(**options)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == ("Weather.", "I look.")
    assert (message.content[2].input, message.stop_reason) == ({"city": "Köln"}, "tool_use")
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Köln"}
    plain = client.messages.create(model=MODEL, max_tokens=999, messages=say(ANSWER))
    assert [block.type for block in plain.content] == ["thinking", "text"]
    assert (plain.content[1].text, plain.stop_reason) == ("Four.", "end_turn")


@pytest.mark.slow
def test_the_terminal_shows_reasoning_and_keeps_the_answer(tmp_path, capsys):
    """`jaxserve chat`: the answer alone becomes part of the conversation."""
    kinds.save_byte_level(tmp_path, TEMPLATE)
    kinds.add_special_tokens(tmp_path, MARKS)
    llm = SimpleNamespace(tokenizer=load_tokenizer(tmp_path))

    def stream(prompt, params):
        assert llm.tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|start|>assistant")
        assert not params.skip_special_tokens
        return (ChoiceDelta(index=0, text=char) for char in ANSWER)

    llm.stream = stream
    assert cli._answer(llm, [{"role": "user", "content": "Hi"}], SamplingParams()) == "Four."
    assert capsys.readouterr().out == "Two and two.\n\nFour.\n"


# The real engine, with a random model: what is asked for holds. A bias makes it end its messages sooner or later.

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
FIND = {"type": "function", "function": {"name": "find", "parameters": PERSON}}
JOIN = {"type": "function", "function": {"name": "join", "parameters": PERSON, "strict": True}}


@pytest.fixture(scope="module")
def random_server(tmp_path_factory):
    folder = tiny_models.build("qwen3_tied", tmp_path_factory.mktemp("random"))
    short = TEMPLATE.replace("tools | tojson", "tools | length | string")  # the model has few positions
    tiny_models.build_tokenizer(folder, 512, marks=MARKS, chat_template=short)
    make_special(folder / "tokenizer.json")
    log = tmp_path_factory.mktemp("log") / "server.log"
    config = SMALL | {"max_model_len": 512, "kv_pages": 130}
    with running_server(folder, log, engine=None, config=config) as started:
        yield started


def draw(server, thinks: float = 0.0, **options):
    """Some answers of at most 300 tokens, and how many tokens of reasoning they have. `thinks`: a bias towards more."""
    first = server.http().post("/tokenize", json={"prompt": "analysis"}).json()["tokens"][0]
    bias = {str(507 + MARKS.index("<|end|>")): 6.0, str(first): thinks}
    fields = {"model": MODEL, "max_tokens": 300, "temperature": 1, "seed": 5, "n": 4, "logit_bias": bias}
    answer = server.openai().chat.completions.create(messages=[{"role": "user", "content": "hi"}], **fields | options)
    return answer.choices, answer.usage.completion_tokens_details.reasoning_tokens


@pytest.mark.slow
def test_forms_through_the_engine(random_server):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    choices, reasoned = draw(random_server, thinks=3.0, response_format=form)
    assert reasoned
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    choices, reasoned = draw(
        random_server, response_format=form, extra_body={"structured_outputs": {"enable_in_reasoning": True}}
    )
    assert reasoned == 0
    for choice in choices:
        jsonschema.validate(json.loads(choice.message.content), PERSON)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_forced_calls_through_the_engine(random_server, choice):
    choices, _ = draw(random_server, tools=[FIND, JOIN], tool_choice=choice, parallel_tool_calls=False)
    ended = [one for one in choices if one.finish_reason != "length"]
    assert ended
    for one in ended:
        assert one.finish_reason == "tool_calls"
        (call,) = one.message.tool_calls
        assert call.function.name in ("find", "join") if choice == "required" else call.function.name == "find"
        jsonschema.validate(json.loads(call.function.arguments), PERSON)


@pytest.mark.slow
def test_a_budget_through_the_engine(random_server):
    """After the budget there are a final message or a call, and no other reasoning."""
    choices, reasoned = draw(
        random_server, thinks=3.0, n=1, tools=[FIND], extra_body={"thinking_token_budget": 5},
        tool_choice="required",
    )  # fmt: skip
    assert reasoned <= 5
    assert choices[0].message.tool_calls
