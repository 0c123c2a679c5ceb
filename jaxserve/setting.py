"""A setting of the operator, said once: default, help, check, and how the command line takes it.

Classes of settings are dataclasses whose fields `setting` makes. The flags and their help (`commands.arguments`,
`commands.help`), the classes' documentation, docs/settings.md and the checks are all made of these fields.
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

Kind = TypeVar("Kind", bound=type)


class ConfigError(ValueError):
    """An invalid setting; the message names what was given, what is allowed and what to change."""


class Rule(NamedTuple):
    """What the values of a setting must be.

    Attributes:
      text: in words, after "must be".
      allows: whether a value, of whatever type, is allowed.
      values: the allowed values, where they can be listed.
      low, high: the bounds of a number.
    """

    text: str
    allows: Callable[[Any], bool]
    values: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Raises ConfigError if the value of the setting `name` is not allowed."""
        if not self.allows(value):
            raise ConfigError(f"{name} must be {self.text}, got {value!r}")


def between(low: float, high: float, unit: str = "") -> Rule:
    """Numbers from `low` to `high`: whole ones, unless `low` is a float."""
    kinds = (int,) if isinstance(low, int) else (int, float)
    text = f"between {low if isinstance(low, int) else format(low, 'g')} and {high} {unit}".rstrip()
    return Rule(text, lambda value: type(value) in kinds and low <= value <= high, low=low, high=high)


def at_least(low: float) -> Rule:
    """Numbers from `low` on: whole ones, unless `low` is a float."""
    kinds = (int,) if isinstance(low, int) else (int, float)
    return Rule(f"at least {low:g}", lambda value: type(value) in kinds and low <= value, low=low)


def in_range(low: float, high: float, unit: str = "") -> Rule:
    """Numbers from `low` to `high`, with fractions."""
    text = f"in [{low}, {high}] {unit}".rstrip()
    return Rule(text, lambda value: type(value) in (int, float) and low <= value <= high, low=low, high=high)


def one_of(*values: str) -> Rule:
    return Rule(f"one of {', '.join(values)}", lambda value: value in values, values=values)


def list_of(text: str, allows: Callable[[str], object] = bool, length: int | None = None) -> Rule:
    """Lists of texts that `allows` accepts, by default those that are not empty; of any length, or of this one."""

    def check(value: Any) -> bool:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            return False
        items = list(value)
        return length in (None, len(items)) and all(isinstance(item, str) and allows(item) for item in items)

    return Rule(text, check)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


SOME_TEXT = Rule("a string that is not empty", _is_text)
A_FOLDER = Rule("a folder", _is_text)
A_WHOLE_NUMBER = Rule("an integer", lambda value: type(value) is int)
PLAIN = (SOME_TEXT, A_FOLDER, A_WHOLE_NUMBER)  # say no more than the type


class FlagOptions(TypedDict, total=False):
    """Arguments of argparse's `add_argument`.

    type: also "tokens", which reads 32k and 32K.
    choices: also a function that returns them.
    """

    metavar: str
    type: Callable[[str], Any] | Literal["tokens"]
    nargs: str
    action: str | builtins.type[argparse.Action]
    choices: Sequence[str] | Callable[[], Sequence[str]]
    const: Any


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of a setting.

    Attributes:
      name, type: of the field; the type without None.
      flags: the flag's names, the usual one first; empty: there is no flag.
      dest: the flag's name in the parsed arguments.
      default: the field's default.
      help: the text of --help. A clause "None: ..." says in words what the default None means.
      more: what the documentation says beyond `help`.
      topic: the topic of `jaxserve.commands.help.TOPICS`.
      usual: the short help shows the flag.
      short: its text there; "": the beginning of `help`.
      rule: what values must be; None: the type says it. None as the default is always allowed.
      secret: the value is a key, which no file, record or log may hold.
      other_values: vLLM's other names of values.
      options: further arguments of argparse's `add_argument`.
    """

    name: str = ""
    type: Any = None
    flags: tuple[str, ...] = ()
    dest: str = ""
    default: Any = None
    help: str
    more: str = ""
    topic: str = ""
    usual: bool = False
    short: str = ""
    rule: Rule | None = None
    secret: bool = False
    other_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: FlagOptions = dataclasses.field(default_factory=lambda: FlagOptions())

    def check(self, value: Any, of: str = "") -> None:
        """Raises ConfigError if the value is not allowed; `of` stands before the setting's name."""
        if self.rule is not None and not (value is None and self.default is None):
            self.rule.check(of + self.name, value)

    @property
    def other_names(self) -> list[str]:
        """The names that vLLM's `LLM` has for the setting: those of its flags, but the usual one."""
        words = (flag.removeprefix("--") for flag in self.flags[1:] if flag.startswith("--"))
        return [word.removeprefix("no-" if self.default is True else "").replace("-", "_") for word in words]


def setting(
    default: Any,
    help: str,
    *,
    topic: str = "",
    flag: str | None = None,
    also: str = "",
    usual: bool = False,
    short: str = "",
    more: str = "",
    rule: Rule | None = None,
    secret: bool = False,
    other_values: Mapping[str, str] | None = None,
    **options: Unpack[FlagOptions],
) -> Any:
    """A field of a dataclass of settings; see `Setting`. With a topic, it has a flag: `--` and the field's name, or
    `flag`; a switch that is on by default has the flag --no-NAME. `also` are other flags for the same, separated by
    spaces."""
    known = Setting(
        flags=(flag or "", *also.split()) if topic else (),
        default=default,
        help=help,
        more=more,
        topic=topic,
        usual=usual or bool(short),
        short=short,
        rule=rule,
        secret=secret,
        other_values=other_values or {},
        options=options,
    )
    how: dict[str, Any] = {"default": default}
    if isinstance(default, dict | list):
        how = {"default_factory": default.copy}
    return dataclasses.field(**how, repr=not secret, metadata={"setting": known})


def settings_of(kind: type) -> dict[str, Setting]:
    """The settings of a class by name, in their order."""
    return _settings_of(typing.cast(Any, kind))


@functools.cache
def _settings_of(kind: type) -> dict[str, Setting]:
    hints = typing.get_type_hints(kind)
    found = {field.name: field.metadata.get("setting") for field in dataclasses.fields(kind)}
    return {name: _named(one, name, hints[name]) for name, one in found.items() if one is not None}


def _named(known: Setting, name: str, hint: Any) -> Setting:
    """The setting with its name, and what follows from the name and the type."""
    flags = known.flags
    dest = name
    if flags and flags[0]:
        dest = flags[0].removeprefix("--").replace("-", "_")
    elif flags:
        opposite = "no-" if known.default is True else ""
        flags = (f"--{opposite}{name.replace('_', '-')}", *flags[1:])
    rule = known.rule
    kind = _without_none(hint)
    if rule is None and typing.get_origin(kind) is Literal:
        rule = one_of(*typing.get_args(kind))
    return dataclasses.replace(known, name=name, type=kind, flags=flags, dest=dest, rule=rule)


def _without_none(hint: Any) -> Any:
    options = [one for one in typing.get_args(hint) if one is not types.NoneType]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return options[0] if is_union and len(options) == 1 else hint


def check_settings(given: Any, of: str = "") -> None:
    """Raises ConfigError for the first setting whose value is not allowed; `of` stands before its name."""
    for name, known in settings_of(type(given)).items():
        known.check(getattr(given, name), of)


def documented(kind: Kind) -> Kind:
    """Adds a class's settings to its documentation, as `help` and notebooks show it."""
    lines = [(kind.__doc__ or "").rstrip(), "", "    Attributes:"]
    for field in dataclasses.fields(kind):
        if (known := field.metadata.get("setting")) is not None:
            text = f"{'False: ' if known.default is True else ''}{known.help}. {known.more}".rstrip()
            lines.append(f"      {field.name}: {_FLAG.sub(_as_name, text)}")
    kind.__doc__ = "\n".join([*lines, "    "])
    return kind


_FLAG = re.compile(r"--([a-z][a-z-]*[a-z])")


def _as_name(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_")
