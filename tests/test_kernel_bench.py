"""The comparison of kernels: its arithmetic on known figures, a run of it, and the notebook that uses it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import kernels
from peers.kernel_backends import Backend, RaggedPagedAttention, XlaDense

from jaxserve.bench import kernel_shapes
from jaxserve.bench.kernel_cases import AttentionCase, MatmulCase, WriteCase, largest_error
from jaxserve.pallas_kernels.registry import Device, load
from jaxserve.pallas_kernels.tuning import timing
from jaxserve.pallas_kernels.tuning import timing as rates

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CEILINGS = {"bytes_per_s": 1e9, "flops_per_s": 1e12}
INT4 = MatmulCase("int4", "float32", "int4", (1, 32), 96, 64, tokens=3, has_zero=True)


def test_bytes_and_operations():
    decode = AttentionCase("", "bfloat16", ((1, 10), (1, 6)), kv_heads=2, group=3, head_dim=8)
    assert decode.part == "decode"
    assert decode.bytes == 2 * 2 * 16 * 8 * 2 + 2 * 2 * 6 * 8 * 2, "keys and values of 16 tokens, 2 queries and results"
    assert decode.flops == 2 * 2 * 8 * 6 * 16
    chunk = AttentionCase("", "bfloat16", ((1, 4), (3, 5)), 1, 1, 8, kv_dtype="int8")
    assert (chunk.part, chunk.tokens, chunk.decodes) == ("mixed", 4, 1)
    assert chunk.flops == 2 * 2 * 8 * (4 + 3 + 4 + 5)
    assert chunk.bytes == 9 * 2 * (8 + 4) + 2 * 4 * 8 * 2, "int8 with a scale a token"
    assert INT4.bytes == 96 * 64 // 2 + 96 * 2 * (4 + 1) + 3 * (64 + 96) * 4
    assert INT4.flops == 2 * 3 * 96 * 64
    assert WriteCase("", "bfloat16", 5, 2, 8, kv_dtype="fp8").bytes == 2 * 5 * 2 * (8 * (2 + 1) + 4)


@pytest.mark.parametrize(
    "case", kernel_shapes.cases("small", "float32", 16), ids=lambda case: f"{case.part} {case.name}"
)
def test_exact_values_find_what_is_wrong(case):
    """Plain XLA's result passes the check against NumPy; a slightly changed one fails."""
    arguments = case.arguments(7)
    result = case.result(*jax.jit(case.call(load(case.operation, "xla")))(case.state(), *arguments))
    assert largest_error(*case.exact(result, *arguments)) <= case.tolerance
    assert largest_error(*case.exact(1.05 * result, *arguments)) > 5 * case.tolerance
    assert largest_error(*case.exact(result.at[...].set(jnp.nan), *arguments)) == float("inf")


def test_cases_have_names_of_their_own_and_fit_a_device():
    cases = list(kernel_shapes.cases("full", "bfloat16", 16))
    assert len({(case.part, case.name) for case in cases}) == len(cases)
    assert {case.part for case in cases} == set(kernel_shapes.OPERATIONS)
    assert max(case.bytes for case in cases) < 16 << 30
    hopper = Device("gpu", "NVIDIA H200", (9, 0))
    assert load("attention", "mosaic_gpu").why_not(hopper, cases[0].problem) is None


class FakeWork:
    """Work with given seconds per call for queueing and for running, on a simulated clock."""

    calls = 4
    asynchronous = True
    state = ()
    outputs = None

    def __init__(self, queue: float, run: float) -> None:
        self.queue = queue
        self.run = run
        self.now = 0.0
        self.done = 0.0

    def enqueue(self, rounds: int) -> None:
        for _ in range(rounds * self.calls):
            self.now += self.queue
            self.done = max(self.done, self.now) + self.run

    def wait(self) -> None:
        self.now = max(self.now, self.done)


@pytest.mark.parametrize(("queue", "run", "host_bound"), [(1e-6, 1e-4, False), (1e-5, 1e-6, True), (1e-6, 1.5, False)])
def test_time_per_call(queue, run, host_bound, monkeypatch):
    work = FakeWork(queue, run)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
    measured = timing.measure(work)
    assert measured.seconds == pytest.approx(max(queue, run), rel=0.02)
    assert measured.host_bound == host_bound
    assert timing.LEAST_SAMPLES <= len(measured.samples) <= timing.SAMPLES


def test_the_least_time_is_that_of_the_best_long_sample(monkeypatch):
    work = FakeWork(0.0, 1e-3)
    starts = []

    def enqueue(rounds):
        work.run = 1e-3 if len(starts) == 3 else 2e-3
        starts.append(rounds)
        FakeWork.enqueue(work, rounds)

    monkeypatch.setattr(rates.time, "perf_counter", lambda: work.now)
    monkeypatch.setattr(work, "enqueue", enqueue)
    assert rates.least_seconds(work) == pytest.approx(1e-3)
    assert min(starts[2:]) * work.calls * 2e-3 >= rates.CEILING_SECONDS


def test_ceilings_are_of_a_large_copy_and_of_products_one_after_the_other(monkeypatch):
    works = []

    def least(work):
        works.append(work)
        return 1e-3

    monkeypatch.setattr(rates, "least_seconds", least)
    assert rates.ceilings("cpu") == {"bytes_per_s": 2 * (64 << 20) / 1e-3, "flops_per_s": 2 * 1024**3 / 1e-3}
    product = works[-1]
    product.enqueue(8)
    product.wait()
    assert float(jnp.std(product.state)) == pytest.approx(1.0, rel=0.1), "rows keep their norms"


def test_a_chain_goes_through_all_inputs():
    sets = [(jnp.float32(10**i),) for i in range(4)]
    chain = timing.Chain(lambda total, x: (total + x, 2 * x), jnp.float32(0), sets, 2)
    chain.enqueue(8 // chain.calls)
    chain.wait()
    assert chain.state == 2222
    assert chain.outputs[-1] == 2000


def contestant(name, compute):
    module = SimpleNamespace(quant_matmul=compute)
    return SimpleNamespace(
        name=name,
        why_not=lambda case, device: None,
        prepare=lambda case, sets: timing.Chain(case.call(module), case.state(), sets),
    )


def test_what_is_wrong_or_fails_is_said_and_the_rest_goes_on():
    def fails(x, w):
        raise RuntimeError("no such\ninstruction")

    exact = load("matmul", "xla").quant_matmul
    half_written = contestant("half", lambda x, w: exact(x, w).at[-1].set(jnp.nan))
    able = [
        contestant("fails", fails),
        half_written,
        contestant("off", lambda x, w: 1.01 * exact(x, w)),
        Backend("xla"),
    ]
    rows = list(kernels.compare_all([INT4], able, CEILINGS, limit=60))
    assert [(row["backend"], row["status"]) for row in rows] == [
        ("fails", "failed"), ("half", "wrong"), ("off", "wrong"), ("xla", "ok"),
    ]  # fmt: skip
    assert "RuntimeError: no such instruction" in kernels.line(rows[0])
    assert "us" not in rows[2]
    assert rows[2]["error"] == pytest.approx(0.01, rel=0.05)
    assert rows[3]["floor_us"] == pytest.approx(1e-3 * INT4.bytes)
    assert rows[3]["fraction"] == pytest.approx(rows[3]["floor_us"] / rows[3]["us"])
    (left_out,) = kernels.compare_all([INT4], able, CEILINGS, limit=-1)
    assert left_out["status"] == "left out"


def test_dense_matmul_stands_beside_one_format():
    device = Device("cpu", "cpu")
    assert XlaDense().why_not(kernel_shapes.matmul("int8 channel", "", (96, 64), 3, "float32"), device) is None
    assert "int8 channel" in XlaDense().why_not(INT4, device)


@pytest.mark.slow
def test_a_run(tmp_path, capsys):
    code = kernels.main(
        ["--op", "write_kv", "matmul", "--json", str(tmp_path / "k.json"), "--plot", str(tmp_path / "k.png")]
    )
    printed = capsys.readouterr().out
    assert code == 0, printed
    document = json.loads((tmp_path / "k.json").read_text())
    results = document["results"]
    assert {row["operation"] for row in results} == {"write_kv", "matmul"}
    assert {row["status"] for row in results} == {"ok"}
    assert {"xla", "xla dense"} <= {row["backend"] for row in results}
    assert document["machine"]["backend"] == "cpu"
    assert document["ceilings"]["bytes_per_s"] > 1e6
    assert document["command"][2:4] == ["--op", "write_kv"]
    assert all(np.median(row["samples_us"]) == pytest.approx(row["us"]) for row in results)
    assert all(f"absent: {name}" in printed for name in document["absent"])
    assert (tmp_path / "k.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_notebook(monkeypatch):
    """The notebook runs completely, and is stored without outputs."""
    import nbformat
    from nbclient import NotebookClient

    path = BENCHMARKS / "notebooks" / "kernels.ipynb"
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent))
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    text = "".join(output.get("text", "") for output in outputs)
    assert "failed:" not in text
    assert "wrong:" not in text


def test_jaxs_ragged_paged_attention_gets_the_same_problem():
    """Runs the kernel's plain JAX reference on our mixed case, as the kernel needs a TPU."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

    case = AttentionCase("", "float32", ((1, 40), (1, 16), (9, 30)), kv_heads=2, group=3, head_dim=128)
    peer = RaggedPagedAttention()
    assert "TPU" in peer.why_not(case, Device("cpu", "cpu"))
    assert peer.why_not(case, Device("tpu", "TPU v5 lite")) is None
    assert peer.why_not(INT4, Device("tpu", "TPU v5 lite")) == "it is for attention"
    arguments = case.arguments(seed=3)
    peer.function = ref_ragged_paged_attention
    q, pages, *rest = arguments
    _, out = case.call(SimpleNamespace(paged_attention=peer.attend))((), q, peer.arrange(pages), *rest)
    assert largest_error(*case.exact(out, *arguments)) < 1e-5
