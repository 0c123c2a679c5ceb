"""Runs a server as its own process: `python launch.py '{"config": {...}, "serve": {...}}'`; or one with several models,
by the command line of `jaxserve serve`: `'{"flags": [...], "engine_class": "module:Class"}'`."""

from __future__ import annotations

import json
import sys

from jaxserve.commands.cli import make_parser
from jaxserve.commands.serve_flags import read_serve
from jaxserve.config import EngineConfig
from jaxserve.server.models.flags import serve_catalog
from jaxserve.server.process.flags import server_options
from jaxserve.server.process.run import serve

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if "flags" in options:
        parser = make_parser().parse_args(["serve"]).serve_parser
        args = read_serve(parser, options["flags"])
        more = {"engine_class": options["engine_class"]} if options["engine_class"] else {}
        sys.exit(serve_catalog(args.several, server_options(args) | more))
    sys.exit(serve(EngineConfig(**options["config"]), **options["serve"]))
