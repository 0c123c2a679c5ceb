"""Partials of /openapi.json that the types of the bodies cannot express. The schemas' own code checks them.

`RULES` holds rules between the fields of an object, as far as JSON Schema can express them and tools that generate
requests can follow them. `FIELDS` describes fields whose types are too general. Descriptions tell the rest.
"""

from __future__ import annotations

from typing import Any

from jaxserve.limits import MAX_INT, MAX_LOGPROBS, MAX_STOP_TOKENS
from jaxserve.server.tools.choice import FUNCTION_NAME


def _one_of(field: str, *values: Any) -> dict[str, Any]:
    """The field is absent, null or one of these."""
    return {"properties": {field: {"enum": [None, *values]}}}


def _is_true(field: str) -> dict[str, Any]:
    return {"properties": {field: {"const": True}}, "required": [field]}


def _either(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(rules)}


def _one_given(**fields: str) -> dict[str, Any]:
    """One of these fields is present, and has the given type; the others are absent or null."""
    absent: dict[str, Any] = {name: {"type": "null"} for name in fields}
    return _either(
        *({"properties": absent | {name: {"type": kind}}, "required": [name]} for name, kind in fields.items())
    )


_NO_FORM = ({"type": "text"},)  # the response_format that allows any text
_NOT_ZERO = {"properties": {"max_tokens": {"anyOf": [{"type": "null"}, {"const": -1}, {"minimum": 1}]}}}
_BEAM_SEARCH = {
    "properties": {
        "structured_outputs": {"type": "null"},
        "prompt_logprobs": {"type": "null"}, "logit_bias": {"enum": [None, {}]},
        "response_format": {"enum": [None, *_NO_FORM]}, "min_tokens": {"enum": [None, 0]},
        "repetition_penalty": {"enum": [None, 1]}, "presence_penalty": {"enum": [None, 0]},
        "frequency_penalty": {"enum": [None, 0]}, **_NOT_ZERO["properties"],
        "n": {"maximum": MAX_LOGPROBS - MAX_STOP_TOKENS},
    }
}  # fmt: skip
_SAMPLING = [
    _either(_one_of("stream_options"), _is_true("stream")),
    _either(_one_of("stream", False), _one_of("prompt_logprobs")),
    _either(_one_of("response_format", *_NO_FORM), _one_of("structured_outputs")),
    _either(_one_of("use_beam_search", False), _BEAM_SEARCH),
]
_ITEM_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_SUMMARY = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "summary_text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_ID = {"type": "string", "minLength": 1}


def _item(kind: str, **fields: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"type": {"const": kind}, **fields}, "required": ["type", *fields]}


_MESSAGE_ITEM = _either(
    _item("message", role={"type": "string", "minLength": 1, "maxLength": 64}, content=_ITEM_CONTENT),
    _item("function_call", call_id=_ID, name=_ID, arguments={"type": "string"}),
    _item("function_call_output", call_id=_ID, output=_ITEM_CONTENT),
    {
        "properties": {"type": {"const": "reasoning"}, "content": {"type": "null"}, "summary": _SUMMARY},
        "required": ["type"],
    },
)
RULES: dict[str, list[dict[str, Any]]] = {
    "CompletionRequest": [
        *_SAMPLING,
        _either(_NOT_ZERO, _is_true("echo")),
        _either(_NOT_ZERO, _one_of("n", 1)),
        _either(_one_of("use_beam_search", False), _one_of("echo", False)),
    ],
    "ChatRequest": [
        *_SAMPLING,
        _either(_one_of("top_logprobs", 0), _is_true("logprobs")),
        _either(_one_of("return_accepted_proposals", False), _is_true("logprobs")),
    ],
    "Message": [
        _either(
            {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
            {"properties": {"role": {"const": "assistant"}}},
        ),
        _either(
            {"properties": {"tool_calls": {"enum": [None, []]}, "function_call": {"type": "null"}}},
            {"properties": {"role": {"const": "assistant"}}},
        ),
    ],
    "Part": [{"properties": {"text": {"type": "string"}}, "required": ["type", "text"]}],
    "ToolCall": [
        _either(
            {"properties": {"function": {"type": "object"}}, "required": ["function"]},
            {"properties": {"custom": {"type": "object"}}, "required": ["custom"]},
        )
    ],
    "OutputFormat": [
        {"properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}}, "required": ["type", "schema"]}
    ],
    "ClaudeTool": [{"required": ["name"]}],
    "FlatTool": [{"required": ["name"]}],
    "FlatChoice": [{"required": ["name"]}],
    "Item": [_MESSAGE_ITEM],
    "MessagesRequest": [
        _either(_one_of("structured_outputs"), {"allOf": [_one_of("output_config"), _one_of("output_format")]})
    ],
    "ResponsesRequest": [
        _either(_one_of("structured_outputs"), _one_of("text")),
        _either(
            _one_of("background", False),
            {"properties": {"stream": {"enum": [None, False]}, "store": {"enum": [None, True]}}},
        ),
    ],
    "TokenizeRequest": [_one_given(prompt="string", messages="array", content="string")],
}


_FUNCTION_NAME = {"type": "string", "pattern": FUNCTION_NAME}
_PARAMETERS: dict[str, Any] = {
    "anyOf": [{"type": "object", "properties": {"type": {"const": "object"}}}, {"type": "null"}],
    "description": "A JSON schema",
}


_BLOCK_FIELDS: dict[str, Any] = {
    name: {"type": ["string", "null"]} for name in ("text", "thinking", "id", "name", "tool_use_id", "content", "title")
} | {"input": {"type": ["object", "null"]}, "is_error": {"type": ["boolean", "null"]}, "source": {"type": "null"}}


def _claude_message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": list(blocks)}, "minItems": 1}]}
    return {
        "type": "object",
        "properties": {"role": {"const": role}, "content": content},
        "required": ["role", "content"],
    }


def _block(kind: str, **fields: dict[str, Any]) -> dict[str, Any]:
    """A block of one of Anthropic's messages. All of `fields` but `content` are required; fields of other kinds of
    blocks must have the right type if they are present."""
    required = ["type", *(name for name in fields if name != "content")]
    return {"type": "object", "properties": {"type": {"const": kind}, **_BLOCK_FIELDS, **fields}, "required": required}


_TEXT_BLOCK = _block("text", text={"type": "string"})
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}]}
_CLAUDE: dict[str, Any] = {
    "messages": {
        "type": "array",
        "items": {
            "anyOf": [
                _claude_message(
                    "user", _TEXT_BLOCK, _block("tool_result", tool_use_id={"type": "string"}, content=_TEXTS)
                ),
                _claude_message(
                    "assistant",
                    _TEXT_BLOCK,
                    _block("thinking", thinking={"type": "string"}),
                    _block("redacted_thinking"),
                    _block("tool_use", id={"type": "string"}, name=_FUNCTION_NAME, input={"type": "object"}),
                ),
            ]
        },
        "minItems": 1,
        "maxItems": 4096,
    },
    "system": {"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]},
    "tool_choice": {
        "anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["auto", "any", "none", "tool"]},
                    "name": {"type": ["string", "null"]},
                    "disable_parallel_tool_use": {"type": "boolean"},
                },
                "required": ["type"],
            },
        ],
        "description": "'any' and 'tool' need tools, and 'tool' the name of one of them",
    },
}
# Fields whose values code checks, because types cannot express the rules.
FIELDS: dict[str, dict[str, Any]] = {
    "CompletionRequest": {
        "suffix": {
            "type": ["string", "null"],
            "description": "Needs prompts that are text, and neither echo nor truncate_prompt_tokens",
        },
    },
    "Message": {
        "role": {"type": "string", "minLength": 1, "maxLength": 64},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": "#/components/schemas/Part"}},
                {"type": "null"},
            ],
            "description": "Only an assistant's or a tool's may be null",
        },
    },
    "Part": {"type": {"const": "text"}, "text": {"type": "string"}},
    "Tool": {"type": {"const": "function"}},
    "Function": {"parameters": _PARAMETERS},
    "ChatRequest": {
        "tool_choice": {
            "anyOf": [
                {"enum": [None, "none", "auto", "required"]},
                {"$ref": "#/components/schemas/NamedChoice"},
            ],
            "description": "A function must be among the tools, which 'required' needs as well",
        },
        "function_call": {
            "anyOf": [{"enum": [None, "none", "auto"]}, {"$ref": "#/components/schemas/NamedFunction"}],
            "description": "The older form of tool_choice; functions and tools exclude each other",
        },
        "continue_final_message": {"type": "boolean", "description": "Needs a last message of role assistant"},
        "thinking_token_budget": {
            "anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_INT}, {"type": "null"}],
            "description": "Needs n to be 1, and no beam search",
        },
    },
    "ResponsesRequest": {
        "input": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": "#/components/schemas/Item"}, "minItems": 1, "maxItems": 4096},
            ],
            "description": "Reasoning must not stand alone",
        },
        "previous_response_id": {
            "anyOf": [{"type": "string", "pattern": "^resp_[0-9a-f]{32}$"}, {"type": "null"}],
            "description": "Of a response that is stored here",
        },
        "tool_choice": {
            "anyOf": [
                {"enum": [None, "none", "auto", "required"]},
                {"$ref": "#/components/schemas/FlatChoice"},
            ],
            "description": "A function must be among the tools, which 'required' needs as well",
        },
        "conversation": {"type": "null"},
        "prompt": {"type": "null"},
    },
    "FlatChoice": {"type": {"const": "function"}},
    "FlatTool": {
        "type": {"const": "function"},
        "name": _FUNCTION_NAME,
        "parameters": _PARAMETERS,
    },
    "TextOptions": {
        "format": {
            "anyOf": [
                {"type": "null"},
                {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
                {
                    "type": "object",
                    "properties": {"type": {"const": "json_object"}, "schema": {"type": "object"}},
                    "required": ["type"],
                },
                {
                    "type": "object",
                    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
                    "required": ["type", "schema"],
                },
            ]
        }
    },
    "Reasoning": {"effort": {"anyOf": [{"type": "string", "maxLength": 32}, {"type": "null"}]}},
    "CountTokensRequest": _CLAUDE,
    "MessagesRequest": _CLAUDE,
    "ClaudeTool": {
        "type": {"enum": [None, "custom"]},
        "name": _FUNCTION_NAME,
        "input_schema": _PARAMETERS,
    },
    "Thinking": {"type": {"enum": ["enabled", "adaptive", "disabled"]}},
}
