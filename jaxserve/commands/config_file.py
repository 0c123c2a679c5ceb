"""Flags of `jaxserve serve` from a file (`--config`), from a record of a deployment, or from a bundle.

A file is YAML or JSON, or TOML by its suffix: names of flags without the dashes in front, `model`, and values. A flag
without a value is `true`, or `false` for its opposite (`prefix-caching: false`); a flag that may be given several times
is a list; JSON is an object. Flags of the command line go first.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.hub import BUNDLE
from jaxserve.commands.help import setting_of
from jaxserve.config import ConfigError

_OURS = ("help", "model", "named_model", "config", "write_lock", "verbose", "target", "out")


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        given = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is neither valid YAML nor JSON (or TOML, as .toml): {error}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{path} must hold flags by their names, got {type(given).__name__}")
    return given


def _yaml(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None


class ServeParser:
    """Reads the flags of `serve` from several sources. `parser` is that of the command, as `commands.cli` makes it."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._parser = parser
        self._actions = {
            text.removeprefix("--"): action
            for action in parser._actions
            for text in action.option_strings
            if text.startswith("--") and action.dest not in _OURS
        }

    def given(self, argv: Sequence[str]) -> set[str]:
        """The destinations of the flags that a command line names."""
        kept = {action: action.default for action in self._parser._actions}
        try:
            for action in kept:
                action.default = argparse.SUPPRESS
            return set(vars(self._parser.parse_args(list(argv))))
        finally:
            for action, default in kept.items():
                action.default = default

    def arguments(self, values: Mapping[str, Any], source: Path, above: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
        """The command line for flags by name, without those whose destinations are in `above`. Raises ConfigError for
        unknown names, values that a flag cannot take, and keys."""
        argv: list[str] = []
        for name, value in values.items():
            flag = name.replace("_", "-")
            action = self._actions.get(flag) or self._actions.get(f"no-{flag}")
            if action is None:
                raise ConfigError(f"{source}: there is no flag --{flag} of jaxserve serve")
            if _is_secret(action):
                raise ConfigError(
                    f"{source}: {name} is a secret, which no such file may hold; use --api-key-file, "
                    "--admin-key-file or the environment"
                )
            if action.dest not in above and value is not None:
                argv += self._words(flag, action, value, source)
        return argv

    def _words(self, flag: str, action: argparse.Action, value: Any, source: Path) -> list[str]:
        if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                raise ConfigError(f"{source}: {flag} must be true or false, got {value!r}")
            opposite = flag.removeprefix("no-") if flag.startswith("no-") else f"no-{flag}"
            name = flag if value else opposite
            return [f"--{name}"] if name in self._actions else []
        many = isinstance(value, list) and (action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction))
        if isinstance(value, list) and not many:
            value = ",".join(map(_text, value))
        if isinstance(action, argparse._AppendAction):
            return [f"--{flag}={_text(one)}" for one in (value if many else [value])]
        return [f"--{flag}", *map(_text, value)] if many else [f"--{flag}={_text(value)}"]

    def chosen(self, args: argparse.Namespace) -> dict[str, Any]:
        """The flags whose values differ from the defaults, by name, without secrets; `arguments` reads them again."""
        found: dict[str, Any] = {}
        for flag, action in self._actions.items():
            value = getattr(args, action.dest, action.default)
            if value == action.default or _is_secret(action) or action.option_strings[0] != f"--{flag}":
                continue
            if isinstance(action, argparse.BooleanOptionalAction):
                found[flag] = value
            else:
                found[flag] = True if action.nargs == 0 else plain(value)
        return found


def _is_secret(action: argparse.Action) -> bool:
    """Whether a flag's values are keys, which no file and no record has."""
    known = setting_of(action)
    return known is not None and known.secret


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if hasattr(value, "_asdict"):
        return {name: one for name, one in value._asdict().items() if one is not None}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def is_bundle(model: str | None) -> bool:
    return model is not None and os.path.isfile(os.path.join(os.path.expanduser(model), BUNDLE))
