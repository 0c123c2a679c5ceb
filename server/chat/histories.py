"""Conversations as particular chat templates want them, where they differ from what most take, and their rendering."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server import plugins
from jaxserve.server.tools import channel_messages as harmony
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import InvalidRequestError

Messages = list[dict[str, Any]]

# Arguments of a call joined to a text, as in the templates of DeepSeek, which fails unless they are a text themselves.
_JOINED_ARGUMENTS = re.compile(
    r"""[+~]\s*\w+(\.function|\[['"]function['"]\])?(\.arguments|\[['"]arguments['"]\])\s*([+~]|-?\}\})"""
)
_DUMPED_ARGUMENTS = re.compile(r"""\barguments(['"]\])?\s*\|\s*tojson""")
_READS_TOOLS = re.compile(r"\b(if|in|set \w+ =) tools\b")


def for_template(messages: Messages, tools: Sequence[Mapping[str, Any]] | None, template: str) -> Messages:
    """The messages as the template wants them. Does not change the given ones."""
    if harmony.matches(template):
        messages = one_call_each(messages)
    if _JOINED_ARGUMENTS.search(template) and not _DUMPED_ARGUMENTS.search(template):
        messages = [_with_calls(message, _with_text) for message in messages]
    if "tool_calls" not in template and any(message.get("tool_calls") for message in messages):
        messages = _calls_as_text(messages, template)
    if tools and "message['tools']" in template and not _READS_TOOLS.search(template):
        messages = _tools_in_the_system_message(messages, tools)
    if "developer" not in template or harmony.matches(template):  # gpt-oss's drops these messages but the first
        # the older name of this role, which every template knows
        messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
    return messages


def rendered(tokenizer: Tokenizer, messages: Messages, options: dict[str, Any]) -> str:
    """The prompt's text by `Tokenizer.render_chat`, whose arguments `options` are.

    If the template refuses the conversation, it is rendered once more as `in_turns` and `complete` rewrite it. Raises
    InvalidRequestError if the template refuses that too, or if it drops a system message.
    """
    try:
        return _render(tokenizer, messages, options)
    except InvalidRequestError as refusal:
        turns = in_turns(messages)
        whole = complete(options["tools"])
        if turns == messages and whole == options["tools"]:
            raise
        try:
            return _render(tokenizer, turns, options | {"tools": whole})
        except InvalidRequestError:
            raise refusal from None


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The prompt's text. Raises InvalidRequestError if the template refuses the messages or drops a system message."""
    text = tokenizer.render_chat(messages, **options)
    others = [m for m in messages if m["role"] != "system" or m["content"].strip() in text]
    if len(others) < len(messages) and _renders_to(text, tokenizer, others, options):
        raise InvalidRequestError("this model's chat template has no place for system messages", "messages")
    return text


def _renders_to(text: str, tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> bool:
    try:
        return tokenizer.render_chat(messages, **options) == text
    except InvalidRequestError:
        return False


def in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with at most one system message, which comes first, and no two user messages in a row.

    A later system message becomes part of the user's turn, between <system> marks.
    """
    turns: list[list[dict[str, Any]]] = []  # each list of messages becomes one message
    for message in messages:
        if message["role"] == "system" and any(turn[0]["role"] != "system" for turn in turns[:2]):
            message = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        if turns and message["role"] == turns[-1][0]["role"] and message["role"] in ("system", "user"):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [turn[0] | {"content": _joined([message["content"] for message in turn])} for turn in turns]


def _joined(contents: Sequence[Any]) -> Any:
    """Contents of messages as that of one: a text, or parts if one has pictures."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[dict[str, Any]] = []
    for content in contents:
        between = [{"type": "text", "text": "\n\n"}] if parts else []
        parts += between + ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    return parts


def template_variables(
    given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, template: str
) -> dict[str, Any]:
    """The given variables and others that particular templates read: SmolLM3's the tools from `xml_tools`, DeepSeek
    V3.1's and Granite's `thinking` instead of `enable_thinking`. Hunyuan 3's has another word for no reasoning."""
    more: dict[str, Any] = {}
    if given.get("reasoning_effort") == "none" and "'no_think'" in template:
        given = {**given, "reasoning_effort": "no_think"}
    if tools and "xml_tools" in template and not _READS_TOOLS.search(template):
        more["xml_tools"] = tools
    if "enable_thinking" in given and "enable_thinking" not in template:
        more["thinking"] = given["enable_thinking"]
    return {**more, **given}


def complete(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """The tools with a description and parameters each, which some templates fail without: gpt-oss's, Seed-OSS's."""
    if tools is None:
        return None
    missing = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return [
        {**tool, "function": {**missing, **tool["function"]}} if "function" in tool else {**missing, **tool}
        for tool in tools
    ]


def tools_for_template(tools: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """The tools as the template wants them: Apertus's reads functions, without the object around each."""
    if "<|tools_prefix|>" in template and "tool.function" not in template:
        return [tool["function"] for tool in tools]
    return tools


def _with_calls(message: dict[str, Any], change: Any) -> dict[str, Any]:
    return message | {"tool_calls": list(map(change, message["tool_calls"]))} if message.get("tool_calls") else message


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


def _calls_as_text(messages: Messages, template: str) -> Messages:
    """Writes calls into the content, for a template that shows no calls, if the model's format can be written."""
    module = plugins.find("jaxserve.server.tools.parsers", "auto", template)
    if module is None or not hasattr(module, "written"):
        return messages
    return [
        message | {"content": message["content"] + module.written([call["function"] for call in message["tool_calls"]])}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _tools_in_the_system_message(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Puts the functions as JSON into the first message, for Phi-4-mini's template, which looks for them there."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] in ("system", "developer"):
        return [messages[0] | {"tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def one_call_each(messages: Sequence[dict[str, Any]]) -> Messages:
    """The conversation for gpt-oss's template, which reads reasoning as `thinking`, renders the first call of a message
    only, and refuses a text beside calls and reasoning.

    A message with several calls becomes one for each call, followed by that call's result. A text beside a call and
    reasoning becomes the end of the reasoning, the channel in which the template renders a text beside a call.
    """
    rewritten: Messages = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        if (reasoning := message.get("reasoning_content")) is not None:
            message = message | {"thinking": reasoning}
        calls = message.get("tool_calls", [])
        if calls and message.get("thinking") and message["content"]:
            message |= {"thinking": f"{message['thinking']}\n\n{message['content']}", "content": ""}
        if len(calls) < 2:
            rewritten.append(message)
            continue
        results: dict[str, Messages] = {call["id"]: [] for call in calls if call["id"]}
        others: deque[dict[str, Any]] = deque()  # results without a call's id, which are in the order of the calls
        while rest and rest[0]["role"] == "tool":
            result = rest.popleft()
            known = results.get(result.get("tool_call_id", ""))
            (others if known is None else known).append(result)
        for call in calls:
            if not (own := results.pop(call["id"], [])):
                own = [others.popleft()] if others else []
            rewritten += [message | {"tool_calls": [call]}, *own]
            message = {"role": "assistant", "content": ""}
        rewritten += others
    return rewritten
