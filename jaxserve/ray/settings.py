"""The settings of replicas on a Ray cluster, and the file that `jaxserve ray deploy` reads them from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxserve.setting import at_least, between, check_settings, documented, setting, settings_of


@documented
@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """What is deployed, and how many replicas of it."""

    model: str = setting(MISSING, 'a folder that every node has, a hub id, or "demo"')
    flags: list[str] = setting([], "further arguments of `jaxserve serve`, but the address")
    environment: dict[str, str] = setting({}, "environment variables of the replicas' processes")
    name: str = setting("jaxserve", "the application's name in Ray Serve, which its metrics carry")
    route_prefix: str = setting("/", "path below which the application is served")
    min_replicas: int = setting(
        1, "fewest replicas", more="At most max_replicas; with equal numbers there is no autoscaling.", rule=at_least(0)
    )
    max_replicas: int = setting(1, "most replicas", rule=at_least(1))
    target_requests: float = setting(
        64.0, "mean number of requests of a replica, running and waiting, that autoscaling aims at",
        rule=at_least(0.001),
    )  # fmt: skip
    target_kv_usage: float = setting(
        0.8, "mean share of a replica's KV pages in use that autoscaling aims at most at", rule=between(0.001, 1)
    )
    upscale_delay: float = setting(
        10.0, "seconds for which more replicas must be wanted before there are more", rule=at_least(0.0)
    )
    downscale_delay: float = setting(
        300.0, "seconds for which fewer replicas must be wanted before there are fewer", rule=at_least(0.0)
    )
    look_back: float = setting(
        30.0, "seconds over which autoscaling averages; more than 10, the time between two reports of a replica",
        rule=at_least(10.001),
    )  # fmt: skip
    max_requests: int = setting(
        1024, "most requests at a time that a replica is given; further ones wait outside", rule=at_least(1)
    )
    hosts: int = setting(1, "hosts of one replica; each is on a node of its own", rule=at_least(1))
    cpus: float = setting(1.0, "processors that Ray reserves on each host of a replica", rule=at_least(0.0))
    gpus: float = setting(0.0, "GPUs that Ray reserves there", rule=at_least(0.0))
    resources: dict[str, float] = setting({}, "other resources that Ray reserves there, such as `{TPU: 4}`")
    fronts: int = setting(1, "processes that read requests and choose their replicas", rule=at_least(1))
    routing: Literal["prefix", "load"] = setting(
        "prefix", "prefix: a replica that has seen the beginning of the prompt, within a bound on its load; load: one "
        "with few requests",
    )  # fmt: skip
    load_factor: float = setting(
        1.25, "prefix routing gives a replica at most so many times the mean number of requests, plus load_slack",
        rule=at_least(1.0),
    )  # fmt: skip
    load_slack: int = setting(8, "requests; see load_factor", rule=at_least(0))
    drain_seconds: float = setting(
        30.0, "time for a replica's requests to finish before the replica is stopped", rule=at_least(0.0)
    )
    max_body_bytes: int = setting(32 * 2**20, "longest request body", rule=at_least(1))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RaySettings:
        """Raises ValueError with the name of a setting that is unknown or has a wrong value."""
        for name in given.keys() - settings_of(cls).keys():
            raise ValueError(f"the settings of the Ray application: unknown field `{name}`")
        try:
            # Values on the command line of `serve run` are texts.
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"the settings of the Ray application: {error}") from None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas must be between 0 and {self.max_replicas}, got {self.min_replicas}")
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


def read_settings(path: Path) -> RaySettings:
    """The settings in a file of YAML. Raises OSError, or ValueError if they cannot be used."""
    import yaml

    try:
        given = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} must hold names and values, such as `model: demo`")
    return RaySettings.of(given)
