"""Parsers of tool calls and reasoning on texts as models write them, cut into pieces in every way."""

from __future__ import annotations

import importlib
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.chat.output_parser import OutputParser, Piece
from jaxserve.server.plugins import find, names
from jaxserve.server.schemas.chat import ChatRequest
from jaxserve.server.tools.choice import (
    AllowedTool,
    AllowedTools,
    Function,
    NamedChoice,
    NamedFunction,
    Tool,
    forced_parser,
)
from jaxserve.text.detokenizer import ChoiceDelta
from jaxserve.types import InvalidRequestError

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "string"}},
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}
PARIS = ("get_weather", {"city": "Paris", "days": 3})
ADD = ("add", {"a": 1, "b": -2.5})
UNICODE = ("get_weather", {"city": 'Köln 😀 "x" \\ {[', "days": 0})

# parser, text, content, calls
CASES = {
    "hermes, one": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "",
        [PARIS],
    ),
    "hermes, text and two": (
        "hermes",
        "Let me look.\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1, "b": -2.5}, "name": "add"}\n</tool_call>\n',
        "Let me look.",
        [PARIS, ADD],
    ),
    "hermes, escapes": (
        "hermes",
        '<tool_call>{"name":"get_weather","arguments":{"city":"K\\u00f6ln 😀 \\"x\\" \\\\ {[","days":0}}</tool_call>'
        " done",
        "done",
        [UNICODE],
    ),
    "hermes, arguments in a string": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": -2.5}"}</tool_call>',
        "",
        [ADD],
    ),
    "hermes, no arguments": (
        "hermes",
        '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "add", "arguments": null}',
        "",
        [("add", {}), ("add", {})],
    ),
    "hermes, not a call": (
        "hermes",
        "a < b <tool_call> is what I would write",
        "a < b <tool_call> is what I would write",
        [],
    ),
    "hermes, cut short": ("hermes", 'So: <tool_call>\n{"name": "get_', 'So: <tool_call>\n{"name": "get_', []),
    "hermes, closed wrongly": ("hermes", '<tool_call>{"name": "x"]}</tool_call>', '<tool_call>{"name": "x"]}', []),
    "hermes, the last brace is missing": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}\n</tool_call>\nafter',
        "after",
        [PARIS],
    ),
    "hermes, the last brace is missing, and so are arguments": (
        "hermes",
        '<tool_call>{"name": "add" </tool_call>',
        "",
        [("add", {})],
    ),
    "hermes, the mark inside a text": (
        "hermes",
        '<tool_call>{"name": "write_file", "arguments": {"path": "</tool_call>", "text": "<tool_call>{}"}}</tool_call>',
        "",
        [("write_file", {"path": "</tool_call>", "text": "<tool_call>{}"})],
    ),
    "hermes, white space": (
        "hermes",
        ' \n<tool_call> \n\t{ "name" : "add" , "arguments" : { "a" : 1 , "b" : -2.5 } } \n </tool_call> \n\n'
        "  <tool_call>{}</tool_call> x",
        "<tool_call>{} x",
        [ADD],
    ),
    "deepseek v3, text and two": (
        "deepseek_v3",
        "I look.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": -2.5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "I look.",
        [PARIS, ADD],
    ),
    "deepseek v3, no arguments": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("add", {})],
    ),
    "deepseek v3, cut short": (
        "deepseek_v3",
        "So <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ad",
        "So <｜tool▁call▁begin｜>function<｜tool▁sep｜>ad",
        [],
    ),
    "deepseek v3, plain": ("deepseek_v3", "a <｜b｜> c", "a <｜b｜> c", []),
    "deepseek v3.1, two": (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": -2.5}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [PARIS, ADD],
    ),
    "deepseek v3.1, the marks inside a text": (
        "deepseek_v31",
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜>',
        "",
        [("add", {"a": "<｜tool▁call▁end｜>"})],
    ),
    "glm, text and two": (
        "glm45",
        "Well.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
        "<arg_key>b</arg_key><arg_value>-2.5</arg_value></tool_call>",
        "Well.",
        [PARIS, ADD],
    ),
    "glm, lines": (
        "glm45",
        "<tool_call>write_file<arg_key>path</arg_key><arg_value>x</arg_value><arg_key>text</arg_key>"
        '<arg_value>\n if a < b:\n\t"</p>"\n</arg_value></tool_call>',
        "",
        [("write_file", {"path": "x", "text": '\n if a < b:\n\t"</p>"\n'})],
    ),
    "glm, no arguments": ("glm45", "<tool_call>add\n</tool_call>done", "done", [("add", {})]),
    "glm, not a call": ("glm45", "see <tool_call> is, <tool_call>", "see <tool_call> is, <tool_call>", []),
    "glm, no name": ("glm45", "<tool_call></tool_call>", "<tool_call>", []),
    "granite, two": (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5}}]',
        "",
        [PARIS, ADD],
    ),
    "granite, one": ("granite", 'Yes: <tool_call> {"name": "add", "arguments": {"a": 1, "b": -2.5}}', "Yes:", [ADD]),
    "granite, not a call": ("granite", "<|tool_call|> [ none ]", "<|tool_call|> [ none ]", []),
    "granite, cut short": ("granite", "<|tool_call|>[", "<|tool_call|>[", []),
    "phi, two": (
        "phi4",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5}}]',
        "",
        [PARIS, ADD],
    ),
    "phi, marks": (
        "phi4",
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": -2.5}}]<|/tool_call|>',
        "",
        [ADD],
    ),
    "phi, plain": ("phi4", "import functools; functools.cache", "import functools; functools.cache", []),
    "llama 4, marks": (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='Paris', days=3), add(a=1, b=-2.5)]<|python_end|>",
        "",
        [PARIS, ADD],
    ),
    "llama 4, no marks": ("llama4_pythonic", "[add(a=1, b=-2.5)]", "", [ADD]),
    "llama 4, text before": (
        "llama4_pythonic",
        "Sure.<|python_start|>[add(a=1, b=-2.5)]<|python_end|>",
        "Sure.",
        [ADD],
    ),
    "llama 4, code": ("llama4_pythonic", "<|python_start|>x = 1<|python_end|>", "x = 1", []),
    "gemma, function": (
        "gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
        "<start_function_call>call:add{a:1,b:-2.5}<end_function_call>",
        "",
        [PARIS, ADD],
    ),
    "gemma 4, text and two": (
        "gemma4",
        'I look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:add{a:1,b:-2.5}<tool_call|>",
        "I look.",
        [PARIS, ADD],
    ),
    "gemma 4, words of Python": (
        "gemma4",
        '<|tool_call>call:add{a:None,b:<|"|>None<|"|>}<tool_call|>',
        "",
        [("add", {"a": None, "b": "None"})],
    ),
    "gemma 4, nested": (
        "gemma",
        '<|tool_call>call:add{a:{k:[1,<|"|>}<tool_call|>,<|"|>,true,null],e:{},l:[]},'
        'b:<|"|>it\'s "so"<|"|>}<tool_call|> ok',
        "ok",
        [("add", {"a": {"k": [1, "}<tool_call|>,", True, None], "e": {}, "l": []}, "b": 'it\'s "so"'})],
    ),
    "gemma 4, no arguments": ("gemma", "<|tool_call>call:add{}<tool_call|>", "", [("add", {})]),
    "gemma 3, code": (
        "gemma",
        "I will.\n```tool_code\nget_weather(city='Paris', days=3)\nprint(add(a=1, b=-2.5))\n```\n",
        "I will.",
        [PARIS, ADD],
    ),
    "gemma 3, other code": (
        "gemma",
        "```tool_code\nimport os\n```",
        "```tool_code\nimport os\n```",
        [],
    ),
    "gemma, broken": (
        "gemma",
        "<|tool_call>call:add{a:1<tool_call|> x",
        "<|tool_call>call:add{a:1<tool_call|> x",
        [],
    ),
    "gemma, without its end": ("gemma", "<|tool_call>call:add{a:1,b:-2.5}", "", [ADD]),
    "gemma, cut short": ("gemma", "<|tool_call>call:add{a:", "<|tool_call>call:add{a:", []),
    "harmony, reasoning and one": (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>',
        "Hm.",
        [PARIS],
    ),
    "harmony, the recipient before the channel": (
        "harmony",
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": -2.5}',
        "",
        [ADD],
    ),
    "harmony, a preamble and two": (
        "harmony",
        "<|channel|>commentary<|message|>I will:\n1. look<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather<|constrain|>json<|message|>{"city": "Paris", "days": 3}<|end|><|start|>assistant '
        'to=functions.add<|channel|>commentary<|message|>{"a": 1, "b": -2.5}\n',
        "I will:\n1. look",
        [PARIS, ADD],
    ),
    "harmony, escapes": (
        "harmony",
        "<|channel|>commentary to=functions.get_weather<|message|>"
        '{"city":"K\\u00f6ln 😀 \\"x\\" \\\\ {[","days":0}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>done<|return|>",
        "done",
        [UNICODE],
    ),
    "harmony, no arguments": (
        "harmony",
        "<|channel|>commentary to=functions.add<|message|><|call|><|start|>assistant to=functions.add"
        "<|channel|>analysis<|message|>{} and more",
        "",
        [("add", {}), ("add", {})],
    ),
    "harmony, texts": (
        "harmony",
        "<|channel|>commentary<|message|>One <|x|> <|<|end|>\n<|start|>assistant<|channel|>final <|constrain|>json"
        "<|message|>two <|message|> to=functions.add<|return|>",
        "One <|x|> <|\n\ntwo <|message|> to=functions.add",
        [],
    ),
    "harmony, built-in tools": (
        "harmony",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|><|start|>assistant to=browser.search"
        '<|channel|>analysis<|message|>{"query": "x"}<|call|>',
        'print(1)\n\n{"query": "x"}',
        [],
    ),
    "harmony, no messages": ("harmony", "Two to=functions.add < three <|ca", "Two to=functions.add < three <|ca", []),
    "harmony, a text like a header": ("harmony", " to=5 is a number", "to=5 is a number", []),
    "harmony, cut in the header": (
        "harmony",
        "<|channel|>final<|message|>So<|end|><|start|>assistant<|channel|>comm",
        "So",
        [],
    ),
    "harmony, no text": (
        "harmony",
        "<|channel|>analysis<|end|><|start|>assistant<|message|>Yes.<|start|>assistant<|channel|>final<|message|>No.",
        "Yes.\n\nNo.",
        [],
    ),
    "kimi, text and two": (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|> functions.add:1 <|tool_call_argument_begin|> '
        '{"a": 1, "b": -2.5} <|tool_call_end|><|tool_calls_section_end|>',
        "I look.",
        [PARIS, ADD],
    ),
    "kimi, the marks inside a text": (
        "kimi_k2",
        '<|tool_call_begin|>add<|tool_call_argument_begin|>{"a": "<|tool_call_end|>"}<|tool_call_end|> done',
        "done",
        [("add", {"a": "<|tool_call_end|>"})],
    ),
    "kimi, no arguments": (
        "kimi_k2",
        "<|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|><|tool_call_end|>"
        "<|tool_call_begin|>functions.add:13<|tool_call_argument_begin|> ",
        "",
        [("a.b", {}), ("add", {})],
    ),
    "kimi, cut short": ("kimi_k2", "So <|tool_call_begin|>functions.ad", "So <|tool_call_begin|>functions.ad", []),
    "minimax, text and two": (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">-2.5</parameter>\n</invoke>\n</minimax:tool_call>',
        "I look.",
        [PARIS, ADD],
    ),
    "minimax, lines": (
        "minimax_m2",
        '<invoke name="write_file"><parameter name="path">x</parameter><parameter name="text">\n if a < b:\n\t"</p>"'
        "\n</parameter></invoke>",
        "",
        [("write_file", {"path": "x", "text": '\n if a < b:\n\t"</p>"\n'})],
    ),
    "minimax, no arguments": (
        "minimax_m2",
        '<minimax:tool_call><invoke name="add"></invoke></minimax:tool_call>\n',
        "",
        [("add", {})],
    ),
    "minimax, plain": ("minimax_m2", 'An <invoke> or <invoke name="x', 'An <invoke> or <invoke name="x', []),
    "seed, text and two": (
        "seed_oss",
        "I look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3"
        "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>"
        "\n<parameter=b>-2.5</parameter>\n</function>\n</seed:tool_call>",
        "I look.",
        [PARIS, ADD],
    ),
    "seed, lines": (
        "seed_oss",
        "<seed:tool_call><function=write_file><parameter=path>x</parameter><parameter=text>\n y\n</parameter>"
        "</function>",
        "",
        [("write_file", {"path": "x", "text": "\n y\n"})],
    ),
    "cohere, two": (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", '
        '"days": 3}},\n    {"tool_call_id": "1", "tool_name": "add", "parameters": {"a": 1, "b": -2.5}}\n]'
        "<|END_ACTION|>",
        "",
        [PARIS, ADD],
    ),
    "cohere, cut short": (
        "cohere",
        'So: <|START_ACTION|>[{"tool_call_id": "0", "tool_na',
        'So: <|START_ACTION|>[{"tool_call_id": "0", "tool_na',
        [],
    ),
    "hunyuan, two": (
        "hunyuan_a13b",
        'I look.<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5}}]</tool_calls>',
        "I look.",
        [PARIS, ADD],
    ),
    "olmo, two": (
        "olmo3",
        'I look.\n<function_calls>get_weather(city="Paris", days=3)\nadd(a=1, b=-2.5)</function_calls>',
        "I look.",
        [PARIS, ADD],
    ),
    "olmo, values of JSON": (
        "olmo3",
        "<function_calls>\nadd(a=[true, null, {\"k\": false}], b='</function_calls>')\n</function_calls>\n",
        "",
        [("add", {"a": [True, None, {"k": False}], "b": "</function_calls>"})],
    ),
    "olmo, no calls": (
        "olmo3",
        "<function_calls>none</function_calls>",
        "<function_calls>none</function_calls>",
        [],
    ),
    "lfm, text and two": (
        "lfm2",
        'I look.<|tool_call_start|>[get_weather(city="Paris", days=3), add(a=1, b=-2.5)]<|tool_call_end|>',
        "I look.",
        [PARIS, ADD],
    ),
    "lfm, the marks inside a text, and words of Python": (
        "lfm2",
        "<|tool_call_start|>[write-file(path='<|tool_call_end|>', class=\"from=1, ]\", from=None, not_=[true, {}])]"
        "<|tool_call_end|>\nDone.",
        "Done.",
        [("write-file", {"path": "<|tool_call_end|>", "class": "from=1, ]", "from": None, "not_": [True, {}]})],
    ),
    "lfm, JSON": (
        "lfm2",
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5}}]<|tool_call_end|>',
        "",
        [PARIS, ADD],
    ),
    "lfm, no calls": (
        "lfm2",
        "<|tool_call_start|> [ none ]<|tool_call_end|>",
        "<|tool_call_start|> [ none ]",
        [],
    ),
    "lfm, cut short": ("lfm2", '<|tool_call_start|>[{"name": "ge', '<|tool_call_start|>[{"name": "ge', []),
    "deepseek v3.2, text and two": (
        "deepseek_v32",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">'
        "1</｜DSML｜parameter>\n"
        '<｜DSML｜parameter name="b" string="false">-2.5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "I look.",
        [PARIS, ADD],
    ),
    "deepseek v3.2, the model tells what is a text": (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">'
        "3</｜DSML｜parameter>"
        '<｜DSML｜parameter name="y" string="false">{"k": [3]}</｜DSML｜parameter></｜DSML｜invoke><｜DSML｜invoke '
        'name="get_weather"><｜DSML｜parameter name="city" string="false">null</｜DSML｜parameter><｜DSML｜parameter '
        'name="units">\n</｜DSML｜invoke></｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
        "",
        [("f", {"x": "3", "y": {"k": [3]}}), ("get_weather", {"city": None, "units": "\n</｜DSML｜invoke>"})],
    ),
    "deepseek v3.2, plain": (
        "deepseek_v32",
        'The <｜DSML｜ mark, <｜DSML｜invoke name="x',
        'The <｜DSML｜ mark, <｜DSML｜invoke name="x',
        [],
    ),
    "deepseek v4, two": (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        "<｜DSML｜parameter "
        'name="b" string="false">-2.5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        [PARIS, ADD],
    ),
    "step 3, text and two": (
        "step3",
        "I look.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city">Paris</steptml:parameter>\n<steptml:parameter name="days">3</steptml:parameter>'
        "\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="add"><steptml:parameter name="a">1</steptml:parameter><steptml:parameter name="b">-2.5'
        "</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
        "I look.",
        [PARIS, ADD],
    ),
    "step 3, lines": (
        "step3",
        '<steptml:invoke name="write_file"><steptml:parameter name="path">x</steptml:parameter><steptml:parameter '
        'name="text">\n if a < b:\n\t"</parameter>"\n</steptml:parameter></steptml:invoke>',
        "",
        [("write_file", {"path": "x", "text": '\n if a < b:\n\t"</parameter>"\n'})],
    ),
    "hunyuan 3, text and two": (
        "hy_v3",
        "I look.<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
        "</tool_call:opensource>\n<tool_call:opensource>add<tool_sep:opensource>\n<arg_key:opensource>a"
        "</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n<arg_key:opensource>b"
        "</arg_key:opensource>\n<arg_value:opensource>-2.5</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        "I look.",
        [PARIS, ADD],
    ),
    "hunyuan 3, the other marks inside a text": (
        "hy_v3",
        "<tool_calls:opensource><tool_call:opensource>write_file<arg_key:opensource>path</arg_key:opensource>"
        "<arg_value:opensource></arg_value></tool_call></arg_value:opensource><arg_key:opensource>text"
        "</arg_key:opensource><arg_value:opensource>\n</arg_value:opensource></tool_call:opensource>"
        "</tool_calls:opensource>",
        "",
        [("write_file", {"path": "</arg_value></tool_call>", "text": "\n"})],
    ),
    "hunyuan 3, not a call": (
        "hy_v3",
        "see <tool_call:opensource> is, <tool_call>",
        "see <tool_call:opensource> is, <tool_call>",
        [],
    ),
    "hunyuan 3's preview, two": (
        "hy_v3_preview",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add<tool_sep>\n<arg_key>a</arg_key>"
        "\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>-2.5</arg_value>\n</tool_call>\n</tool_calls>",
        "",
        [PARIS, ADD],
    ),
    "hunyuan 3's preview, no arguments": (
        "hy_v3_preview",
        "<tool_calls><tool_call>add<tool_sep></tool_call></tool_calls>",
        "",
        [("add", {})],
    ),
    "longcat, text and two": (
        "longcat",
        "I look.\n<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Paris"
        "</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n"
        "</longcat_tool_call>\n<longcat_tool_call>add<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>1"
        "</longcat_arg_value><longcat_arg_key>b</longcat_arg_key><longcat_arg_value>-2.5</longcat_arg_value>"
        "</longcat_tool_call>",
        "I look.",
        [PARIS, ADD],
    ),
    "longcat, JSON": (
        "longcat",
        '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        "</longcat_tool_call>\n"
        '<longcat_tool_call>{"name": "add", "arguments": {"a": 1, "b": -2.5}}</longcat_tool_call>',
        "",
        [PARIS, ADD],
    ),
    "longcat, cut short": (
        "longcat",
        'So <longcat_tool_call>\n{"name": "get_',
        'So <longcat_tool_call>\n{"name": "get_',
        [],
    ),
    "apertus, text and two": (
        "apertus",
        'I look.<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 3}}, {"add": {"a": 1, "b": -2.5}}]'
        "<|tools_suffix|>",
        "I look.",
        [PARIS, ADD],
    ),
    "apertus, escapes": (
        "apertus",
        '<|tools_prefix|>[ { "get_weather" : {"city":"K\\u00f6ln 😀 \\"x\\" \\\\ {[","days":0}\n}\n'
        "]<|tools_suffix|> done",
        "done",
        [UNICODE],
    ),
    "apertus, the marks inside a text": (
        "apertus",
        '<|tools_prefix|>[{"add": {"a": "}]<|tools_suffix|>"}}]<|tools_suffix|>',
        "",
        [("add", {"a": "}]<|tools_suffix|>"})],
    ),
    "apertus, not a call": (
        "apertus",
        'So: <|tools_prefix|>[{"add": 3}]<|tools_suffix|>',
        'So: <|tools_prefix|>[{"add": 3}]',
        [],
    ),
    "apertus, cut short": ("apertus", '<|tools_prefix|>[{"ad', '<|tools_prefix|>[{"ad', []),
    "nemotron, two": (
        "nemotron_json",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5}}]</TOOLCALL>',
        "",
        [PARIS, ADD],
    ),
    "mimo, lines and two": (
        "mimo",
        "I look.<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</tool_call><tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>-2.5"
        "</parameter>\n</function>\n</tool_call>",
        "I look.",
        [PARIS, ADD],
    ),
    "mimo, lines": (
        "mimo",
        "<tool_call>\n<function=write_file>\n<parameter=path>x</parameter>\n<parameter=text>\n y\n\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("write_file", {"path": "x", "text": "\n y\n\n"})],
    ),
    "solar, text and two": (
        "solar_open",
        "<|content|>I look.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2<|tool_call:name|>get_weather"
        '<|tool_call:args|>{"city": "Paris", "days": 3}<|tool_call:end|><|tool_call:begin|>c3<|tool_call:name|>add'
        '<|tool_call:args|>{"a": 1, "b": -2.5}<|tool_call:end|><|calls|>',
        "I look.",
        [PARIS, ADD],
    ),
    "solar, no arguments, and a mark inside a text": (
        "solar_open",
        "<|tool_calls|><|tool_call:begin|><|tool_call:name|>add<|tool_call:args|><|tool_call:end|><|tool_call:begin|>"
        '<|tool_call:name|>add<|tool_call:args|>{"a": "<|tool_call:end|>"}<|tool_call:end|>',
        "",
        [("add", {}), ("add", {"a": "<|tool_call:end|>"})],
    ),
    "olmo, cut short": ("olmo3", "<function_calls>add(a=1, b=-2.5)\n</function", "", [ADD]),
    "llama 4, marks of JSON": (
        "llama3_json",
        '<|python_start|>{"name": "add", "parameters": {"a": 1, "b": -2.5}}<|python_end|>',
        "",
        [ADD],
    ),
    "llama 4, a text between the marks": (
        "llama3_json",
        '<|python_start|>I add.<|python_end|>{"name": "add", "parameters": {"a": 1, "b": -2.5}}',
        "I add.",
        [ADD],
    ),
    "hermes, plain": ("hermes", "Two < three, <b>bold</b>.\n", "Two < three, <b>bold</b>.\n", []),
    "llama, one": ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', "", [PARIS]),
    "llama, tag and two": (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"type": "function", "name": "add", "parameters": {"a": 1, "b": -2.5}}',
        "",
        [PARIS, ADD],
    ),
    "llama, JSON that is an answer": ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    "llama, plain": ("llama3_json", "Hello; {braces} here.", "Hello; {braces} here.", []),
    "mistral, list": (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5}, "id": "abcdefghi"}]',
        "",
        [PARIS, ADD],
    ),
    "mistral, names": (
        "mistral",
        'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]add{"a": 1, "b": -2.5}',
        "Sure.",
        [PARIS, ADD],
    ),
    "mistral, name with id": ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": -2.5}', "", [ADD]),
    "mistral, plain": ("mistral", "A list: [1, 2] and [TOOL", "A list: [1, 2] and [TOOL", []),
    "mistral, cut short": ("mistral", "[TOOL_CALLS]get_wea", "[TOOL_CALLS]get_wea", []),
    "coder, one": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [PARIS],
    ),
    "coder, lines and marks": (
        "qwen3_coder",
        "I will write it.\n<tool_call>\n<function=write_file>\n<parameter=path>\na b.txt\n</parameter>\n"
        "<parameter=text>\n"
        '\n  if a < b:\n\tprint("</p>")\n\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n'
        "<parameter=a>\n1\n</parameter>\n<parameter=b>\n-2.5\n</parameter>\n</function>\n</tool_call>",
        "I will write it.",
        [("write_file", {"path": "a b.txt", "text": '\n  if a < b:\n\tprint("</p>")\n'}), ADD],
    ),
    "coder, no parameters": ("qwen3_coder", "<function=add>\n</function>", "", [("add", {})]),
    "coder, untyped text": (
        "qwen3_coder",
        "<function=add><parameter=a>one\ntwo</parameter></function>",
        "",
        [("add", {"a": "one\ntwo"})],
    ),
    "coder, words of Python": (
        "qwen3_coder",
        "<function=add><parameter=a>\nTrue\n</parameter><parameter=b>\nNone\n</parameter></function>"
        "<function=get_weather><parameter=city>\nFalse\n</parameter></function>",
        "",
        [("add", {"a": True, "b": None}), ("get_weather", {"city": "False"})],
    ),
    "coder, empty text": (
        "qwen3_coder",
        "<function=get_weather><parameter=city>\n</parameter></function>",
        "",
        [("get_weather", {"city": ""})],
    ),
    "coder, plain": ("qwen3_coder", "x <function y", "x <function y", []),
    "pythonic, two": ("pythonic", "[get_weather(city='Paris', days=3), add(a=1, b=-2.5)]", "", [PARIS, ADD]),
    "pythonic, nested": (
        "pythonic",
        '[ a.b(x={"k": [1, (2, None)], "s": "it\'s) [fine]"}, y=True, z=false) ]',
        "",
        [("a.b", {"x": {"k": [1, [2, None]], "s": "it's) [fine]"}, "y": True, "z": False})],
    ),
    "pythonic, code": ("pythonic", "[f(x=__import__('os').system('ls'))]", "[f(x=__import__('os').system('ls'))]", []),
    "pythonic, expression": ("pythonic", "[f(x=1+1)] ", "[f(x=1+1)] ", []),
    "pythonic, positional": ("pythonic", "[f(1)]", "[f(1)]", []),
    "pythonic, list": ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    "pythonic, cut short": ("pythonic", "[f(x='never", "[f(x='never", []),
    "pythonic, deep": ("pythonic", "[f(x=" + "[" * 80 + "]" * 80 + ")]", "[f(x=" + "[" * 80 + "]" * 80 + ")]", []),
    "pythonic, infinite": ("pythonic", "[f(x=1e999)]", "[f(x=1e999)]", []),
}


_MARKS = re.compile(r"<[^<>\n]{1,60}>|\[[A-Z_]+\]|functools\[|```\w*|call:\w+")  # of any format


def parse(make, pieces: list[str]) -> tuple[str, str, list[tuple[str, dict]]]:
    """Reasoning, content and calls of a text in pieces; what every stream of calls promises is checked."""
    parser = make()
    shown: list[Piece] = []
    for i, text in enumerate(pieces):
        delta = ChoiceDelta(index=0, text=text, token_ids=[i], finish_reason="stop" if i == len(pieces) - 1 else None)
        if (piece := parser.push(delta)) is not None:
            assert piece.parts or piece.reasoning or piece.finish_reason
            shown.append(piece)
    assert [token for piece in shown for token in piece.token_ids] == list(range(len(pieces)))
    deltas = [call for piece in shown for call in piece.calls]
    seen: set[int] = set()
    for delta in deltas:
        assert (delta.name is not None) == (delta.id is not None) == (delta.index not in seen)
        seen.add(delta.index)
    assert sorted(seen) == list(range(len(seen)))
    whole = joined(shown)
    calls = [(call.name, json.loads(call.arguments)) for call in whole.calls]
    assert shown[-1].finish_reason == ("tool_calls" if calls else "stop")
    return whole.reasoning, whole.content, calls


def joined(pieces: list[Piece]) -> Piece:
    """Pieces as one, as they are joined for an answer that is not streamed."""
    whole = Piece(index=0)
    for piece in pieces:
        whole.extend(piece)
    return whole


def cuts(text: str):
    """Ways to cut a text: whole, every way into two, single characters, and a hundred at random."""
    yield [text]
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]
    yield list(text)
    chance = random.Random(len(text))
    for _ in range(100):
        places = sorted(chance.sample(range(1, len(text)), min(len(text) - 1, chance.randint(2, 12))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def parser_of(name: str):
    module = importlib.import_module(f"jaxserve.server.tools.parsers.{name}")
    return lambda: OutputParser(None, module.Parser(TOOLS))


@pytest.mark.parametrize("case", CASES)
def test_parser(case):
    name, text, content, calls = CASES[case]
    for pieces in cuts(text):
        assert parse(parser_of(name), pieces) == ("", content, calls), pieces


def test_every_case_of_every_parser():
    """Whole, and one character after the other."""
    for case, (name, text, content, calls) in CASES.items():
        for pieces in ([text], list(text)):
            assert parse(parser_of(name), pieces) == ("", content, calls), case


FRAGMENTS = {
    name: sorted({mark for parser, text, *_ in CASES.values() if parser == name for mark in _MARKS.findall(text)})
    for name in names("jaxserve.server.tools.parsers")
}
COMMON = [
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "add"',
    '"arguments": {',
    "}",
    "]",
    "[",
    "{",
    '"',
    ",",
    ": ",
]
COMMON += ["add", "(a=1)", " ", "\n", "<", "text", "</", "é😀", "\\", "'", "```", "```json\n", ";", "1"]


@pytest.mark.parametrize("name", names("jaxserve.server.tools.parsers"))
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_streamed_and_whole_answers_agree(name, data):
    """For texts of any marks in any order, damaged ones too, and any way of cutting them."""
    fragment = st.one_of(st.sampled_from([*FRAGMENTS[name], "["]), st.sampled_from(COMMON), st.text(max_size=3))
    text = "".join(data.draw(st.lists(fragment, min_size=1, max_size=14)))
    if data.draw(st.booleans()):  # begin with a text that is almost right
        good = data.draw(st.sampled_from([case[1] for case in CASES.values() if case[0] == name]))
        at = data.draw(st.integers(0, len(good)))
        text = good[:at] + text + good[at + data.draw(st.integers(0, 3)) :]
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    reason = data.draw(st.sampled_from(["stop", "length"]))
    whole = raw_parse(name, [text], reason)
    assert raw_parse(name, pieces, reason) == whole
    assert raw_parse(name, list(text), reason) == whole


def raw_parse(name: str, pieces: list[str], reason: str = "stop") -> tuple[str, list[tuple[str | None, str]]]:
    """Content and calls; the arguments as texts, because a damaged call's may be no JSON."""
    parser = parser_of(name)()
    shown = [parser.push(ChoiceDelta(index=0, text=text, token_ids=[0])) for text in pieces]
    shown.append(parser.push(ChoiceDelta(index=0, text="", token_ids=[], finish_reason=reason)))
    whole = joined([piece for piece in shown if piece is not None])
    return whole.content, [(call.name, call.arguments) for call in whole.calls]


# Two calls in each format, without text around them
TWO_CALLS = [
    (name, text.removeprefix(content).strip())
    for name, text, content, calls in CASES.values()
    if calls == [PARIS, ADD] and name not in ("harmony", "solar_open")
]
TWO_CALLS.append(("solar_open", CASES["solar, text and two"][1].partition("assistant")[2]))
TWO_CALLS.append(("qwen3_coder", dict(TWO_CALLS)["seed_oss"].replace("seed:", "")))
HARMONY_CALLS = CASES["harmony, a preamble and two"][1].partition("<|end|>")[2].strip()


def test_every_format_has_two_calls():
    assert {name for name, _ in TWO_CALLS} | {"harmony"} == set(names("jaxserve.server.tools.parsers"))


@pytest.mark.parametrize(("name", "calls"), TWO_CALLS)
def test_white_space_around_calls(name, calls):
    """It is kept between two texts. Beside a call where no text follows or precedes, it is that of the format."""
    edges = [(f" Before. \n\n{calls}\n", " Before."), (f"{calls}\n\nAfter.", "After."), (f"\n{calls} ", "")]
    for text, content in edges[1:] if name == "pythonic" else edges:  # calls begin the answers of pythonic
        for pieces in ([text], list(text)):
            assert parse(parser_of(name), pieces) == ("", content, [PARIS, ADD]), pieces
    if name != "pythonic":
        for pieces in cuts(f"Before.\n{calls} \n\tAfter.\n"):
            assert parse(parser_of(name), pieces) == ("", "Before.\n \n\tAfter.\n", [PARIS, ADD]), pieces


def test_white_space_of_messages_around_calls():
    final = "<|start|>assistant<|channel|>final<|message|>"
    text = f"{final}Before.\n<|end|>{HARMONY_CALLS}<|end|>{final}After. <|return|>"
    for pieces in cuts(text):
        assert parse(parser_of("harmony"), pieces) == ("", "Before.\n\n\nAfter. ", [PARIS, ADD]), pieces


def test_parts_come_in_the_order_of_the_text():
    """Also where one delta holds several."""
    name, calls = TWO_CALLS[0]
    piece = parser_of(name)().push(ChoiceDelta(index=0, text=f"Before.{calls}After.", finish_reason="stop"))
    assert [part if isinstance(part, str) else part.name for part in piece.parts] == [
        "Before.", "get_weather", "add", "After.",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "calls"), [*TWO_CALLS, ("harmony", HARMONY_CALLS)])
def test_one_call_at_a_time(name, calls):
    """The first is kept, and text after the others."""
    module = importlib.import_module(f"jaxserve.server.tools.parsers.{name}")
    after = "" if name == "harmony" else "\nAfter."
    for pieces in cuts(calls + after):
        result = parse(lambda: OutputParser(None, module.Parser(TOOLS), one_call=True), pieces)
        assert result == ("", after.strip(), [PARIS]), pieces


def cut_parse(make, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls of a text that the limit of tokens ended."""
    parser = make()
    shown = [parser.push(ChoiceDelta(index=0, text=text)) for text in pieces[:-1]]
    shown.append(parser.push(ChoiceDelta(index=0, text=pieces[-1], finish_reason="length")))
    whole = joined([piece for piece in shown if piece is not None])
    assert whole.finish_reason == "length"
    return whole.reasoning, whole.content, [(call.name, call.arguments) for call in whole.calls]


def check_cuts(make, text: str, content: str, calls: list[tuple[str, str]], reasoning: str = "") -> None:
    """Cuts a text at every place. What is read is the beginning of what the whole text holds, and nothing else."""
    for place in range(1, len(text) + 1):
        shown = cut_parse(make, [text[:place]])
        pieces = [text[: place // 2], text[place // 2 : place]] if place % 9 else list(text[:place])
        assert cut_parse(make, pieces) == shown
        assert reasoning.startswith(shown[0]), text[:place]
        assert content.startswith(shown[1].rstrip()), text[:place]
        for i, (name, arguments) in enumerate(shown[2]):
            is_last = i == len(shown[2]) - 1
            assert name == calls[i][0]
            assert arguments, text[:place]
            assert calls[i][1].startswith(arguments) if is_last else arguments == calls[i][1], text[:place]
    assert shown == (reasoning, content, calls)


@pytest.mark.parametrize(("name", "calls"), TWO_CALLS)
def test_what_a_cut_leaves_unfinished_is_neither_text_nor_a_call(name, calls):
    text = calls if name == "pythonic" else f"Before.\n{calls}"
    _, found = raw_parse(name, [text])
    check_cuts(parser_of(name), text, "" if name == "pythonic" else "Before.", found)


def test_cut_messages():
    module = importlib.import_module("jaxserve.server.reasoning.harmony")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Before.<|end|>"
    text += HARMONY_CALLS
    _, found = raw_parse("harmony", [text])
    check_cuts(
        lambda: OutputParser(module.splitter("<|start|>assistant"), module.tool_format.Parser(TOOLS)),
        text, "Before.", found, "Hm.",
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_cut_reasoning_and_calls(mode):
    """Half a mark of reasoning is neither reasoning nor arguments."""
    qwen3 = importlib.import_module("jaxserve.server.reasoning.qwen3")
    arguments = [json.dumps(arguments) for _, arguments in (PARIS, ADD)]
    answer = {
        "auto": dict(TWO_CALLS)["hermes"],
        "required": json.dumps([{"name": name, "parameters": arguments} for name, arguments in (PARIS, ADD)]),
        "named": arguments[0],
    }[mode]
    calls = [("get_weather", arguments[0]), ("add", arguments[1])]

    def make():
        hermes = importlib.import_module("jaxserve.server.tools.parsers.hermes")
        return OutputParser(qwen3.splitter(""), hermes.Parser(TOOLS) if mode == "auto" else forced_parser(TOOLS, mode))

    text = f"<think>\nHm.\n</think>\n\n{answer}"
    check_cuts(make, text, "", calls[:1] if mode == "named" else calls, "Hm.")
    check_cuts(make, answer, "", calls[:1] if mode == "named" else calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a < b"),
        ("hermes", "<tool_call> is a mark"),
        ("phi4", "a list of"),  # the end of a word, with which `functools[` begins
        ("llama3_json", '{"title": "A story", "pages": [1, 2'),
        ("llama3_json", '{"name": "Bob", "age": 3'),
        ("pythonic", "[1, 2"),
        ("gemma", "```python\nprint("),
    ],
)
def test_a_cut_text_that_is_no_call_stays(name, text):
    for pieces in cuts(text):
        assert cut_parse(parser_of(name), pieces) == ("", text, [])


def test_the_beginning_of_a_mark_is_text_where_the_model_stopped():
    for name in FRAGMENTS:
        if name not in ("harmony", "llama3_json"):
            assert raw_parse(name, ["Two <"]) == ("Two <", [])


def test_every_format_has_cases():
    assert {case[0] for case in CASES.values()} == set(names("jaxserve.server.tools.parsers"))


def test_arguments_come_as_they_are_written():
    parser = parser_of("hermes")()
    text = '<tool_call>{"name": "write_file", "arguments": {"path": "x", "text": "' + "line " * 50
    pieces = [parser.push(ChoiceDelta(index=0, text=char)) for char in text]
    sent = "".join(call.arguments for piece in pieces if piece for call in piece.calls)
    assert sent == text.partition('"arguments": ')[2]


def test_kimi_s_ids_are_kept():
    """The template writes them into later prompts. An id that comes twice gets another one."""
    parser = importlib.import_module("jaxserve.server.tools.parsers.kimi_k2").Parser(TOOLS)
    call = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    ids = [one.id for one in parser.push("".join(map(call.format, (0, 1, 1)))).calls]
    assert ids[:2] == ["functions.add:0", "functions.add:1"]
    assert ids[2] not in ids[:2]


def test_solar_s_ids_are_kept():
    """An empty id gets another one."""
    parser = importlib.import_module("jaxserve.server.tools.parsers.solar_open").Parser(TOOLS)
    call = "<|tool_call:begin|>{}<|tool_call:name|>add<|tool_call:args|>{{}}<|tool_call:end|>"
    ids = [one.id for one in parser.push("".join(map(call.format, ("a1", "")))).calls]
    assert ids[0] == "a1"
    assert len(ids[1]) > 2


def test_mistral_ids_have_nine_letters_and_digits():
    parser = importlib.import_module("jaxserve.server.tools.parsers.mistral").Parser(TOOLS)
    (call,) = parser.push("[TOOL_CALLS]add{}").calls
    assert len(call.id) == 9
    assert call.id.isalnum()


# forced calls


def allowed(*names: str, mode: str = "auto") -> AllowedTools:
    return AllowedTools([AllowedTool(NamedFunction(name)) for name in names], mode)


def tool(name: str) -> Tool:
    return Tool(Function(name, parameters=TOOLS.get(name)))


def test_parser_of_forced_calls():
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in (PARIS, ADD, ("nothing", {}))])
    for pieces in cuts(text):
        result = parse(lambda: OutputParser(None, forced_parser(TOOLS, "required")), pieces)
        assert result == ("", "", [PARIS, ADD, ("nothing", {})])
    arguments = {"city": "  two  words and\n a line ", "days": 3}
    named = {"get_weather": TOOLS["get_weather"]}
    for pieces in cuts("\n" + json.dumps(arguments, indent=1)):
        calls = [("get_weather", arguments)]
        assert parse(lambda: OutputParser(None, forced_parser(named, "named")), pieces) == ("", "", calls)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([tool("a b")], None, "tools"),
        ([tool("a"), tool("a")], None, "tools"),
        ([Tool(Function("a"), type="retrieval")], None, "tools"),
        ([Tool(Function("a", parameters={"type": "array"}))], None, "tools"),
        ([tool(f"f{i}") for i in range(513)], None, "tools"),
        ([tool("a")], "sometimes", "tool_choice"),
        ([tool("a")], NamedChoice(NamedFunction("b")), "tool_choice"),
        ([], "required", "tool_choice"),
        ([], NamedChoice(NamedFunction("b")), "tool_choice"),
        ([tool("a")], NamedChoice(type="allowed_tools"), "tool_choice"),
        ([tool("a")], NamedChoice(type="allowed_tools", allowed_tools=AllowedTools([])), "tool_choice"),
        ([tool("a")], NamedChoice(type="allowed_tools", allowed_tools=allowed("b")), "tool_choice"),
        ([tool("a")], NamedChoice(type="allowed_tools", allowed_tools=allowed("a", mode="none")), "tool_choice"),
    ],
)
def test_tools_that_are_refused(tools, choice, param):
    with pytest.raises(InvalidRequestError) as caught:
        ChatRequest(messages=[], tools=tools, tool_choice=choice).check()
    assert caught.value.param == param


# reasoning

# splitter, end of the prompt, text, reasoning, the rest
REASONING = [
    ("deepseek_r1", "", "Let me see.\n</think>\n\nFour.", "Let me see.", "Four."),
    ("deepseek_r1", "<think>\n", "Let me see.</think>Four.", "Let me see.", "Four."),
    ("deepseek_r1", "", "<think>\nLet me\n\nsee </thin.\n</think>\n\nFour.\n", "Let me\n\nsee </thin.", "Four.\n"),
    ("deepseek_r1", "", "never ends </th", "never ends </th", ""),
    ("deepseek_r1", "</think>", "Four.", "", "Four."),
    ("qwen3", "", "<think>\nHm.\n</think>\n\nFour.", "Hm.", "Four."),
    ("qwen3", "<think>\n", "Hm.\n</think>\n\nFour.", "Hm.", "Four."),
    ("qwen3", "<think>\n\n</think>\n\n", "Four.", "", "Four."),
    ("qwen3", "", "Four <think> is a tag</think>", "", "Four <think> is a tag</think>"),
    ("qwen3", "", "<think>\n\n</think>\n\nFour.", "", "Four."),
    ("qwen3", "", "<thi", "", "<thi"),
    ("mistral", "", "[THINK]Let me [see].[/THINK]\n\nFour.", "Let me [see].", "Four."),
    ("mistral", "[THINK]", "Hm.[/THINK]Four.", "Hm.", "Four."),
    ("mistral", "", "A list: [TH", "", "A list: [TH"),
    ("granite", "", "Here is my thought process: Hm.\n\nHere is my response: Four.", "Hm.", "Four."),
    ("granite", "", "Here's my thought process:\nHm, Here is.\nHere's my response:\nFour.", "Hm, Here is.", "Four."),
    ("granite", "", "<think>Hm.</think>Four.", "Hm.", "Four."),
    ("granite", "", "Here is my answer.", "", "Here is my answer."),
    ("nemotron", "", "<think>\nHm.\n</think>\n\nFour.", "Hm.", "Four."),
    ("nemotron", "<think>\n", "Hm.</think>Four.", "Hm.", "Four."),
    (
        "harmony",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.\n\nWell.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
        "Hm.\n\nWell.",
        "Four.",
    ),
    (
        "harmony",
        "<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Now.<|end|><|start|>assistant<|channel|>final<|message|>4",
        "Hm.\n\nNow.",
        "Look:\n\n4",
    ),
    (
        "harmony",
        "<|start|>assistant",
        "<|channel|>analysis to=python code<|message|>print(4)",
        "print(4)",
        "",
    ),
    ("harmony", "<|start|>assistant", "<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", "{}"),
    ("harmony", "<|start|>assistant", "<|channel|>final<|message|> Four\n", "", " Four\n"),
    ("harmony", "<|start|>assistant", "Four.", "", "Four."),
    ("harmony", "<|start|>assistant<|channel|>analysis<|message|>Hm", ", so<|end|>", ", so", ""),
    ("harmony", " is the text of a message whose header is far", "Four.", "", "Four."),
    ("deepseek_r1", "<｜tool▁output▁begin｜>4<｜tool▁output▁end｜>", "Four.", "", "Four."),
    ("granite", "", "<think>Hm.</think><response>Four.</response>\n", "Hm.", "Four."),
    ("ernie45", "<think>\n", "Hm.\n</think>\n\n<response>\nFour.\n</response>\n", "Hm.", "Four."),
    ("ernie45", "<think>\n", "Hm.\n</think>\n\nFour <response>", "Hm.", "Four <response>"),
    ("ernie45", "", "<response>\nFour, </res.", "", "Four, </res."),
    ("hunyuan_a13b", "", "<think>\nHm.\n</think>\n<answer>\nFour.\n</answer>", "Hm.", "Four."),
    ("hunyuan_a13b", "<think>\n\n</think>\n", "<answer>\nFour\n\n.\n</answer> And.", "", "Four\n\n.And."),
    ("hunyuan_a13b", "", "<think>Hm.</think>\n<answ", "Hm.", "<answ"),
    ("cohere", "", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>", "Hm.", "Four."),
    ("cohere", "<|START_THINKING|>", "Hm.<|END_THINKING|><|START_TEXT|>Four.<|END_TEXT|>", "Hm.", "Four."),
    ("cohere", "", "<|START_RESPONSE|>Four.<|END_RESPONSE|>", "", "Four."),
    ("cohere", "<|START_THINKING|>", "Hm. <|START_RESPONSE|>Four.", "Hm.", "Four."),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>Four.", "Hm.", "Four."),
    (
        "seed_oss",
        "<seed:think><seed:cot_budget_reflect>",
        "None.</seed:cot_budget_reflect>\n</seed:think>Four.",
        "None.</seed:cot_budget_reflect>",
        "Four.",
    ),
    ("kimi_k2", "", "<think>Hm.</think>Four.", "Hm.", "Four."),
    ("kimi_k2", "", "<think>Hm. <|tool_calls_section_begin|>x", "Hm.", "<|tool_calls_section_begin|>x"),
    (
        "deepseek_r1",
        "<｜Assistant｜><think>",
        "Hm.\n\n<｜DSML｜tool_calls>x",
        "Hm.",
        "<｜DSML｜tool_calls>x",
    ),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Four.", "Hm.", "Four."),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Four.", "", "Four."),
    ("gemma4", "", "<|channel>thought\nHm. <|tool_call>x", "Hm.", "<|tool_call>x"),
    ("longcat", "<longcat_think>\n", "Hm.\n</longcat_think>\nFour.", "Hm.", "Four."),
    ("longcat", "", "<longcat_think>Hm.</longcat_think>Four.", "Hm.", "Four."),
    ("apertus", "", "<|inner_prefix|>Hm.<|inner_suffix|>Four.", "Hm.", "Four."),
    ("apertus", "", "<|inner_prefix|>Hm.<|tools_prefix|>[]", "Hm.", "<|tools_prefix|>[]"),
    ("hy_v3", "<think:opensource>", "Hm, </think>.</think:opensource>Four.", "Hm, </think>.", "Four."),
    ("hy_v3", "<think:opensource></think:opensource>", "Four.", "", "Four."),
    ("hy_v3", "<think>", "Hm.</think>Four.", "Hm.", "Four."),
    ("hy_v3", "<think></think>", "Four.", "", "Four."),
    (
        "solar_open",
        "<|begin|>assistant",
        "<|think|>Hm, <|x|>.<|end|><|begin|>assistant<|content|>Four.<|end|>",
        "Hm, <|x|>.",
        "Four.",
    ),
    ("solar_open", "<|think|><|end|><|begin|>assistant", "<|content|>Four.", "", "Four."),
    (
        "solar_open",
        "",
        "<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|>x",
        "Hm.",
        "<|begin|>assistant<|tool_calls|>x",
    ),
    ("glm45", "", "\n<think>Hm.</think>\n\nFour.", "Hm.", "Four."),
    ("glm45", "<think></think>", "\nFour.", "", "\nFour."),
]


def test_every_kind_of_reasoning_has_cases():
    assert {case[0] for case in REASONING} == set(names("jaxserve.server.reasoning"))


@pytest.mark.parametrize("name", names("jaxserve.server.reasoning"))
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_streamed_and_whole_reasoning_agree(name, data):
    module = importlib.import_module(f"jaxserve.server.reasoning.{name}")
    prompts = ["", "<think>", "</think>", "<think:opensource>", "[THINK]", "<|start|>assistant"]
    prompt = data.draw(st.sampled_from(prompts))
    kind = module.splitter(prompt)
    marks = list(kind.marks)
    if name == "harmony":
        marks += ["assistant", "analysis", "final", " to=functions.f", "<|call|>", *kind.openings]
    marks += [mark[:at] for mark in marks for at in (1, len(mark) // 2, len(mark) - 1)]
    text = "".join(data.draw(st.lists(st.sampled_from([*marks, " ", "\n", "text", "Here"]), min_size=1, max_size=9)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))

    is_cut = data.draw(st.booleans())

    def split(pieces):
        parser = module.splitter(prompt)
        parts = [*map(parser.push, pieces), parser.finish(is_cut)]
        return ["".join(part[i] for part in parts) for i in range(2)]

    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert split(pieces) == split([text]) == split(list(text))


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "rest"), REASONING)
def test_reasoning(name, prompt, text, reasoning, rest):
    module = importlib.import_module(f"jaxserve.server.reasoning.{name}")
    for pieces in cuts(text):
        assert parse(lambda: OutputParser(module.splitter(prompt), None), pieces) == (reasoning, rest, []), pieces


def test_reasoning_before_a_call():
    text = "<think>\nI could write <tool_call>.\n</think>\n\n" + CASES["hermes, text and two"][1]
    module = importlib.import_module("jaxserve.server.reasoning.qwen3")
    hermes = importlib.import_module("jaxserve.server.tools.parsers.hermes")
    for pieces in cuts(text):
        result = parse(lambda: OutputParser(module.splitter(""), hermes.Parser(TOOLS)), pieces)
        assert result == ("I could write <tool_call>.", "Let me look.", [PARIS, ADD])


def test_calls_between_messages_of_reasoning():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|><|start|>"
        'assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": -2.5}<|call|><|start|>assistant'
        "<|channel|>analysis<|message|>Again.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>OK."
    )
    module = importlib.import_module("jaxserve.server.reasoning.harmony")
    for pieces in cuts(text):
        result = parse(
            lambda: OutputParser(module.splitter("<|start|>assistant"), module.tool_format.Parser(TOOLS)), pieces
        )
        assert result == ("Hm.\n\nAgain.", "Look:\n\nOK.", [ADD, PARIS])


def test_reasoning_tokens_are_counted():
    parser = OutputParser(importlib.import_module("jaxserve.server.reasoning.deepseek_r1").splitter(""), None)
    for i, text in enumerate(["<think>", "a", "b", "</think>", "c", "d"]):
        parser.push(ChoiceDelta(index=0, text=text, token_ids=[i]))
    assert parser.reasoning_tokens == 4


# which format a model writes


@pytest.mark.quick
@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('<tool_call>{"name": <n>, "arguments": <a>}</tool_call> <think></think>', "hermes", "qwen3"),
        ('<tool_call><function=f><parameter=p> "arguments"', "qwen3_coder", None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜> ```json <｜Assistant｜></think>", "deepseek_v3", "deepseek_r1"),
        ("<｜tool▁call▁begin｜>name<｜tool▁sep｜> <｜Assistant｜></think>", "deepseek_v31", "deepseek_r1"),
        ("[gMASK]<sop><tool_call><arg_key><arg_value> <think></think>", "glm45", "glm45"),
        ("<|start_of_role|> <|tool_call|> 'Here is my thought process:'", "granite", "granite"),
        ("<|system|> <|tool|><|/tool|>", "phi4", None),
        ("<|header_start|> [func_name1(params_name1=params_value1)]", "llama4_pythonic", None),
        ("<start_of_turn> <start_function_call>call:", "gemma", None),
        ("<|turn>model <|tool_call>call:", "gemma4", None),
        ("detailed thinking on", None, "nemotron"),
        ("[TOOL_CALLS]", "mistral", None),
        ('<|python_tag|> {"name": n, "parameters": p}', "llama3_json", None),
        ("<｜Assistant｜><think></think>", None, "deepseek_r1"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("tool_declare <|im_middle|> <|tool_calls_section_begin|> <think></think>", "kimi_k2", "kimi_k2"),
        ("tool_declare <|im_middle|>", "kimi_k2", None),
        ("<minimax:tool_call><invoke name= <response></response><think></think>", "minimax_m2", "qwen3"),
        ("<seed:tool_call><function=f><parameter=p> <seed:think>", "seed_oss", "seed_oss"),
        ("<|START_ACTION|> <|START_THINKING|> <|START_RESPONSE|>", "cohere", "cohere"),
        ("<tool_calls></tool_calls> <think></think> <answer></answer>", "hunyuan_a13b", "hunyuan_a13b"),
        ("<functions></functions> <function_calls></function_calls> <think>", "olmo3", None),
        (r"<tool_call>{\"name\": <n>, \"arguments\": <a>}</tool_call> <think></think>", "hermes", "qwen3"),
        ('<tool_call>{"name": n, "arguments": a}</tool_call> </think><response></response>', "hermes", "ernie45"),
        ("<|start_of_role|> <|tool_call|> <think></think> <response></response>", "granite", "granite"),
        ("<{{ dsml }}function_calls> ｜DSML｜ <｜Assistant｜> </think>", "deepseek_v32", "deepseek_r1"),
        ("<｜DSML｜tool_calls> <｜Assistant｜> </think>", "deepseek_v4", "deepseek_r1"),
        ("<steptml:invoke name= <think></think>", "step3", "qwen3"),
        ("<|tool_list_start|>", "lfm2", None),
        ("List of tools: [] <|tool_call_start|>[ <think></think>", "lfm2", "qwen3"),
        ("<|tools_prefix|> <|inner_prefix|>", "apertus", "apertus"),
        ("<TOOLCALL>[ <SPECIAL_10> <think></think>", "nemotron_json", "nemotron"),
        ("<longcat_tool_call> <longcat_think>", "longcat", "longcat"),
        ("<|tool_calls|> <|tool_call:begin|> <|tool_call:args|> <|think|> <|end|>", "solar_open", "solar_open"),
        ("hy_User reasoning_mode <tool_sep{}> :opensource <tool_calls{}> <think{}>", "hy_v3", "hy_v3"),
        (
            "hy_User reasoning_mode <tool_sep> <tool_calls></tool_calls> <arg_key><arg_value> <think></think>",
            "hy_v3_preview",
            "hy_v3",
        ),
        (
            "<tool_call><function=f><parameter=p>value</parameter> '<parameter=' + name + '>' }}",
            "mimo",
            None,
        ),
        (r"<tool_call><function=f><parameter=p>\nvalue\n '<parameter=' + name + '>\n' }}", "qwen3_coder", None),
        ("<tool_call><function=f><parameter=p>\nvalue\n", "qwen3_coder", None),
        ("<|tool_call>call: <|channel>thought\n <channel|>", "gemma4", "gemma4"),
        ("<tool_call>NAME <arg_key><arg_value> detailed thinking <think></think>", "glm45", "nemotron"),
        ('<|header_start|> <|python_start|> {"name": n, "parameters": p}', "llama3_json", None),
        ('<|header_start|> <|python_start|> [func_name1(x=1)] "parameters"', "llama4_pythonic", None),
        ("{{ messages }}", None, None),
        (None, None, None),
    ],
)
def test_formats_are_found_by_the_template(template, tools, reasoning):
    for package, expected in (("jaxserve.server.tools.parsers", tools), ("jaxserve.server.reasoning", reasoning)):
        module = find(package, "auto", template)
        assert (module and module.__name__) == (expected and f"{package}.{expected}")
        assert find(package, "none", template) is None
