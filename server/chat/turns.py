"""Rewrites conversations for chat templates that allow one system message and strictly alternating turns."""

from __future__ import annotations

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
