"""From a conversation to its answers, whatever the shape in which a client asked for them.

The endpoints for chat, responses and messages turn their bodies into a ChatRequest, and this module's pieces into their
own answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from jaxserve.tokenizer import Tokenizer
from jaxserve.types import Grammar, InvalidRequestError, SamplingParams
from server.generation import CompletionTokensDetails, Generation, Usage
from server.messages import Ready
from server.parsing import OutputParser, Piece
from server.reasoning import Splitter, ends_inside
from server.schemas_chat import ChatRequest, Conversation
from server.state import ServerState, fit_prompt, fit_text, room_for
from server.thinking_budget import BudgetedGeneration
from server.tools.base import ToolParser
from server.tools.choice import forced_parser, schema_for_tools
from server.turns import in_turns

_PROMPT_END = 16  # tokens that show whether a prompt opens the reasoning


async def prepare(state: ServerState, http: HTTPRequest, body: ChatRequest) -> ChatRun:
    """Renders, tokenizes and checks a conversation. Raises APIError or InvalidRequestError."""
    state.check_model(body.model)
    body.check()
    tokenizer, info = state.require_ready()
    ids = await state.off_loop(lambda: encode_chat(tokenizer, info, body.conversation(), body.truncate_prompt_tokens))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ids = fit_prompt(ids, info, body.truncate_prompt_tokens, "messages", max_tokens)
    room = room_for(max_tokens, len(ids), info)
    params = body.sampling_params(
        tokenizer,
        info.vocab_size,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    params = tokenizer.with_eos(params, info.eos_token_ids)
    params = msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    run = ChatRun(state, tokenizer, body, ids)
    if run.is_forced:
        if params.grammar is not None:
            raise InvalidRequestError("a forced tool call and a response format exclude each other", "tool_choice")
        schema = schema_for_tools(body.tools or [], body.choice, body.parallel_tool_calls is not False)
        params = msgspec.structs.replace(params, grammar=Grammar("json", msgspec.json.encode(schema).decode()))
    elif run.keeps_special_tokens:
        params = msgspec.structs.replace(params, skip_special_tokens=False)

    def generate(prompt: list[int], params: SamplingParams) -> Generation:
        return Generation(
            state,
            tokenizer,
            [prompt],
            [params],
            priority=body.priority or 0,
            cache_salt=state.cache_salt(http, body.cache_salt),
            streams=bool(body.stream),
        )

    run.generation = generate(ids, params)
    if body.thinking_token_budget is not None and (splitter := run.splitter()) is not None:
        run.generation = BudgetedGeneration(
            run.generation,
            generate,
            budget=body.thinking_token_budget,
            splitter=splitter,
            tokenizer=tokenizer,
            max_model_len=info.max_model_len,
        )
    return run


def encode_chat(
    tokenizer: Tokenizer, info: Ready, conversation: Conversation, truncate: int | None = None
) -> list[int]:
    """Token ids of a rendered conversation. Slow: run it off the event loop.

    A conversation that the template refuses is rendered once more as `in_turns` puts it. Raises InvalidRequestError
    when the template refuses that as well, or leaves a system message out in silence, and for what `fit_text` refuses.
    """
    messages = conversation.template_messages()
    if "developer" not in (tokenizer.chat_template or ""):
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"  # the older name of the same role
    options: dict[str, Any] = {
        "tools": conversation.template_tools(),
        "add_generation_prompt": conversation.add_generation_prompt,
        "continue_final_message": conversation.continue_final_message,
        **conversation.template_kwargs(),
    }
    try:
        text = _render(tokenizer, messages, options)
    except InvalidRequestError as refusal:
        turns = in_turns(messages)
        if turns == messages:
            raise
        try:
            text = _render(tokenizer, turns, options)
        except InvalidRequestError:
            raise refusal from None
    text = fit_text(text, tokenizer, info, truncate, "messages")
    return tokenizer.encode(text, conversation.add_special_tokens)


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The prompt's text; raises InvalidRequestError also where a system message would be left out in silence."""
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


class ChatRun:
    """One conversation's answers on their way.

    Attributes:
      generation: the completions behind them.
      is_forced: the model has to call a tool, and does nothing else.
      keeps_special_tokens: the format of the tool calls needs them in the text.
    """

    generation: Generation | BudgetedGeneration

    def __init__(self, state: ServerState, tokenizer: Tokenizer, body: ChatRequest, prompt: list[int]):
        self.tokenizer, self.body = tokenizer, body
        self._tools = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
        self._tool_format = state.tool_format
        if body.choice == "auto" and self._tool_format is None:
            raise InvalidRequestError(
                "the format of this model's tool calls is not known here, so the model cannot choose by itself; start "
                "the server with --tool-call-parser, or set tool_choice to 'required', 'none' or a function",
                "tool_choice",
            )
        self.is_forced = body.choice not in ("auto", "none")
        self.keeps_special_tokens = body.choice == "auto" and self._tool_format.Parser.keeps_special_tokens  # type: ignore[union-attr]
        end = tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
        begins_anew = not body.continue_final_message or ends_inside(end)
        self._reasoning = None if self.is_forced or not begins_anew else state.reasoning_format
        self._prompt_end = end
        self._parsers: dict[int, OutputParser] = {}

    def splitter(self) -> Splitter | None:
        """What finds the reasoning in one answer; None where there is none."""
        return self._reasoning.splitter(self._prompt_end) if self._reasoning else None

    def _parser(self, index: int) -> OutputParser:
        if (parser := self._parsers.get(index)) is None:
            parser = OutputParser(self.splitter(), self._tool_parser(), self.body.include_reasoning)
            self._parsers[index] = parser
        return parser

    def _tool_parser(self) -> ToolParser | None:
        if self.is_forced:
            return forced_parser(self._tools, self.body.choice)
        return self._tool_format.Parser(self._tools) if self.body.choice == "auto" and self._tool_format else None

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What the choices gain, as it comes; see Generation.deltas."""
        async with contextlib.aclosing(self.generation.deltas()) as batches:
            async for deltas in batches:
                parsed = (self._parser(delta.index).push(delta) for delta in deltas)
                if pieces := [piece for piece in parsed if piece is not None]:
                    yield pieces

    async def collect(self) -> list[Piece]:
        """All choices, whole and in order."""
        choices: dict[int, Piece] = {}
        async with contextlib.aclosing(self.pieces()) as batches:
            async for pieces in batches:
                for piece in pieces:
                    if (choice := choices.get(piece.index)) is not None:
                        choice.extend(piece)
                    else:
                        choices[piece.index] = piece
        return [choices[index] for index in sorted(choices)]

    def usage(self) -> Usage:
        usage = self.generation.usage()
        if self._reasoning is not None:
            tokens = sum(parser.reasoning_tokens for parser in self._parsers.values())
            usage.completion_tokens_details = CompletionTokensDetails(tokens)
        return usage
