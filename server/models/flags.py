"""`jaxserve serve --models FILE` and `--model-dir DIR`: the flags of a server with several models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.bundles.container import Bundle, is_bundle, read_key
from jaxserve.commands.arguments import chosen
from jaxserve.commands.config_file import read_config
from jaxserve.commands.serve_flags import ServeFlags
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.server.http.models_settings import ModelsSettings
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.models.catalog import Model, models_in, models_of
from jaxserve.server.models.serve import OF_MODEL, serve_models
from jaxserve.setting import settings_of


def serve_catalog(flags: ServeFlags, options: dict[str, Any]) -> int:
    """Serves the models that the command line names, whose flags are the defaults of all. `options` are those of
    `process.run.serve`. Raises ConfigError."""
    args = flags.parser.parse_args(flags.argv)
    if args.models is not None and args.model_dir is not None:
        raise ConfigError("the models are named twice, by --models and by --model-dir; leave one out")
    for given, flag, instead in (
        (args.served_model_name, "--served-model-name", "the models' own names and aliases"),
        (args.lora_modules, "--lora-modules", "the settings of the model that they are for"),
        (args.tokenizer, "--tokenizer", "the settings of the model that it is for"),
        (args.write_lock, "--write-lock", "a file of models"),
    ):  # fmt: skip
        if given:
            raise ConfigError(f"{flag} is for a server with one model; several have {instead}")
    catalog = models_in(args.model_dir) if args.models is None else models_of(read_config(args.models), args.models)
    configure = _FlagsOf(flags)
    for model in catalog:
        if not is_bundle(model.source):
            configure(model)  # wrong flags are reported before anything starts
    options.pop("served_model_name")
    return serve_models(catalog, ModelsSettings(**chosen(args, ModelsSettings)), configure, **options)


class _FlagsOf:
    """Reads the flags of one model: those of the server, of a bundle, and its own, the latter above the former."""

    def __init__(self, flags: ServeFlags):
        self._parser, self._reader, self._argv = flags

    def __call__(self, model: Model) -> tuple[EngineConfig, dict[str, Any]]:
        """The settings of a model's engine, and those of the server that it has for itself. Raises ConfigError for
        wrong flags, and OSError or ValueError for a bundle that cannot be read."""
        where = Path(f"the model {model.name}")
        own = self._reader.arguments(model.settings, where)
        given = self._given(own, where)
        every = settings_of(ServerSettings) | settings_of(ModelsSettings)
        of_server = {name: known.dest for name, known in every.items() if name not in OF_MODEL}
        if wrong := [name for name, dest in of_server.items() if dest in given]:
            raise ConfigError(f"{where}: {wrong[0].replace('_', '-')} is a setting of the whole server, not of a model")
        of_bundle = []
        if is_bundle(model.source):
            key = read_key(self._parse(own, where).bundle_key_file)
            flags = Bundle.open(Path(model.source).expanduser(), key).manifest.flags
            of_bundle = self._reader.arguments(flags, Path(model.source), given)
        args = self._parse([*of_bundle, *own], where)
        config = EngineConfig(model=model.source, **chosen(args, EngineConfig))
        return config, {name: getattr(args, settings_of(ServerSettings)[name].dest) for name in OF_MODEL}

    def _given(self, own: Sequence[str], where: Path) -> set[str]:
        with _Errors(self._parser, where):
            return self._reader.given(own) - {"run", "serve_parser"}

    def _parse(self, own: Sequence[str], where: Path) -> argparse.Namespace:
        with _Errors(self._parser, where):
            return self._parser.parse_args([*self._argv, *own])


class _Errors:
    """Makes a parser raise ConfigError, which names the model, instead of ending the process."""

    def __init__(self, parser: argparse.ArgumentParser, where: Path):
        self._parser: Any = parser
        self._where = where

    def __enter__(self) -> None:
        def error(message: str) -> NoReturn:
            raise ConfigError(f"{self._where}: {message}")

        self._parser.error = error

    def __exit__(self, *exception: object) -> None:
        del self._parser.error
