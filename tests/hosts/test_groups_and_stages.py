"""Groups of devices with their own sequences, and pipelines, over several hosts as real processes: the answers of one
process with as many devices, until a host is lost."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import SIZES, answers
from processes import Replica, expected
from serving import free_port

from jaxserve.llm import LLM

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
slow = pytest.mark.slow
EXPERTS = "qwen3_moe_plain"
LATENT = "deepseek_v3_groups"
DENSE = "tp_gqa"
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
ASKING = str(Path(__file__).parent / "asking.py")


@pytest.fixture
def start_replica(model_folders, tmp_path):
    started = []

    def start(case: str | Path, **settings: Any) -> Replica:
        folder = case if isinstance(case, Path) else model_folders(case)
        replica = Replica(folder, tmp_path, **settings)
        started.append(replica)
        return replica

    yield start
    for replica in started:
        replica.stop()


def answers_of_hosts(replica: Replica, folder: Path, count: int, settings: dict[str, Any]) -> list[Any]:
    """The first host's answers if all hosts ask the same as scripts, and the commands that it told, counted."""
    ports = {"coordinator": f"127.0.0.1:{free_port()}", "command_port": free_port(), "num_hosts": count}
    given = json.dumps([str(folder), settings | ports])
    hosts = [replica.run([sys.executable, ASKING, given, str(i)]) for i in range(count)]
    assert [host.wait(240) for host in hosts] == [0] * count, replica.said()
    (found,) = (line for line in hosts[0].said().splitlines() if line.startswith("answers "))
    return json.loads(found.removeprefix("answers "))


def commands_of_same(
    start_replica, model_folders, case: str, count: int, devices: int, options: dict[str, Any]
) -> dict[str, int]:
    """Asserts that hosts answer as one process does. Returns the first host's commands, counted."""
    folder = model_folders(case)
    replica = start_replica(case, count=count, devices=devices)
    settings = SIZES | options
    found, told = answers_of_hosts(replica, folder, count, settings)
    alone = answers(LLM(str(folder), **settings))
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in alone]
    for mine, other in zip(found, alone, strict=True):
        for some, others in zip(mine[1:], other[1:], strict=True):
            np.testing.assert_allclose(some, others, atol=1e-3)
    return told


def groups(count: int, devices: int = 1, whole: bool = False) -> dict[str, Any]:
    return {"data_parallel_size": count, "tensor_parallel_size": devices, "enable_expert_parallel": whole}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "hosts", "devices", "options"),
    [
        (LATENT, 2, 1, groups(2, 1, whole=True)),
        pytest.param(EXPERTS, 2, 1, groups(2), marks=slow),
        pytest.param(EXPERTS, 2, 2, groups(2, 2), marks=slow),
        pytest.param(LATENT, 2, 2, groups(4, 1, whole=True), marks=slow),
        pytest.param(DENSE, 4, 1, groups(2, 2), marks=slow),
        pytest.param(EXPERTS, 4, 1, groups(4, 1, whole=True), marks=slow),
    ],
)
def test_groups(start_replica, model_folders, case, hosts, devices, options):
    commands_of_same(start_replica, model_folders, case, hosts, devices, options)


def stages(count: int, devices: int = 1, **others: Any) -> dict[str, Any]:
    return {"pipeline_parallel_size": count, "tensor_parallel_size": devices} | others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "hosts", "devices", "options"),
    [
        (DENSE, 2, 1, stages(2)),
        pytest.param(DENSE, 2, 2, stages(2, 2), marks=slow),
        pytest.param(DENSE, 4, 1, stages(2, 2), marks=slow),
        pytest.param(EXPERTS, 2, 2, stages(2, 2, enable_expert_parallel=True), marks=slow),
        pytest.param(LATENT, 2, 2, stages(2, 2, decode_context_parallel_size=2), marks=slow),
        pytest.param(LATENT, 3, 1, stages(3), marks=slow),
        pytest.param(LATENT, 3, 1, stages(3, async_scheduling=False), marks=slow),
        pytest.param(DENSE, 2, 1, stages(2, speculative_config=LOOKUP), marks=slow),
        pytest.param(LATENT, 3, 1, stages(3, speculative_config=LOOKUP), marks=slow),
    ],
)
def test_stages(start_replica, model_folders, case, hosts, devices, options):
    """There are as many sequences as stages or more, so tokens seldom have to be fetched from the last stage early."""
    told = commands_of_same(start_replica, model_folders, case, hosts, devices, options)
    assert told["TakeAll"] < told["Step"] / 3 or {"async_scheduling", "speculative_config"} & set(options)
    assert (told["proposals"] > 20) == ("speculative_config" in options)


@pytest.mark.slow
@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "own"),
    [(2, {"data_parallel_size": 2}), (2, {"pipeline_parallel_size": 2}), (3, {"pipeline_parallel_size": 3})],
)
def test_a_server(start_replica, deep_folders, tmp_path, count, own):
    """Another checkpoint is refused. A host that is killed or stopped ends the replica, which starts again."""
    folder = deep_folders("llama3_gqa", 3)
    replica = start_replica(folder, count=count, engine_restarts=2, host_timeout=6, **own)
    replica.start(0)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    stranger = replica.start(1, folder=other)
    assert stranger.wait(60) == 1
    assert "its checkpoint (model.safetensors) is" in stranger.said()
    answers = expected(folder, 1, **own)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        hosts = [replica.start(host_id) for host_id in range(1, count)]
        replica.wait_ready(300)
        assert replica.answers() == answers
        error, seconds = replica.error_when(partial(hosts[-1].signal_all, number))
        assert f"host {count - 1} (127.0.0.1) is lost" in error
        assert seconds < 30
        hosts[-1].signal_all(signal.SIGKILL)
        for host in hosts[:-1]:
            assert host.wait(20) == 1
            assert f"host {count - 1} (127.0.0.1) is lost" in host.said()
    hosts = [replica.start(host_id) for host_id in range(1, count)]
    replica.wait_ready(300)
    for host in (replica.hosts[0], *hosts):
        host.process.send_signal(signal.SIGTERM)
    assert [host.wait(30) for host in (replica.hosts[0], *hosts)] == [0] * count, replica.said()
