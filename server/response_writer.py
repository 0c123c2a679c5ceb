"""Builds the object of /v1/responses from pieces, and the events that tell of it, in OpenAI's order.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from jaxserve.tokenizer import Tokenizer
from server.chat import logprobs_json
from server.errors import APIError
from server.generation import Usage
from server.parsing import Piece
from server.schemas_chat import CalledFunction, Message, ToolCall
from server.schemas_responses import ResponsesRequest
from server.sse import event
from server.state import to_json
from server.tools.base import CallDelta

_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}  # an item's type -> its part's type


class ResponseWriter:
    """One response in the making.

    Attributes:
      response: the object as it stands.
    """

    def __init__(self, body: ResponsesRequest, model: str, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
        self._events = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, where it goes on
        text = body.text.format if body.text else None
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model,
            "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    # Each of these gives the events of what it does

    def begin(self) -> Iterator[bytes]:
        yield self._event("created", response=self.response)
        yield self._event("in_progress", response=self.response)

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            yield from self._text("reasoning", piece.reasoning)
        if piece.content:
            yield from self._text("message", piece.content, piece)
        for call in piece.calls:
            yield from self._call(call)

    def end(self, reason: str | None, usage: Usage) -> Iterator[bytes]:
        """After the last piece, whose finish_reason is `reason`."""
        status = "incomplete" if reason == "length" else "completed"
        if not self._output:
            yield from self._begin_item("message")
        yield from self._end_item(status)
        details = usage.completion_tokens_details
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if reason == "length" else None
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens if details else 0},
            "total_tokens": usage.total_tokens,
        }
        yield self._event(status, response=self.response)

    def fail(self, error: APIError) -> Iterator[bytes]:
        self.response |= {"status": "failed", "error": {"code": error.code or error.type, "message": error.message}}
        yield self._event("failed", response=self.response)

    def message(self) -> Message:
        """The output as a message of a conversation that goes on."""
        texts = {"message": "", "reasoning": ""}
        calls = []
        for item in self._output:
            if item["type"] == "function_call":
                calls.append(ToolCall(CalledFunction(item["name"], item["arguments"]), item["call_id"]))
            else:
                texts[item["type"]] += item["content"][0]["text"]
        return Message("assistant", texts["message"], reasoning=texts["reasoning"] or None, tool_calls=calls or None)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name, number = f"response.{kind}", self._events
        self._events += 1
        return event(name, {"type": name, "sequence_number": number, **fields})

    @property
    def _place(self) -> dict[str, Any]:
        """Where the last item, and its only part, stand."""
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}

    def _begin_item(self, kind: str, call: CallDelta | None = None) -> Iterator[bytes]:
        yield from self._end_item("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        else:
            item["content"] = []
            if kind == "message":
                item["role"] = "assistant"
            else:
                item["summary"] = []
        self._open = item
        self._output.append(item)
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=item)
        if call is None:
            part: dict[str, Any] = {"type": _TEXT[kind], "text": ""}
            item["content"].append(part | {"annotations": [], "logprobs": []} if kind == "message" else part)
            yield self._event("content_part.added", **self._place, part=item["content"][0])

    def _text(self, kind: str, text: str, piece: Piece | None = None) -> Iterator[bytes]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin_item(kind)
        part = self._output[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if piece is not None:
            top = self._logprobs
            more["logprobs"] = [] if top is None else logprobs_json(self._tokenizer, piece.logprobs, top)
            part["logprobs"] += more["logprobs"]
        yield self._event(f"{part['type']}.delta", **self._place, delta=text, **more)

    def _call(self, call: CallDelta) -> Iterator[bytes]:
        if call.name is not None:
            yield from self._begin_item("function_call", call)
        if call.arguments:
            self._output[-1]["arguments"] += call.arguments
            yield self._event("function_call_arguments.delta", **self._place, delta=call.arguments)

    def _end_item(self, status: str) -> Iterator[bytes]:
        item, self._open = self._open, None
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **self._place, **whole)
        else:
            part = item["content"][0]
            whole = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"{part['type']}.done", **self._place, **whole)
            yield self._event("content_part.done", **self._place, part=part)
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def encoded(self) -> bytes:
        return to_json(self.response)
