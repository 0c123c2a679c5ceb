"""The first minutes on a device, rehearsed on CPU: records, the driver, stages, and going on after a kill."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import first_light
from light import correctness, decode, driver, profile, record, recorded, table
from light.driver import Driver, Stage
from light.profile import Kernel
from light.record import OutOfTimeError, Record, read

from jaxserve.pallas_kernels import selfcheck
from jaxserve.pallas_kernels.alone import RUN, Run, alone
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import BLOCK_KINDS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPT = str(BENCHMARKS / "first_light.py")
FILES = {f"{name}.json" for name in ("run", "decode", "tune", "correctness", "server", "kernels")}


def run(*args, env=None, timeout=600):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)],
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def keys(path):
    return [row["key"] for row in read(path)["rows"]]


# --- records ---


def test_processes_share_the_rows_of_a_file(tmp_path):
    first = Record(tmp_path / "x.json")
    second = Record(tmp_path / "x.json")
    assert first.take("a")
    assert not second.take("a")
    assert second.take("b")
    with first.row("a") as row:
        row["figure"] = float("inf")
    with second.row("b") as row:
        raise ValueError("no such case")
    found, failed = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert (found["key"], found["status"], found["figure"]) == ("a", "ok", "inf")
    assert (failed["status"], failed["reason"]) == ("failed", "ValueError: no such case")
    assert "Traceback" in failed["traceback"]
    assert not Record(tmp_path / "x.json").take("a"), "what is measured is not measured again"
    assert first.data["running"] == {}


def test_rows_of_a_process_that_ended_are_ended(tmp_path):
    path = tmp_path / "x.json"
    assert Record(path).take("a")
    assert not record.end_rows(path, [1], "crashed", "another process")
    assert record.end_rows(path, [os.getpid()], "cut off", "the time was over")
    assert [(row["key"], row["status"]) for row in read(path)["rows"]] == [("a", "cut off")]
    record.reopen(path)
    assert Record(path).take("a"), "what was cut off is measured by the next run"


def test_a_broken_device_ends_the_process_but_not_the_stage(tmp_path):
    stage = Record(tmp_path / "x.json")
    with pytest.raises(SystemExit) as ended, stage.row("a"):
        raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    assert ended.value.code == record.RESTART
    assert read(tmp_path / "x.json")["rows"][0]["status"] == "failed"


def test_no_row_begins_after_the_deadline(tmp_path):
    with pytest.raises(OutOfTimeError):
        Record(tmp_path / "x.json", deadline=time.time() - 1).take("a")
    assert read(tmp_path / "x.json") is None


def test_half_a_file_is_as_good_as_none(tmp_path):
    (tmp_path / "x.json").write_text('{"file": "x", "rows": [')
    assert read(tmp_path / "x.json") is None
    assert Record(tmp_path / "x.json").data["rows"] == []


def test_a_file_that_would_be_too_large_loses_what_is_bulky_in_its_last_rows(tmp_path):
    rows = [{"key": str(i), "status": "failed", "figure": i, "traceback": 2000 * "x"} for i in range(600)]
    record.write(tmp_path / "x.json", record.new("x") | {"rows": rows})
    found = read(tmp_path / "x.json")
    assert (tmp_path / "x.json").stat().st_size <= record.MOST_BYTES
    assert [row["figure"] for row in found["rows"]] == list(range(600))
    assert "traceback" in found["rows"][0]
    assert "traceback" not in found["rows"][-1]
    assert "traceback" in found["facts"]["left_out"]


# --- the driver ---

COUNTS = """
import pathlib, sys, time
count, until = 0, time.time() + 20
while time.time() < until and not pathlib.Path(sys.argv[1], "end").exists():
    count += 1
    pathlib.Path(sys.argv[1], "count").write_text(str(count))
    time.sleep(0.01)
"""


def test_others_stand_still_while_one_measures(tmp_path, monkeypatch):
    other = subprocess.Popen([sys.executable, "-c", COUNTS, str(tmp_path)], start_new_session=True)

    def counted() -> bool:
        before = (tmp_path / "count").read_text()
        time.sleep(0.3)
        return (tmp_path / "count").read_text() != before

    try:
        while not (tmp_path / "count").exists():
            time.sleep(0.02)
        group = Run(tmp_path)
        group.set_groups([os.getpgrp(), other.pid])
        monkeypatch.setenv(RUN, str(tmp_path))
        with alone(), alone():
            assert not counted()
            with group.idle() as idle:
                assert not idle
            assert group.measuring()[0] == os.getpgrp()
        assert counted()
        with group.idle() as idle:
            assert idle
    finally:
        (tmp_path / "end").touch()
        other.kill()
        other.wait()


@pytest.fixture
def drive(tmp_path):
    """Runs stages whose processes are the given Python programs, which have `record`, `out` and `alone`."""

    def run(programs, seconds=60.0, slots=2, gib=float("inf"), sizes=None, row_seconds=240.0):
        (tmp_path / "scratch").mkdir(exist_ok=True)
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)

        def command(stage, starts):
            program = f"""
import os, pathlib, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from light.record import Record
from jaxserve.pallas_kernels.alone import alone
out = pathlib.Path({str(out)!r})
record = Record(out / "{stage.file}.json")
{programs[stage.name]}
"""
            return [sys.executable, "-c", program], {**os.environ, RUN: str(tmp_path / "scratch")}

        stages = [Stage(name, "x", (sizes or {}).get(name, 1)) for name in programs]
        limits = {"slots": slots, "gib": gib, "row_seconds": row_seconds}
        found = Driver(stages, command, out, tmp_path / "scratch", time.time() + seconds, **limits)
        return found.run(), read(out / "x.json"), read(out / "run.json")

    return run


def test_a_stage_goes_on_behind_a_row_that_crashes_and_lets_others_go_on(drive):
    """The process dies while it measures, so that the other one stands still."""
    crashing = """
for key in ("a", "b", "c"):
    if record.take(key):
        with record.row(key):
            if key == "b":
                with alone():
                    os._exit(11)
"""
    other = """
if record.take("d"):
    with record.row("d"):
        while not any(row["status"] == "crashed" for row in record.data["rows"]): time.sleep(0.05)
"""
    whole, found, processes = drive({"crashing": crashing, "other": other})
    assert whole
    assert {row["key"]: row["status"] for row in found["rows"]} == {"a": "ok", "b": "crashed", "c": "ok", "d": "ok"}
    assert sorted(row["status"] for row in processes["rows"]) == ["ok", "ok", "restarted"]


def test_what_runs_at_the_end_of_the_time_is_cut_off_and_a_stage_that_fails_says_why(drive, tmp_path):
    programs = {
        "failing": "import no_such_package",
        "slow": "if record.take('a'):\n    with record.row('a'): pass\nrecord.take('b'); time.sleep(60)",
    }
    began = time.monotonic()
    whole, found, processes = drive(programs, seconds=3)
    assert not whole
    assert time.monotonic() - began < 10
    assert [(row["key"], row["status"]) for row in found["rows"]] == [("a", "ok"), ("b", "cut off")]
    failed, cut = processes["rows"]
    assert (failed["status"], cut["status"]) == ("failed", "cut off")
    assert "No module named 'no_such_package'" in failed["output"]
    assert not list((tmp_path / "out").glob("*.new"))


def test_a_process_that_measures_without_end_is_killed(drive, monkeypatch):
    monkeypatch.setattr(driver, "MOST_ALONE", 0.5)
    hanging = """
if record.take("a"):
    with record.row("a"), alone(): time.sleep(60)
"""
    other = "if record.take('b'):\n    with record.row('b'): time.sleep(1.5)"
    whole, found, _ = drive({"hanging": hanging, "other": other})
    assert whole
    assert {row["key"]: row["status"] for row in found["rows"]} == {"a": "crashed", "b": "ok"}


def test_processes_that_do_not_fit_the_device_together_run_in_turn(drive):
    """The second one waits for the first one. The third one may begin before it, but not the fourth one, which would
    leave it no room."""
    program = """
if record.take(name):
    with record.row(name) as row:
        row["beside"] = [key for key in record.data["running"] if key != name]
        time.sleep(1.5)
"""
    sizes = {"large": 60, "also large": 60, "small": 10, "medium": 16}
    programs = {name: f"name = {name!r}\n{program}" for name in sizes}
    whole, found, _ = drive(programs, slots=3, gib=77, sizes=sizes)
    assert whole
    beside = {row["key"]: row["beside"] for row in found["rows"]}
    met = {frozenset([key, other]) for key, others in beside.items() for other in others}
    assert frozenset(["large", "small"]) in met
    assert not met & {frozenset(["large", "also large"]), frozenset(["large", "medium"])}


# --- the stages ---


@pytest.mark.slow
def test_the_cases_of_a_device_begin_with_one_of_each_family():
    cases = list(correctness.cases(Device("gpu", "NVIDIA H200", (9, 0)), rehearse=False))
    names = [case.key for case in cases]
    assert len(set(names)) == len(names)
    assert len(names) > 150
    ordered = correctness.in_order(cases)
    families = {case.family for case in cases}
    assert {case.family for case in ordered[: len(families)]} == families
    rest = [case.distance for case in ordered[len(families) :]]
    assert rest == sorted(rest)
    first = [case.key for case in ordered[:40]]
    assert "attention bfloat16, same cache, head_dim 128, pages of 16, mosaic_gpu" in first
    assert "matmul 8B out int4 g128, bfloat16, mosaic_gpu" in first
    assert max(correctness.LARGE.decodes) >= 8192
    assert len(correctness.LARGE.decodes) > 48, "so many that rows are not split"


@pytest.mark.slow
def test_the_cases_have_every_kernel_in_the_forms_that_engines_use():
    keys = [case.key for case in correctness.cases(Device("gpu", "NVIDIA H200", (9, 0)), rehearse=False)]
    for kernel in ("int4 g128 shuffled, bfloat16", "int8 channel shuffled, float16", "fp8 tensor, bfloat16"):
        assert any(kernel in key and key.endswith("mosaic_gpu") for key in keys), kernel
    assert "latent bfloat16, same cache, 16 heads, mosaic_gpu" in keys
    assert "matmul fp8 dynamic, bfloat16 in parts, w8a8" in keys
    on_tpu = [case.key for case in correctness.cases(Device("tpu", "TPU v6 lite"), rehearse=False)]
    for kernel in ("write-and-attend bfloat16, same cache", "latent bfloat16, int8 cache, 128 heads",
                   "latent-write bfloat16, same cache, 16 heads", "matmul mxfp4, bfloat16",
                   "adapters bfloat16"):  # fmt: skip
        assert f"{kernel}, mosaic_tpu" in on_tpu
    assert not [key for key in on_tpu if "shuffled" in key]


def test_the_cases_have_every_triton_kernel():
    pytest.importorskip("jax_triton")
    keys = [case.key for case in correctness.cases(Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0)), rehearse=False)]
    blocks = [f"matmul{by} {kind}, bfloat16" for kind in BLOCK_KINDS for by in ("", " by expert")]
    for kernel in (*blocks, "matmul mxfp4, bfloat16 in parts", "matmul nvfp4, bfloat16", "fused bfloat16, int8 cache",
                   "draw from 128256 tokens", "adapters bfloat16",
                   "latent bfloat16, int8 cache, 128 heads"):  # fmt: skip
        assert f"{kernel}, triton" in keys
    assert "matmul int8 dynamic, bfloat16, w8a8" in keys
    assert "matmul fp8 dynamic, bfloat16, w8a8" not in keys, "float8 products need a newer GPU"


def test_a_wrong_kernel_becomes_a_wrong_row(tmp_path, monkeypatch):
    stage = Record(tmp_path / "correctness.json")
    wrong = selfcheck.Finding("mixed rows", 0.5, 0.016, "row 0")
    found = [wrong, selfcheck.Finding("decode rows", 0.0, 0.016)]
    case = correctness.Case("attention, mosaic_gpu", ("attention",), 0, lambda: found)
    monkeypatch.setattr(correctness, "cases", lambda device, rehearse: [case])
    correctness.run(stage, rehearse=True)
    (row,) = stage.data["rows"]
    assert (row["status"], row["error"]) == ("wrong", 0.5)
    said = table.markdown(tmp_path)
    assert "| attention | mosaic_gpu | 0 | 1 | 0 |" in said
    assert "wrong: mixed rows: off by 0.5 (row 0), where 0.016 is allowed" in said


def test_what_does_not_compile_elsewhere_is_said(tmp_path):
    stage = Record(tmp_path / "decode.json")
    stage.add({"key": "int4: decode_32", "status": "ok"})
    with stage.row("int4: mixed_512"):
        raise ValueError("no such instruction")
    said = table.compiled(tmp_path, "h200x1")
    assert "Compiled for h200x1: 1 of decode." in said
    assert "int4: mixed_512: failed: ValueError: no such instruction" in said


def test_a_step_by_kernel():
    """Three and a half steps of 100 µs: a product of 60 µs, a gap of 10, and two norms of 5 each."""
    kernels = []
    for i in range(4):
        start = 1e5 * i
        kernels += [Kernel("product", start, 6e4), Kernel("norm", start + 7e4, 5e3), Kernel("norm", start + 7.5e4, 5e3)]
    found = profile.by_kernel(kernels[1:], steps=4)
    assert (found["whole_steps"], found["step_us"], found["kernels_per_step"]) == (2, 100.0, 3.0)
    assert (found["busy_us"], found["idle_us"]) == (70.0, 30.0)
    assert found["kernels"] == [["product", 1.0, 60.0, 60.0, 10.0], ["norm", 2.0, 5.0, 10.0, 5.0]]
    assert found["order"] == [[0, 0.0, 60.0], [1, 70.0, 5.0], [1, 75.0, 5.0]]
    assert found["gaps"][0] == [20.0, "norm", "product"]
    assert profile.by_kernel(kernels[:3], steps=1)["whole_steps"] == 0


THUNKS = """000: kCopy         [source | next=001 (1)] kCopy
001: kCommandBuffer [source       | next=008 (1)]
    002: kCustomKernel [source       | next=003 (1)] fusion grid: [2048, 1, 1] threads: [64, 1, 1]
    003: kWhile [prev=002 (1) | sink]
  body:
        004: kCustomKernel [source | sink] body_fusion
005: kWhile         [prev=000 (1) | sink        ]
condition:
    006: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    007: kSort [source | sink] sort
"""


def test_what_is_recorded_is_told_from_what_is_launched(tmp_path, monkeypatch):
    found = recorded.operations(THUNKS)
    assert found["launched"] == {"kCopy": 1, "kCommandBuffer": 1, "kWhile": 1, "kCustomKernel": 1, "kSort": 1}
    assert found["recorded"] == {"kCustomKernel": 2, "kWhile": 1}
    (tmp_path / "module_0123.jit_decode_32.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    (tmp_path / "module_0123.jit_decode_32.thunk_sequence.txt").write_text(THUNKS)
    monkeypatch.setenv(recorded.DUMP, str(tmp_path))
    assert recorded.programs() == [{"program": "jit_decode_32", **found}]


def test_profiles_are_taken_again_where_command_buffers_hide_the_kernels(tmp_path, monkeypatch):
    record = Record(tmp_path / "decode.json")
    load = decode.Load((32, 1), 1024, 128)
    monkeypatch.setenv("XLA_FLAGS", recorded.environment(tmp_path, in_profiles=True)["XLA_FLAGS"])
    assert "int4, 32 rows, profile" in decode._work(record, "int4", load)
    record.add({"key": "int4, 32 rows, profile", "status": "ok", "kernels_per_step": 290.0})
    record.add({"key": "int4, 1 rows, profile", "status": "ok", "kernels_per_step": 1.0})
    monkeypatch.setenv("XLA_FLAGS", recorded.environment(tmp_path, in_profiles=False)["XLA_FLAGS"])
    again = [key for key in decode._work(record, "int4", load) if "profile" in key]
    assert again == ["int4, 1 rows, profile, launched one by one"]


LOGGED = """
command_buffer_thunk.cc:233] Update command buffer on device #0 by recoding command buffer cmd sequence after 7 \
executions since last update; num_commands=78; updated_allocs=3
command_executor.cc:421] Updated 70 commands in 120 us (skipped 68 command updates)
command_executor.cc:421] Updated 8 commands in 230 us (skipped 7 command updates)
command_buffer_thunk.cc:251] Updated command buffer in 240 us; num_commands=78
command_buffer_thunk.cc:260] Execute command buffer on device #0; num_executions=1
command_buffer_thunk.cc:260] Execute command buffer on device #0; num_executions=2
command_buffer_thunk.cc:210] Execute command buffer thunk as a regular thunk sequence because we detected a session
"""


def test_updates_of_command_buffers():
    found = recorded.updates(LOGGED, steps=2)
    assert found == {"ran_per_step": 1.0, "updated_per_step": 0.5, "operations_updated_per_step": 1.5}
    with recorded.captured() as said:
        os.write(2, b"before")
        said.mark()
        os.write(2, b"after")
    assert said.text == "after"


def test_gaps_between_steps():
    # Two tokens a call; the host dispatches a step 3 ms before the one before it has arrived, once 1 ms after.
    dispatched = [(0.000, 0.001), (0.006, 0.007), (0.016, 0.021), (0.026, 0.027), (0.036, 0.037)]
    arrived = [(0.001, 0.010, 2), (0.015, 0.020, 2), (0.025, 0.030, 2), (0.03999, 0.040, 2), (0.045, 0.050, 2)]
    found = decode.steady(dispatched, arrived, first=1)
    assert found["token_ms"] == pytest.approx(5.0)
    assert (found["steps"], found["steps_per_call"]) == (3, 2)
    assert found["ahead_ms"] == pytest.approx(3.0)
    assert found["ahead_least_ms"] == pytest.approx(-1.0)
    assert found["late"] == pytest.approx(1 / 3)
    with pytest.raises(RuntimeError, match="too few steps"):
        decode.steady(dispatched[:2], arrived[:2], first=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decode")
    config = decode.settings("bf16", decode.LOADS[True], folder, "cpu", rehearse=True)
    with mock.patch("jaxserve.engine.loading.check_kernels", side_effect=AssertionError("kernels are checked")):
        return decode.Engine.load(config, checks=False)


def test_the_floor_counts_what_a_step_reads(small):
    # Two layers of 64 x (64 + 32 + 32 + 64) and 3 x 64 x 128 weights with two norms, a last norm, and the head.
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64 + 256 * 64
    length = 40 + 70 / 2
    expected = 4 * (weights + 2 * length * 2 * 2 * 2 * 16)  # of two rows: layers, keys and values, heads, head_dim
    assert decode.step_bytes(small, 2, decode.LOADS[True]) == pytest.approx(expected, rel=0.01), "tiles have headers"


@pytest.mark.slow
def test_prompts_are_done_when_the_last_one_is(small, monkeypatch):
    """Of three prompts, two wait until the first one has drawn four tokens."""
    engine = small
    held = []
    decoding = []
    add = engine.add_request
    step = engine.step

    def hold(request):
        (held.append if len(held) < 2 else add)(request)

    drawn = []

    def release():
        output = step()
        drawn.append(sum(len(update.token_ids) for update in output))
        if sum(drawn) >= 4:
            while held:
                add(held.pop())
        return output

    monkeypatch.setattr(engine, "add_request", hold)
    monkeypatch.setattr(engine, "step", release)
    found = decode.generate(
        engine, decode.Watch(engine), 3, decode.LOADS[True], 1, decoding=lambda: decoding.append(sum(drawn))
    )
    assert decoding[0] > 4
    assert found["decoded_beside_prompts"] == decoding[0] - 3 > 0


# --- the script ---


@pytest.fixture
def stand_ins(tmp_path) -> str:
    """A folder for PYTHONPATH in which the stand-ins are found, as if the packages were not installed."""
    folder = tmp_path / "path"
    folder.mkdir()
    for name in ("msgspec.py", "llguidance"):
        (folder / name).symlink_to(BENCHMARKS / "light" / "stand_ins" / name)
    return str(folder)


@pytest.mark.slow
def test_stages_are_imported_with_stand_ins(stand_ins):
    modules = ", ".join(path.stem for path in (BENCHMARKS / "light").glob("*.py") if path.stem != "__init__")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([stand_ins, str(BENCHMARKS)])}
    subprocess.run([sys.executable, "-c", f"from light import {modules}"], env=environment, check=True)


@pytest.mark.slow
def test_a_rehearsal_with_stand_ins_that_is_killed_and_goes_on(tmp_path, stand_ins):
    """The engine runs without msgspec and llguidance."""
    out = tmp_path / "out"
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": stand_ins, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, SCRIPT, "--out", str(out), "--rehearse", "--only", "device", "decode-int4"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "key int4, start" in line:  # the engine is loaded, and no batch has run yet
            break
    process.kill()
    process.wait()
    before = read(out / "decode.json")
    assert keys(out / "decode.json") == ["int4, start"]
    done = run("--out", out, "--rehearse", "--only", "device", "decode-int4", env={"PYTHONPATH": stand_ins})
    assert done.returncode == 0, done.stdout + done.stderr
    after = read(out / "decode.json")
    assert after["rows"][0] == before["rows"][0]
    names = ["int4, start", "int4, 3 rows", "int4, 3 rows, profile", "int4, 1 rows", "int4, 1 rows, profile"]
    assert keys(out / "decode.json") == [*names, "int4, programs"]
    assert {row["status"] for row in after["rows"]} == {"ok"}
    profiles = [row for row in after["rows"] if "step_us" in row]
    assert all(row["whole_steps"] > 2 and len(row["kernels"]) > 5 for row in profiles)
    assert "ceilings" in keys(out / "run.json")
    assert "| int4 | 3 |" in done.stdout
    again = run("--out", out, "--rehearse", "--only", "device", "decode-int4")
    assert read(out / "decode.json") == after, "what is there is not measured again"
    assert again.returncode == 0


@pytest.mark.slow
def test_a_rehearsal_of_all_stages_ends_in_time(tmp_path):
    began = time.monotonic()
    done = run("--out", tmp_path, "--rehearse", "--minutes", 9)
    print(done.stdout)
    assert time.monotonic() - began < 9 * 60
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {path.stem: read(path)["rows"] for path in tmp_path.iterdir()}
    assert {row["key"].partition(",")[0] for row in rows["run"]} >= set(first_light.NAMES)
    for name, found in rows.items():
        others = {row["status"] for row in found if not row["key"].startswith("transformers")}  # needs torch
        assert others == {"ok"}, (name, found)
    assert keys(tmp_path / "server.json") == ["cold start", "1 at a time", "4 at a time", "warm start"]
    assert {row["weights"] for row in rows["decode"] if "token_ms" in row} >= set(decode.FORMS)
    for said in (
        "| attention | xla | 2 | 0 | 0 |",
        "| decode | 4 x 300 | xla |",
        "| cold start |",
        "One step, bf16, 1",
    ):
        assert said in done.stdout
    assert re.search(r"\| latent \| xla \| \d \| 0 \| 0 \|", done.stdout)
    assert run("--table", tmp_path).stdout.strip() in done.stdout
