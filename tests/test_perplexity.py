"""benchmarks/perplexity.py: every token but the first is scored once, and the figures are the model's."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import perplexity


@pytest.mark.parametrize("count", [2, 5, 6, 9, 10])
def test_windows_score_each_token_once(count):
    pieces = perplexity.windows(range(count), 5)
    assert [token for piece in pieces for token in piece[1:]] == list(range(1, count))
    assert max(map(len, pieces)) <= 5
    assert all(len(piece) > 1 for piece in pieces)


def test_figures_of_the_demo(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("import os\n\n\ndef main():\n    return 0\n<|endoftext|>class A:\n    pass\n")
    out = tmp_path / "out.json"
    rows = perplexity.main(["demo,max_model_len=64", "--text", str(text), "--window", "8", "512", "--json", str(out)])
    short, long = rows
    assert short["tokens"] == long["tokens"]
    assert 1 < long["perplexity"] < short["perplexity"] < 4096  # less context means a higher perplexity
    nats = math.log(long["perplexity"]) * long["tokens"]
    size = len(text.read_text().replace("<|endoftext|>", ""))
    assert long["bits_per_byte"] == pytest.approx(nats / math.log(2) / size)
    assert "demo,max_model_len=64" in capsys.readouterr().out
