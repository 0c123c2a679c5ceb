"""The scripts for TPU VMs: the commands of a dry run, and a whole run with a `gcloud` whose VMs are local folders."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks" / "tpu_vm"))

import fleet
from shards import ShardError, merge, split

PLACE = ["--name", "t", "--count", "2", "--zone", "z", "--project", "p"]
# Runs in a VM's folder what `gcloud` would run on the VM: its arguments are those that the scripts give it.
GCLOUD = """#!/usr/bin/env python3
import os, pathlib, shutil, subprocess, sys
assert sys.argv[1:4] == ["compute", "tpus", "tpu-vm"], sys.argv
verb, *rest = sys.argv[4:]
root = pathlib.Path(os.environ["FLEET"])
def local(name):
    vm, colon, path = name.partition(":")
    return root / vm / path if colon else pathlib.Path(name)
if verb == "create":
    (root / rest[0]).mkdir()
elif verb == "delete":
    shutil.rmtree(root / rest[0])
elif verb == "scp":
    source, target = map(local, rest[:2])
    sys.exit("no such file") if not source.exists() else shutil.copy(source, target)
else:
    assert verb == "ssh" and rest[1] == "--command"
    home = root / rest[0]
    sys.exit(subprocess.run(["bash", "-c", rest[2]], cwd=home, env=os.environ | {"HOME": str(home)}).returncode)
"""


def write_requests(path: Path, count: int) -> Path:
    body = {"prompt": "import os", "max_tokens": 2, "temperature": 0, "model": "demo"}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body | {"seed": i}}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_dry_run_prints_the_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    requests = write_requests(tmp_path / "requests.jsonl", 3)
    assert fleet.main(["create", *PLACE, "--type", "v6e-8", "--spot", "--source", "a [b]", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "gcloud compute tpus tpu-vm create t-0 --accelerator-type v6e-8 --version v2-alpha-tpuv6e --spot --zone z "
        "--project p"
    )
    assert len(lines) == 4
    assert "uv venv --quiet --python 3.12 ~/jaxserve && " in lines[1]  # the images' own Python is 3.10
    assert "uv pip install --quiet --python ~/jaxserve/bin/python " in lines[1]
    assert "a [b]" in lines[1]
    assert fleet.main(["start", *PLACE, "--dry-run", str(requests), "--model", "a b", "--", "--kv-pages", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4:7] for line in lines] == [
        ["scp", "tpu-vm-t/shard-0.jsonl", "t-0:jaxserve-batch/shard.jsonl"], ["ssh", "t-0", "--command"],
        ["scp", "tpu-vm-t/shard-1.jsonl", "t-1:jaxserve-batch/shard.jsonl"], ["ssh", "t-1", "--command"],
    ]  # fmt: skip
    assert "--kv-pages 9" in lines[1]
    start = ["start", *PLACE, "--only", "1", "--dry-run", str(requests), "--model", "demo"]
    assert fleet.main(start) == 0
    assert [line.split()[5] for line in capsys.readouterr().out.splitlines() if " ssh " in line] == ["t-1"]
    assert fleet.main(["delete", *PLACE, "--only", "2", "--dry-run"]) == 2
    assert "--only 2" in capsys.readouterr().err
    assert fleet.main(["collect", *PLACE, "--dry-run", str(requests), "out.jsonl"]) == 0
    assert fleet.main(["delete", *PLACE, "--dry-run"]) == 0
    assert "delete t-1 --quiet" in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("kind", ["v6e-16", "v4-8", "v5litepod-0"])
def test_what_is_not_one_host_is_refused(kind, capsys):
    assert fleet.main(["create", *PLACE, "--type", kind, "--source", "x", "--dry-run"]) == 2
    assert f"not {kind}" in capsys.readouterr().err


def test_shards_are_dealt_out_and_merged(tmp_path):
    requests = write_requests(tmp_path / "requests.jsonl", 5)
    shards = [tmp_path / "0", tmp_path / "1"]
    split(requests, shards)
    assert sorted("".join(x.read_text() for x in shards).splitlines()) == sorted(requests.read_text().splitlines())
    answers = [tmp_path / "a0", tmp_path / "a1"]
    answers[0].write_text('{"custom_id":"r4","n":1}\n{"custom_id":"r0"}\n{"custom_id":"r2"')
    assert merge(requests, answers, tmp_path / "out") == ["r1", "r2", "r3"]  # one is cut off, one shard has none
    assert (tmp_path / "out").read_text() == '{"custom_id":"r0"}\n{"custom_id":"r4","n":1}\n'
    answers[1].write_text('{"custom_id":"r4","n":2}\n')
    with pytest.raises(ShardError, match="another answer to 'r4'"):
        merge(requests, answers, tmp_path / "out")
    answers[1].write_text('{"custom_id":"r9"}\n')
    with pytest.raises(ShardError, match="'r9', which"):
        merge(requests, answers, tmp_path / "out")
    requests.write_text(requests.read_text() * 2)
    with pytest.raises(ShardError, match="line 6: custom_id 'r0' was there before"):
        split(requests, shards)


@pytest.fixture
def local_vms(tmp_path, monkeypatch):
    """A `gcloud` on the path, and a pip that installs this environment's jaxserve; returns the VMs' folder."""
    tools = tmp_path / "bin"
    vms = tmp_path / "vms"
    tools.mkdir(), vms.mkdir()
    (tools / "gcloud").write_text(GCLOUD)
    (tools / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FLEET", str(vms))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.chdir(tmp_path)
    return vms


@pytest.mark.slow
def test_a_fleet_answers_a_file(local_vms, tmp_path, monkeypatch):
    """With the real `jaxserve batch`. One VM is lost and comes back, and gets the answers that it had given."""
    monkeypatch.setattr(fleet, "IMAGES", {"v6e-": "image"})
    requests = write_requests(tmp_path / "requests.jsonl", 5)
    out = tmp_path / "out.jsonl"
    start = ["start", *PLACE, str(requests), "--model", "demo", "--", "--max-num-seqs", "2", "--kv-pages", "40"]
    start += ["--max-num-batched-tokens", "32", "--max-model-len", "64"]

    def install(vm: str) -> None:
        (local_vms / vm / "jaxserve-batch").mkdir(parents=True)
        (local_vms / vm / "jaxserve" / "bin").mkdir(parents=True)
        (local_vms / vm / "jaxserve" / "bin" / "jaxserve").symlink_to(Path(sys.executable).parent / "jaxserve")

    for vm in ("t-0", "t-1"):
        install(vm)
    assert fleet.main(start) == 0
    deadline = time.monotonic() + 500
    while (status := fleet.main(["collect", *PLACE, str(requests), str(out)])) == fleet.MISSING:
        assert time.monotonic() < deadline, (local_vms / "t-0" / "jaxserve-batch" / "batch.log").read_text()
        time.sleep(1)
    assert status == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == [f"r{i}" for i in range(5)]
    assert all(one["response"]["status_code"] == 200 for one in answers)
    subprocess.run(["rm", "-r", str(local_vms / "t-1")], check=True)
    install("t-1")
    assert fleet.main(["collect", *PLACE, str(requests), str(out)]) == 0  # what was collected stays
    assert fleet.main([*start[:1], "--only", "1", *start[1:]]) == 0
    again = (local_vms / "t-1" / "jaxserve-batch" / "answers.jsonl").read_text()
    assert again == (tmp_path / "tpu-vm-t" / "answers-1.jsonl").read_text()
    assert fleet.main(["delete", *PLACE]) == 0
    assert list(local_vms.iterdir()) == []
