"""A replica: an actor of Ray Serve that starts `jaxserve serve` and passes requests to it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxserve.ray.child import ServeProcess
from jaxserve.ray.scaling import KV_USAGE
from jaxserve.ray.settings import RaySettings

_LOOK_SECONDS = 0.1  # between two looks whether the server is ready
_ANSWER_SECONDS = 10.0  # for the server's answers about itself
_EXIT_SECONDS = 10.0  # for the server's processes to end after their last request
_IDLE_SECONDS = 30.0  # for which a connection to the server is kept; the server closes it after 65
REPLICA_HEADER = "x-jaxserve-replica"  # tells clients which replica answered
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade"}
_NOT_SENT = _HOP_BY_HOP | {"content-length", "expect"}  # the HTTP client writes its own
_NOT_ANSWERED = _HOP_BY_HOP | {"date"}  # Serve writes its own


@dataclass(frozen=True)
class Call:
    """A request as fronts pass it to replicas.

    Attributes:
      target: the path and the query, as in the request line.
      blocks: the prompt's blocks, see `prefix_routing.prompt_blocks`.
      avoid: names of replicas to avoid while there are others.
    """

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    blocks: tuple[bytes, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Head:
    """The beginning of an answer. `replica`: the name of the one that gave it."""

    status: int
    headers: list[tuple[str, str]]
    replica: str

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers as ASGI wants them."""
        return [(name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in self.headers]

    @property
    def is_event_stream(self) -> bool:
        return any(name == b"content-type" and text.startswith(b"text/event-stream") for name, text in self.raw_headers)


class Replica:
    """The deployment's class. It is ready when its server is; what ends the server makes it unhealthy."""

    async def __init__(self, settings: RaySettings):  # type: ignore[misc]
        self._settings = settings
        self._name = serve.get_replica_context().replica_id.unique_id
        self._folder = tempfile.mkdtemp(prefix="jaxserve-ray-")
        path = os.path.join(self._folder, "http")
        # A server with API keys answers questions about its load with this key.
        given = {**os.environ, **settings.environment}
        self._monitor_key = given.get("JAXSERVE_METRICS_KEY") or secrets.token_urlsafe(32)
        environment = settings.environment | {"JAXSERVE_METRICS_KEY": self._monitor_key}
        arguments = [
            settings.model, *settings.flags, f"--drain-seconds={settings.drain_seconds}",
            f"--max-body-bytes={settings.max_body_bytes}", "--max-connections-per-address=0",
        ]  # fmt: skip
        self._others: list[Any] = []
        if settings.hosts > 1:
            more, secret = self._start_other_hosts(arguments)
            arguments += [*more, "--host-id=0"]
            environment |= {"JAXSERVE_HOST_SECRET": secret}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1024)
            descriptor = listener.fileno()
            self._server = ServeProcess([*arguments, f"--fd={descriptor}"], environment, [descriptor])
        connector = aiohttp.UnixConnector(path, limit=0, keepalive_timeout=_IDLE_SECONDS)
        self._http = aiohttp.ClientSession(
            "http://replica", connector=connector, timeout=aiohttp.ClientTimeout(), auto_decompress=False
        )
        while await self._status("/ready") != 200:
            self._require_server()
            await asyncio.sleep(_LOOK_SECONDS)

    def _start_other_hosts(self, arguments: list[str]) -> tuple[list[str], str]:
        """Starts the hosts behind the first, one in each further bundle of this replica's placement group. Returns the
        arguments that all hosts need, and the hosts' secret."""
        secret = secrets.token_urlsafe(32)
        with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
            ports = first.getsockname()[1], second.getsockname()[1]
        shared = [
            f"--coordinator={ray.util.get_node_ip_address()}:{ports[0]}", f"--command-port={ports[1]}",
            f"--num-hosts={self._settings.hosts}",
        ]  # fmt: skip
        group = ray.util.get_current_placement_group()
        for host in range(1, self._settings.hosts):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=host)
            actor = ray.remote(OtherHost).options(scheduling_strategy=place, **reserved(self._settings))
            environment = self._settings.environment | {"JAXSERVE_HOST_SECRET": secret}
            self._others.append(actor.remote([*arguments, *shared, f"--host-id={host}"], environment))
        return shared, secret

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """The head of the server's answer, then its body as it comes. An abandoned call ends the request."""
        async with self._send(call) as reply:
            headers = [(name, value) for name, value in reply.headers.items() if name.lower() not in _NOT_ANSWERED]
            yield Head(reply.status, [*headers, (REPLICA_HEADER, self._name)], self._name)
            async for chunk in reply.content.iter_any():
                yield chunk

    async def whole_answer(self, call: Call) -> tuple[Head, bytes]:
        """The same for a short answer, at once. Fronts send such calls to all replicas."""
        parts = [part async for part in self.answer(call)]
        return parts[0], b"".join(parts[1:])  # type: ignore[return-value,arg-type]

    def _send(self, call: Call) -> Any:
        headers = [(name, value) for name, value in call.headers if name.lower() not in _NOT_SENT]
        return self._http.request(call.method, call.target, headers=headers, data=call.body or None)

    async def _status(self, path: str) -> int | None:
        """The status of the server's answer; None without an answer."""
        try:
            timeout = aiohttp.ClientTimeout(_ANSWER_SECONDS)
            async with self._http.get(path, timeout=timeout) as reply:
                return reply.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    def _require_server(self) -> None:
        if not self._server.runs:
            raise RuntimeError(f"jaxserve serve has ended:\n{self._server.last_lines}")

    async def check_health(self) -> None:
        """Serve calls this every few seconds, and replaces the replica if it fails repeatedly. While the server itself
        starts its engine again, the replica stays."""
        self._require_server()
        if await self._status("/health") is None:
            raise RuntimeError(f"jaxserve serve has not answered within {_ANSWER_SECONDS:g} s")
        await asyncio.gather(*(other.check_health.remote() for other in self._others))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this where autoscaling is on."""
        key = {"Authorization": f"Bearer {self._monitor_key}"}
        timeout = aiohttp.ClientTimeout(_ANSWER_SECONDS)
        async with self._http.get("/metrics", headers=key, timeout=timeout, raise_for_status=True) as reply:
            text = await reply.text()
        for line in text.splitlines():
            if ":kv_cache_usage_perc{" in line:
                return {KV_USAGE: float(line.rpartition(" ")[2])}
        return {KV_USAGE: 0.0}  # no engine so far

    async def __del__(self) -> None:
        """Serve calls this when the replica's last request has ended."""
        await self._server.stop(self._settings.drain_seconds + _EXIT_SECONDS)
        await self._http.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class OtherHost:
    """An actor on a host behind the first one of a replica. It ends with the replica that owns it."""

    def __init__(self, arguments: list[str], environment: dict[str, str]):
        self._start = lambda: ServeProcess(arguments, environment)
        self._server = self._start()

    def check_health(self) -> None:
        """Starts a server that has ended again: it has when the first host's engine did, which starts again, too."""
        if not self._server.runs:
            self._server = self._start()


def reserved(settings: RaySettings) -> dict[str, Any]:
    """What Ray reserves for an actor on one host, as options of the actor."""
    return {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "resources": dict(settings.resources)}
