"""The first half hour on a device, rehearsed on CPU: stages, continuing after a kill, failing rows and stages."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import first_light
from light import correctness, engine, record, resources, table
from light.record import OutOfTimeError, Record, read

from jaxserve.pallas_kernels import selfcheck
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import BLOCK_KINDS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPT = str(BENCHMARKS / "first_light.py")


def run(*args, env=None, timeout=280):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)],
        env={**os.environ, "XLA_FLAGS": "", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def keys(path):
    return [row["key"] for row in read(path)["rows"]]


# --- records ---


def test_a_record_goes_on_behind_its_last_row(tmp_path):
    path = tmp_path / "x.json"
    first = Record(path, "x")
    with first.row("a") as row:
        row["figure"] = float("inf")
    with first.row("b") as row:
        raise ValueError("no such case")
    assert json.loads(path.read_text())["rows"][0] == {"key": "a", "status": "ok", "figure": "inf", "seconds": 0.0}
    second = Record(path, "x")
    assert second.has("a")
    failed = second.data["rows"][1]
    assert failed["status"] == "failed"
    assert failed["reason"] == "ValueError: no such case"
    assert "Traceback" in failed["traceback"]
    second.finish()
    assert read(path)["status"] == "complete"


def test_a_row_that_kills_its_process_is_tried_twice(tmp_path):
    path = tmp_path / "x.json"
    for _ in range(2):
        dying = Record(path, "x")
        assert not dying.has("a")
        with pytest.raises(KeyboardInterrupt), dying.row("a"):
            raise KeyboardInterrupt  # like a kill: nothing more is written
    third = Record(path, "x")
    assert third.data["rows"] == [{"key": "a", "status": "crashed", "reason": third.data["rows"][0]["reason"]}]


def test_a_broken_device_ends_the_process_but_not_the_stage(tmp_path):
    stage = Record(tmp_path / "x.json", "x")
    with pytest.raises(SystemExit) as ended, stage.row("a"):
        raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    assert ended.value.code == record.RESTART
    assert read(tmp_path / "x.json")["rows"][0]["status"] == "failed"
    assert read(tmp_path / "x.json")["status"] == "running"


def test_no_row_begins_after_the_deadline(tmp_path):
    late = Record(tmp_path / "x.json", "x", seconds=-1)
    with pytest.raises(OutOfTimeError), late.row("a"):
        pass
    assert not late.has("a")


def test_half_a_file_is_as_good_as_none(tmp_path):
    (tmp_path / "x.json").write_text('{"stage": "x", "rows": [')
    assert read(tmp_path / "x.json") is None
    assert Record(tmp_path / "x.json", "x").data["rows"] == []


# --- the driver ---


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """Runs stages whose processes are the given Python programs, which have `record`, `out` and `seconds`."""
    programs: dict[str, str] = {}

    def in_process(name, out, rehearse, seconds):
        program = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from light.record import Record
record = Record(__import__("pathlib").Path({str(out)!r}) / "{name}.json", "{name}", {seconds})
{programs[name]}
record.finish()
"""
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, process.communicate()[1]
        return process.returncode, errors

    monkeypatch.setattr(first_light, "in_process", in_process)

    def drive(program, seconds=30.0, limit=600.0):
        programs["x"] = program
        first_light.drive(first_light.Stage("x", seconds), tmp_path, False, time.monotonic() + limit)
        return read(tmp_path / "x.json")

    return drive


def test_a_stage_goes_on_after_a_row_that_crashes(stages):
    found = stages("""
for key in ("a", "b", "c"):
    if not record.has(key):
        with record.row(key):
            if key == "b":
                os._exit(11)
""")
    assert found["status"] == "complete"
    assert [(row["key"], row["status"]) for row in found["rows"]] == [("a", "ok"), ("b", "crashed"), ("c", "ok")]


def test_a_stage_that_fails_outside_of_its_rows_says_why(stages):
    found = stages("import no_such_package")
    assert found["status"] == "failed"
    assert "No module named 'no_such_package'" in found["output"]
    assert stages("record.add({'key': 'a', 'status': 'ok'})")["rows"] == [], "what has failed is left alone"


def test_what_failed_is_tried_again_by_the_next_call(tmp_path, monkeypatch):
    failed = {"stage": "device", "status": "failed", "seconds": 3.0, "rows": [], "facts": {}, "reason": "no driver"}
    record.write(tmp_path / "device.json", failed)
    seen = []
    monkeypatch.setattr(first_light, "drive", lambda stage, out, *_: seen.append(read(out / f"{stage.name}.json")))
    assert first_light.main(["--out", str(tmp_path), "--only", "device"]) == 1
    assert seen == [{"stage": "device", "status": "running", "seconds": 3.0, "rows": [], "facts": {}}]


@pytest.mark.slow
def test_a_row_that_hangs_costs_the_stage_its_time(stages):
    found = stages("""
with record.row("a"): pass
with record.row("b"): time.sleep(60)
""", seconds=3.0)  # fmt: skip
    assert found["status"] == "complete"
    assert "time is used up" in found["reason"]
    assert keys_of(found) == ["a"]
    assert found["at"] == "b"


@pytest.mark.slow
def test_what_the_end_of_a_call_interrupts_is_done_by_the_next_one(stages, monkeypatch, tmp_path):
    monkeypatch.setattr(first_light, "GRACE", 2)
    program = """
if not record.has("a"):
    with record.row("a"): pass
with record.row("b"):
    if os.path.exists("{flag}"): pass
    else: open("{flag}", "w").close(); time.sleep(60)
"""
    program = program.replace("{flag}", str(tmp_path / "flag"))
    found = stages(program, seconds=300, limit=5)
    assert (found["status"], keys_of(found)) == ("running", ["a"])
    assert "at" not in found
    found = stages(program, seconds=300)
    assert (found["status"], keys_of(found)) == ("complete", ["a", "b"])


def test_rows_that_did_not_begin_in_time_are_left_to_the_next_call(tmp_path, monkeypatch):
    from light import device

    def late(stage, rehearse):
        with stage.row("a"):
            pass

    monkeypatch.setattr(device, "run", late)
    assert first_light.run_stage("device", tmp_path, rehearse=True, seconds=-1) == 0
    assert read(tmp_path / "device.json")["status"] == "running"
    assert first_light.run_stage("device", tmp_path, rehearse=True, seconds=10) == 0
    assert (read(tmp_path / "device.json")["status"], keys(tmp_path / "device.json")) == ("complete", ["a"])


def keys_of(document):
    return [row["key"] for row in document["rows"]]


# --- the stages ---


@pytest.mark.slow
def test_the_cases_of_a_device_begin_with_what_matters_most():
    cases = list(correctness.cases(Device("gpu", "NVIDIA H200", (9, 0)), rehearse=False))
    names = [case.key for case in cases]
    assert len(set(names)) == len(names)
    assert len(names) > 150
    first = sorted(cases, key=lambda case: case.distance)[:12]
    assert "attention bfloat16, same cache, head_dim 128, pages of 16, mosaic_gpu" in [case.key for case in first]
    assert "matmul 8B out int4 g128, bfloat16, mosaic_gpu" in [case.key for case in first]
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
    stage = Record(tmp_path / "correctness.json", "correctness")
    wrong = selfcheck.Finding("mixed rows", 0.5, 0.016, "row 0")
    case = correctness.Case("attention, mosaic_gpu", 0, lambda: [wrong, selfcheck.Finding("decode rows", 0.0, 0.016)])
    monkeypatch.setattr(correctness, "cases", lambda device, rehearse: [case])
    correctness.run(stage, rehearse=True)
    (row,) = stage.data["rows"]
    assert (row["status"], row["error"]) == ("wrong", 0.5)
    stage.finish()
    said = table.markdown(tmp_path)
    assert "| attention | mosaic_gpu | 0 | 1 | 0 |" in said
    assert "wrong: mixed rows: off by 0.5 (row 0), where 0.016 is allowed" in said


PTXAS = """
Resources(smem_scratch_bytes=116736, tmem_scratch_cols=0, barrier_counts=Counter({Barrier(arrival_count=128): 2}))
Resources(smem_scratch_bytes=231424, tmem_scratch_cols=0)
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for paged_decode_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers, 1 bytes smem
ptxas warning : Registers are spilled to local memory in function 'paged_prompts_mosaic_gpu_kernel'
ptxas info    : Compiling entry function 'paged_prompts_mosaic_gpu_kernel' for 'sm_90a'
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 8 bytes cumulative stack size, 1 bytes smem
"""


def test_what_the_assembler_says_is_read():
    decode, prompts = resources.parse(PTXAS)
    assert decode == {
        "kernel": "paged_decode_mosaic_gpu_kernel", "target": "sm_90a", "stack": 0, "spill_stores": 0,
        "spill_loads": 0, "registers": 128, "static_shared": 1, "dynamic_shared": 116736,
    }  # fmt: skip
    assert (prompts["registers"], prompts["spill_loads"], prompts["dynamic_shared"]) == (168, 4, 231424)
    assert resources.parse("nothing of the kind") == []


def test_how_many_programs_fit_a_multiprocessor():
    assert resources.programs(128, 116_736, 256) == 1, "1,024 bytes too many for two"
    assert resources.programs(128, 115_712, 256) == 2
    assert resources.programs(168, 1024, 384) == 1
    assert resources.programs(32, 0, 128) == 16


def test_gaps_between_steps():
    # Two tokens a call; the host dispatches a step 3 ms before the one before it has arrived, once 1 ms after.
    dispatched = [(0.000, 0.001), (0.006, 0.007), (0.016, 0.021), (0.026, 0.027), (0.036, 0.037)]
    arrived = [(0.001, 0.010, 2), (0.015, 0.020, 2), (0.025, 0.030, 2), (0.03999, 0.040, 2), (0.045, 0.050, 2)]
    found = engine.steady(dispatched, arrived, first=1)
    assert found["token_ms"] == pytest.approx(5.0)
    assert (found["steps"], found["steps_per_call"]) == (3, 2)
    assert found["ahead_ms"] == pytest.approx(3.0)
    assert found["ahead_least_ms"] == pytest.approx(-1.0)
    assert found["late"] == pytest.approx(1 / 3)
    with pytest.raises(RuntimeError, match="too few steps"):
        engine.steady(dispatched[:2], arrived[:2], first=1)


def test_the_floor_counts_what_a_step_reads(tmp_path):
    from jaxserve.config import EngineConfig
    from jaxserve.engine.engine import Engine

    folder = engine.folder_of(engine.SMALL, tmp_path / "model")
    one = Engine.load(EngineConfig(model=str(folder), load_format="dummy", max_num_seqs=2, kv_pages=16, page_size=8))
    # Two layers of 64 x (64 + 32 + 32 + 64) and 3 x 64 x 128 weights with two norms, a last norm, and the head.
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64 + 256 * 64
    length = 40 + 70 / 2
    expected = 4 * (weights + 2 * length * 2 * 2 * 2 * 16)  # of two rows: layers, keys and values, heads, head_dim
    assert engine.step_bytes(one, 2, engine.LOADS[True]) == pytest.approx(expected, rel=0.01), "tiles have headers"


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
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": stand_ins}
    command = [sys.executable, SCRIPT, "--out", str(out), "--rehearse", "--only", "device", "engine-int4"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "key start" in line:  # the engine is loaded, and no batch has run yet
            break
    stop_all(process)
    before = read(out / "engine-int4.json")
    assert before["status"] == "running"
    done = run("--out", out, "--rehearse", "--only", "device", "engine-int4", env={"PYTHONPATH": stand_ins})
    assert done.returncode == 0, done.stdout + done.stderr
    after = read(out / "engine-int4.json")
    assert after["rows"][0] == before["rows"][0]
    assert after["status"] == "complete"
    batches = [row for row in after["rows"] if "token_ms" in row]
    assert [row["batch"] for row in batches] == [1, 1, 3, 3]
    assert [row["steps_per_call"] == 1 for row in batches] == [False, True, False, True]
    assert all(row["status"] == "ok" and row["floor_ms"] > 0 for row in batches)
    assert keys(out / "device.json") == ["ceilings"]
    assert "| int4 | 3 |" in done.stdout
    again = run("--out", out, "--rehearse", "--only", "device", "engine-int4")
    assert read(out / "engine-int4.json") == after, "what is complete is skipped"
    assert again.returncode == 0
    assert run("--table", out).stdout.strip() == done.stdout[done.stdout.index(f"{read_device(out)};") :].strip()


def stop_all(process):
    """Stops the script, and its stage's process, which is in another process group."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    for pid in [str(process.pid), *children.stdout.split()]:
        subprocess.run(["kill", "-9", pid], check=False)
    process.wait()


def read_device(out):
    return read(out / "device.json")["facts"]["device"]


@pytest.mark.slow
@pytest.mark.parametrize("only", [["correctness", "resources"], ["kernels", "peers"]], ids="-".join)
def test_a_rehearsal(tmp_path, only):
    done = run("--out", tmp_path, "--rehearse", "--only", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not right, or not done" not in done.stdout or "transformers continuous" in done.stdout
    for name in only:
        document = read(tmp_path / f"{name}.json")
        assert document["status"] == "complete"
        assert document["rows"]
        if name != "peers":  # the peers need torch
            assert {row["status"] for row in document["rows"]} == {"ok"}
    if only[0] == "correctness":
        assert "| attention | xla | 2 | 0 | 0 |" in done.stdout
        assert re.search(r"\| adapters \| (cpu|reference) \| 1 \| 0 \| 0 \|", done.stdout)
        assert re.search(r"\| latent \| xla \| \d \| 0 \| 0 \|", done.stdout)
    else:
        assert "| decode | 4 x 300 | xla |" in done.stdout
