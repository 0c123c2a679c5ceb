"""The command line of `jaxserve serve` beyond the engine's. Light: nothing here imports what serving needs."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from jaxserve.limits import MAX_COMPLETIONS
from jaxserve.server import plugins

_SAME_NAME = (
    "host", "port", "fd", "served_model_name", "chat_template", "trust_request_chat_template",
    "api_key_file", "salt_by_key", "open_metrics", "drain_seconds", "engine_restarts", "watchdog_seconds",
    "request_timeout", "metrics_prefix", "tool_call_parser", "reasoning_parser", "ssl_certfile", "ssl_keyfile",
    "max_connections", "max_connections_per_address", "max_body_bytes", "max_completions_per_request",
    "max_header_bytes", "client_timeout", "max_stored_responses", "ui", "access_log", "otlp_endpoint",
    "escape_special_tokens",
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
    flag("--served-model-name", action="append", metavar="NAME",
         help="what clients call the model (may be given several times; answers carry the name asked for, metrics the "
         "first); None: MODEL as given")  # fmt: skip
    flag("--chat-template", metavar="FILE",
         help="a Jinja template for conversations, instead of the model's own; or the template itself")  # fmt: skip
    flag("--trust-request-chat-template", action="store_true",
         help="requests may bring a chat_template of their own")  # fmt: skip
    flag("--api-key", action="append", type=_key, default=None, metavar="KEY",
         help="demand this bearer key (may be given several times); also read from JAXSERVE_API_KEY, which `ps` does "
         "not show")  # fmt: skip
    flag("--api-key-file", metavar="FILE", help="more keys, in lines 'key [name] [max-concurrency] [min-priority]'")
    flag("--salt-by-key", action=argparse.BooleanOptionalAction, default=None,
         help="requests under different keys share no prefix cache; None: where there are several keys")  # fmt: skip
    flag("--admin-key", type=_key, metavar="KEY",
         help="opens POST /reset_prefix_cache and /profile to this bearer key, and /metrics, /load and /pool; also "
         "read from JAXSERVE_ADMIN_KEY")  # fmt: skip
    flag("--admin-key-file", metavar="FILE", help="holds that key")
    flag("--metrics-key", type=_key, metavar="KEY",
         help="opens /metrics, /load and /pool to this bearer key; of several API keys none does; also read from "
         "JAXSERVE_METRICS_KEY")  # fmt: skip
    flag("--open-metrics", action="store_true", help="/metrics needs no key")
    flag("--drain-seconds", type=float, default=30.0, help="what running requests get after SIGTERM")
    flag("--engine-restarts", type=int, default=3, metavar="N",
         help="an engine that dies is started again so often in ten minutes; then the server exits with 1")  # fmt: skip
    flag("--watchdog-seconds", type=float, default=120.0, metavar="SECONDS",
         help="an engine that has work and does not finish a step for so long, compiling apart, is ended and started "
         "again; 0: never")  # fmt: skip
    flag("--request-timeout", type=float, metavar="SECONDS", help="longest a request may take; None: no limit")
    flag("--metrics-prefix", default="jaxserve", help="first part of the metrics' names, such as vllm")
    flag("--allowed-host", action="append", default=[], metavar="NAME",
         help="a name that `Host` may have besides localhost, of a keyless server on a loopback address")  # fmt: skip
    flag("--cors-origin", action="append", default=[], metavar="ORIGIN", help="browsers may call from there")
    flag("--tool-call-parser", default="auto", choices=plugins.choices("jaxserve.server.tools.parsers"),
         help="how the model writes tool calls; auto: by its chat template, where that is certain")  # fmt: skip
    flag("--reasoning-parser", default="auto", choices=plugins.choices("jaxserve.server.reasoning"),
         help="how the model marks its reasoning; auto: by its chat template, where that is certain")  # fmt: skip
    flag("--escape-special-tokens", action="store_true",
         help="special tokens in the text of prompts, users and tools are plain text; those of the chat template and "
         "in assistants' messages stay what they are")  # fmt: skip
    flag("--reasoning-content", action="store_true",
         help="chat messages call their reasoning reasoning_content instead of reasoning")  # fmt: skip
    flag("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate chain, in PEM format")
    flag("--ssl-keyfile", metavar="FILE", help="its private key, where the certificate's file does not hold it")
    flag("--max-connections", type=int, default=4096, metavar="N", help="open connections, beyond which there is 503")
    flag("--max-connections-per-address", type=int, metavar="N",
         help="open connections of one client; 0: any number; None: half of --max-connections, and any number from "
         "this machine itself, whose proxies stand for many")  # fmt: skip
    flag("--max-body-bytes", type=int, default=32 * 2**20, metavar="BYTES", help="longest request body")
    flag("--max-completions-per-request", type=int, default=MAX_COMPLETIONS, metavar="N",
         help="most completions of one request, its prompts times n")  # fmt: skip
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
    """Keyword arguments of `jaxserve.server.process.run.serve`. Exits with 2 where a key in the environment is
    empty."""
    return {name: getattr(args, name) for name in _SAME_NAME} | {
        "api_keys": [*(args.api_key or []), *filter(None, [_from_environment("JAXSERVE_API_KEY")])],
        "admin_key": args.admin_key or _admin_key(args) or _from_environment("JAXSERVE_ADMIN_KEY"),
        "metrics_key": args.metrics_key or _from_environment("JAXSERVE_METRICS_KEY"),
        "cors_origins": tuple(args.cors_origin),
        "allowed_hosts": tuple(args.allowed_host),
        "reasoning_field": "reasoning_content" if args.reasoning_content else "reasoning",
    }


def _key(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a key must not be empty, as everybody has that one")
    return text


def _from_environment(name: str) -> str | None:
    try:
        return None if (text := os.environ.get(name)) is None else _key(text)
    except argparse.ArgumentTypeError as error:
        print(f"jaxserve serve: error: {name}: {error}; unset it to have none", file=sys.stderr)
        raise SystemExit(2) from None


def _admin_key(args: argparse.Namespace) -> str | None:
    from jaxserve.server.http.keys import read_key

    return args.admin_key_file and read_key(args.admin_key_file)
