"""Ray Serve's router with our choice of a replica."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxserve.prefix_routing import PrefixTable
from jaxserve.ray.replica import Call


class PrefixRouter(RequestRouter):
    """Sends a call to the replica that has seen its prompt's beginning, within a bound on the replica's load.

    Every front has one, which knows what this front has sent and, from the replicas' replies, how many requests they
    have in all. Serve's own routing follows: a replica that is full or gone is passed over.
    """

    def initialize_state(self, load_factor: float, load_slack: int) -> None:  # type: ignore[override]
        """`request_router_kwargs` of the deployment."""
        self._table = PrefixTable(load_factor, load_slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then all others in case it is full."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        call: Call = pending_request.args[0]
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # A replica from which nothing was heard for a while counts as idle.
        cache = self.replica_queue_len_cache
        loads = {
            name: cache.get(replica.replica_id) or 0 for name, replica in names.items() if name not in call.avoid
        } or dict.fromkeys(names, 0)
        chosen = names.pop(self._table.choose(call.blocks, loads))
        return [[chosen], list(names.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.note(pending_request.args[0].blocks, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        for gone in self.curr_replicas.keys() - {replica.replica_id for replica in replicas}:
            self._table.forget(gone.unique_id)
        super().update_replicas(replicas)
