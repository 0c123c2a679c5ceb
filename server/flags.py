"""The command line of `jaxserve serve` beyond the engine's. Light: nothing here imports what serving needs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from server import plugins

_SAME_NAME = (
    "host", "port", "fd", "served_model_name", "api_key_file", "salt_by_key", "drain_seconds", "request_timeout",
    "engine_restarts", "watchdog_seconds",
    "metrics_prefix", "tool_call_parser", "reasoning_parser", "ssl_certfile", "ssl_keyfile", "max_connections",
    "max_body_bytes", "max_header_bytes", "client_timeout",
    "max_stored_responses", "ui", "access_log", "otlp_endpoint",
)  # fmt: skip


def add_server_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags to a command; `server_options` reads them."""
    group = command.add_argument_group("server")
    flag = group.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on")
    flag("--port", type=int, default=8000, help="port to listen on; 0: a free one")
    flag("--fd", type=int, metavar="N",
         help="a listening socket to take over instead, as of systemd's socket units: 3; clients then wait while the "
         "server restarts")  # fmt: skip
    flag("--served-model-name", metavar="NAME", help="what clients call the model; None: MODEL as given")
    flag("--api-key", action="append", default=None, metavar="KEY",
         help="demand this bearer key (may be given several times); also read from JAXSERVE_API_KEY")  # fmt: skip
    flag("--api-key-file", metavar="FILE", help="more keys, in lines 'key [name] [max-concurrency]'")
    flag("--salt-by-key", action="store_true", help="requests under different keys share no prefix cache")
    flag("--admin-key", metavar="KEY",
         help="opens POST /reset_prefix_cache to this bearer key; also read from JAXSERVE_ADMIN_KEY")  # fmt: skip
    flag("--drain-seconds", type=float, default=30.0, help="what running requests get after SIGTERM")
    flag("--engine-restarts", type=int, default=3, metavar="N",
         help="an engine that dies is started again so often in ten minutes; then the server exits with 1")  # fmt: skip
    flag("--watchdog-seconds", type=float, default=120.0, metavar="SECONDS",
         help="an engine that has work and does not finish a step for so long, compiling apart, is ended and started "
         "again; 0: never")  # fmt: skip
    flag("--request-timeout", type=float, metavar="SECONDS", help="longest a request may take; None: no limit")
    flag("--metrics-prefix", default="jaxserve", help="first part of the metrics' names, such as vllm")
    flag("--cors-origin", action="append", default=[], metavar="ORIGIN", help="browsers may call from there")
    flag("--tool-call-parser", default="auto", choices=["auto", "none", *plugins.names("server.tools.parsers")],
         help="how the model writes tool calls; auto: by its chat template, where that is certain")  # fmt: skip
    flag("--reasoning-parser", default="auto", choices=["auto", "none", *plugins.names("server.reasoning")],
         help="how the model marks its reasoning; auto: by its chat template, where that is certain")  # fmt: skip
    flag("--reasoning-content", action="store_true",
         help="chat messages call their reasoning reasoning_content instead of reasoning")  # fmt: skip
    flag("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate chain, in PEM format")
    flag("--ssl-keyfile", metavar="FILE", help="its private key, where the certificate's file does not hold it")
    flag("--max-connections", type=int, default=4096, metavar="N", help="open connections, beyond which there is 503")
    flag("--max-body-bytes", type=int, default=32 * 2**20, metavar="BYTES", help="longest request body")
    flag("--max-header-bytes", type=int, default=64 * 2**10, metavar="BYTES", help="longest request head")
    flag("--client-timeout", type=float, default=60.0, metavar="SECONDS",
         help="in which a request's head must come, then its body, and something of its answer be taken")  # fmt: skip
    flag("--no-access-log", dest="access_log", action="store_false",
         help="do not print a line of JSON for each request")  # fmt: skip
    flag("--otlp-endpoint", metavar="URL",
         help="send OpenTelemetry traces there, by OTLP over HTTP, as to http://localhost:4318")  # fmt: skip
    flag("--no-ui", dest="ui", action="store_false", help="have no page at /")
    flag("--max-stored-responses", type=int, default=1000, metavar="N", help="of /v1/responses, kept in memory")


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `server.run.serve`."""
    return {name: getattr(args, name) for name in _SAME_NAME} | {
        "api_keys": [*(args.api_key or []), *filter(None, [os.environ.get("JAXSERVE_API_KEY")])],
        "admin_key": args.admin_key or os.environ.get("JAXSERVE_ADMIN_KEY"),
        "cors_origins": tuple(args.cors_origin),
        "reasoning_field": "reasoning_content" if args.reasoning_content else "reasoning",
    }
