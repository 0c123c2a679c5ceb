"""The settings of replicas on a Ray cluster, and the file that `jaxserve ray deploy` reads them from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is deployed, and how many replicas of it.

    Attributes:
      model: a folder that every node has, a hub id, or "demo".
      flags: further arguments of `jaxserve serve`, as on a command line; the address is not among them.
      environment: environment variables of the replicas' processes.
      name: the application's name in Ray Serve, which its metrics carry.
      route_prefix: path below which the application is served.
      min_replicas, max_replicas: bounds of autoscaling; with equal numbers there is none.
      target_requests: mean number of requests of a replica, running and waiting, that autoscaling aims at.
      target_kv_usage: mean share of a replica's KV pages in use that autoscaling aims at most at.
      upscale_delay, downscale_delay: seconds for which more or fewer replicas must be wanted before they are.
      look_back: seconds over which autoscaling averages; more than 10, the time between two reports of a replica.
      max_requests: most requests at a time that a replica is given; further ones wait outside.
      hosts: hosts of one replica; each is on a node of its own.
      cpus, gpus, resources: what Ray reserves on each host of a replica.
      fronts: processes that read requests and choose their replicas.
      routing: "prefix": a replica that has seen the beginning of the prompt, within a bound on its load; "load": one
        with few requests.
      load_factor, load_slack: prefix routing gives a replica at most load_factor times the mean number of requests,
        plus load_slack.
      drain_seconds: time for a replica's requests to finish before the replica is stopped.
      max_body_bytes: longest request body.
    """

    model: str
    flags: list[str] = []
    environment: dict[str, str] = {}
    name: str = "jaxserve"
    route_prefix: str = "/"
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float = 64.0
    target_kv_usage: float = 0.8
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    look_back: float = 30.0
    max_requests: int = 1024
    hosts: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = {}
    fronts: int = 1
    routing: Literal["prefix", "load"] = "prefix"
    load_factor: float = 1.25
    load_slack: int = 8
    drain_seconds: float = 30.0
    max_body_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        limits = {  # name -> (lowest, highest) value
            "max_replicas": (1, None), "min_replicas": (0, self.max_replicas), "target_requests": (0.001, None),
            "target_kv_usage": (0.001, 1), "upscale_delay": (0, None), "downscale_delay": (0, None),
            "look_back": (10.001, None), "max_requests": (1, None), "hosts": (1, None), "cpus": (0, None),
            "gpus": (0, None), "fronts": (1, None), "load_factor": (1, None), "load_slack": (0, None),
            "drain_seconds": (0, None), "max_body_bytes": (1, None),
        }  # fmt: skip
        for name, (lowest, highest) in limits.items():
            value = getattr(self, name)
            if value < lowest or (highest is not None and value > highest):
                bounds = f"at least {lowest}" if highest is None else f"between {lowest} and {highest}"
                raise ValueError(f"{name} must be {bounds}, got {value}")
        if not self.route_prefix.startswith("/"):
            raise ValueError(f"route_prefix must begin with /, got {self.route_prefix!r}")
        for flag in self.flags:
            if flag.partition("=")[0] in _OWN_FLAGS:
                raise ValueError(f"flags must not hold {flag.partition('=')[0]}, which a replica sets itself")
        if any(flag.partition("=")[0] == "--metrics-key" for flag in self.flags):
            raise ValueError("flags must not hold --metrics-key; give JAXSERVE_METRICS_KEY in environment")


_OWN_FLAGS = {
    "--host", "--port", "--fd", "--ssl-certfile", "--ssl-keyfile", "--coordinator", "--num-hosts", "--host-id",
    "--command-port", "--drain-seconds", "--max-body-bytes",
}  # fmt: skip


def settings_of(given: dict[str, Any]) -> RaySettings:
    """Raises ValueError with the name of a setting that is unknown or has a wrong value."""
    try:
        # Values on the command line of `serve run` are texts.
        return msgspec.convert(given, RaySettings, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"the settings of the Ray application: {error}") from None


def read_settings(path: Path) -> RaySettings:
    """The settings in a file of YAML. Raises OSError, or ValueError if they cannot be used."""
    import yaml

    try:
        given = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} must hold names and values, such as `model: demo`")
    return settings_of(given)
