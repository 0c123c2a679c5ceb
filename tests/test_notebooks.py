"""The research notebooks run completely at small sizes, say what they promise, and are stored without outputs."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install 'jaxserve[test-slow]'")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install 'jaxserve[test-slow]'")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(monkeypatch):
    def run(name: str) -> tuple[str, int]:
        """Runs a notebook. Returns what it printed, and how many figures it has drawn."""
        path = ROOT / "benchmarks" / "notebooks" / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in cells)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}).execute()
        outputs = [output for cell in cells for output in cell.outputs]
        text = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
        return text, sum("image/png" in output.get("data", {}) for output in outputs)

    return run


@pytest.mark.slow
def test_plan(run):
    text, figures = run("plan")
    assert figures == 2
    assert re.search(r"simulated traffic: TTFT .* (holds|does not hold)", text), text


@pytest.mark.slow
def test_determinism(run):
    text, figures = run("determinism")
    assert figures == 1
    assert "deterministic=True: 0 of 6 requests differ in some bit" in text
    assert "16 of 16 log-probabilities have the same bits" in text
    assert "second round: " in text
    rounds = re.findall(r"round: (\d+) of \d+ proposals kept, 0 requests differ", text)
    assert len(rounds) == 2, text
    assert int(rounds[1]) > int(rounds[0]), text


def test_all_are_tested():
    """The notebook of kernels is tested in `test_kernel_bench`."""
    assert {path.stem for path in (ROOT / "benchmarks" / "notebooks").glob("*.ipynb")} == {
        "determinism",
        "kernels",
        "plan",
    }
