"""The other hosts of a replica: they load the model, then run what the first host tells them to."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from jaxserve.config import EngineConfig
from jaxserve.engine.held_weights import HeldWeights
from jaxserve.engine.loading import load_runners
from jaxserve.execution import runner_commands
from jaxserve.hosts.host_environment import found_hosts
from jaxserve.hosts.other_host import OtherHost
from jaxserve.hosts.start_jax import start_jax, stop_jax

log = logging.getLogger(__name__)


def follow(config: EngineConfig) -> int:
    """Follows the first host until it has finished; then returns the process's exit code, 0. Must run in the main
    thread, before JAX has looked for devices.

    Ends the process with exit code 1 if the replica ends for another reason. The first SIGTERM or SIGINT is only noted,
    because a job manager sends it to all hosts, and the first host may still have answers to finish. Raises
    ConfigError, CheckpointError or HostError if this host cannot join.
    """
    config = found_hosts(config)
    host = OtherHost(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _note)
    host.wait_start()
    try:
        runners, held = load_runners(start_jax(config))
        runners[0].watcher = host.digests.add
        host.compiles = lambda: any(runner.compiling for runner in runners)
        host.busy = False
        for call in host.calls():
            command = runner_commands.decode(call.command)
            host.busy = isinstance(command, runner_commands.Long)
            target = [*runners, held][call.runner]
            if isinstance(command, runner_commands.Answered):
                host.answer(*_attempt(target, command))
            else:
                target.run(command)
    except (ValueError, OSError) as error:
        host.fail(str(error))
    except Exception as error:
        log.exception("host %d failed", config.host_id)
        host.fail(f"{type(error).__name__}: {error}")
    stop_jax()
    return 0


def _attempt(held: HeldWeights, command: runner_commands.Answered) -> tuple[dict[str, str], str | None]:
    """What a call that may fail returns, and why it has failed; None: it has not."""
    try:
        return held.run(command) or {}, None
    except Exception as error:
        log.warning("the weights cannot be replaced: %s", error)
        return {}, str(error) or type(error).__name__


def leave(code: int) -> NoReturn:
    """Ends the process without JAX's own farewell, which would wait for the other hosts."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _note(number: int, frame: FrameType | None) -> None:
    """The first signal waits for the first host, the second ends the process."""
    log.warning("the first host decides when this one ends; a second signal ends it at once")
    signal.signal(number, signal.SIG_DFL)
