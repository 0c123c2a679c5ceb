"""What `jaxserve serve` was told: by its command line, by a file, by a record of a deployment, and by a bundle."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.commands.arguments import add_settings
from jaxserve.commands.config_file import ServeParser, is_bundle, read_config
from jaxserve.config import ConfigError
from jaxserve.setting import setting

log = logging.getLogger(__name__)


def add_record_flags(command: argparse.ArgumentParser) -> None:
    add_settings(command.add_argument_group("deployment"), RecordSettings)


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """Files that `serve` reads flags from, and writes them to."""

    config: Path | None = setting(
        None,
        "YAML, JSON or TOML file with flags by name and `model`, or a record that --write-lock or `jaxserve lock` "
        "wrote, which is then verified; the command line goes first",
        topic="server", short="file with flags, or a record of a deployment", type=Path, metavar="FILE",
    )  # fmt: skip
    write_lock: Path | None = setting(
        None,
        "write a record of this deployment: hashes of model, tokenizer and template, all flags, versions; never keys",
        topic="server", type=Path, metavar="FILE",
    )  # fmt: skip


class ServeFlags(NamedTuple):
    """What reads the flags of `serve`, and the command line with the flags of a file."""

    parser: argparse.ArgumentParser
    reader: ServeParser
    argv: list[str]


def read_serve(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The flags of `serve` from all sources; `parser` is that of the command, and `argv` its part of the command line.

    The namespace has more names: `flags`, those that are not defaults; `lock`, the record to be verified, or None; and
    `several`, with which a server with several models reads the flags of each, or None; then the others are missing.
    Raises ConfigError.
    """
    from jaxserve.deployment.record import is_record

    reader = ServeParser(parser)
    args = parser.parse_args(list(argv))
    above = reader.given(argv)
    before = []
    lock = None
    if args.named_model is not None:
        if args.model not in (None, args.named_model):
            raise ConfigError(f"two models: {args.model}, and --model {args.named_model}; name one of them")
        args.model = args.named_model
    model: Any = args.model
    if args.config is not None:
        values = read_config(args.config)
        if is_record(values):
            lock = values
            values = {"model": lock["model"]["name"], **lock["flags"]}
            if lock["model"].get("revision") and "revision" not in above:
                values["revision"] = lock["model"]["revision"]
        named = values.pop("model", None)
        if lock is not None and args.model not in (None, named):
            raise ConfigError(f"{args.config} is a record of the model {named}, but {args.model} was given beside it")
        model = args.model or named
        before = reader.arguments(values, args.config, above)
    if args.models is not None or args.model_dir is not None:
        if not parser.prog.endswith(" serve"):
            raise ConfigError(f"{parser.prog} is for one model; leave out --models and --model-dir")
        if model is not None or lock is not None:
            raise ConfigError(f"--models and --model-dir name the models; leave out {model or args.config}")
        args.several = ServeFlags(parser, reader, [*argv, *before])
        return args
    if model is None and (words := _model_after_name(argv)):
        return read_serve(parser, words)
    if not isinstance(model, str) or not model:
        raise ConfigError(
            "jaxserve serve needs a model: as its argument, or as `model` in the file of --config; or several, in the "
            "file of --models or the folder of --model-dir"
        )
    if is_bundle(model):
        from jaxserve.bundles.container import Bundle, read_key

        bundle = Bundle.open(Path(model).expanduser(), read_key(args.bundle_key_file))
        of_file = reader.given([model, *before]) if before else set()
        flags = {"served-model-name": [bundle.manifest.model], **bundle.manifest.flags}
        before = reader.arguments(flags, Path(model), above | of_file) + before
    args = parser.parse_args([*argv, *before])
    args.model = model
    args.flags = reader.chosen(args)
    args.lock = lock
    args.several = None
    return args


def _model_after_name(argv: Sequence[str]) -> list[str]:
    """The command line with the model in front if --served-model-name took it, as in `--served-model-name a MODEL`:
    the last of several words after the flag. Empty if there are no several words."""
    words = list(argv)
    for start in [i for i, word in enumerate(words) if word == "--served-model-name"]:
        end = next((i for i in range(start + 1, len(words)) if words[i].startswith("-")), len(words))
        if end - start > 2:
            return [words.pop(end - 1), *words]
    return []
