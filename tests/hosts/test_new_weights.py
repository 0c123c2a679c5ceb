"""Sleep and new weights of a replica on several hosts, as real processes: the same weights on all of them, or the old
ones; and a host that is lost meanwhile ends the replica."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from processes import PROMPTS, SIZES, Replica, bodies, expected
from safetensors.numpy import save_file
from serving import free_port

from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.llm import LLM
from jaxserve.types import SamplingParams

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
slow = pytest.mark.slow
CASE, DRAFT = "tp_gqa", {"method": "draft_model", "num_speculative_tokens": 3}
ADMIN = {"Authorization": "Bearer admin"}

# Host 1 once reads for longer than the time after which a host that does nothing is lost. Paths are relative to folders
# of which each host has its own.
SCRIPT = """
import json, sys, time
from jaxserve.engine.held_weights import HeldWeights
from jaxserve.llm import LLM
from jaxserve.types import SamplingParams
model, prompts, settings = json.loads(sys.argv[1])
read = HeldWeights.read
def slowly(*arguments):
    HeldWeights.read = read
    time.sleep(3)
    read(*arguments)
if int(sys.argv[2]):
    HeldWeights.read = slowly
llm = LLM(model, **settings, num_hosts=2, host_id=int(sys.argv[2]), host_timeout=2)
llm.engine.compile()
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
def answer():
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, progress=False)
    print("answer", json.dumps([[one.outputs[0].token_ids for one in outputs], llm.engine.runner.num_executables]))
answer()
for level in (1, 2):
    llm.sleep(level)
    llm.wake_up()
    answer()
for folder in ("other", "missing", {}):
    try:
        llm.update_weights(folder)
    except ValueError as error:
        print("refused", error)
answer()
llm.sleep(2)
try:
    llm.update_weights("other")
except ValueError as error:
    print("refused", error)
llm.update_weights("new")
answer()
llm.sleep(2)
llm.wake_up()
answer()
"""


@pytest.fixture
def start_replica(model_folders, tmp_path):
    started = []

    def start(**settings: Any) -> Replica:
        started.append(Replica(model_folders(CASE), tmp_path, **settings))
        return started[-1]

    yield start
    for replica in started:
        replica.stop()


def other_weights(folder: Path, target: Path, factor: float = 1.0) -> Path:
    """Other weights of the same model."""
    shutil.copytree(folder, target)
    values = {name: tensor.read() for name, tensor in read_folder(folder).items()}
    changed = {name: np.ascontiguousarray(value[::-1] * value.dtype.type(factor)) for name, value in values.items()}
    save_file(changed, target / "model.safetensors")
    return target


def answers(folder: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(str(folder), **SIZES, **settings)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, progress=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


@slow
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"quantization": "int8"},
        {"speculative_config": DRAFT},
    ],
    ids=["shards", "stages", "groups", "int8", "draft"],
)
def test_llm(start_replica, model_folders, tmp_path, own):
    folder = model_folders(CASE)
    own = {
        name: value | {"model": str(folder)} if name == "speculative_config" else value for name, value in own.items()
    }
    new = other_weights(folder, tmp_path / "new")
    for host in ("0", "1"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "new").symlink_to(new)
        other_weights(folder, tmp_path / host / "other", 1.1 + int(host))
    (tmp_path / "0" / "missing").symlink_to(new)
    settings = SIZES | own | {"coordinator": f"127.0.0.1:{free_port()}", "command_port": free_port()}
    given = json.dumps([str(folder), PROMPTS, settings])
    replica = start_replica()
    hosts = [replica.run([sys.executable, "-c", SCRIPT, given, str(i)], folder=tmp_path / str(i)) for i in range(2)]
    assert [host.wait(200) for host in hosts] == [0, 0], replica.said()
    said = hosts[0].said().splitlines()
    found = [json.loads(line.removeprefix("answer ")) for line in said if line.startswith("answer ")]
    shards = {} if {"pipeline_parallel_size", "data_parallel_size"} & own.keys() else {"tensor_parallel_size": 2}
    before, after = (answers(one, **shards, **own) for one in (folder, new))
    assert [tokens for tokens, _ in found] == [before] * 4 + [after] * 2
    assert before != after
    assert len({executables for _, executables in found}) == 1
    refused = [line for line in said if line.startswith("refused ")]
    differs = "refused host 1 (127.0.0.1) cannot take the new weights: its checkpoint (model.safetensors) is"
    assert [refused[i].startswith(differs) for i in (0, 3)] == [True, True], refused
    assert refused[1].startswith("refused host 1 (127.0.0.1) cannot take the new weights: missing")
    assert refused[2].startswith("refused arrays replace only weights of one host")


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "own", [{}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}], ids=["shards", "stages", "groups"]
)
def test_a_server(start_replica, model_folders, tmp_path, own):
    """Answers tell their weights. A host that is killed or stopped during an update ends the replica, which starts
    again with the weights that it has served."""
    new = other_weights(model_folders(CASE), tmp_path / "root" / "new")
    bad = other_weights(model_folders(CASE), tmp_path / "root" / "bad")
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    options = {"weights_root": str(tmp_path / "root"), "admin_key": "admin"}
    replica = start_replica(engine_restarts=2, host_timeout=6, **own, **options)

    def post(path: str, folder: str | None = None) -> httpx.Response:
        given: Any = {} if folder is None else {"json": {"model_path": folder}}
        return httpx.post(replica.url + path, headers=ADMIN, timeout=60, **given)

    def facts() -> tuple[str, str]:
        answer = replica.ask(bodies()[0])
        return answer.headers["x-weight-version"], answer.json()["system_fingerprint"]

    replica.start(0)
    second = replica.start(1)
    replica.wait_ready()
    before, first_facts = replica.answers(), facts()
    for level in (1, 2):
        assert post(f"/sleep?level={level}").status_code == 200
        assert replica.ask(bodies()[0]).status_code == 503
        assert post("/wake_up").status_code == 200
        assert replica.answers() == before
    assert post("/update_weights", "bad").status_code == 400
    assert (replica.answers(), facts()) == (before, first_facts)
    assert post("/update_weights", "new").status_code == 200
    devices = 1 if own else 2
    after, new_facts = replica.answers(), facts()
    assert after == expected(new, devices, **own) != before == expected(model_folders(CASE), devices, **own)
    assert (new_facts[0], new_facts[1] != first_facts[1]) == ("1", True)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        second.signal_all(signal.SIGSTOP)  # so that the update waits for it
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(post, "/update_weights", "new")
            time.sleep(0.5)
            began = time.monotonic()
            second.signal_all(number)
            found = answer.result()
        assert time.monotonic() - began < 30
        assert found.status_code == 503
        assert "host 1 (127.0.0.1) is lost" in found.json()["error"]["message"]
        second.signal_all(signal.SIGKILL)
        second = replica.start(1)
        replica.wait_ready()
        assert (replica.answers(), facts()) == (after, new_facts)
