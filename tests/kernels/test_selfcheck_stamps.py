"""Checks that have passed are not repeated on devices like this one, and all checks of a model run at once."""

import os
import threading
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.pallas_kernels import checked_ops, selfcheck, selfcheck_stamps
from jaxserve.pallas_kernels.checked_ops import Trials, checked_matmul, on_trial, passing
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.quant_matmul import reference
from jaxserve.pallas_kernels.registry import AttentionProblem, Device, MatmulProblem
from jaxserve.pallas_kernels.selfcheck import Finding

BF16 = np.dtype(ml_dtypes.bfloat16)
GPU = Device("gpu", "some GPU", (9, 0))
PROBLEM = MatmulProblem(BF16, np.dtype(np.int8), 320, 256, (1, 256))
RIGHT = Finding("1 rows", 0.0, 0.1)
WRONG = Finding("1 rows", 0.5, 0.1)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU whose product is `reference`. `checks` are the problems that were checked, `finding` what a
    check finds, and `start()` is what happens at a start."""
    around = {"device": "some GPU", "platform": "gpu CUDA 13", "driver": "580", "versions": {}, "code": "abc"}
    found = SimpleNamespace(checks=[], finding=RIGHT, around=around, folder=tmp_path / "cache" / "checks")

    def check(multiply, problem, **_):
        found.checks.append(problem)
        return [found.finding]

    def start():
        """A new process asks for the backend of products."""
        found.checks.clear()
        selfcheck_stamps._passed.clear()
        return checked_matmul(Trials(), GPU, [PROBLEM], "auto")

    found.start = start
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(selfcheck, "check_matmul", check)
    monkeypatch.setattr(checked_ops, "choose", lambda operation, device, problem, backend: "triton")
    monkeypatch.setattr(checked_ops, "load", lambda operation, backend: reference)
    monkeypatch.setattr(selfcheck_stamps, "surroundings", lambda: found.around)
    monkeypatch.setattr(selfcheck_stamps, "_passed", set())
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield found
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_check_that_has_passed_is_not_repeated(machine, caplog):
    caplog.set_level("INFO")
    assert machine.start() == "auto"
    assert machine.checks == [PROBLEM]
    (stamp,) = machine.folder.iterdir()
    assert machine.folder.stat().st_mode & 0o77 == 0
    assert "reference.quant_matmul" in stamp.read_text()
    assert machine.start() == "auto"
    assert machine.checks == []
    trials = Trials()
    trials.products(GPU, PROBLEM, "auto")
    trials.tell()
    assert "1 checks of kernels, which have passed on such a device before, are not repeated" in caplog.text
    assert "took" not in caplog.text


@pytest.mark.parametrize("name", ["device", "platform", "driver", "versions", "code"])
def test_other_devices_and_versions_check_for_themselves(machine, name):
    machine.start()
    machine.around = machine.around | {name: "gpu another"}
    assert machine.start() == "auto"
    assert machine.checks == [PROBLEM]


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", None])
def test_a_damaged_stamp_does_not_count(machine, damage):
    machine.start()
    (stamp,) = machine.folder.iterdir()
    right = stamp.read_bytes()
    stamp.write_bytes(right[:-9] if damage is None else damage)
    assert machine.start() == "auto"
    assert machine.checks == [PROBLEM]
    assert stamp.read_bytes() == right, "and is written again"


def test_a_failed_check_leaves_no_stamp(machine):
    machine.finding = WRONG
    for _ in range(2):
        assert machine.start() == "xla"
        assert machine.checks == [PROBLEM]
    assert not machine.folder.exists()
    machine.finding = RIGHT
    assert machine.start() == "auto"


def test_without_a_folder_to_write_to_each_start_checks(machine):
    os.chmod(machine.folder.parent, 0o500)
    for _ in range(2):
        assert machine.start() == "auto"
        assert machine.checks == [PROBLEM]
    os.chmod(machine.folder.parent, 0o700)
    for nowhere in (None, "gs://bucket/cache"):
        jax.config.update("jax_compilation_cache_dir", nowhere)
        for _ in range(2):
            machine.start()
            assert machine.checks == [PROBLEM]
    assert not machine.folder.exists()


def test_only_kernels_of_this_package_are_stamped(machine):
    """The code of others is not part of the stamp."""
    assert selfcheck_stamps.stamp_of([reference.quant_matmul]) is not None
    assert selfcheck_stamps.stamp_of([reference]) is not None
    for other in (lambda x: x, test_a_failed_check_leaves_no_stamp, np, reference.quant_matmul.__call__):
        assert selfcheck_stamps.stamp_of([reference.quant_matmul, other]) is None
    machine.around = machine.around | {"platform": "cpu"}
    assert selfcheck_stamps.stamp_of([reference.quant_matmul]) is None


def test_what_a_stamp_depends_on():
    found = selfcheck_stamps.surroundings()
    assert found["device"] == jax.devices()[0].device_kind
    assert found["versions"]["jax"] == jax.__version__
    assert len(found["code"]) == len(found["tables"]) == 64


def test_stamps_travel(machine):
    """As a bundle takes them from one machine to another like it, which cannot write to its cache."""
    machine.start()
    taken = selfcheck_stamps.passed()
    assert len(taken) == 1
    jax.config.update("jax_compilation_cache_dir", None)
    selfcheck_stamps._passed.clear()
    selfcheck_stamps.add(taken)
    machine.checks.clear()
    assert checked_matmul(Trials(), GPU, [PROBLEM], "auto") == "auto"
    assert machine.checks == []


def test_all_checks_run_at_once(machine, monkeypatch):
    """Attention, writes and products: each waits for the others to have begun."""
    barrier = threading.Barrier(4)

    def wait(*args, **options):
        barrier.wait(20)
        return [RIGHT]

    for name in ("check_attention", "check_write", "check_matmul", "check_grouped"):
        monkeypatch.setattr(selfcheck, name, wait)
    problem = AttentionProblem(BF16, BF16, 2, 4, 64, 16)
    ops = on_trial(Ops(paged_attention=lambda: None, write_kv=lambda: None), problem, "auto")
    trials = ops.trials
    for grouped in (False, True):
        trials.products(GPU, PROBLEM, "auto", grouped=grouped)
    assert passing(ops).paged_attention is ops.paged_attention
    assert checked_matmul(trials, GPU, [PROBLEM], "auto", [PROBLEM]) == "auto"
