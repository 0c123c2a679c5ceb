"""Sleep and new weights of a replica on several hosts, as real processes: the same weights on all of them, or the old
ones; and a host that is lost meanwhile ends the replica."""

from __future__ import annotations

import json
import re
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
CASE = "tp_gqa"
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}
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
    HeldWeights.read = fails
    time.sleep(3)
    read(*arguments)
def fails(held, folder):
    if folder == "lost":
        raise OSError("the disk is gone")
    read(held, folder)
if int(sys.argv[2]):
    HeldWeights.read = slowly
llm = LLM(model, **settings, host_id=int(sys.argv[2]), host_timeout=2)
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
for level in (0, 2):
    if level:
        llm.sleep(level)
    for folder in ("other", "missing", "short", "lost", {}):
        try:
            llm.update_weights(folder)
        except ValueError as error:
            print("refused", error)
    if not level:
        answer()
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


def other_weights(folder: Path, target: Path, factor: float = 1.0, without: str = "") -> Path:
    """Other weights of the same model, of which one is missing."""
    shutil.copytree(folder, target)
    values = {name: tensor.read() for name, tensor in read_folder(folder).items() if name != without}
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
    ("count", "devices", "own"),
    [
        (2, 1, {}),
        (2, 2, {"quantization": "int8"}),
        (2, 1, {"pipeline_parallel_size": 2}),
        (4, 1, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        (2, 1, {"data_parallel_size": 2}),
        (2, 1, {"speculative_config": DRAFT}),
    ],
    ids=["shards", "int8 shards", "stages", "stages of hosts", "groups", "draft"],
)
def test_llm(start_replica, model_folders, tmp_path, count, devices, own):
    folder = model_folders(CASE)
    own = {
        name: value | {"model": str(folder)} if name == "speculative_config" else value for name, value in own.items()
    }
    new = other_weights(folder, tmp_path / "new")
    short = other_weights(folder, tmp_path / "short", without="model.norm.weight")  # the last stage reads it
    for i in range(count):
        (tmp_path / f"{i}").mkdir()
        for name, target in {"new": new, "lost": new, "short": short}.items():
            (tmp_path / f"{i}" / name).symlink_to(target)
        other_weights(folder, tmp_path / f"{i}" / "other", 1.1 + i)
    (tmp_path / "0" / "missing").symlink_to(new)
    ports = {"coordinator": f"127.0.0.1:{free_port()}", "command_port": free_port()}
    given = json.dumps([str(folder), PROMPTS, SIZES | own | ports | {"num_hosts": count}])
    replica = start_replica(devices=devices)
    hosts = [replica.run([sys.executable, "-c", SCRIPT, given, str(i)], folder=tmp_path / f"{i}") for i in range(count)]
    assert [host.wait(200) for host in hosts] == [0] * count, replica.said()
    said = hosts[0].said().splitlines()
    found = [json.loads(line.removeprefix("answer ")) for line in said if line.startswith("answer ")]
    stages, groups = (own.get(f"{name}_parallel_size", 1) for name in ("pipeline", "data"))
    shards = {"tensor_parallel_size": count * devices // stages // groups}
    before, after = (answers(one, **own | shards) for one in (folder, new))
    assert [tokens for tokens, _ in found] == [before] * 4 + [after] * 2
    assert before != after
    assert len({executables for _, executables in found}) == 1
    cannot = r"host 1 \(127.0.0.1\) cannot take the new weights: "
    last = rf"host {count // 2} \(127.0.0.1\) cannot take the new weights: " if stages > 1 else ""
    reasons = [
        cannot + r"its checkpoint \(model.safetensors\) is .* bytes with digest .*, and that of the first host is",
        cannot + "missing",
        last + ".*model.norm.weight",
        cannot + "the disk is gone",
        "arrays replace only weights of one host",
    ]
    refused = [line for line in said if line.startswith("refused ")]
    for line, reason in zip(refused, 2 * reasons, strict=True):
        assert re.match("refused " + reason, line)


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
    before = replica.answers()
    first_facts = facts()
    for level in (1, 2):
        assert post(f"/sleep?level={level}").status_code == 200
        assert replica.ask(bodies()[0]).status_code == 503
        assert post("/wake_up").status_code == 200
        assert replica.answers() == before
    assert post("/update_weights", "bad").status_code == 400
    assert (replica.answers(), facts()) == (before, first_facts)
    assert post("/update_weights", "new").status_code == 200
    devices = 1 if own else 2
    after = replica.answers()
    new_facts = facts()
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
