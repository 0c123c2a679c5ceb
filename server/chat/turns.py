"""Rewrites conversations for chat templates: those that allow one system message and strictly alternating turns, and
those of messages in channels."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any


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
    return [turn[0] | {"content": "\n\n".join(message["content"] for message in turn)} for turn in turns]


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for gpt-oss's template, which reads reasoning as `thinking`, renders the first call of a message
    only, and refuses a text beside calls and reasoning.

    A message with several calls becomes one for each call, followed by that call's result. A text beside a call and
    reasoning becomes the end of the reasoning, the channel in which the template renders a text beside a call.
    """
    rewritten: list[dict[str, Any]] = []
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
        results: dict[str, list[dict[str, Any]]] = {call["id"]: [] for call in calls if call["id"]}
        others: deque[dict[str, Any]] = deque()  # results without a call's id, which are in the order of the calls
        while rest and rest[0]["role"] == "tool":
            result = rest.popleft()
            others_or_own = results.get(result.get("tool_call_id", ""))
            (others if others_or_own is None else others_or_own).append(result)
        for call in calls:
            if not (own := results.pop(call["id"], [])):
                own = [others.popleft()] if others else []
            rewritten += [message | {"tool_calls": [call]}, *own]
            message = {"role": "assistant", "content": ""}
        rewritten += others
    return rewritten
