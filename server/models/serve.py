"""Starts a server with several models, and stops it in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from starlette.middleware import Middleware

from jaxserve.config import ConfigError
from jaxserve.server.http.models_settings import ModelsSettings
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.run_engine import DEFAULT_ENGINE
from jaxserve.server.models.catalog import Model
from jaxserve.server.models.endpoints import ROUTES
from jaxserve.server.models.engines import Configure, Models, SeveralState
from jaxserve.server.models.routing import Routing
from jaxserve.server.observe.access import log_to_stdout
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.observe.output import log_to_stderr, say
from jaxserve.server.observe.recorder import open_records
from jaxserve.server.process.api_server import ApiServer, allow_files, http_config
from jaxserve.server.process.app import build_app
from jaxserve.server.process.run import final_settings, listen

# Settings of the server that belong to one model, so that each model may have its own.
OF_MODEL = frozenset(
    {
        "chat_template", "tool_call_parser", "reasoning_parser", "default_chat_template_kwargs",
        "trust_request_chat_template", "escape_special_tokens", "reasoning_field", "request_timeout",
        "limit_images_per_request", "max_image_pixels", "allow_image_urls", "engine_restarts", "watchdog_seconds",
    }
)  # fmt: skip


def serve_models(
    catalog: Sequence[Model],
    models: ModelsSettings,
    configure: Configure,
    *,
    api_keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    engine_class: str = DEFAULT_ENGINE,
    **settings: Any,
) -> int:
    """Serves several models as `process.run.serve` serves one; the arguments are those of `serve`, without a model.

    configure: makes the settings of a model of its flags, each time before its size is computed. It is called once for
    each model before the server listens, so that wrong flags are reported; files that cannot be read are not. Raises
    ConfigError for settings that a server with several models cannot have, and what `serve` raises."""
    log_to_stderr(logging.INFO)
    names = tuple(name for model in catalog for name in model.names)
    own = final_settings(names, api_keys, allowed_hosts, settings)
    if own.api_server_count != 1:
        raise ConfigError(
            "a server with several models has one API server, which alone decides what is in memory; leave out "
            "--api-server-count"
        )
    if own.record is not None:
        os.close(open_records(own.record))  # a file that cannot be written is reported now
    state = SeveralState(own, EngineClient(), Metrics("", own.metrics_prefix))
    served = Models(catalog, state, models, configure, engine_class)
    state.models = served
    routing = Middleware(Routing, models=served)
    uvicorn_config = http_config(state, build_app(state, ROUTES, routing))
    log_to_stdout()
    allow_files(own)
    if (listener := listen(own)) is None:
        return 1
    with listener:
        server = ApiServer(uvicorn_config, state, served, shares_listener=own.fd is not None, routing=routing)
        server.run(sockets=[listener])
    if server.failure is not None:
        say(f"jaxserve: {server.failure}")
        return 1
    return 0
