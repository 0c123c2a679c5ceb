"""The flags of `jaxserve serve` beyond the engine's. Imports no library that serving needs, so that --help is fast."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any

from jaxserve.commands.arguments import json_object
from jaxserve.server import plugins
from jaxserve.server.http.settings import ServerSettings

_SAME_NAME = (
    "host", "port", "fd", "served_model_name", "chat_template", "default_chat_template_kwargs",
    "trust_request_chat_template", "api_key_file", "salt_by_key", "open_metrics", "drain_delay",
    "drain_seconds", "engine_restarts", "watchdog_seconds", "request_timeout", "metrics_prefix", "tool_call_parser",
    "reasoning_parser", "ssl_certfile", "ssl_keyfile", "max_connections", "max_connections_per_address",
    "max_body_bytes", "max_completions_per_request", "max_header_bytes", "client_timeout", "max_stored_responses",
    "ui", "access_log", "otlp_endpoint", "escape_special_tokens", "lora_root", "weights_root", "api_server_count",
    "record", "record_max_bytes", "root_path",
)  # fmt: skip


def add_server_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags to a command; `server_options` reads them."""
    group = command.add_argument_group("server")
    flag = group.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on")
    flag("--port", type=int, default=8000, help="port to listen on; 0: a free one")
    flag("--fd", type=int, metavar="N",
         help="file descriptor of a listening socket to use instead of --host and --port, such as 3 under a systemd "
         "socket unit; clients then wait while the server restarts")  # fmt: skip
    flag("--root-path", type=_root_path, default="", metavar="PATH",
         help="path at which a proxy serves this server, such as /llm; the proxy may take it off requests or leave "
         "it")  # fmt: skip
    flag("--api-server-count", type=int, default=1, metavar="N",
         help="processes that answer HTTP, for one engine and on one port; more than 1 add a process that supervises "
         "them")  # fmt: skip
    flag("--served-model-name", action="extend", nargs="+", metavar="NAME",
         help="names under which clients ask for the model; may be given several times; an answer carries the name "
         "that its request used, metrics carry the first; None: MODEL as given")  # fmt: skip
    flag("--chat-template", metavar="FILE",
         help="Jinja template for conversations, or a file that holds one; None: the model's own")  # fmt: skip
    flag("--default-chat-template-kwargs", type=json_object, default={}, metavar="JSON",
         help='variables of the chat template for requests that do not set them, for example '
         '{"enable_thinking": false}')  # fmt: skip
    flag("--trust-request-chat-template", action="store_true",
         help="requests may bring a chat_template of their own")  # fmt: skip
    flag("--api-key", action="append", type=_key, default=None, metavar="KEY",
         help="require this bearer key; may be given several times; also read from JAXSERVE_API_KEY, which `ps` does "
         "not show")  # fmt: skip
    flag("--api-key-file", metavar="FILE",
         help="file with more keys, one line each: 'key [name] [max-concurrency] [min-priority]'")  # fmt: skip
    flag("--salt-by-key", action=argparse.BooleanOptionalAction, default=None,
         help="keep prefix-cache hits within one key; None: on when there are two or more keys")  # fmt: skip
    flag("--lora-root", metavar="DIR",
         help="folder below which POST /v1/load_lora_adapter may load adapters; needs --enable-lora and "
         "--admin-key")  # fmt: skip
    flag("--weights-root", metavar="DIR",
         help="folder below which POST /update_weights may read weights, for example a trainer's; needs "
         "--admin-key")  # fmt: skip
    flag("--admin-key", type=_key, metavar="KEY",
         help="bearer key for POST /reset_prefix_cache, /profile, /v1/load_lora_adapter, /v1/unload_lora_adapter, "
         "/sleep, /wake_up, /is_sleeping and /update_weights, and for /metrics, /load and /pool; also read from "
         "JAXSERVE_ADMIN_KEY")  # fmt: skip
    flag("--admin-key-file", metavar="FILE", help="file that holds the admin key")
    flag("--metrics-key", type=_key, metavar="KEY",
         help="bearer key for /metrics, /load and /pool, which API keys do not open when there are two or more; also "
         "read from JAXSERVE_METRICS_KEY")  # fmt: skip
    flag("--open-metrics", action="store_true", help="serve /metrics without a key")
    flag("--drain-delay", type=float, default=ServerSettings.drain_delay, metavar="SECONDS",
         help="time after SIGTERM during which /ready fails and new requests are still served, so that load balancers "
         "can take the server out")  # fmt: skip
    flag("--drain-seconds", type=float, default=ServerSettings.drain_seconds, metavar="SECONDS",
         help="time for running requests to finish after that")  # fmt: skip
    flag("--engine-restarts", type=int, default=ServerSettings.engine_restarts, metavar="N",
         help="most restarts of an engine that died within ten minutes; one more death ends the server with exit code "
         "1")  # fmt: skip
    flag("--watchdog-seconds", type=float, default=ServerSettings.watchdog_seconds, metavar="SECONDS",
         help="restart an engine that has work but finishes no step for this long, not counting compilation; 0: "
         "never")  # fmt: skip
    flag("--request-timeout", type=float, metavar="SECONDS", help="longest time for one request; None: no limit")
    flag("--metrics-prefix", default=ServerSettings.metrics_prefix, help="prefix of metric names, for example vllm")
    flag("--allowed-host", action="append", default=[], metavar="NAME",
         help="another accepted value of the Host header, besides localhost; applies to a server without keys on a "
         "loopback address")  # fmt: skip
    flag("--cors-origin", "--allowed-origins", action="extend", type=_origins, default=[], metavar="ORIGIN",
         help="origin whose pages browsers may let call the server, or a JSON list of them; *: all")  # fmt: skip
    flag("--tool-call-parser", default="auto", choices=plugins.choices("jaxserve.server.tools.parsers"),
         help="format of the model's tool calls; auto: the one that the chat template shows for certain")  # fmt: skip
    flag("--reasoning-parser", default="auto", choices=plugins.choices("jaxserve.server.reasoning"),
         help="format of the model's reasoning; auto: the one that the chat template shows for certain")  # fmt: skip
    flag("--escape-special-tokens", action="store_true",
         help="read special tokens in prompts, user messages and tool results as plain text; the chat template and "
         "assistant messages keep special tokens")  # fmt: skip
    flag("--reasoning-content", action="store_true",
         help="name the reasoning of a chat message reasoning_content instead of reasoning")  # fmt: skip
    flag("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate chain, in PEM format")
    flag("--ssl-keyfile", metavar="FILE", help="private key of the certificate; None: --ssl-certfile holds it")
    flag("--max-connections", type=int, default=ServerSettings.max_connections, metavar="N",
         help="most open connections; requests on further ones get 503")  # fmt: skip
    flag("--max-connections-per-address", type=int, metavar="N",
         help="most open connections of one client address; 0: no limit; None: half of --max-connections, and no limit "
         "for this machine, where a proxy may serve many clients")  # fmt: skip
    flag("--max-body-bytes", type=int, default=ServerSettings.max_body_bytes, metavar="BYTES",
         help="longest request body")  # fmt: skip
    flag("--max-completions-per-request", type=int, default=ServerSettings.max_completions_per_request, metavar="N",
         help="most completions of one request: the number of its prompts times n")  # fmt: skip
    flag("--max-header-bytes", type=int, default=64 * 2**10, metavar="BYTES", help="longest request head")
    flag("--client-timeout", type=float, default=60.0, metavar="SECONDS",
         help="time for a client to send a request's head, then its body, and to read some of the answer")  # fmt: skip
    flag("--no-access-log", "--disable-uvicorn-access-log", dest="access_log", action="store_false",
         help="do not print a line of JSON for each request")  # fmt: skip
    flag("--record", metavar="FILE",
         help="append every answered request to this file, with the tokens of prompt and answer, for `jaxserve "
         "replay`; only this user can read it; None: nothing is recorded")  # fmt: skip
    flag("--record-max-bytes", type=int, default=ServerSettings.record_max_bytes, metavar="BYTES",
         help="size of this file from which on nothing is recorded")  # fmt: skip
    flag("--otlp-endpoint", "--otlp-traces-endpoint", metavar="URL",
         help="send OpenTelemetry traces here, by OTLP over HTTP, for example to http://localhost:4318")  # fmt: skip
    flag("--no-ui", dest="ui", action="store_false", help="serve no page at /")
    flag("--max-stored-responses", type=int, default=ServerSettings.max_stored_responses, metavar="N",
         help="most answers of /v1/responses that are kept in memory")  # fmt: skip


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `jaxserve.server.process.run.serve`. Exits with 2 if a key in the environment is empty."""
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


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if not re.fullmatch(r"(/[\w.~-]+)*", path, re.ASCII):
        raise argparse.ArgumentTypeError(f"not a path of letters, digits and - . _ ~, such as /llm: {text}")
    return path


def _origins(text: str) -> list[str]:
    if not text.lstrip().startswith("["):
        return [text]
    try:
        origins = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError(f"not a list of strings: {text}")
    return origins


def _from_environment(name: str) -> str | None:
    try:
        return None if (text := os.environ.get(name)) is None else _key(text)
    except argparse.ArgumentTypeError as error:
        print(f"jaxserve serve: error: {name}: {error}; unset it to have none", file=sys.stderr)
        raise SystemExit(2) from None


def _admin_key(args: argparse.Namespace) -> str | None:
    from jaxserve.server.http.keys import read_key

    return args.admin_key_file and read_key(args.admin_key_file)
