"""From a conversation to its answers.

The endpoints for chat, responses and messages convert their bodies to a ChatRequest, and convert the pieces that this
module yields to their own answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from jaxserve.server.chat.forms import Frame, Functions, Thoughts, answer_grammar
from jaxserve.server.chat.generation import CompletionTokensDetails, Generation, Usage, whole_choices
from jaxserve.server.chat.histories import for_template, rendered, template_variables, tools_for_template
from jaxserve.server.chat.output_parser import OutputParser, Piece
from jaxserve.server.chat.thinking_budget import BudgetedGeneration
from jaxserve.server.http.state import ServerState, fit_prompt, fit_text, key_of, room_for
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.reasoning import Splitter, ends_inside, qwen3
from jaxserve.server.schemas.chat import ChatRequest, Conversation
from jaxserve.server.schemas.response_format import binds_reasoning
from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.choice import forced_parser
from jaxserve.text.detokenizer import StopStrings
from jaxserve.text.foreign_text import ForeignText
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import Grammar, Image, InvalidRequestError, SamplingParams

_PROMPT_END = 16  # tokens of a prompt's end in which a mark that opens or closes reasoning is looked for


async def prepare(
    state: ServerState,
    http: HTTPRequest,
    body: ChatRequest,
    *,
    form_field: str | None = None,
    before: Sequence[int] = (),
    context: int | None = None,
) -> ChatRun:
    """Renders, tokenizes and checks a conversation. Raises APIError or InvalidRequestError.

    `form_field`: the field for the answer's form in the client's body, for error messages; None for a chat request.
    `before`: token ids that the prompt begins with; a conversation with pictures has none. `context`: the most tokens
    of prompt and answer, where that is less than the model's.
    """
    adapter = state.check_model(body.model)
    body.check()
    if body.chat_template is not None:
        state.check_template()
    tokenizer, info = state.require_ready(context)
    body.count_logprobs(info.vocab_size, info.max_logprobs)
    state.accounts.check(key_of(http), 1, body.n)
    conversation = body.conversation()
    if sources := conversation.pictures:
        state.check_images(sources, info)
    given = conversation, body.truncate_prompt_tokens, body.truncation_side
    ids = await state.text_work(http, partial(encode_chat, tokenizer, info, *given))
    if before:
        ids = [*before, *(ids[1:] if ids[:1] == [tokenizer.bos_token_id] else ids)]
    images: list[Image] = []
    if sources:
        ids, images = await state.with_images(ids, sources, info, truncates=body.truncate_prompt_tokens is not None)
    max_tokens = body.output_limit()
    ids = fit_prompt(ids, info, body.truncate_prompt_tokens, "messages", max_tokens, body.truncation_side)

    def build() -> tuple[ChatRun, SamplingParams]:
        form = body.form()
        if form is not None and form.field == "response_format" and form_field is not None:
            form = msgspec.structs.replace(form, field=form_field)
        ends = tuple(body.stop_token_ids or ())
        if not body.ignore_eos:
            ends = tokenizer.with_eos(ends, info.eos_token_ids)
        run = ChatRun(state, tokenizer, body, ids, form, ends)
        params = body.sampling_params(
            tokenizer,
            info.vocab_size,
            max_tokens=max_tokens,
            room=room_for(max_tokens, len(ids), info),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            stop_token_ids=ends,
            grammar=run.grammar,
            skip_special_tokens=body.skip_special_tokens and not run.keeps_special_tokens,
            seed=state.seed_of(body.seed),
        )
        return run, params

    run, params = await state.text_work(http, build, short=True)

    def generate(prompt: list[int], params: SamplingParams) -> Generation:
        stops = run.stop_strings(prompt, params)
        return Generation(state, tokenizer, http, [prompt], params, body, stops, adapter, images)

    run.generation = generate(ids, params)
    if body.thinking_token_budget is not None and (splitter := run.splitter()) is not None:
        run.generation = BudgetedGeneration(
            run.generation,
            generate,
            budget=body.thinking_token_budget,
            splitter=splitter,
            grammar=run.grammar_after_reasoning,
            tokenizer=tokenizer,
            max_model_len=info.max_model_len,
        )
    return run


def encode_chat(
    tokenizer: Tokenizer,
    info: Ready,
    conversation: Conversation,
    truncate: int | None = None,
    side: str | None = None,
) -> list[int]:
    """Token ids of a rendered conversation. Slow: call it off the event loop.

    Raises InvalidRequestError if the template refuses it (`histories.rendered`), or if `fit_text` does.
    """
    text, foreign = rendered_chat(tokenizer, conversation)
    text = fit_text(text, tokenizer, info, truncate, "messages", side)
    return foreign.encode(text, conversation.add_special_tokens)


def rendered_chat(tokenizer: Tokenizer, conversation: Conversation) -> tuple[str, ForeignText]:
    """The text of a conversation's prompt, rendered from the `hidden` parts of its foreign text. Slow, as above; raises
    InvalidRequestError if the template refuses it."""
    template = conversation.chat_template or tokenizer.chat_template or ""
    tools = tools_for_template(conversation.template_tools(), template) if conversation.tools else None
    messages = for_template(conversation.template_messages(), tools, template)
    kwargs = template_variables(tokenizer.template_defaults | conversation.template_kwargs(), tools, template)
    foreign_at = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    foreign = ForeignText(tokenizer, [[messages[i] for i in foreign_at], tools, kwargs])
    hidden, tools, kwargs = foreign.hidden
    for i, message in zip(foreign_at, hidden, strict=True):
        messages[i] = message
    options: dict[str, Any] = {
        "tools": tools,
        "add_generation_prompt": conversation.add_generation_prompt is not False,
        "continue_final_message": conversation.continue_final_message,
        "chat_template": conversation.chat_template,
        **kwargs,
    }
    return rendered(tokenizer, messages, options), foreign


class ChatRun:
    """The answers to one conversation while they are generated.

    Attributes:
      generation: the completions that become the answers.
      grammar: the grammar of the whole output, reasoning included; None for any text.
      grammar_after_reasoning: the grammar of the output that follows the reasoning; None for any text.
      keeps_special_tokens: the format of reasoning or of tool calls needs special tokens in the text.
    """

    generation: Generation | BudgetedGeneration

    def __init__(
        self,
        state: ServerState,
        tokenizer: Tokenizer,
        body: ChatRequest,
        prompt: list[int],
        form: Grammar | None,
        stop_token_ids: tuple[int, ...],
    ):
        """`form`: the form that the client asks for. `stop_token_ids`: tokens that may end an answer."""
        self.tokenizer = tokenizer
        self.body = body
        tools, self._mode = body.choose()
        self._tools = {tool.function.name: tool.function.parameters or {} for tool in tools}
        self._tool_format = state.tool_format if self._mode == "auto" else None
        if self._mode == "auto" and self._tool_format is None:
            raise InvalidRequestError(
                "the format of this model's tool calls is not known here, so the model cannot choose by itself; start "
                "the server with --tool-call-parser, or set tool_choice to 'required', 'none' or a function",
                "tool_choice",
            )
        self._prompt_end = tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
        self._reasoning = self._find_reasoning(state)
        splitter = self.splitter()
        self._is_framed = splitter is not None and splitter.is_framed
        if self._is_framed and self._mode in ("required", "named"):
            self._tool_format = getattr(self._reasoning, "tool_format", None)
        self.keeps_special_tokens = splitter is not None and not tokenizer.special_texts.isdisjoint(splitter.marks)
        if self._tool_format is not None:
            self.keeps_special_tokens |= self._tool_format.Parser.keeps_special_tokens
        functions = None
        if self._mode != "none" and not (self._mode == "auto" and body.use_beam_search):
            is_restricted = len(tools) < len(body.all_tools)
            field = "functions" if body.functions else "tools"
            functions = Functions(tools, self._mode, body.is_parallel, is_restricted, self._tool_format, field)
        self.grammar: Grammar | None = None
        self.grammar_after_reasoning: Grammar | None = None
        if functions is not None or form is not None or self._is_framed:
            self._find_grammars(functions, form, stop_token_ids)
        self._parsers: dict[int, OutputParser] = {}

    def _find_grammars(self, functions: Functions | None, form: Grammar | None, stop_ids: tuple[int, ...]) -> None:
        """Sets `grammar` and `grammar_after_reasoning`."""

        def grammar(thoughts: Thoughts | Frame | None) -> Grammar | None:
            return answer_grammar(form, functions, thoughts, stop_ids)

        binds = binds_reasoning(self.body.structured_outputs)
        if self._is_framed:
            if functions is not None and not functions.is_framed:
                functions = None  # the operator has chosen another format, which has no place among messages
            self.grammar = self.grammar_after_reasoning = grammar(Frame(reasons=True))
            if self.body.thinking_token_budget is not None or (binds and self.grammar is not None):
                self.grammar_after_reasoning = grammar(Frame(reasons=False))
            if binds:
                self.grammar = self.grammar_after_reasoning
            return
        self.grammar_after_reasoning = self.grammar = grammar(None)
        if self.grammar is not None and binds:
            self._reasoning = None
        if self.grammar is not None and (thoughts := self._thoughts()) is not None:
            self.grammar = grammar(thoughts)

    def _find_reasoning(self, state: ServerState) -> ModuleType | None:
        """The module for the format of the reasoning. If none is known but the prompt opens <think>, that of Qwen3."""
        inside = ends_inside(self._prompt_end)
        if hasattr(state.reasoning_format, "tool_format"):
            return state.reasoning_format
        if self.body.continue_final_message and not inside:
            return None
        if state.reasoning_format is None and inside and state.settings.reasoning_parser == "auto":
            return qwen3
        return state.reasoning_format

    def _thoughts(self) -> Thoughts | None:
        """The marks of the reasoning that may begin the answer; None if the prompt has closed the reasoning."""
        splitter = self.splitter()
        if splitter is None or hasattr(self._reasoning, "tool_format"):
            return None
        opening = splitter.openings[0]
        closing = splitter.closings[0]
        if ends_inside(self._prompt_end, opening, closing) is False:
            return None
        return Thoughts(opening, closing, splitter.begins_inside)

    def stop_strings(self, prompt: list[int], params: SamplingParams) -> StopStrings | None:
        """The stop strings of a generation after `prompt`; None if they are looked for in the whole text."""
        if self._reasoning is None or not params.stop:
            return None
        end = self.tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
        return self._reasoning.splitter(end).stop_strings(params.stop)

    def splitter(self) -> Splitter | None:
        """A new splitter that finds the reasoning in one answer; None if the format has no reasoning."""
        return self._reasoning.splitter(self._prompt_end) if self._reasoning else None

    def _parser(self, index: int) -> OutputParser:
        if (parser := self._parsers.get(index)) is None:
            tools: ToolParser | None = None
            if self._tool_format is not None:
                tools = self._tool_format.Parser(self._tools)
            elif self._mode != "none":
                tools = forced_parser(self._tools, self._mode)
            one_call = not self.body.is_parallel
            parser = OutputParser(self.splitter(), tools, self.body.include_reasoning, one_call=one_call)
            self._parsers[index] = parser
        return parser

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What the choices gain, as it is generated; see Generation.deltas."""
        accepted = False
        async with contextlib.aclosing(self.generation.deltas()) as batches:
            async for deltas in batches:
                parsed = (self._parser(delta.index).push(delta) for delta in deltas)
                if (pieces := [piece for piece in parsed if piece is not None]) or not accepted:
                    yield pieces
                accepted = True

    async def collect(self) -> list[Piece]:
        """All choices, whole and in order."""
        return await whole_choices(self.pieces())

    def usage(self) -> Usage:
        usage = self.generation.usage()
        if self._reasoning is not None:
            tokens = sum(parser.reasoning_tokens for parser in self._parsers.values())
            usage.completion_tokens_details = CompletionTokensDetails(tokens)
        return usage
