"""Starts a server (port, engine process, HTTP API server) and stops it in order."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.bundles.container import is_bundle
from jaxserve.config import EngineConfig
from jaxserve.pallas_kernels import cpu_build
from jaxserve.server.http.keys import ApiKey, read_keys
from jaxserve.server.http.one_model import OneModel
from jaxserve.server.http.origin import is_local
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.run_engine import DEFAULT_ENGINE
from jaxserve.server.observe.access import log_to_stdout
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.observe.output import log_to_stderr, say
from jaxserve.server.process.api_server import ApiServer, allow_files, http_config
from jaxserve.server.process.api_server_process import ApiServerLaunch
from jaxserve.server.process.api_servers import MOST_FRONTS, serve_api_servers
from jaxserve.server.process.engine_process import EngineProcess
from jaxserve.server.process.served_model import OwnEngine, ServedModel
from jaxserve.setting import check_settings
from jaxserve.text.chat_template import check_variables, read_chat_template


def serve(
    config: EngineConfig,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    engine_class: str = DEFAULT_ENGINE,
    engine: subprocess.Popen[bytes] | None = None,
    **settings: Any,
) -> int:
    """Serves until a signal ends it; returns the process's exit code. Must run in the main thread.

    The port is bound before anything is loaded. /health and /ready answer at once, with 503 until the engine has
    loaded. An engine that dies or hangs is started again, within the limits in `settings`. The first SIGTERM or SIGINT
    drains: after `drain_delay` seconds new requests get 503, running ones have `drain_seconds` to finish, then they end
    with an error. A second signal exits at once. Returns 1 if the port is taken, the engine does not start, or it died
    too often.

    With `api_server_count` above 1, so many processes answer HTTP, and this one supervises them and the engine.

    `settings` are those of ServerSettings as --help has them: `chat_template` is a file or a template's text, and
    `api_key_file` has keys besides `api_keys`. `fd` is an inherited listening socket; after this server stops,
    connections to it wait for the next server. `served_model_name` is one name or several, by default `config.model`.
    `allowed_hosts` are accepted values of the Host header. `engine` is a process that `jaxserve.start` has started.
    Raises ValueError or OSError for a certificate, a key file or a chat template that cannot be used, and ValueError
    for a number of API servers that is out of range.
    """
    log_to_stderr(logging.INFO)
    if config.max_waiting is None:
        config = dataclasses.replace(config, max_waiting=config.queue_limit)
    if config.num_hosts > 1:  # an engine's process that stands still keeps the other hosts waiting
        watchdog = settings.get("watchdog_seconds", ServerSettings.watchdog_seconds)
        settings["watchdog_seconds"] = watchdog and min(watchdog, config.host_timeout)
    names = (served_model_name,) if isinstance(served_model_name, str) else tuple(served_model_name or (config.model,))
    own = final_settings(names, api_keys, allowed_hosts, settings)
    if not 1 <= own.api_server_count <= MOST_FRONTS:
        raise ValueError(f"--api-server-count must be from 1 to {MOST_FRONTS}, got {own.api_server_count}")
    state = ServerState(own, EngineClient(), Metrics(own.model_name, own.metrics_prefix))
    state.models = OneModel(state, config.model)
    uvicorn_config = http_config(state)
    log_to_stdout()
    allow_files(own)
    if (listener := listen(own)) is None:
        return 1
    if not is_bundle(config.model):
        cpu_build.begin()  # builds missing CPU kernels while the engine's process is still importing JAX
    with listener, EngineProcess(config, engine_class, engine) as process:
        if own.api_server_count == 1:
            served = ServedModel(state, OwnEngine(process), config)
            server = ApiServer(uvicorn_config, state, served, shares_listener=own.fd is not None)
            server.run(sockets=[listener])
            failure = server.failure
        else:
            launch = ApiServerLaunch(
                config=dataclasses.asdict(config),
                settings=dataclasses.asdict(own),
                socket_path=process.socket_path,
                shared=str(process.shared),
                created=state.created,
                shares_listener=own.fd is not None,
                count=own.api_server_count,
                listener=listener.fileno(),
            )
            failure = serve_api_servers(launch, process)
    if failure is not None:
        say(f"jaxserve: {failure}")
        return 1
    return 0


def final_settings(
    names: tuple[str, ...], api_keys: Sequence[str], allowed_hosts: Sequence[str], given: Mapping[str, Any]
) -> ServerSettings:
    """The settings in their final form; see `ServerSettings`. Raises what `serve` raises for them."""
    own = ServerSettings(model_names=names, **given)
    own = dataclasses.replace(
        own,
        api_keys=(*map(ApiKey, api_keys), *(read_keys(own.api_key_file) if own.api_key_file else ())),
        chat_template=None if own.chat_template is None else read_chat_template(own.chat_template),
        hosts=tuple(allowed_hosts) if is_local(own.host if own.fd is None else _host_of(own.fd)) else None,
    )
    check_variables(own.default_chat_template_kwargs, "default_chat_template_kwargs")
    check_settings(own)
    return own


def listen(own: ServerSettings) -> socket.socket | None:
    """The listening socket; None, after telling why, if there cannot be one."""
    try:
        return bind(own.host, own.port) if own.fd is None else socket.socket(fileno=own.fd)
    except (OSError, OverflowError) as error:  # OverflowError: of a port above 65,535
        where = f"{own.host}:{own.port}" if own.fd is None else f"file descriptor {own.fd}"
        why = getattr(error, "strerror", None) or error
        say(f"jaxserve: cannot listen on {where}: {why}")
        return None


def _host_of(fd: int) -> str:
    """The address that an inherited socket listens on; "" for a unix socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
        if listener.family != socket.AF_UNIX:
            return listener.getsockname()[0]
    return ""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError if the address is in use or does not belong to this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
