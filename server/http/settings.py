"""The settings of a server that its operator chooses. Imports nothing heavy, so that the command line can use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.limits import MAX_COMPLETIONS

if TYPE_CHECKING:
    from jaxserve.server.http.keys import ApiKey


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The operator's settings of one API server; the flags of `jaxserve serve` take their defaults from here.

    Attributes:
      model_names: names of the model for clients; the first is the default and the metrics' `model_name` label.
      api_keys: accepted keys; if empty, no key is needed.
      salt_by_key: keep prefix-cache hits within one key; None: on when there are two or more keys.
      admin_key: key of the admin endpoints, which answer 404 without one.
      lora_root: folder below which adapters may be loaded while the server runs; None: they may not.
      weights_root: folder below which weights may be read that replace those of the model; None: they may not.
      metrics_key: key for /metrics, /load and /pool, which the admin key opens too.
      open_metrics: serve /metrics without a key.
      max_body_bytes: longest request body.
      max_completions_per_request: most completions of all prompts of a request together.
      max_connections: most open connections; requests on further ones get 503.
      max_connections_per_address: most open connections of one client; for None and 0 see `Connections`.
      request_timeout: longest time for one request, in seconds; None: no limit.
      max_stored_responses: most answers of /v1/responses that are kept.
      cors_origins: origins whose pages browsers may let call the server.
      hosts: accepted values of the Host header besides localhost, on a server without keys; None: any.
      metrics_prefix: prefix of metric names.
      drain_delay: time after the first signal to stop during which /ready fails and new requests are still served.
      drain_seconds: time for running requests to finish after that.
      engine_restarts: most restarts of an engine that died within ten minutes.
      watchdog_seconds: an engine that has work but finishes no step for this long is restarted; 0: never.
      tool_call_parser: a module of `jaxserve.server.tools.parsers`, "auto" (by the chat template) or "none".
      reasoning_parser: a module of `jaxserve.server.reasoning`, "auto" or "none".
      escape_special_tokens: read special tokens in the text of users and tools as plain text.
      reasoning_field: name of the field for the reasoning in a chat message.
      root_path: the path at which a proxy serves this server, such as /llm; "": there is none.
      ui: serve the page at `/`.
      access_log: log a line for each request.
      record: file to which answered requests are appended, for `jaxserve replay`; None: nothing is recorded.
      record_max_bytes: size of this file from which on nothing is recorded.
      otlp_endpoint: URL for OpenTelemetry traces; None: no traces.
      chat_template: source of a template that replaces the model's own.
      default_chat_template_kwargs: variables of the chat template for requests that do not set them.
      trust_request_chat_template: accept chat templates in requests.
      deployment: what the answers of this server depend on (`jaxserve.deployment.record`).
    """

    model_names: tuple[str, ...]
    api_keys: tuple[ApiKey, ...] = ()
    salt_by_key: bool | None = None
    admin_key: str | None = field(default=None, repr=False)
    lora_root: str | None = None
    weights_root: str | None = None
    metrics_key: str | None = field(default=None, repr=False)
    open_metrics: bool = False
    max_body_bytes: int = 32 * 2**20
    max_completions_per_request: int = MAX_COMPLETIONS
    max_connections: int = 4096
    max_connections_per_address: int | None = None
    request_timeout: float | None = None
    max_stored_responses: int = 1000
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    metrics_prefix: str = "jaxserve"
    drain_delay: float = 0.0
    drain_seconds: float = 30.0
    engine_restarts: int = 3
    watchdog_seconds: float = 120.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    escape_special_tokens: bool = False
    reasoning_field: str = "reasoning"
    root_path: str = ""
    ui: bool = True
    access_log: bool = False
    record: str | None = None
    record_max_bytes: int = 2**30
    otlp_endpoint: str | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    deployment: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def model_name(self) -> str:
        """The default name."""
        return self.model_names[0]

    @property
    def salts_by_key(self) -> bool:
        """Whether requests under different keys must not share cached prefixes, which would reveal prompts."""
        return len({key.key for key in self.api_keys}) > 1 if self.salt_by_key is None else self.salt_by_key
