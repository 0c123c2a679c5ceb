"""Help of commands with many flags: those that people set, by topic; the others by `--help=all`, topic or flag."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from typing import Any

from jaxserve.setting import PLAIN, Setting, settings_of

_WIDEST = 120  # columns
_COLUMN = 34  # where texts begin
_LONGEST_CHOICES = 30  # characters of the choices in a flag's head


TOPICS = {  # title of each topic by its name; settings say which one is theirs
    "server": "Address and processes",
    "api": "What clients see",
    "models": "Several models in one server",
    "keys": "Keys and access",
    "limits": "Limits of clients",
    "files": "Files and batches of requests",
    "watching": "Logs, metrics, traces",
    "model": "Model and weights",
    "batches": "Lengths and batches",
    "memory": "Memory and KV cache",
    "devices": "Devices",
    "hosts": "Several hosts (the same command on each, with its --host-id)",
    "roles": "Prefill and decode on servers of their own",
    "speculation": "Speculative decoding",
    "lora": "LoRA adapters",
    "determinism": "The same bits for the same request",
    "pooling": "Embeddings and scores",
    "vllm": "Flags of vLLM for what is so without them",
}


def setting_of(action: argparse.Action) -> Setting | None:
    """The setting that a flag was made of; None if it was made of none."""
    return getattr(action, "setting", None)


def settings_page(parser: CommandParser) -> str:
    """docs/settings.md: all settings of a command, as its help has them, and what there is to say beyond that."""
    from jaxserve.ray.settings import RaySettings  # only this page needs them

    lines = [
        "# Settings",
        "",
        "The flags of `jaxserve serve`, by topic; `make settings` writes this page from the settings' definitions.",
        "Other commands have those of the engine, too. In a [file of flags](deployments.md) they have the same names.",
        "`EngineConfig` and `LLM` have the settings of the engine with underscores, and without `no-`.",
    ]
    for name, title in TOPICS.items():
        lines += ["", f"## {title}", "", "| flag | what it sets |", "|---|---|"]
        lines += _rows(_of_topic(parser, name, usual=True) + _of_topic(parser, name, usual=False))
    lines += ["", "## Replicas on Ray (the file of `jaxserve ray deploy`)", ""]
    lines += ["| setting | what it sets |", "|---|---|"]
    for known in settings_of(RaySettings).values():
        given = "" if known.default in (MISSING, [], {}) else f" (default: {known.default})"
        bounds = "" if known.rule is None else f" Values: {known.rule.text}."
        lines.append(f"| `{known.name}` | {known.help}{given}. {known.more}".rstrip() + f"{bounds} |")
    return "\n".join(lines) + "\n"


def _rows(actions: Sequence[argparse.Action]) -> Iterator[str]:
    for action in actions:
        known = setting_of(action)
        assert known is not None
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        text = f"{_text(action, short=False, values=False)}. {known.more}".rstrip()
        if action.choices is not None:
            text += f" Values: {', '.join(map(str, action.choices))}."
        elif known.rule is not None and known.rule not in PLAIN:
            text += f" Values: {known.rule.text}."
        cells = [f"{names} {action.metavar or ''}".rstrip(), text]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


class CommandParser(argparse.ArgumentParser):
    """A parser whose help is short where there are many flags."""

    by_topic = False

    def use_topics(self) -> None:
        """To be called once the flags of settings are added."""
        self.by_topic = True
        help_action = next(action for action in self._actions if isinstance(action, argparse._HelpAction))
        for text in help_action.option_strings:
            del self._option_string_actions[text]
        self._actions.remove(help_action)
        self._optionals._group_actions.remove(help_action)
        what: Any = {"nargs": "?", "const": "", "metavar": "WORD", "default": argparse.SUPPRESS}
        self.add_argument("-h", "--help", action=_ShowHelp, help="help on all flags, a topic or a flag", **what)

    def format_usage(self) -> str:
        return _usage(self) if self.by_topic else super().format_usage()

    def format_help(self) -> str:
        return "\n".join(_short(self)) + "\n" if self.by_topic else super().format_help()


class _ShowHelp(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, word: Any, option: str | None = None) -> None:
        lines = {"": _short, "all": _all}.get(word)
        parser._print_message("\n".join(lines(parser) if lines else _about(parser, word)) + "\n", sys.stdout)
        parser.exit()


def _short(parser: CommandParser) -> Iterator[str]:
    yield from _beginning(parser)
    for title, actions in _own_groups(parser):
        yield from _group(title, actions)
    for name, title in TOPICS.items():
        yield from _group(f"{title}  --help={name}", _of_topic(parser, name, usual=True), short=True)
    yield ""
    count = len(_flags(parser))
    more = f"--help=all shows all {count}, --help=kv-pages the flag --kv-pages, --help=TOPIC those of a topic: "
    yield from _wrapped(f"These are the flags that people set. {more}{', '.join(TOPICS)}.")


def _all(parser: CommandParser) -> Iterator[str]:
    yield from _beginning(parser)
    for title, actions in _own_groups(parser):
        yield from _group(title, actions)
    for name in TOPICS:
        yield from _topic(parser, name)


def _about(parser: CommandParser, word: str) -> Iterator[str]:
    """Help on a topic or a flag; on the flags that have the word in their names; or else on the topics."""
    wanted = word.lstrip("-").replace("_", "-").lower()
    if wanted in TOPICS:
        yield from list(_topic(parser, wanted))[1:]
        return
    flags = _flags(parser)
    exact = [action for action in flags if wanted in (text.lstrip("-") for text in action.option_strings)]
    found = exact or [action for action in flags if wanted and any(wanted in text for text in action.option_strings)]
    if found:
        for action in found:
            yield from _entry(action)
        if exact and (known := setting_of(exact[0])) is not None:
            yield f"\n{TOPICS[known.topic]}: --help={known.topic}"
        return
    yield f"{word!r} is no topic, and no flag has it in its name. Topics are:\n"
    for name, title in TOPICS.items():
        yield f"  --help={name}".ljust(_COLUMN) + title
    yield "  --help=all".ljust(_COLUMN) + "All flags"


def _topic(parser: CommandParser, name: str) -> Iterator[str]:
    usual = _of_topic(parser, name, usual=True)
    yield from _group(f"{TOPICS[name]}  --help={name}", usual + _of_topic(parser, name, usual=False))


def _of_topic(parser: CommandParser, name: str, *, usual: bool) -> list[argparse.Action]:
    """The flags of a topic that people set, or the others."""
    known = [(action, setting_of(action)) for action in _flags(parser)]
    return [action for action, one in known if one is not None and one.topic == name and one.usual is usual]


def _beginning(parser: CommandParser) -> Iterator[str]:
    yield _usage(parser)
    yield parser.description or ""


def _usage(parser: CommandParser) -> str:
    positional = [action for action in parser._actions if not action.option_strings]
    words = [f"[{action.dest}]" if action.nargs == "?" else action.dest for action in positional]
    required = [f"{action.option_strings[0]} {_metavar(action)}" for action in _flags(parser) if action.required]
    words = [*words, *required, "[flags]"]
    return f"usage: {parser.prog} {' '.join(words)}\n"


def _flags(parser: CommandParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _own_groups(parser: CommandParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """What a command has besides the flags of topics, in its groups; the first has no title."""
    first, second, *others = parser._action_groups  # positional arguments, options
    for title, actions in [("", first._group_actions + second._group_actions)] + [
        (str(group.title).capitalize(), group._group_actions) for group in others
    ]:
        yield title, [action for action in actions if setting_of(action) is None]


def _group(title: str, actions: Sequence[argparse.Action], *, short: bool = False) -> Iterator[str]:
    if not actions:
        return
    yield ""
    if title:
        head, _, more = title.partition("  ")
        yield f"{head}{more.rjust(_width() - len(head))}" if more else head
    for action in actions:
        yield from _entry(action, short=short)


def _entry(action: argparse.Action, *, short: bool = False) -> Iterator[str]:
    """A flag or argument with its text; `short`: without its other names, and only what it is for."""
    names = action.option_strings or [action.dest]
    names = names[:1] if short else names
    head = f"  {', '.join(names)} {_metavar(action)}".rstrip()
    lines = list(_wrapped(_text(action, short), _COLUMN))
    if len(head) < _COLUMN - 1:
        lines[0] = head.ljust(_COLUMN) + lines[0].lstrip()
    else:
        yield from textwrap.wrap(head, _width(), subsequent_indent="    ", break_on_hyphens=False)
    yield from lines


def _metavar(action: argparse.Action) -> str:
    if action.nargs == 0 or not action.option_strings:
        return ""
    name = str(action.metavar or action.dest.upper())
    if action.choices is not None and action.metavar is None:
        name = "|".join(map(str, action.choices))
        name = name if len(name) <= _LONGEST_CHOICES else "NAME"
    return f"[{name}]" if action.nargs == "?" else name + (" ..." if action.nargs == "+" else "")


def _text(action: argparse.Action, short: bool, *, values: bool = True) -> str:
    """What a flag is for, and its default; with `values` also its choices, where its head does not have them."""
    clauses = ((action.help or "") % {"default": action.default, "prog": ""}).split("; ")
    value = ",".join(action.default) if isinstance(action.default, tuple) else action.default
    silent = action.nargs == 0 or not action.option_strings or value == argparse.SUPPRESS
    default = None if silent or value is None or value in ("", [], {}) else str(value)
    for clause in [clause for clause in clauses if clause.startswith("None: ")]:
        clauses.remove(clause)
        default = clause.removeprefix("None: ")
    if short:
        known = setting_of(action)
        clauses = [known.short if known is not None and known.short else clauses[0]]
        default = None if action.default in (None, "auto") else default
    elif values and action.choices is not None and _metavar(action) == "NAME":
        clauses.append(f"one of {', '.join(map(str, action.choices))}")
    return "; ".join(clauses) + (f" (default: {default})" if default else "")


def _wrapped(text: str, indent: int = 0) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text, _width(), initial_indent=space, subsequent_indent=space, break_on_hyphens=False, break_long_words=False
    ) or [""]


def _width() -> int:
    return min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)
