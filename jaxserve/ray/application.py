"""The deployments of Ray Serve: fronts, and the replicas behind them."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from jaxserve.ray.front import Front
from jaxserve.ray.replica import Replica, reserved
from jaxserve.ray.settings import RaySettings

_STOP_SECONDS = 15.0  # for a replica to end, beyond the time for its requests


def build(settings: RaySettings) -> serve.Application:
    """The application. Deploying it again with other settings replaces the replicas one after the other."""
    options: dict[str, Any] = {
        "max_ongoing_requests": settings.max_requests,
        "graceful_shutdown_timeout_s": settings.drain_seconds + _STOP_SECONDS,
        "graceful_shutdown_wait_loop_s": min(1.0, settings.drain_seconds),
        "ray_actor_options": reserved(settings),
    }
    if settings.min_replicas == settings.max_replicas:
        options["num_replicas"] = settings.max_replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target_requests,
            upscale_delay_s=settings.upscale_delay,
            downscale_delay_s=settings.downscale_delay,
            look_back_period_s=settings.look_back,
            policy=AutoscalingPolicy(
                policy_function="jaxserve.ray.scaling:LoadPolicy",
                policy_kwargs={
                    "target_requests": settings.target_requests,
                    "target_kv_usage": settings.target_kv_usage,
                },
            ),
        )
    if settings.routing == "prefix":
        options["request_router_config"] = RequestRouterConfig(
            request_router_class="jaxserve.ray.routing:PrefixRouter",
            request_router_kwargs={"load_factor": settings.load_factor, "load_slack": settings.load_slack},
        )
    if settings.hosts > 1:
        bundle = {"CPU": settings.cpus, "GPU": settings.gpus, **settings.resources}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        options["placement_group_bundles"] = [bundle] * settings.hosts
        options["placement_group_strategy"] = "STRICT_SPREAD"
    replicas = serve.deployment(Replica, name="replica", **options).bind(settings)
    front = serve.deployment(
        Front,
        name="front",
        num_replicas=settings.fronts,
        max_ongoing_requests=settings.max_requests * settings.max_replicas,
        graceful_shutdown_timeout_s=settings.drain_seconds + _STOP_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas, settings.max_body_bytes)


def deploy(settings: RaySettings, address: str, host: str, port: int) -> None:
    """Deploys the application on the cluster at `address` and returns when it serves. Raises RuntimeError if it does
    not start. `host` and `port`: where Serve listens on every node, if it does not run there yet."""
    import ray

    try:
        ray.init(address, log_to_driver=False)
    except ConnectionError as error:
        raise RuntimeError(f"no Ray cluster at {address!r} ({error}); `ray start --head` starts one") from None
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    serve.run(build(settings), name=settings.name, route_prefix=settings.route_prefix)
