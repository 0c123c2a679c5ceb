"""Builds the response object of /v1/responses from pieces, and its events in OpenAI's order.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxserve.server.chat.generation import Usage
from jaxserve.server.chat.output_parser import Piece
from jaxserve.server.endpoints.chat import logprobs_json
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.sse import event
from jaxserve.server.http.state import to_json
from jaxserve.server.schemas.chat import CUSTOM_INPUT, CalledFunction, Message, ToolCall
from jaxserve.server.schemas.response_items import sealed
from jaxserve.server.schemas.response_tools import LOCAL_SHELL, ToolMap, shell_action
from jaxserve.server.schemas.responses import ResponsesRequest
from jaxserve.server.tools.base import CallDelta
from jaxserve.server.tools.call_arguments import StringReader, loads
from jaxserve.text.tokenizer import Tokenizer

_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}  # an item's type -> its part's type
_CALLS = {"function": "function_call", "custom": "custom_tool_call", LOCAL_SHELL: "local_shell_call"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # OpenAI's codes; other statuses: server_error


class ResponseWriter:
    """Builds one response.

    Attributes:
      response: the object in its current state.
    """

    def __init__(self, body: ResponsesRequest, model: str, tokenizer: Tokenizer, tools: ToolMap):
        self._tokenizer = tokenizer
        self._tools = tools
        self._seals = body.wants_sealed_reasoning
        self._logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
        self._events = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, if it is not complete
        self._calls: list[ToolCall] = []  # calls of functions, as the model wrote them
        self._input = StringReader(CUSTOM_INPUT)  # reads the last item's input, if it is a custom tool's call
        text: dict[str, Any] = {"format": (body.text and body.text.format) or {"type": "text"}}
        if body.text and body.text.verbosity:
            text["verbosity"] = body.text.verbosity
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if body.background else "in_progress",
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
            "text": text,
            "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
            "tools": tools.kept,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            "max_tool_calls": body.max_tool_calls,
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
        }

    # Each of these methods returns the events that report its change.

    def wait(self) -> Iterator[bytes]:
        """Begins a response that is made in the background."""
        yield self._event("created", response=self.response)
        yield self._event("queued", response=self.response)

    def begin(self) -> Iterator[bytes]:
        """The engine has accepted the request."""
        if self.response["status"] != "queued":
            yield self._event("created", response=self.response)
        self.response["status"] = "in_progress"
        yield self._event("in_progress", response=self.response)

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            yield from self._text("reasoning", piece.reasoning)
        scores = self._scores(piece)
        for part in piece.parts:
            if isinstance(part, str):
                yield from self._text("message", part, scores)
                scores = []
            else:
                yield from self._call(part)
        if piece.finish_reason is not None and self._open is not None and self._open["type"] == "message":
            self._open["content"][0]["logprobs"] += scores  # of the token that ended the text

    def end(self, reason: str | None, usage: Usage) -> Iterator[bytes]:
        """Completes the response. `reason`: the last piece's finish_reason."""
        status = "incomplete" if reason == "length" else "completed"
        if not self._output:
            yield from self._begin_item("message", role="assistant")
        yield from self._end_item(status)
        details = usage.completion_tokens_details
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if reason == "length" else None
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,  # cache writes are not charged
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens if details else 0},
            "total_tokens": usage.total_tokens,
        }
        yield self._event(status, response=self.response)

    def fail(self, error: APIError) -> Iterator[bytes]:
        code = _ERROR_CODES.get(error.status, "server_error")
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("failed", response=self.response)

    def message(self) -> Message:
        """The output as a message, for a conversation that continues."""
        texts = {"message": "", "reasoning": ""}
        for item in self._output:
            if item["type"] in texts:
                texts[item["type"]] += item["content"][0]["text"]
        reasoning = texts["reasoning"] or None
        calls = self._calls or None
        return Message("assistant", texts["message"], reasoning=reasoning, tool_calls=calls)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        number = self._events
        self._events += 1
        return event(name, {"type": name, "sequence_number": number, **fields})

    @property
    def _place(self) -> dict[str, Any]:
        """The fields that locate the last item, and its only part, in the output."""
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        return {**place, "content_index": 0} if item["type"] in _TEXT else place

    def _begin_item(self, kind: str, **fields: Any) -> Iterator[bytes]:
        yield from self._end_item("completed")
        name = f"{_PREFIXES.get(kind, 'lsh')}_{uuid.uuid4().hex}"
        self._open = item = {"type": kind, "id": name, "status": "in_progress", **fields}
        if kind in _TEXT:
            item["content"] = []
        self._output.append(item)
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=item)
        if kind in _TEXT:
            part: dict[str, Any] = {"type": _TEXT[kind], "text": ""}
            item["content"].append(part | {"annotations": [], "logprobs": []} if kind == "message" else part)
            yield self._event("content_part.added", **self._place, part=item["content"][0])

    def _scores(self, piece: Piece) -> list[dict[str, Any]]:
        """The log-probabilities of a piece's tokens, if the client asked for them."""
        return [] if self._logprobs is None else logprobs_json(self._tokenizer, piece.logprobs, self._logprobs)

    def _text(self, kind: str, text: str, scores: list[dict[str, Any]] | None = None) -> Iterator[bytes]:
        if self._open is None or self._open["type"] != kind:
            fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin_item(kind, **fields)
        part = self._output[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if scores is not None:
            more["logprobs"] = scores
            part["logprobs"] += scores
        yield self._event(f"{part['type']}.delta", **self._place, delta=text, **more)

    def _call(self, call: CallDelta) -> Iterator[bytes]:
        if call.name is not None:
            yield from self._begin_call(call.name, call.id or "")
        if not call.arguments:
            return
        self._calls[-1].function.arguments += call.arguments  # type: ignore[operator, union-attr]
        item = self._output[-1]
        if item["type"] == "function_call":
            item["arguments"] += call.arguments
            yield self._event("function_call_arguments.delta", **self._place, delta=call.arguments)
        elif item["type"] == "custom_tool_call":
            yield from self._custom_input(self._input.push(call.arguments))

    def _begin_call(self, name: str, call_id: str) -> Iterator[bytes]:
        origin = self._tools.origin(name)
        kind = _CALLS[origin.type]
        fields: dict[str, Any] = {"call_id": call_id}
        if kind == "local_shell_call":
            fields["action"] = shell_action("")
        else:
            fields |= {"name": origin.name, "arguments" if kind == "function_call" else "input": ""}
            if origin.namespace is not None:
                fields["namespace"] = origin.namespace
        yield from self._begin_item(kind, **fields)
        self._calls.append(ToolCall(CalledFunction(name, ""), call_id))
        self._input = StringReader(CUSTOM_INPUT)

    def _custom_input(self, more: str) -> Iterator[bytes]:
        if more:
            self._output[-1]["input"] += more
            yield self._event("custom_tool_call_input.delta", **self._place, delta=more)

    def _end_item(self, status: str) -> Iterator[bytes]:
        item = self._open
        self._open = None
        if item is None:
            return
        item["status"] = "completed" if self._is_whole_call(item) else status
        match item["type"]:
            case "function_call":
                whole = {"name": item["name"], "arguments": item["arguments"]}
                yield self._event("function_call_arguments.done", **self._place, **whole)
            case "custom_tool_call":
                yield from self._custom_input(self._input.finish())
                yield self._event("custom_tool_call_input.done", **self._place, input=item["input"])
            case "local_shell_call":
                item["action"] = shell_action(self._calls[-1].function.arguments)  # type: ignore[union-attr, arg-type]
            case kind:
                part = item["content"][0]
                whole = {name: part[name] for name in ("text", "logprobs") if name in part}
                yield self._event(f"{part['type']}.done", **self._place, **whole)
                yield self._event("content_part.done", **self._place, part=part)
                if kind == "reasoning" and self._seals:
                    item["encrypted_content"] = sealed(part["text"])
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _is_whole_call(self, item: dict[str, Any]) -> bool:
        """Whether the last item is a call with all its arguments, which the end of the response has not cut."""
        if item["type"] not in _CALLS.values():
            return False
        return isinstance(loads(self._calls[-1].function.arguments), dict)  # type: ignore[union-attr, arg-type]

    def encoded(self) -> bytes:
        return to_json(self.response)
