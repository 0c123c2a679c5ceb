"""Replicas on a real Ray cluster: two nodes as processes of this machine, the demo model on CPU, real HTTP clients."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from serving import SMALL, free_port, wait_until

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'jaxserve[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]
FLAGS = [
    *(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "forbid_compile"),
    "--no-access-log",
]
TOKENS = 40
PROMPTS = ["def add(a, b):", "import os\n", "class Stack:\n", "for i in range(10):\n"]


@dataclass
class Cluster:
    """A Ray cluster on which applications can be deployed."""

    address: str
    url: str
    folder: Path

    def deploy(self, **settings) -> None:
        """Deploys by the command, and returns when the application serves."""
        config = self.folder / "config.yaml"
        config.write_text(json.dumps({"model": "demo", "flags": FLAGS, **settings}))  # JSON is YAML
        command = [sys.executable, "-m", "jaxserve", "ray", "deploy", str(config), "--address", self.address]
        done = subprocess.run(
            [*command, "--port", self.url.rpartition(":")[2]], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert f"at {self.url}/" in done.stdout

    def replicas(self) -> int:
        """How many replicas are running."""
        from ray import serve

        return serve.status().applications["jaxserve"].deployments["replica"].replica_states.get("RUNNING", 0)

    def prefix_hits(self) -> np.ndarray:
        """Tokens found in the prefix caches of all replicas, and tokens looked up."""
        names = "prefix_cache_hits_total", "prefix_cache_queries_total"
        return np.array([sum(self.metric(name).values()) for name in names])

    def metric(self, name: str, key: str = "none") -> dict[str, float]:
        """A metric of each replica."""
        text = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {key}"}, timeout=30).text
        return {
            found[1]: float(found[2])
            for found in re.finditer(rf'^jaxserve:{name}{{replica="(\w+)".*?}} (\S+)$', text, re.MULTILINE)
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    from ray import serve
    from ray.cluster_utils import Cluster as Nodes

    folder = tmp_path_factory.mktemp("ray")
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"  # one device, one thread
    )
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=2)
        nodes.wait_for_nodes()
        ray.init(nodes.address, log_to_driver=False)
        yield Cluster(nodes.address, f"http://127.0.0.1:{free_port()}", folder)
        serve.shutdown()
        ray.shutdown()
    finally:
        nodes.shutdown()


@dataclass
class Answer:
    """What a client got: the replica that answered, the text, and the error if there was one."""

    prompt: str
    replica: str | None = None
    text: str = ""
    finished: bool = False
    error: str | None = None


async def ask(client: httpx.AsyncClient, prompt: str) -> Answer:
    """Streams a completion. A connection that breaks counts as no answer: neither finished nor an error."""
    answer = Answer(prompt)
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            answer.replica = reply.headers.get("x-jaxserve-replica")
            if reply.status_code != 200:
                answer.error = (await reply.aread()).decode()
                return answer
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    answer.finished = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.error = event["error"]["message"]
                else:
                    answer.text += "".join(choice["text"] for choice in event["choices"])
    except httpx.HTTPError as error:
        print("a connection broke:", repr(error))
    return answer


class Load:
    """Clients that send one request after the other until they are stopped."""

    def __init__(self, url: str, clients: int):
        self.answers: list[Answer] = []
        self._stop = False
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=clients))
        self._tasks = [asyncio.ensure_future(self._run(i)) for i in range(clients)]

    async def _run(self, client: int) -> None:
        turn = client
        while not self._stop:
            self.answers.append(await ask(self._http, PROMPTS[turn % len(PROMPTS)]))
            turn += 1

    def latest(self, count: int) -> Counter[str | None]:
        """How many of the latest answers came from each replica."""
        return Counter(answer.replica for answer in self.answers[-count:])

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < deadline, f"timed out after {len(self.answers)} answers"
            await asyncio.sleep(0.5)

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()


def children_of_replicas() -> list[tuple[int, int]]:
    """The process of each server that a replica started, and the replica's own."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if b"jaxserve.ray.child" in command and command[command.index(b"jaxserve.ray.child") + 1] == b"%d" % parent:
            found.append((int(folder.name), parent))
    return found


def is_running(process: int) -> bool:
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_is_lost_but_what_a_killed_replica_was_answering(cluster):
    """1 → 3 replicas under load, one of them killed, 1,000 streams and more, and back to 1."""
    cluster.deploy(
        max_replicas=3, target_requests=8, upscale_delay=1, downscale_delay=5, look_back=11, drain_seconds=20
    )
    assert cluster.replicas() == 1

    async def run() -> tuple[list[Answer], list[Answer]]:
        load = Load(cluster.url, clients=40)
        await load.until(lambda: cluster.replicas() == 3, 240)
        print(len(load.answers), "answers when three replicas ran")
        await load.until(lambda: sum(count > 20 for count in load.latest(150).values()) == 3, 90)
        server, replica = random.Random(0).choice(children_of_replicas())
        os.kill(replica, signal.SIGKILL)
        killed_at = len(load.answers)
        await load.until(lambda: not is_running(server), 10)  # nothing is left behind
        await load.until(lambda: len(load.answers) >= max(1000, killed_at + 200), 400)
        await load.stop()
        trickle = Load(cluster.url, clients=2)
        await trickle.until(lambda: cluster.replicas() == 1, 120)
        await trickle.stop()
        return load.answers, trickle.answers

    answers, late = asyncio.run(run())
    failed = [answer for answer in answers if not answer.finished or answer.error]
    print(len(answers), "answers,", len(failed), "failed;", Counter(answer.replica for answer in answers))
    print(len(late), "answers while replicas were stopped")
    assert len({answer.replica for answer in failed}) == 1  # the killed one's
    assert all(answer.error for answer in failed)
    assert len(failed) <= 40
    assert all(answer.finished and not answer.error for answer in late)
    texts = {(answer.prompt, answer.text) for answer in answers + late if not answer.error}
    assert len(texts) == len(PROMPTS)  # every replica gives the same answers
    wait_until(lambda: len(children_of_replicas()) == 1, 40)


LINES = [f"name_{i} = {i * 7919 % 10007}\n" for i in range(400)]
BEGINNINGS = ["".join(random.Random(group).sample(LINES, 14)) for group in range(12)]


async def ask_with_shared_beginnings(url: str) -> None:
    """240 short requests by four clients; each prompt begins with one of BEGINNINGS."""
    draw = random.Random(3)

    async def client(http: httpx.AsyncClient) -> None:
        for _ in range(60):
            prompt = f"{draw.choice(BEGINNINGS)}# {draw.random()}\n"
            (await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})).raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await asyncio.gather(*(client(http) for _ in range(4)))


def test_routing_by_prefix_finds_twice_as_many_cached_tokens(cluster):
    """12 beginnings of some 140 tokens on three replicas, each with 26 pages of 16 tokens."""
    rates = {}
    for routing in ("load", "prefix"):
        cluster.deploy(min_replicas=3, max_replicas=3, routing=routing)
        before = cluster.prefix_hits()
        asyncio.run(ask_with_shared_beginnings(cluster.url))
        hits, queries = cluster.prefix_hits() - before
        rates[routing] = hits / queries
    print("hit rates:", rates)
    assert rates["prefix"] >= 2 * rates["load"]


def test_what_concerns_all_replicas_reaches_all(cluster):
    """Stored responses are found on whichever replica has them; administrators change all replicas."""
    keys = {"JAXSERVE_ADMIN_KEY": "boss", "JAXSERVE_API_KEY": "me"}
    cluster.deploy(min_replicas=2, max_replicas=2, environment=keys)
    with httpx.Client(base_url=cluster.url, timeout=60, headers={"Authorization": "Bearer me"}) as client:
        for turn in range(4):
            body = {"model": "demo", "input": f"turn {turn}", "max_output_tokens": 16}
            first = client.post("/v1/responses", json=body)
            assert first.status_code == 200, first.text
            name = first.json()["id"]
            assert client.get(f"/v1/responses/{name}").json()["id"] == name
            more = client.post("/v1/responses", json=body | {"previous_response_id": name})
            assert more.status_code == 200, more.text
            assert more.headers["x-jaxserve-replica"] == first.headers["x-jaxserve-replica"]
        assert client.get("/v1/responses/resp_missing").status_code == 404
        admin = {"Authorization": "Bearer boss", "Content-Type": "application/json"}
        assert client.post("/reset_prefix_cache", headers=admin, content="{}").status_code == 200
        assert client.post("/reset_prefix_cache", headers=admin | {"Authorization": "Bearer me"}).status_code == 401
        assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert client.post("/v1/completions", json=[]).status_code == 400
        assert len(cluster.metric("num_requests_running", "me")) == 2
        assert not cluster.metric("num_requests_running")  # without the key

        before = sum(cluster.metric("generation_tokens_total", "me").values())
        body = {"prompt": "a", "max_tokens": 200, "n": 8, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
        wait_until(lambda: not sum(cluster.metric("num_requests_running", "me").values()), 20)
        assert sum(cluster.metric("generation_tokens_total", "me").values()) - before < 1200  # of 1,600


def test_one_replica_on_two_nodes(cluster):
    """Each node has one of the replica's two hosts, and the answer is that of one host."""
    cluster.deploy(min_replicas=1, max_replicas=1)
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    alone = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    cluster.deploy(min_replicas=1, max_replicas=1, hosts=2)
    both = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert both == alone
    assert len(children_of_replicas()) == 2
