"""How many replicas the load needs: Ray Serve's autoscaling by requests and by use of the KV caches."""

from __future__ import annotations

from typing import Any

KV_USAGE = "kv_usage"  # the metric that replicas report: the share of their KV pages in use


class LoadPolicy:
    """Wants enough replicas for both targets. Serve then applies bounds, delays and averages.

    target_requests: mean number of requests of a replica, running and waiting.
    target_kv_usage: mean share of KV pages in use. Pages that only hold cached prefixes do not count as used.
    """

    def __init__(self, target_requests: float, target_kv_usage: float):
        self._target_requests = target_requests
        self._target_kv_usage = target_kv_usage

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas wanted, and no state. `context`: ray.serve.config.AutoscalingContext."""
        usage = sum((context.aggregated_metrics or {}).get(KV_USAGE, {}).values())
        return max(context.total_num_requests / self._target_requests, usage / self._target_kv_usage), {}
