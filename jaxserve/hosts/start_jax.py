"""Makes the devices of all hosts one set of devices."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import jax

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.jax_versions import write_compile_cache_here
from jaxserve.devices.platforms import choose_platform
from jaxserve.hosts.host_environment import split_address
from jaxserve.hosts.messages import HostError

log = logging.getLogger(__name__)

JOIN_SECONDS = 300  # for all hosts to come
_LOCAL = ("127.0.0.1", "localhost", "::1")
SHUTDOWN_SECONDS = 5  # for all hosts to end


def start_jax(config: EngineConfig) -> EngineConfig:
    """Connects JAX's processes; returns the settings with the number of all devices. Must be called before JAX has
    looked for devices. Raises HostError, or ConfigError for settings that do not fit the devices."""
    assert config.coordinator is not None
    host, port = split_address(config.coordinator)
    choose_platform(config)
    # The notice of a preemption would replace our handlers of signals. Our own watch over the hosts is faster than
    # JAX's, and names the host.
    jax.config.update("jax_enable_preemption_service", False)
    leave_out_source_files()
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_hosts,
            config.host_id,
            cluster_detection_method="deactivate",
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=max(100, 5 * int(config.host_timeout)),
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            coordinator_bind_address=f"{host}:{port}" if host in _LOCAL else None,
        )
    except RuntimeError as error:
        raise HostError(f"JAX could not connect the hosts through {config.coordinator}: {error}") from error
    check_place(config, jax.process_index(), jax.process_count())
    total = jax.device_count()
    write_compile_cache_here()
    if jax.default_backend() == "gpu":
        # XLA divides the autotuning of a program among its hosts, and each waits (up to a day) for the others' results.
        # A host that finds the program in its cache sends none, and the cache of another host may lack it.
        jax.config.update("jax_enable_compilation_cache", False)
    return with_all_devices(config, total)


def leave_out_source_files() -> None:
    """Has kernels be compiled without the paths and lines of their source, which JAX and Triton store in them. Hosts
    with these files in different folders would have different programs, and GPUs that compile one wait for the hosts
    that have the same."""
    jax.config.update("jax_traceback_in_locations_limit", 0)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"


def check_place(config: EngineConfig, index: int, count: int) -> None:
    """Raises ConfigError unless the devices belong to hosts as the settings say. TPUs know their hosts by themselves:
    JAX numbers them as libtpu does, and VMs of no common slice do not see each other's devices."""
    if (index, count) != (config.host_id, config.num_hosts):
        raise ConfigError(
            f"host_id {config.host_id} of num_hosts {config.num_hosts} was given, but to its devices this is host "
            f"{index} of {count}: number the hosts of a TPU slice as TPU_WORKER_ID does, and start all of them"
        )


def with_all_devices(config: EngineConfig, total: int) -> EngineConfig:
    """The settings with a tensor_parallel_size that uses all `total` devices. Raises ConfigError if the given sizes
    leave some unused."""
    groups = config.data_parallel_size * config.pipeline_parallel_size
    size = total // groups if config.tensor_parallel_size == 1 else config.tensor_parallel_size
    if size * groups != total:
        raise ConfigError(
            f"several hosts must use all their devices: data_parallel_size {config.data_parallel_size} x "
            f"pipeline_parallel_size {config.pipeline_parallel_size} x tensor_parallel_size "
            f"{config.tensor_parallel_size} must be {total}, the number of all hosts' devices; by default "
            "tensor_parallel_size makes it so, if the others divide it"
        )
    return replace(config, tensor_parallel_size=size)


def stop_jax() -> None:
    """Disconnects JAX's processes, which must all call it within SHUTDOWN_SECONDS."""
    try:
        jax.distributed.shutdown()
    except RuntimeError as error:
        log.warning("JAX did not disconnect the hosts in order: %s", error)
