"""The hosts of a replica as job managers describe them in the environment, and the hosts' secret."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxserve.config import AUTO_COORDINATOR, ConfigError, EngineConfig

SECRET = "JAXSERVE_HOST_SECRET"
SHORTEST_SECRET = 16  # bytes
PORT = 8476  # of the coordinator, where nothing else is said
_JOB_PORTS = range(61440, 65530, 2)  # of coordinators under Slurm, where jobs may share a host


class Group(NamedTuple):
    """What a job manager says: the coordinator's address, the number of hosts, and which of them this is."""

    coordinator: str
    num_hosts: int
    host_id: int


def found_hosts(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> EngineConfig:
    """The settings with the hosts of the environment, if the coordinator is "auto". Settings that differ from their
    defaults win. Raises ConfigError if the environment names no hosts."""
    if config.coordinator != AUTO_COORDINATOR:
        return config
    for reader in (_leader_worker_set, _tpu_pod, _slurm):
        try:
            group = reader(environment)
        except (KeyError, ValueError, IndexError) as error:
            raise ConfigError(f"the hosts of a replica cannot be read from the environment: {error!r}") from None
        if group is not None:
            count = group.num_hosts if config.num_hosts == 1 else config.num_hosts
            place = group.host_id if config.host_id == 0 else config.host_id
            if count == 1:
                return replace(config, coordinator=None)
            return replace(config, coordinator=group.coordinator, num_hosts=count, host_id=place)
    raise ConfigError(
        "coordinator auto needs the variables of a LeaderWorkerSet (LWS_LEADER_ADDRESS), of a TPU pod "
        "(TPU_WORKER_HOSTNAMES) or of Slurm (SLURM_STEP_NODELIST): give --coordinator, --num-hosts and --host-id"
    )


def _leader_worker_set(given: Mapping[str, str]) -> Group | None:
    """Kubernetes LeaderWorkerSet, https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables.
    The leader has index 0."""
    if "LWS_LEADER_ADDRESS" not in given:
        return None
    return Group(f"{given['LWS_LEADER_ADDRESS']}:{PORT}", int(given["LWS_GROUP_SIZE"]), int(given["LWS_WORKER_INDEX"]))


def _tpu_pod(given: Mapping[str, str]) -> Group | None:
    """TPU pod slices on GKE, whose device plugin sets the same variables as libtpu reads."""
    if "TPU_WORKER_HOSTNAMES" not in given:
        return None
    names = given["TPU_WORKER_HOSTNAMES"].split(",")
    return Group(f"{names[0].strip()}:{PORT}", len(names), int(given["TPU_WORKER_ID"]))


def _slurm(given: Mapping[str, str]) -> Group | None:
    """A step of Slurm with one task on each host, https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.
    The first name of a list such as "rack1-n[003-004,9]" is rack1-n003."""
    if "SLURM_STEP_NODELIST" not in given:
        return None
    first = re.fullmatch(r"([^\[,]+)(?:\[(\d+))?.*", given["SLURM_STEP_NODELIST"])
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={given['SLURM_STEP_NODELIST']}")
    port = _JOB_PORTS[int(given["SLURM_JOB_ID"]) % len(_JOB_PORTS)]
    name = first[1] + (first[2] or "")
    return Group(f"{name}:{port}", int(given["SLURM_STEP_NUM_TASKS"]), int(given["SLURM_PROCID"]))


def read_secret(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret that all hosts of the replica know. Raises ConfigError if there is none or it is too short."""
    if config.host_secret_file is not None:
        try:
            secret = Path(config.host_secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"host_secret_file {config.host_secret_file} cannot be read: {error.strerror}") from None
    else:
        secret = environment.get(SECRET, "").encode().strip()
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the hosts of a replica must share a secret of at least {SHORTEST_SECRET} bytes, got {len(secret)}: give "
            f"--host-secret-file or the environment variable {SECRET}"
        )
    return secret


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[address]:port"."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def command_address(config: EngineConfig) -> tuple[str, int]:
    """Where the other hosts connect to get the first host's commands."""
    assert config.coordinator is not None
    host, port = split_address(config.coordinator)
    return host, port + 1 if config.command_port is None else config.command_port


def listen_address(config: EngineConfig) -> tuple[str, int]:
    """Where the first host waits for them."""
    host, port = command_address(config)
    return config.command_host or host, port
