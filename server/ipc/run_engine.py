"""What runs in the engine's process: loads an engine and serves it."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import time
from pathlib import Path
from typing import Any

from jaxserve import heap
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.server.ipc import messages
from jaxserve.server.ipc.engine_server import TIDY_SECONDS, EngineServer

log = logging.getLogger("jaxserve.engine")

LAST_SECONDS = 3.0  # for an engine's own work once it is drained; the API server waits a little longer
DEFAULT_ENGINE = "jaxserve.engine.engine:Engine"


def run_engine(
    config: EngineConfig,
    socket_path: str,
    engine_class: str = DEFAULT_ENGINE,
    weights: messages.ServedWeights = messages.ServedWeights(),  # noqa: B008  (it is immutable)
) -> int:
    """Loads an engine and serves it on a unix socket until `EngineServer.run` returns. Returns an exit code.

    `weights`: those of an engine that has died, which this one replaces.

    `engine_class` is "module:Class"; the class has the interface `EngineLike` and a class method `load(config)`. The
    socket listens before anything is loaded, so that an API server can connect and learn why loading failed.
    """
    server = EngineServer(socket_path)
    try:
        engine = _load(config, engine_class, weights)
    except Exception as error:
        expected = isinstance(error, ConfigError | ValueError | OSError)
        if not expected:
            log.exception("the engine did not start")
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        if not server.fail(text):
            log.error("the engine did not start: %s", text)
        server.close()
        return 1
    pooler = getattr(engine, "pooler", None)
    pooling = {"task": pooler.task, "result_size": pooler.size, "score_prompt": pooler.prompt} if pooler else {}
    adapters = getattr(engine, "adapters", None)
    ready = messages.Ready(
        model_folder=str(engine.model_folder),
        tokenizer_folder=str(getattr(engine, "tokenizer_folder", engine.model_folder)),
        dtype=str(getattr(engine, "dtype", config.dtype)),
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=tuple(engine.eos_token_ids),
        page_size=engine.page_size,
        max_num_seqs=config.max_num_seqs,
        profile_dir=config.profile_dir,
        scheduling_policy=config.scheduling_policy,
        max_logprobs=config.max_logprobs,
        sees=getattr(engine, "sees", None),
        max_loras=config.max_loras if adapters else 0,
        adapters=adapters.registry.served if adapters else [],
        weights=weights,
        **pooling,
    )
    hosts = getattr(engine, "hosts", None)
    if hosts is not None:
        hosts.on_end = server.end_process
    copies = getattr(engine, "copies", None)
    if copies is not None and copies.role is not None:
        copies.role.notify = server.wake
    try:
        server.run(engine, ready)
    except Exception as error:
        log.exception("the engine failed")
        text = f"the engine failed: {type(error).__name__}: {error}"
        if hosts is not None:
            hosts.fail(text)
        server.fail(text, patience=0.0)
        server.close()
        return 1
    end = time.monotonic() + LAST_SECONDS
    while engine.idle() and time.monotonic() < end:
        time.sleep(TIDY_SECONDS)
    if hosts is not None:
        hosts.close()
    server.close()
    return 0


def _load(config: EngineConfig, engine_class: str, weights: messages.ServedWeights) -> Any:
    module, _, name = engine_class.partition(":")
    engine = getattr(importlib.import_module(module), name).load(config)
    if weights.path:
        engine.weights.update(Path(weights.path))
    engine.compile()  # before `Ready` is sent, so that no request waits for compilation
    _forget_traces()
    return engine


def _forget_traces() -> None:
    """Frees JAX's caches of traced programs, 17 MiB for a model of 28 layers: this process compiles nothing more.
    Compiled programs that are still referenced stay. `Engine.compile` has called `heap.freeze` before."""
    if "jax" in sys.modules:  # tests use engines without JAX
        sys.modules["jax"].clear_caches()
        gc.collect()
        heap.trim()
