"""One replica over several hosts, as real processes: its answers are those of one process, and it ends as a whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from adapter_folders import save_adapter
from processes import SIZES, Replica, bodies, expected
from serving import free_port, wait_until

from jaxserve.llm import LLM
from jaxserve.offline import LoRARequest
from jaxserve.types import SamplingParams

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
CASE = "tp_gqa"


@pytest.fixture
def start_replica(model_folders, tmp_path):
    started = []

    def start(**settings) -> Replica:
        replica = Replica(model_folders(settings.pop("case", CASE)), tmp_path, **settings)
        started.append(replica)
        return replica

    yield start
    for replica in started:
        replica.stop()


def other_checkpoint(folder: Path, target: Path) -> Path:
    """A model with the same shapes, one of whose weights differs."""
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return target


@pytest.mark.slow
def test_from_start_to_end(start_replica, model_folders, tmp_path):
    """Hosts that do not fit are refused, and one that comes late is waited for. Together they answer as one process
    does, also after they have slept, until one is killed. Another takes its place, until it stands still."""
    replica = start_replica(engine_restarts=1, host_timeout=5, admin_key="admin")
    first = replica.start(0)
    other = other_checkpoint(model_folders(CASE), tmp_path / "other")
    refused = [
        (replica.start(1, secret="another secret of these hosts"), "it has another secret"),
        (replica.start(1, folder=other), "its checkpoint (model.safetensors) is"),
    ]
    for host, reason in refused:
        assert host.wait(60) == 1
        assert reason in host.said()
    assert "it has another secret" in first.said()
    assert "host 1 does not fit: its checkpoint (model.safetensors) is" in first.said()
    second = replica.start(1)
    replica.wait_ready()
    twin = replica.start(1)
    answers = replica.answers()
    assert answers == expected(model_folders(CASE), 2)
    assert twin.wait(60) == 1
    assert "host 1 is here already, at 127.0.0.1" in twin.said()
    assert replica.answers() == answers
    for path in ("/sleep", "/wake_up", "/sleep?level=2", "/wake_up"):
        assert httpx.post(replica.url + path, headers={"Authorization": "Bearer admin"}, timeout=60).status_code == 200
    assert replica.answers() == answers
    error, seconds = replica.error_when(second.process.kill)
    assert "host 1 (127.0.0.1) is lost: its process has ended" in error
    assert seconds < 10
    third = replica.start(1)
    replica.wait_ready()
    assert replica.answers() == answers
    error, seconds = replica.error_when(lambda: third.signal_all(signal.SIGSTOP))
    assert "host 1 (127.0.0.1) is lost: it has been silent for 5 s" in error
    assert seconds < 20
    assert first.wait(20) == 1
    assert "the engine died 2 times" in first.said()
    third.signal_all(signal.SIGCONT)
    assert third.wait(20) != 0


@pytest.mark.slow
def test_stopping_in_order(start_replica):
    """A job manager signals all hosts at once. Requests are still answered."""
    replica = start_replica()
    first = replica.start(0)
    second = replica.start(1)
    replica.wait_ready()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(replica.ask, bodies(100)[0])
        time.sleep(0.3)
        for host in (first, second):
            host.process.send_signal(signal.SIGTERM)
        assert answer.result().json()["usage"]["completion_tokens"] == 100
    assert first.wait() == second.wait() == 0, replica.said()


@pytest.mark.slow
def test_a_killed_first_host(start_replica):
    replica = start_replica(engine_restarts=0)
    first = replica.start(0)
    second = replica.start(1)
    replica.wait_ready()
    _, seconds = replica.error_when(lambda: os.kill(first.engine(), signal.SIGKILL))
    assert seconds < 10
    assert second.wait(10) != 0
    assert "host 1 ends: the first host (127.0.0.1:" in second.said()
    assert "is lost: its process has ended" in second.said()
    assert first.wait(30) == 1


SCRIPT = """
import json, sys
from jaxserve.llm import LLM
from jaxserve.offline import LoRARequest
from jaxserve.types import SamplingParams
model, prompts, settings, adapter = json.loads(sys.argv[1])
llm = LLM(model, **settings, num_hosts=2, host_id=int(sys.argv[2].partition("=")[2]))
options = {"progress": False, "lora_request": adapter and LoRARequest("a", 1, adapter)}
for prompt in prompts:
    found = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=12), **options)
    print(json.dumps(found[0].outputs[0].token_ids), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "own"),
    [
        (CASE, {"quantization": "int8"}),
        (CASE, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        (CASE, {"speculative_config": {"method": "draft_model", "model": CASE, "num_speculative_tokens": 3}}),
        (CASE, {"enable_lora": True}),
        ("qwen3_moe_plain", {}),
        ("qwen3_moe_plain", {"enable_expert_parallel": True}),
        ("deepseek_v2_lite", {}),
        ("deepseek_v2_lite", {"decode_context_parallel_size": 2}),
    ],
)
def test_llm(start_replica, model_folders, tmp_path, case, own):
    """All hosts run the same script; that of the first one goes on."""
    folder = str(model_folders(case))
    own = json.loads(json.dumps(own))
    if "model" in (draft := own.get("speculative_config", {})):
        draft["model"] = folder
    settings = SIZES | own | {"coordinator": f"127.0.0.1:{free_port()}", "command_port": free_port()}
    prompts = [[5, 6, 7, 8] * 4, [9] * 20]
    adapter = str(save_adapter(tmp_path / "adapter", 3, model=Path(folder))) if "enable_lora" in own else None
    given = json.dumps([folder, prompts, settings, adapter])
    replica = start_replica()
    first, second = (replica.run([sys.executable, "-c", SCRIPT, given, f"--host-id={i}"]) for i in range(2))
    assert first.wait(200) == second.wait(20) == 0, replica.said()
    lines = [json.loads(line) for line in first.said().splitlines() if line.startswith("[") and "Gloo" not in line]
    llm = LLM(folder, tensor_parallel_size=2, **SIZES | own)
    params = SamplingParams(temperature=0, max_tokens=12)
    options = {"progress": False, "lora_request": adapter and LoRARequest("a", 1, adapter)}
    alone = [llm.generate({"prompt_token_ids": prompt}, params, **options) for prompt in prompts]
    assert lines == [outputs[0].outputs[0].token_ids for outputs in alone]


@pytest.mark.slow
def test_batch_goes_on_after_a_host_was_killed(start_replica, model_folders, tmp_path):
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    asked = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(60)]
    source.write_text("".join(json.dumps(one) + "\n" for one in asked))
    command = "batch", str(source), str(target), f"--model={model_folders(CASE)}"
    replica = start_replica()
    first, second = (replica.start(i, command) for i in range(2))
    wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") > 3, 200, "no answer")
    second.process.kill()
    wait_until(lambda: "host 1 (127.0.0.1) is lost" in first.said(), 20, "nobody noticed")
    third = replica.start(1, command)
    assert first.wait(200) == third.wait(20) == 0, replica.said()
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(one["custom_id"] for one in asked)
    assert {one["response"]["status_code"] for one in answers} == {200}
    assert len({one["response"]["body"]["choices"][0]["text"] for one in answers}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("which", ["engine", "host"])
def test_a_first_host_that_stands_still(start_replica, which):
    """With the default limit. Its own front notices if only the engine's process stands still."""
    replica = start_replica(engine_restarts=0)
    first = replica.start(0)
    second = replica.start(1)
    replica.wait_ready()
    began = time.monotonic()
    if which == "engine":
        error, _ = replica.error_when(lambda: os.kill(first.engine(), signal.SIGSTOP))
        assert "the engine has not finished a step for 20 s" in error
        assert first.wait(10) == 1
    else:
        first.signal_all(signal.SIGSTOP)
    assert second.wait(30) == 1
    assert time.monotonic() - began < 30
    assert "is lost: it has been silent for 20 s" in second.said()
    if which == "host":
        first.signal_all(signal.SIGCONT)
        assert first.wait(30) == 1
        assert "host 1 (127.0.0.1) is lost" in first.said()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_more_devices_and_hosts(start_replica, model_folders, count, devices):
    """Then each host dies in turn, by a signal that kills or one that stops it."""
    replica = start_replica(count=count, devices=devices, engine_restarts=2 * count, host_timeout=6)
    hosts = {host_id: replica.start(host_id) for host_id in range(count)}
    replica.wait_ready(300)
    answers = replica.answers()
    assert answers == expected(model_folders(CASE), count * devices)
    for victim in range(1, count):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            error, seconds = replica.error_when(partial(hosts[victim].signal_all, number))
            assert f"host {victim} (127.0.0.1) is lost" in error
            assert seconds < 30
            for host_id in range(1, count):
                if host_id != victim:
                    assert hosts[host_id].wait(10) == 1
                    assert f"host {victim} (127.0.0.1) is lost" in hosts[host_id].said()
            hosts[victim].signal_all(signal.SIGKILL)
            hosts |= {host_id: replica.start(host_id) for host_id in range(1, count)}
            replica.wait_ready(300)
            assert replica.answers() == answers
