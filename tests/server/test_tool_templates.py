"""Families' chat templates and the formats chosen for them: an answer as the template writes it is read back.

The templates here are short ones, with the marks of the published ones and nothing else of them.
"""

from __future__ import annotations

import pytest
import tokenizers_for_tests as kinds
from test_tools import PARIS, cuts, parse

from jaxserve.server.chat.conversation import encode_chat
from jaxserve.server.chat.output_parser import OutputParser
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.plugins import find
from jaxserve.server.schemas.chat import CalledFunction, Conversation, Message, ToolCall
from jaxserve.server.tools.choice import Function, Tool

SIZES = {"vocab_size": 1000, "max_model_len": 10_000, "page_size": 16, "max_num_seqs": 1}
INFO = Ready(model_folder="", tokenizer_folder="", dtype="", eos_token_ids=(0,), **SIZES)

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "set": {
        "type": "object",
        "properties": {
            "on": {"type": "boolean"},
            "none": {},
            "many": {"type": "array"},
            "how": {"$ref": "#/$defs/how"},
        },
        "$defs": {"how": {"type": "object"}},
    },
}
TOOLS = [Tool(Function(name, f"Does {name}.", schema)) for name, schema in SCHEMAS.items()]
TEXT = '\n  if a < b and c > "d\'":\n\treturn [{"x": \\n}] </p> <|x|> <tool> </arg> </par\n'
CALLS = [
    PARIS,
    ("write_file", {"path": "Köln 😀.py", "text": TEXT}),
    ("set", {"on": True, "none": None, "many": [1, "a, b", False], "how": {"k": {"l": -2.5}}}),
]

JSON_CALLS = r"""{% for c in m.tool_calls %}
{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{% endfor %}"""
CODER_CALLS = r"""{% for c in m.tool_calls %}
{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for key, value in c.function.arguments | items %}
{{ '<parameter=' + key + '>\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\n</parameter>\n' }}
{%- endfor %}
{{ '</function>\n</tool_call>' }}
{% endfor %}"""
ARG_CALLS = r"""{% for c in m.tool_calls %}
{{ '\n<PREFIXtool_callSUFFIX>' + c.function.name + 'SEPARATOR\n' }}
{%- for key, value in c.function.arguments | items %}
{{ '<PREFIXarg_keySUFFIX>' + key + '</PREFIXarg_keySUFFIX>\n<PREFIXarg_valueSUFFIX>' }}
{{- value if value is string else value | tojson }}
{{- '</PREFIXarg_valueSUFFIX>\n' }}
{%- endfor %}
{{ '</PREFIXtool_callSUFFIX>' }}
{% endfor %}"""
INVOKE_CALLS = r"""{% for c in m.tool_calls %}
{{ 'BEFORE<PREFIXinvoke name="' + c.function.name + '">\n' }}
{%- for key, value in c.function.arguments | items %}
{{ '<PREFIXparameter name="' + key + '"' + KIND + '>' }}
{{- value if value is string else value | tojson }}
{{- '</PREFIXparameter>\n' }}
{%- endfor %}
{{ '</PREFIXinvoke>AFTER' }}
{% endfor %}"""
PYTHON_CALLS = r"""{{ '<|tool_call_start|>[' }}{% for c in m.tool_calls %}
{{ c.function.name + '(' }}
{%- for key, value in c.function.arguments | items %}
{{ key + '=' }}
{%- if value is string %}
{{ "'" + (value | replace('\\', '\\\\') | replace("'", "\\'") | replace('\n', '\\n')) + "'" }}
{%- else %}
{{ value | tojson if value is mapping or value is iterable else value | string }}
{%- endif %}
{{ ', ' if not loop.last }}
{%- endfor %}
{{ ')' + (', ' if not loop.last else '') }}
{%- endfor %}{{ ']<|tool_call_end|>' }}"""
GEMMA_CALLS = r"""{% macro written(value) %}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean %}{{ 'true' if value else 'false' }}
{%- elif value is mapping %}
{{ '{' }}{% for k, v in value | dictsort %}{{ '<|"|>' + k + '<|"|>:' }}{{ written(v) }}{{ ',' if not loop.last }}
{%- endfor %}{{ '}' }}
{%- elif value is sequence %}
{{ '[' }}{% for v in value %}{{ written(v) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
{%- else %}{{ value }}{% endif %}
{% endmacro %}{% for c in m.tool_calls %}
{{ '<|tool_call>call:' + c.function.name + '{' }}
{%- for key, value in c.function.arguments | dictsort %}
{{ key }}:{{ written(value) }}{{ ',' if not loop.last }}
{%- endfor %}
{{ '}<tool_call|>' }}
{%- endfor %}"""


def listed(opening: str, item: str, closing: str, between: str = ", ") -> str:
    """The template of calls in a list. `item`: the expression for one of them."""
    return (
        f"{{{{ '{opening}[' }}}}{{% for c in m.tool_calls %}}{{{{ {item} }}}}"
        f"{{{{ '{between}' if not loop.last }}}}{{% endfor %}}{{{{ ']{closing}' }}}}"
    )


def replaced(template: str, **parts: str) -> str:
    for name, text in parts.items():
        template = template.replace(name, text)
    return template


NAMED = """'{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}'"""
DSML = replaced(
    INVOKE_CALLS, BEFORE="", AFTER=r"\n", PREFIX="｜DSML｜",
    KIND="""(' string="true"' if value is string else ' string="false"')""",
)  # fmt: skip
STEP = replaced(
    INVOKE_CALLS, BEFORE="<｜tool_call_begin｜>function<｜tool_sep｜>", AFTER=r"<｜tool_call_end｜>\n",
    PREFIX="steptml:", KIND="''",
)  # fmt: skip


def hunyuan(suffix: str) -> str:
    calls = replaced(ARG_CALLS, SEPARATOR=f"<tool_sep{suffix}>", PREFIX="", SUFFIX=suffix)
    return f"{{{{ '<tool_calls{suffix}>' }}}}{calls}{{{{ '\\n</tool_calls{suffix}>' }}}}"


THINK = ("<think>", "</think>")
# What a template says of the format, how it writes calls, the marks of the reasoning and whether the prompt opens it,
# the formats of calls and of reasoning.
FAMILIES = {
    "Qwen 3.5, Step 3.7": (
        r"<function=f>\n<parameter=p>\nvalue\n</parameter>", CODER_CALLS, THINK, True, "qwen3_coder", "qwen3",
    ),
    "Nemotron 3": (r"<parameter=p>\nvalue\n</parameter>", CODER_CALLS, THINK, True, "qwen3_coder", "qwen3"),
    "Nemotron Nano 2": (
        "<SPECIAL_10>", listed("<TOOLCALL>", NAMED, "</TOOLCALL>"), THINK, True, "nemotron_json", "nemotron",
    ),
    "DeepSeek V3.2": (
        "<｜Assistant｜>", r"{{ '<｜DSML｜function_calls>\n' }}" + DSML + "{{ '</｜DSML｜function_calls>"
        "' }}", THINK, True,
        "deepseek_v32", "deepseek_r1",
    ),
    "DeepSeek V4": (
        "<｜Assistant｜>", r"{{ '<｜DSML｜tool_calls>\n' }}" + DSML + "{{ '</｜DSML｜tool_calls>' }}", THINK, True,
        "deepseek_v4", "deepseek_r1",
    ),
    "LFM 2.5": ("List of tools: ", PYTHON_CALLS, THINK, True, "lfm2", "qwen3"),
    "LFM 2": (
        "<|tool_list_start|>", listed("<|tool_call_start|>", NAMED, "<|tool_call_end|>"), ("", ""), False, "lfm2", None,
    ),
    "Step 3": (
        "", r"{{ '<｜tool_calls_begin｜>\n' }}" + STEP + "{{ '<｜tool_calls_end｜>' }}", THINK, True, "step3", "qwen3",
    ),
    "Hunyuan 3": (
        "hy_User reasoning_mode", hunyuan(":opensource"), ("<think:opensource>", "</think:opensource>"), True,
        "hy_v3", "hy_v3",
    ),
    "Hunyuan 3's preview": (
        "hy_User reasoning_mode", hunyuan(""), THINK, True, "hy_v3_preview", "hy_v3",
    ),
    "Ling 2, Trinity, EXAONE 4": (r'{\"name\": n, \"arguments\": a}', JSON_CALLS, THINK, True, "hermes", "qwen3"),
    "Ling 3": (
        "detailed thinking on", replaced(ARG_CALLS, SEPARATOR="", PREFIX="", SUFFIX=""), THINK, True,
        "glm45", "nemotron",
    ),
    "Laguna": ("", replaced(ARG_CALLS, SEPARATOR="", PREFIX="", SUFFIX=""), THINK, True, "glm45", "qwen3"),
    "MiMo": (
        "<parameter=example>value</parameter>", CODER_CALLS.replace(r">\n' }}" "\n{{- value", ">' }}\n{{- value")
        .replace(r"'\n</parameter>", "'</parameter>"), THINK, False, "mimo", "qwen3",
    ),
    "LongCat Flash Chat": (
        "", JSON_CALLS.replace("tool_call>", "longcat_tool_call>"), ("", ""), False, "longcat", None,
    ),
    "LongCat Flash Thinking": (
        "", replaced(ARG_CALLS, SEPARATOR="", PREFIX="longcat_", SUFFIX=""), ("<longcat_think>", "</longcat_think>"),
        True, "longcat", "longcat",
    ),
    "Mistral 4": (
        "[AVAILABLE_TOOLS]", "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}"
        "{{ c.function.arguments | tojson }}{% endfor %}", ("[THINK]", "[/THINK]"), False, "mistral", "mistral",
    ),
    "Apertus": (
        "", listed(
            "<|tools_prefix|>", """'{"' + c.function.name + '": ' + c.function.arguments | tojson + '}'""",
            "<|tools_suffix|>",
        ), ("<|inner_prefix|>", "<|inner_suffix|>"), False, "apertus", "apertus",
    ),
    "Solar Open": (
        "", "{{ '<|tool_calls|>' }}{% for c in m.tool_calls %}{{ '<|tool_call:begin|>' + c.id + '<|tool_call:name|>' "
        "+ c.function.name + '<|tool_call:args|>' }}{{ c.function.arguments | tojson }}{{ '<|tool_call:end|>' }}"
        "{% endfor %}{{ '<|calls|>' }}", ("<|think|>", "<|end|><|begin|>assistant<|content|>"), False,
        "solar_open", "solar_open",
    ),
    "Command A+": (
        "", listed(
            "<|START_ACTION|>", """'{"tool_call_id": "0", "tool_name": "' + c.function.name + '", "parameters": ' """
            """+ c.function.arguments | tojson + '}'""", "<|END_ACTION|>", r",\n",
        ), ("<|START_THINKING|>", "<|END_THINKING|>"), True, "cohere", "cohere",
    ),
    "Gemma 4": ("", GEMMA_CALLS, ("<|channel>thought\\n", "<channel|>"), False, "gemma4", "gemma4"),
}  # fmt: skip
END = "<END>"


def template_of(shown: str, calls: str, marks: tuple[str, str], opens: bool) -> str:
    """A template with reasoning before answers if `enable_thinking` is true. `opens`: prompts open it, or close it."""
    opening, closing = marks
    prompt = f"{{% if enable_thinking %}}{{{{ '{opening}' }}}}{{% else %}}{{{{ '{opening}{closing}' }}}}{{% endif %}}"
    return f"""{{% if tools %}}{{{{ '{shown}' }}}}{{{{ tools | tojson }}}}{{% endif %}}
{{%- for m in messages %}}{{% if m.role == 'assistant' %}}
{{{{ '<assistant>' }}}}
{{%- if enable_thinking %}}{{{{ '{opening}' + m.reasoning_content + '{closing}' }}}}
{{%- elif {opens} %}}{{{{ '{opening}{closing}' }}}}{{% endif %}}
{{{{ m.content }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}{{{{ '{END}' }}}}
{{%- else %}}
{{{{ '<' + m.role + '>' + m.content }}}}
{{%- endif %}}{{% endfor %}}
{{%- if add_generation_prompt %}}
{{{{ '<assistant>' }}}}{prompt if opens else ""}
{{%- endif %}}"""


def rendered(template: str, messages: list[Message], **fields) -> str:
    tokenizer = kinds.byte_level(template)
    conversation = Conversation(messages=messages, tools=TOOLS, **fields)
    return tokenizer.decode(encode_chat(tokenizer, INFO, conversation), skip_special_tokens=False)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_writes_is_read(family, thinks):
    *parts, tool_format, reasoning_format = FAMILIES[family]
    template = template_of(*parts)
    calls = find("jaxserve.server.tools.parsers", "auto", template)
    thoughts = find("jaxserve.server.reasoning", "auto", template)
    assert calls.__name__.endswith(f".{tool_format}")
    assert thoughts is None if reasoning_format is None else thoughts.__name__.endswith(f".{reasoning_format}")
    written = [ToolCall(CalledFunction(name, arguments), f"call{i}") for i, (name, arguments) in enumerate(CALLS)]
    reasoning = "I could call </p>, [x]." if thinks and thoughts else ""
    question = Message("user", "Hi")
    answer = Message("assistant", "I look.", reasoning_content=reasoning, tool_calls=written)
    switch = {"chat_template_kwargs": {"enable_thinking": thinks}}
    prompt = rendered(template, [question], **switch)
    text = rendered(template, [question, answer], add_generation_prompt=False, **switch)
    assert text.startswith(prompt)
    text = text.removeprefix(prompt).removesuffix(END)

    def make(one_call: bool = False) -> OutputParser:
        splitter = thoughts.splitter(prompt[-100:]) if thoughts else None
        return OutputParser(splitter, calls.Parser(SCHEMAS), one_call=one_call)

    for pieces in cuts(text) if thinks else ([text], list(text)):
        assert parse(make, pieces) == (reasoning, "I look.", CALLS), pieces
    for pieces in ([text], list(text)):
        assert parse(lambda: make(one_call=True), pieces) == (reasoning, "I look.", CALLS[:1]), pieces
