"""The flags of `jaxserve serve` beyond the engine's. Imports no library that serving needs, so that --help is fast."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from jaxserve.commands.arguments import add_settings
from jaxserve.server.http.models_settings import ModelsSettings
from jaxserve.server.http.settings import ServerSettings, a_key
from jaxserve.setting import settings_of


def add_server_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags to a command; `server_options` reads them."""
    add_settings(command.add_argument_group("server"), ServerSettings)
    add_settings(command.add_argument_group("models"), ModelsSettings)


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `jaxserve.server.process.run.serve`. Exits with 2 if a key in the environment is empty."""
    options = {name: getattr(args, known.dest) for name, known in settings_of(ServerSettings).items()}
    options["api_keys"] = [*options["api_keys"], *filter(None, [_from_environment("JAXSERVE_API_KEY")])]
    options["admin_key"] = args.admin_key or _admin_key(args) or _from_environment("JAXSERVE_ADMIN_KEY")
    options["metrics_key"] = args.metrics_key or _from_environment("JAXSERVE_METRICS_KEY")
    options["served_model_name"] = options.pop("model_names")
    options["allowed_hosts"] = options.pop("hosts") or ()
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _from_environment(name: str) -> str | None:
    try:
        return None if (text := os.environ.get(name)) is None else a_key(text)
    except argparse.ArgumentTypeError as error:
        print(f"jaxserve serve: error: {name}: {error}; unset it to have none", file=sys.stderr)
        raise SystemExit(2) from None


def _admin_key(args: argparse.Namespace) -> str | None:
    from jaxserve.server.http.keys import read_key

    return args.admin_key_file and read_key(args.admin_key_file)
