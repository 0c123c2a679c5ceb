"""Help of commands with many flags: those that people set, by topic; the others by `--help=all`, topic or flag."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_WIDEST = 120  # columns
_COLUMN = 34  # where texts begin
_LONGEST_CHOICES = 30  # characters of the choices in a flag's head


class Topic(NamedTuple):
    """Flags that belong together, without their dashes. `usual` are those that the short help shows."""

    title: str
    usual: str
    others: str = ""

    @property
    def flags(self) -> list[str]:
        return self.usual.split() + self.others.split()


TOPICS = {
    "server": Topic(
        "Address and processes",
        "host port root-path api-server-count config",
        "fd write-lock drain-delay drain-seconds engine-restarts watchdog-seconds no-ui",
    ),
    "api": Topic(
        "What clients see",
        "served-model-name chat-template tool-call-parser reasoning-parser generation-config",
        "default-chat-template-kwargs trust-request-chat-template override-generation-config escape-special-tokens "
        "reasoning-content max-logprobs max-completions-per-request max-stored-responses",
    ),
    "keys": Topic(
        "Keys and access",
        "api-key admin-key ssl-certfile ssl-keyfile cors-origin",
        "api-key-file admin-key-file metrics-key open-metrics salt-by-key allowed-host weights-root",
    ),
    "limits": Topic(
        "Limits of clients",
        "request-timeout",
        "max-waiting max-waiting-tokens max-connections max-connections-per-address max-body-bytes max-header-bytes "
        "client-timeout",
    ),
    "watching": Topic(
        "Logs, metrics, traces", "no-access-log otlp-endpoint", "metrics-prefix record record-max-bytes profile"
    ),
    "model": Topic(
        "Model and weights",
        "revision tokenizer download-dir dtype quantization load-format",
        "ignore-config-keys dequantize activation-quantization bundle-key-file seed",
    ),
    "batches": Topic(
        "Lengths and batches",
        "max-model-len max-num-seqs max-num-batched-tokens",
        "prefill-chunk prompts-first max-penalty-seqs decode-steps latency-goal-ms scheduling-policy "
        "no-async-scheduling forbid-compile",
    ),
    "memory": Topic(
        "Memory and KV cache",
        "memory-utilization kv-pages kv-cache-dtype no-prefix-caching kv-offload-gib",
        "page-size kv-offload-dir kv-offload-dir-gib cpu-offload-gib state-snapshots",
    ),
    "devices": Topic(
        "Devices",
        "platform tensor-parallel-size pipeline-parallel-size data-parallel-size enable-expert-parallel",
        "decode-context-parallel-size attention-backend matmul-backend no-kernel-timing",
    ),
    "hosts": Topic(
        "Several hosts (the same command on each, with its --host-id)",
        "",
        "coordinator num-hosts host-id command-host command-port host-secret-file host-timeout",
    ),
    "roles": Topic(
        "Prefill and decode on servers of their own",
        "",
        "role prefill-listen prefill-servers prefill-min-tokens prefill-timeout",
    ),
    "speculation": Topic("Speculative decoding", "speculative-config"),
    "lora": Topic(
        "LoRA adapters", "enable-lora lora-modules max-loras", "max-lora-rank lora-dtype max-cpu-loras lora-root"
    ),
    "determinism": Topic("The same bits for the same request", "deterministic"),
    "pooling": Topic("Embeddings and scores", "task", "pooling score-tokens score-prompt"),
    "vllm": Topic("Flags of vLLM for what is so without them", "", "async-scheduling"),
}
# Texts of usual flags in the short help, where the beginning of the long one says too much or too little.
SHORT = {
    "config": "file with flags, or a record of a deployment",
    "root-path": "path at which a proxy serves this server",
    "api-server-count": "processes that answer HTTP",
    "served-model-name": "names under which clients ask for the model",
    "chat-template": "Jinja template for conversations",
    "generation-config": "recommended sampling: auto, none or a folder",
    "api-key": "require this bearer key (or JAXSERVE_API_KEY)",
    "admin-key": "key of the administrator's endpoints",
    "ssl-certfile": "serve HTTPS with this certificate chain",
    "ssl-keyfile": "private key of the certificate",
    "cors-origin": "origin whose pages may call the server; *: all",
    "no-access-log": "print no line for each request",
    "otlp-endpoint": "send OpenTelemetry traces to this address",
    "revision": "branch, tag or commit of a hub id",
    "tokenizer": "folder, GGUF file or hub id of another one",
    "download-dir": "folder for what is downloaded from the hub",
    "dtype": "of weights, computation and cache",
    "quantization": "int8, int4, fp8: quantize while loading",
    "load-format": "dummy: random weights, for tests",
    "max-model-len": "longest prompt and output together",
    "max-num-batched-tokens": "most tokens in one step",
    "memory-utilization": "share of device memory to use",
    "kv-pages": "size of the KV cache (default: what fits)",
    "kv-cache-dtype": "of cached keys and values",
    "no-prefix-caching": "do not reuse equal beginnings of prompts",
    "kv-offload-gib": "host memory for evicted KV pages",
    "platform": "what JAX runs on",
    "pipeline-parallel-size": "groups that each have some of the layers",
    "data-parallel-size": "groups with sequences of their own",
    "enable-expert-parallel": "each device has some experts whole",
    "speculative-config": 'for example {"method": "ngram"}',
    "enable-lora": "serve LoRA adapters beside the model",
    "lora-modules": "adapters to load at start",
    "max-loras": "adapters on the devices at a time",
    "deterministic": "whatever else runs beside it",
    "task": "what the model is for",
}
_TOPIC_OF = {flag: name for name, topic in TOPICS.items() for flag in topic.flags}


class CommandParser(argparse.ArgumentParser):
    """A parser whose help is short where there are many flags."""

    def __init__(self, *args: Any, **options: Any):
        self.by_topic = False
        super().__init__(*args, **options)

    def use_topics(self) -> None:
        """To be called once the flags that topics list are added."""
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
    for name, topic in TOPICS.items():
        yield from _group(f"{topic.title}  --help={name}", _named(parser, topic.usual.split()), short=True)
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
        if exact and (name := _TOPIC_OF.get(_name(exact[0]))):
            yield f"\n{TOPICS[name].title}: --help={name}"
        return
    yield f"{word!r} is no topic, and no flag has it in its name. Topics are:\n"
    for name, topic in TOPICS.items():
        yield f"  --help={name}".ljust(_COLUMN) + topic.title
    yield "  --help=all".ljust(_COLUMN) + "All flags"


def _topic(parser: CommandParser, name: str) -> Iterator[str]:
    yield from _group(f"{TOPICS[name].title}  --help={name}", _named(parser, TOPICS[name].flags))


def _named(parser: CommandParser, names: Sequence[str]) -> list[argparse.Action]:
    """The flags of these names that the command has, in this order."""
    known = {_name(action): action for action in _flags(parser)}
    return [known[name] for name in names if name in known]


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
        yield title, [action for action in actions if _name(action) not in _TOPIC_OF]


def _name(action: argparse.Action) -> str:
    return action.option_strings[0].lstrip("-") if action.option_strings else action.dest


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


def _text(action: argparse.Action, short: bool) -> str:
    clauses = ((action.help or "") % {"default": action.default, "prog": ""}).split("; ")
    value = ",".join(action.default) if isinstance(action.default, tuple) else action.default
    silent = action.nargs == 0 or not action.option_strings or value == argparse.SUPPRESS
    default = None if silent or value is None or value in ("", [], {}) else str(value)
    for clause in [clause for clause in clauses if clause.startswith("None: ")]:
        clauses.remove(clause)
        default = clause.removeprefix("None: ")
    if short:
        clauses = [SHORT.get(_name(action), clauses[0])]
        default = None if action.default in (None, "auto") else default
    elif action.choices is not None and _metavar(action) == "NAME":
        clauses.append(f"one of {', '.join(map(str, action.choices))}")
    return "; ".join(clauses) + (f" (default: {default})" if default else "")


def _wrapped(text: str, indent: int = 0) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text, _width(), initial_indent=space, subsequent_indent=space, break_on_hyphens=False, break_long_words=False
    ) or [""]


def _width() -> int:
    return min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)
