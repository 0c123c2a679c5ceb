"""`jaxserve serve --models FILE` and `--model-dir DIR`: the flags of a server with several models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxserve.commands.arguments import chosen
from jaxserve.commands.config_file import ServeParser, is_bundle, read_config
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.setting import settings_of

if TYPE_CHECKING:  # help needs no models
    from jaxserve.server.models.catalog import Model


def read_catalog(parser: argparse.ArgumentParser, reader: ServeParser, argv: Sequence[str]) -> argparse.Namespace:
    """The flags of the server, which are the defaults of its models, with the `catalog` of the models, and `flags_of`,
    which reads the flags of one. Raises ConfigError."""
    from jaxserve.server.models.catalog import models_in, models_of

    args = parser.parse_args(list(argv))
    if not parser.prog.endswith(" serve"):
        raise ConfigError(f"{parser.prog} is for one model; leave out --models and --model-dir")
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
    if args.models is not None:
        args.catalog = models_of(read_config(args.models), args.models)
    else:
        args.catalog = models_in(args.model_dir)
    args.flags_of = _FlagsOf(parser, reader, argv)
    return args


class _FlagsOf:
    """Reads the flags of one model: those of the server, of a bundle, and its own, the latter above the former."""

    def __init__(self, parser: argparse.ArgumentParser, reader: ServeParser, argv: Sequence[str]):
        self._parser = parser
        self._reader = reader
        self._argv = list(argv)

    def __call__(self, model: Model) -> tuple[EngineConfig, dict[str, Any]]:
        """The settings of a model's engine, and those of the server that it has for itself. Raises ConfigError for
        wrong flags, and OSError or ValueError for a bundle that cannot be read."""
        from jaxserve.server.http.settings import ServerSettings
        from jaxserve.server.models.serve import OF_MODEL
        from jaxserve.server.models.settings import ModelsSettings

        where = Path(f"the model {model.name}")
        own = self._reader.arguments(model.settings, where)
        given = self._given(own, where)
        every = settings_of(ServerSettings) | settings_of(ModelsSettings)
        of_server = {name: known.dest for name, known in every.items() if name not in OF_MODEL}
        if wrong := [name for name, dest in of_server.items() if dest in given]:
            raise ConfigError(f"{where}: {wrong[0].replace('_', '-')} is a setting of the whole server, not of a model")
        of_bundle = []
        if is_bundle(model.source):
            from jaxserve.bundles.container import Bundle, read_key

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


def serve_catalog(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Serves the models of a catalog. `options` are those of `serve`. Raises ConfigError."""
    from jaxserve.server.models.serve import serve_models
    from jaxserve.server.models.settings import ModelsSettings

    if args.engine is not None:  # it waits to be told of one model
        args.engine.stdin.close()
    for model in args.catalog:
        if not is_bundle(model.source):
            args.flags_of(model)  # wrong flags are reported before anything starts
    options.pop("served_model_name")
    models = ModelsSettings(**chosen(args, ModelsSettings))
    return serve_models(args.catalog, models, args.flags_of, **options)
