"""Runs a server as its own process: `python launch.py '{"config": {...}, "serve": {...}}'`."""

from __future__ import annotations

import json
import sys

from jaxserve.config import EngineConfig
from jaxserve.server.process.run import serve

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    sys.exit(serve(EngineConfig(**options["config"]), **options["serve"]))
