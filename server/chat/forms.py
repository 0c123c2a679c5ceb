"""The grammar of a whole answer: reasoning, then function calls or a form that the client asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import ModuleType

import msgspec

from jaxserve.grammars.grammar import WHITESPACE
from jaxserve.server.tools import channel_messages
from jaxserve.server.tools.choice import Mode, Tool
from jaxserve.server.tools.syntax import Called, Syntax, call_object, one_or_more, quoted
from jaxserve.types import Grammar, InvalidRequestError

_MAX_PARTS = 2**17  # most characters of schemas in mode "auto"; more may take seconds to compile
_NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


class Thoughts(msgspec.Struct, frozen=True):
    """The reasoning before an answer, between two marks.

    `is_open`: the answer begins inside the reasoning. Otherwise it may begin with the opening mark, or not reason.
    """

    opening: str
    closing: str
    is_open: bool


class Frame(msgspec.Struct, frozen=True):
    """The answer is messages in channels, see `jaxserve.server.tools.channel_messages`, and begins within a header.

    `reasons`: messages of reasoning may come first.
    """

    reasons: bool


class Functions(msgspec.Struct, frozen=True):
    """Functions that an answer may call.

    Attributes:
      tools: the functions.
      mode: "auto", "required" or "named".
      is_parallel: an answer may hold several calls.
      is_restricted: the prompt also shows functions that may not be called.
      format: the module for the model's own format of calls; None if it is not known.
      field: the field of the functions in the client's body, for error messages.
    """

    tools: Sequence[Tool]
    mode: Mode
    is_parallel: bool
    is_restricted: bool = False
    format: ModuleType | None = None
    field: str = "tools"

    @property
    def is_forced(self) -> bool:
        return self.mode != "auto"

    @property
    def is_framed(self) -> bool:
        """Whether calls are messages in channels."""
        return self.format is not None and self.format.Parser.reads_messages

    @property
    def is_bound(self) -> bool:
        """Whether calls in mode "auto" must satisfy more than the format, such as a strict schema."""
        strict = any(tool.function.strict for tool in self.tools)
        return strict or self.is_restricted or not self.is_parallel

    def schema(self, tool: Tool, *, is_loose: bool = False) -> Grammar:
        """The grammar of a function's arguments. Each schema is a separate grammar, so that its references resolve.
        Unless the function is strict, what cannot be enforced is left out: tools of MCP servers have such schemas."""
        text = json.dumps({"type": "object", **(tool.function.parameters or _NO_PARAMETERS)})
        origin = f"the schema of {tool.function.name!r}"
        is_lenient = not tool.function.strict
        return Grammar("json", text, field=self.field, origin=origin, is_lenient=is_lenient, is_loose=is_loose)


def answer_grammar(
    form: Grammar | None, functions: Functions | None, thoughts: Thoughts | Frame | None, stop_ids: Sequence[int] = ()
) -> Grammar | None:
    """The grammar of an answer; None for any text. `stop_ids`: the request's own tokens that may end an answer.

    - A forced call ("required", "named") is the whole answer; the form does not apply to it.
    - In mode "auto" with a form, the answer is either calls or the form. If the format of calls has no syntax to
      enforce, only the form is allowed.
    - In mode "auto" without a form, any text is allowed. If `is_bound`, the text after the opening of a call must be
      calls of the functions, as far as the format has a syntax.
    - With a form, or if `is_bound`, the arguments of calls satisfy the functions' schemas. In mode "auto" a schema that
      is not supported is not enforced, and if all are too large together, only those of strict functions are.
    - Within a frame, a form is the text of the last message, and forced calls are written in the model's own format. An
      answer of any text, if it may not reason first, must be messages too.

    Raises InvalidRequestError, naming the field of the functions, for schemas that are too large.
    """
    may_call = functions is not None and not functions.is_forced
    try:
        grammar = _answer_grammar(form, functions, thoughts, stop_ids)
        too_large = grammar is not None and sum(len(part.value) for _, part in grammar.parts) > _MAX_PARTS
    except InvalidRequestError:
        if not may_call:
            raise
        too_large = True
    if may_call and too_large:
        return _answer_grammar(form, functions, thoughts, stop_ids, only_strict=True)
    return grammar


def _answer_grammar(
    form: Grammar | None,
    functions: Functions | None,
    thoughts: Thoughts | Frame | None,
    stop_ids: Sequence[int],
    *,
    only_strict: bool = False,
) -> Grammar | None:
    needed = form is not None or (functions is not None and (functions.is_forced or functions.is_bound))
    rules = _Rules(only_strict or not needed)
    if isinstance(thoughts, Frame):
        return rules.framed(form, functions, thoughts, stop_ids) if needed or not thoughts.reasons else None
    if functions is not None and functions.is_forced:
        if functions.mode == "named":
            form = functions.schema(functions.tools[0])
        else:
            rules.add_forced(functions)
            form = None
    elif functions is not None and needed and hasattr(functions.format, "syntax"):
        rules.add_chosen(functions, has_form=form is not None)
    if form is not None:
        if thoughts is None and not rules.answers:
            return form
        rules.add_part("form", form)
        rules.answers.append("@form")
    return rules.grammar(thoughts, stop_ids) if rules.answers else None


class _Rules:
    """Collects a grammar's rules. `answers`: the alternative expressions for an answer. `only_strict`: the arguments of
    functions that are not strict may be any object."""

    def __init__(self, only_strict: bool) -> None:
        self.answers: list[str] = []
        self._only_strict = only_strict
        self._is_free = False  # any text without calls is an answer too
        self._lines = [f"W: /{WHITESPACE}/", r"GAP: /[ \n]{1,3}/"]
        self._marks: list[tuple[str, str]] = []
        self._parts: list[tuple[str, Grammar]] = []

    def add_part(self, name: str, part: Grammar) -> str:
        self._parts.append((name, part))
        return f"@{name}"

    def add_forced(self, functions: Functions) -> None:
        """Adds a list of {"name", "parameters"}, the format that `choice.CallListParser` reads."""
        called = [
            Called(tool.function.name, self.add_part(f"arguments{i}", functions.schema(tool)), {}, True)
            for i, tool in enumerate(functions.tools)
        ]
        calls = one_or_more("call", 'W? "," W?', functions.is_parallel)
        self._lines.append(f"call: {call_object(called, 'parameters')}")
        self.answers.append(f'"[" W? {calls} W? "]"')

    def add_chosen(self, functions: Functions, *, has_form: bool) -> None:
        """Adds calls in the model's own format and, without a form, any text."""
        syntax = self._add_syntax(functions)
        if syntax.start:
            self.answers.append("calls")
        if syntax.opening:
            self._marks.append(("called", syntax.opening))
            anywhere = not (has_form or syntax.start)
            self.answers.append(f"{'until_called' if anywhere else 'called'} W? calls")
        if not has_form:
            self._is_free = True
            self.answers.append("OTHERS?" if syntax.start else "no_called")
        if not has_form and syntax.start:
            self._lines.append(rf"OTHERS: /(?s:.*)/ & ~/\s*\{syntax.start}(?s:.*)/")

    def _add_syntax(self, functions: Functions) -> Syntax:
        """Adds the rules of calls in the model's own format."""
        called = []
        for i, tool in enumerate(functions.tools):
            is_strict = bool(tool.function.strict) or not self._only_strict
            part = Grammar("json_object", field=functions.field)
            if is_strict:
                part = functions.schema(tool, is_loose=not functions.is_forced)
            rule = self.add_part(f"arguments{i}", part)
            called.append(Called(tool.function.name, rule, tool.function.parameters or _NO_PARAMETERS, is_strict))
        assert functions.format is not None
        syntax: Syntax = functions.format.syntax(called, functions.is_parallel)
        self._lines.append(syntax.rules)
        self._parts += syntax.parts
        self._marks += syntax.marks
        return syntax

    def framed(
        self, form: Grammar | None, functions: Functions | None, frame: Frame, stop_ids: Sequence[int]
    ) -> Grammar:
        """The grammar of messages. Before the last one there may be reasoning and, beside functions, other texts."""
        before = ["analysis"]
        if functions is not None:
            self._add_syntax(functions)
            self.answers.append("calls")
            before.append("commentary")
        if form is not None and not (functions is not None and functions.is_forced):
            self.answers.append(f'channel "final" type? message {self.add_part("form", form)}')
        elif functions is None or not functions.is_forced:
            stop = f"({' | '.join(f'<[{token}]>' for token in stop_ids)})?" if stop_ids else ""
            self.answers.append(f'channel ("final" | "commentary") type? message no_end {stop}')
        self._marks += channel_messages.FRAME
        others = " | ".join(map(quoted, before))
        lines = [
            f"start: {'other* ' if frame.reasons else ''}({' | '.join(self.answers)})",
            f'other: channel ({others}) message until_end begin "assistant"',
            'type: " "? constrain "json" | " json"',
            *self._lines,
        ]
        field = self._parts[0][1].field if self._parts else "messages"
        return Grammar("lark", "\n".join(lines), tuple(self._parts), tuple(self._marks), field=field)

    def grammar(self, thoughts: Thoughts | None, stop_ids: Sequence[int]) -> Grammar:
        whole = "answer"
        if thoughts is not None:
            self._marks += [("open", thoughts.opening), ("close", thoughts.closing)]
            whole = f"{'open? thought' if thoughts.is_open else '(open thought)?'} answer"
            if self._is_free:
                whole += f" | open{'?' if thoughts.is_open else ''} no_close"
            self._lines.append("thought: until_close GAP?")
        if self._is_free and stop_ids:
            whole = f"({whole}) ({' | '.join(f'<[{token}]>' for token in stop_ids)})?"
        lines = [f"start: {whole}", f"answer: {' | '.join(self.answers)}", *self._lines]
        field = self._parts[0][1].field
        return Grammar("lark", "\n".join(lines), tuple(self._parts), tuple(self._marks), field=field)
