"""Arguments that several commands share: the model, and every setting of the engine."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxserve import jax_pools
from jaxserve.commands.help import CommandParser
from jaxserve.config import ConfigError, EngineConfig, LoRAModule, SpeculativeConfig
from jaxserve.hosts.host_environment import found_hosts
from jaxserve.setting import Setting, settings_of


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except for flags such as --no-ui, where argparse would show the default of the opposite."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.const is False else super()._get_help_string(action)


class _Ignored(argparse.Action):
    """A flag that asks for what the engine does anyway. It is accepted and has no effect."""

    def __call__(self, *_: Any) -> None:
        pass


def add_command(commands: Any, name: str, run: Callable, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=_Help,
    )
    command.add_argument("-v", "--verbose", action="store_true", help="log in detail")
    command.set_defaults(run=run)
    return command


def add_model(command: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    what = "a folder in Hugging Face format, a bundle, a hub id such as org/name, or 'demo'"
    command.add_argument("model", help=what, nargs=nargs)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _tokens(text: str) -> int:
    """A number of tokens; as in vLLM, 32k is 32,000 and 32K is 32,768."""
    unit = {"k": 1000, "K": 1024}.get(text[-1:])
    try:
        return int(text) if unit is None else int(text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number of tokens, such as 32768, 32k or 32K: {text}") from None


def json_object(text: str) -> dict[str, Any]:
    """A flag's value that is a JSON object."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return given


def _adapter(text: str) -> LoRAModule:
    try:
        return LoRAModule.of(json_object(text) if text.lstrip().startswith("{") else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_settings(group: Any, kind: type) -> None:
    """Adds the flags of a class of settings (`jaxserve.setting`) to a command or a group of its flags."""
    for known in settings_of(kind).values():
        if known.flags:
            action = group.add_argument(*known.flags, dest=known.dest, help=known.help, **_options(known))
            action.setting = known


def chosen(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The values of the flags that `add_settings` added, by the names of the settings."""
    return {name: getattr(args, known.dest) for name, known in settings_of(kind).items()}


def _options(known: Setting) -> dict[str, Any]:
    """The arguments of `add_argument` for a setting: those for its type, unless the setting names its own."""
    options = {"default": known.default, **known.options}
    if options.get("action") in ("append", "extend"):
        options["default"] = list(known.default) if isinstance(known.default, tuple) else None
    elif "action" in options:
        pass
    elif known.type is bool:
        options["action"] = "store_false" if known.default else "store_true"
    elif known.other_values:
        options["type"] = partial(_canonical, known.other_values)
    elif reader := _READERS.get(options.get("type", known.type)):
        options["type"] = reader
    if callable(options.get("choices")):
        options["choices"] = options["choices"]()
    elif known.rule is not None and known.rule.values:
        options["choices"] = known.rule.values
    return options


def _canonical(others: Mapping[str, str], value: str) -> str:
    """The name by which the engine knows a value that other engines call otherwise."""
    return others.get(value, value)


# How the values of settings are read, by type, or by the word that a setting gives as the type of its flag.
_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    "tokens": _tokens,
    tuple[str, ...]: _names,
    tuple[LoRAModule, ...]: _adapter,
    Mapping[str, Any]: json_object,
    dict[str, Any]: json_object,
    SpeculativeConfig: json_object,
}


def add_engine_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("engine")
    add_settings(group, EngineConfig)
    ignored = group.add_argument(
        "--async-scheduling", "--enable-prefix-caching", "--enable-chunked-prefill", "--enable-auto-tool-choice",
        "--disable-log-requests", "--no-enable-log-requests", "--enable-prompt-tokens-details",
        "--enable-request-id-headers", "--enable-server-load-tracking", "--enable-sleep-mode", action=_Ignored, nargs=0,
        dest=argparse.SUPPRESS, default=argparse.SUPPRESS, help="flags of vLLM for what is so without them",
    )  # fmt: skip
    ignored.setting = Setting(help="", topic="vllm")  # type: ignore[attr-defined]
    if isinstance(command, CommandParser):
        command.use_topics()


def engine_config(args: argparse.Namespace) -> EngineConfig:
    config = found_hosts(EngineConfig(model=args.model, **chosen(args, EngineConfig)))
    jax_pools.reserve(config.memory_utilization)
    if config.cpu_offload_gib:
        weights = math.ceil(2 * config.cpu_offload_gib * config.tensor_parallel_size)  # twice: the pool has gaps
        os.environ.setdefault(jax_pools.HOST_POOL, str(jax_pools.USUAL_HOST_POOL + weights))
    return config
