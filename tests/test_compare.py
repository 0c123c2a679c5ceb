"""The comparison with other engines: its arithmetic on known timelines, and a run in which the peers are missing."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import compare
from peers import figures
from peers.model import make_model, token_texts, tokens_of

from jaxserve.bench.stats import RequestRecord
from jaxserve.tokenizer import load_tokenizer

TINY = {
    **compare.SHAPE,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}


def record(start, arrivals):
    return RequestRecord(
        start=start, end=arrivals[-1], input_tokens=8, output_tokens=len(arrivals), arrivals=arrivals, last=arrivals[-1]
    )


def test_decode_rate_leaves_prefill_out():
    """Two requests, of which the second has its first token at 3 s: both decode from 3 to 5 s, 2 + 4 tokens."""
    records = [record(0.0, [1.0, 2.0, 3.0, 4.0, 5.0]), record(0.0, [3.0, 3.5, 4.0, 4.5, 5.0])]
    assert figures.decode_rate(records, 2) == pytest.approx(6 / 2)
    assert figures.decode_rate(records[:1], 1) == pytest.approx(4 / 4)
    assert figures.decode_rate([record(0.0, [1.0, 2.0]), record(2.0, [3.0, 4.0])], 2) is None, "never two at a time"
    got = figures.figures(records, 2)
    assert got["output_tokens_per_s"] == pytest.approx(10 / 5)
    assert got["ttft_p50_ms"] == pytest.approx(2000)
    assert got["tpot_p50_ms"] == pytest.approx((1000 + 500) / 2)


def test_ratios_of_medians():
    def run(engine, repeat, rate):
        rates = {"output_tokens_per_s": rate, "decode_tokens_per_s": None, "ttft_p50_ms": 1.0, "tpot_p50_ms": 1.0}
        return {"engine": engine, "concurrency": 8, "repeat": repeat} | rates

    ours = [run("jaxserve", i, rate) for i, rate in enumerate((30.0, 90.0, 40.0))]
    peer = [run("peer", i, rate) for i, rate in enumerate((10.0, 20.0, 60.0))]
    results = figures.medians([*ours, *peer])
    (row,) = figures.ratios(results)
    assert (row["peer"], row["output_tokens_per_s"], row["decode_tokens_per_s"]) == ("peer", 2.0, None)
    assert "2.00" in figures.results_table(results)


def test_agreement_counts_up_to_the_first_difference():
    ours, theirs, gaps = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 6]], [[1.0] * 3, [1.0, 1e-6, 1.0]]
    result = figures.agreement(ours, theirs, gaps)
    assert (result["agree"], result["tokens"], result["differ"]) == (4, 6, 1)
    assert result["gaps_at_first_difference"] == [1e-6]
    assert "4 of 6 tokens" in figures.agreement_line("peer", result)


def test_a_text_tells_its_tokens(tmp_path):
    tokenizer = load_tokenizer(make_model(tmp_path / "model", TINY))
    ids = np.random.default_rng(0).integers(1, TINY["vocab_size"], 50).tolist()
    assert tokens_of(tokenizer.decode(ids)) == ids
    assert len(token_texts(TINY["vocab_size"])) == tokenizer.vocab_size == TINY["vocab_size"]


def test_a_run_without_peers(tmp_path, capsys):
    """A real server is measured, and every peer that is missing is named with the reason."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    flags = "--max-num-seqs 4 --max-num-batched-tokens 32 --kv-pages 64 --max-model-len 64"
    code = compare.main(
        [
            *("--config", str(tmp_path / "config.json"), "--folder", str(tmp_path), f"--jaxserve-flags={flags}"),
            *("--concurrency", "2", "--requests", "6", "--input-len", "8", "--output-len", "64", "--check", "1"),
            *("--torch-python", str(tmp_path / "no-python"), "--json", str(tmp_path / "results.json")),
            *("--plot", str(tmp_path / "plot.png")),
        ]
    )
    assert code == 0
    document = json.loads((tmp_path / "results.json").read_text())
    (row,) = document["medians"]
    assert (row["engine"], row["concurrency"]) == ("jaxserve", 2)
    assert row["output_tokens_per_s"] > 0
    assert row["decode_tokens_per_s"] > 0
    absent = document["absent"]
    assert set(absent) == {
        "transformers, static batching",
        "transformers, continuous batching",
        "llama.cpp",
        "llama.cpp, flash attention",
    }
    assert "no-python" in absent["transformers, static batching"]
    assert "--llama-server" in absent["llama.cpp"]
    printed = capsys.readouterr().out
    assert all(f"absent: {name}: {reason}" in printed for name, reason in absent.items())
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
