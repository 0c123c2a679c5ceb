"""The settings of a server that its operator chooses. Imports nothing heavy, so that the command line can use it."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import MISSING, dataclass, field
from functools import partial
from typing import Any

from jaxserve.limits import MAX_COMPLETIONS, MAX_IMAGE_PIXELS
from jaxserve.server import plugins
from jaxserve.server.http.keys import ApiKey
from jaxserve.setting import at_least, documented, setting


def a_key(text: str) -> str:
    """The value of a flag that is a key."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a key must not be empty, as everybody has that one")
    return text


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if not re.fullmatch(r"(/[\w.~-]+)*", path, re.ASCII):
        raise argparse.ArgumentTypeError(f"not a path of letters, digits and - . _ ~, such as /llm: {text}")
    return path


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip().lower() for host in text.split(",") if host.strip())
    if wrong := [host for host in hosts if host != "*" and not re.fullmatch(r"[\w.:-]+", host, re.ASCII)]:
        raise argparse.ArgumentTypeError(f"not the name or address of a host: {wrong[0]}")
    return hosts


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


@documented
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The operator's settings of a server, in the order in which --help shows them.

    What `jaxserve.server.process.run.serve` makes of flags is here in its final form: `chat_template` is the source of
    a template, `api_keys` has the keys of all files, and `hosts` are the accepted values of the Host header besides
    localhost on a server without keys; None: any. The first of `model_names` is also the metrics' `model_name` label.
    `deployment` is what the answers of this server depend on (`jaxserve.deployment.record`).
    """

    # Address and processes

    host: str = setting("127.0.0.1", "address to listen on", topic="server", usual=True)
    port: int = setting(8000, "port to listen on; 0: a free one", topic="server", usual=True)
    root_path: str = setting(
        "", "path at which a proxy serves this server, such as /llm; the proxy may take it off requests or leave it",
        topic="server", short="path at which a proxy serves this server", type=_root_path, metavar="PATH",
    )  # fmt: skip
    api_server_count: int = setting(
        1, "processes that answer HTTP, for one engine and on one port; more than 1 add a process that supervises them",
        topic="server", short="processes that answer HTTP", metavar="N",
    )  # fmt: skip
    fd: int | None = setting(
        None,
        "file descriptor of a listening socket to use instead of --host and --port, such as 3 under a systemd socket "
        "unit; clients then wait while the server restarts",
        topic="server", metavar="N",
    )  # fmt: skip
    drain_delay: float = setting(
        0.0,
        "time after SIGTERM during which /ready fails and new requests are still served, so that load balancers can "
        "take the server out",
        topic="server", metavar="SECONDS",
    )  # fmt: skip
    drain_seconds: float = setting(
        30.0, "time for running requests to finish after that", topic="server", metavar="SECONDS"
    )
    engine_restarts: int = setting(
        3, "most restarts of an engine that died within ten minutes; one more death ends the server with exit code 1",
        topic="server", metavar="N",
    )  # fmt: skip
    watchdog_seconds: float = setting(
        120.0, "restart an engine that has work but finishes no step for this long, not counting compilation; 0: never",
        topic="server", metavar="SECONDS",
    )  # fmt: skip
    ui: bool = setting(True, "serve no page at /", topic="server")

    # What clients see

    model_names: tuple[str, ...] = setting(
        MISSING,
        "names under which clients ask for the model; may be given several times; an answer carries the name that its "
        "request used, metrics carry the first; None: MODEL as given",
        topic="api", flag="--served-model-name", short="names under which clients ask for the model", action="extend",
        nargs="+", metavar="NAME",
    )  # fmt: skip
    chat_template: str | None = setting(
        None, "Jinja template for conversations, or a file that holds one; None: the model's own",
        topic="api", short="Jinja template for conversations", metavar="FILE",
    )  # fmt: skip
    tool_call_parser: str = setting(
        "auto", "format of the model's tool calls; auto: the one that the chat template shows for certain",
        topic="api", usual=True, choices=partial(plugins.choices, "jaxserve.server.tools.parsers"),
    )  # fmt: skip
    reasoning_parser: str = setting(
        "auto", "format of the model's reasoning; auto: the one that the chat template shows for certain",
        topic="api", usual=True, choices=partial(plugins.choices, "jaxserve.server.reasoning"),
    )  # fmt: skip
    default_chat_template_kwargs: dict[str, Any] = setting(
        {}, 'variables of the chat template for requests that do not set them, for example {"enable_thinking": false}',
        topic="api", metavar="JSON",
    )  # fmt: skip
    trust_request_chat_template: bool = setting(False, "requests may bring a chat_template of their own", topic="api")
    escape_special_tokens: bool = setting(
        False, "read special tokens in prompts, user messages and tool results as plain text; the chat template and "
        "assistant messages keep special tokens",
        topic="api",
    )  # fmt: skip
    reasoning_field: str = setting(
        "reasoning", "name the reasoning of a chat message reasoning_content instead of reasoning",
        topic="api", flag="--reasoning-content", action="store_const", const="reasoning_content",
    )  # fmt: skip
    max_completions_per_request: int = setting(
        MAX_COMPLETIONS, "most completions of one request: the number of its prompts times n",
        topic="api", metavar="N",
    )  # fmt: skip
    max_stored_responses: int = setting(
        1000, "most answers of /v1/responses that are kept in memory", topic="api", metavar="N"
    )

    # Keys and access

    api_keys: tuple[ApiKey, ...] = setting(
        (), "require this bearer key; may be given several times; also read from JAXSERVE_API_KEY, which `ps` does not "
        "show",
        topic="keys", flag="--api-key", short="require this bearer key (or JAXSERVE_API_KEY)", secret=True,
        action="append", type=a_key, metavar="KEY",
    )  # fmt: skip
    admin_key: str | None = setting(
        None,
        "bearer key for POST /reset_prefix_cache, /profile, /v1/load_lora_adapter, /v1/unload_lora_adapter, /sleep, "
        "/wake_up, /is_sleeping, /update_weights, and load and unload below /v2/repository/models, and for /metrics, "
        "/load, /pool and /slots; also read from JAXSERVE_ADMIN_KEY",
        topic="keys", short="key of the administrator's endpoints", secret=True, type=a_key, metavar="KEY",
    )  # fmt: skip
    ssl_certfile: str | None = setting(
        None, "serve HTTPS with this certificate chain, in PEM format",
        topic="keys", short="serve HTTPS with this certificate chain", metavar="FILE",
    )  # fmt: skip
    ssl_keyfile: str | None = setting(
        None, "private key of the certificate; None: --ssl-certfile holds it",
        topic="keys", short="private key of the certificate", metavar="FILE",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), "origin whose pages browsers may let call the server, or a JSON list of them; *: all",
        topic="keys", flag="--cors-origin", also="--allowed-origins",
        short="origin whose pages may call the server; *: all", action="extend", type=_origins, metavar="ORIGIN",
    )  # fmt: skip
    api_key_file: str | None = setting(
        None,
        "file with more keys, one line each: 'key [name] [max-concurrency] [min-priority] [models]', models with "
        "commas between them",
        topic="keys", metavar="FILE",
    )  # fmt: skip
    admin_key_file: str | None = setting(None, "file that holds the admin key", topic="keys", metavar="FILE")
    metrics_key: str | None = setting(
        None,
        "bearer key for /metrics, /load, /pool and /slots, which API keys do not open when there are two or more; also "
        "read from JAXSERVE_METRICS_KEY",
        topic="keys", secret=True, type=a_key, metavar="KEY",
    )  # fmt: skip
    open_metrics: bool = setting(False, "serve /metrics without a key", topic="keys")
    salt_by_key: bool | None = setting(
        None, "keep prefix-cache hits within one key; None: on when there are two or more keys",
        topic="keys", action=argparse.BooleanOptionalAction,
    )  # fmt: skip
    hosts: tuple[str, ...] | None = setting(
        None,
        "another accepted value of the Host header, besides localhost; applies to a server without keys on a loopback "
        "address",
        topic="keys", flag="--allowed-host", action="append", metavar="NAME",
    )  # fmt: skip
    weights_root: str | None = setting(
        None, "folder below which POST /update_weights may read weights, for example a trainer's; needs --admin-key",
        topic="keys", metavar="DIR",
    )  # fmt: skip

    # Limits of clients

    request_timeout: float | None = setting(
        None, "longest time for one request; None: no limit", topic="limits", usual=True, metavar="SECONDS"
    )
    max_connections: int = setting(
        4096, "most open connections; requests on further ones get 503", topic="limits", metavar="N"
    )
    max_connections_per_address: int | None = setting(
        None,
        "most open connections of one client address; 0: no limit; None: half of --max-connections, and no limit for "
        "this machine, where a proxy may serve many clients",
        topic="limits", metavar="N",
    )  # fmt: skip
    max_body_bytes: int = setting(32 * 2**20, "longest request body", topic="limits", metavar="BYTES")
    max_header_bytes: int = setting(64 * 2**10, "longest request head", topic="limits", metavar="BYTES")
    limit_images_per_request: int = setting(16, "most pictures in a request", topic="limits", metavar="N")
    limit_videos_per_request: int = setting(4, "most videos in a request", topic="limits", metavar="N")
    max_image_pixels: int = setting(
        MAX_IMAGE_PIXELS, "most pixels of a picture as it is sent; the model's own settings say how many it sees",
        topic="limits", metavar="N",
    )  # fmt: skip
    allow_image_urls: tuple[str, ...] = setting(
        (), "hosts, separated by commas, from which pictures may be fetched by http and https; *: all with a public "
        "address",
        topic="limits", type=_hosts, metavar="HOSTS",
        more="Without, pictures come as data URLs only. A private address is fetched from only if it is named itself, "
        "as an address or as localhost.",
    )  # fmt: skip
    client_timeout: float = setting(
        60.0, "time for a client to send a request's head, then its body, and to read some of the answer",
        topic="limits", metavar="SECONDS",
    )  # fmt: skip

    # Files and batches of requests

    files_dir: str | None = setting(
        None, "folder for the files of /v1/files and for batches, which belongs to this server alone; None: neither is "
        "served",
        topic="files", short="folder for files and batches", metavar="DIR",
    )  # fmt: skip
    max_files_bytes: int = setting(
        10 * 2**30, "most bytes of all files of one key; the output of batches counts, and is never cut off",
        topic="files", rule=at_least(1), metavar="BYTES",
    )  # fmt: skip
    max_file_bytes: int = setting(512 * 2**20, "longest file", topic="files", rule=at_least(1), metavar="BYTES")
    max_batch_requests: int = setting(
        50_000, "most requests of one batch", topic="files", rule=at_least(1), metavar="N"
    )
    max_batches_in_progress: int = setting(
        16, "most batches of one key that have not ended", topic="files", rule=at_least(1), metavar="N"
    )
    batch_concurrency: int | None = setting(
        None,
        "most requests of batches in work at a time, of each API server; None: a quarter more than the engine runs "
        "sequences, divided among the API servers",
        topic="files", rule=at_least(1), metavar="N",
    )  # fmt: skip

    # Logs, metrics, traces

    access_log: bool = setting(
        True, "do not print a line of JSON for each request",
        topic="watching", also="--disable-uvicorn-access-log", short="print no line for each request",
    )  # fmt: skip
    otlp_endpoint: str | None = setting(
        None, "send OpenTelemetry traces here, by OTLP over HTTP, for example to http://localhost:4318",
        topic="watching", also="--otlp-traces-endpoint", short="send OpenTelemetry traces to this address",
        metavar="URL",
    )  # fmt: skip
    metrics_prefix: str = setting("jaxserve", "prefix of metric names, for example vllm", topic="watching")
    record: str | None = setting(
        None,
        "append every answered request to this file, with the tokens of prompt and answer, for `jaxserve replay`; only "
        "this user can read it; None: nothing is recorded",
        topic="watching", metavar="FILE",
    )  # fmt: skip
    record_max_bytes: int = setting(
        2**30, "size of this file from which on nothing is recorded", topic="watching", metavar="BYTES"
    )

    # LoRA adapters

    lora_root: str | None = setting(
        None, "folder below which POST /v1/load_lora_adapter may load adapters; needs --enable-lora and --admin-key",
        topic="lora", metavar="DIR",
    )  # fmt: skip

    deployment: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def model_name(self) -> str:
        """The default name."""
        return self.model_names[0]

    @property
    def salts_by_key(self) -> bool:
        """Whether requests under different keys must not share cached prefixes, which would reveal prompts."""
        return len({key.key for key in self.api_keys}) > 1 if self.salt_by_key is None else self.salt_by_key
