"""The comparison with other engines: its arithmetic on known timelines, and a run without peers."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import compare
import readme_figures
from peers import figures, files, memory
from peers.engines import PeerLoad
from peers.model import SHAPE, SHAPES, make_model, parameters, token_texts, tokens_of

from jaxserve.bench.stats import RequestRecord
from jaxserve.text.tokenizer import load_tokenizer

TINY = {
    **SHAPE,
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
    ours = [[1, 2, 3], [4, 5, 6]]
    theirs = [[1, 2, 3], [4, 7, 6]]
    gaps = [[1.0] * 3, [1.0, 1e-6, 1.0]]
    result = figures.agreement(ours, theirs, gaps)
    assert (result["agree"], result["tokens"], result["differ"]) == (4, 6, 1)
    assert result["gaps_at_first_difference"] == [1e-6]
    assert "4 of 6 tokens" in figures.agreement_line("peer", result)


def test_a_text_tells_its_tokens(tmp_path):
    tokenizer = load_tokenizer(make_model(tmp_path / "model", TINY))
    ids = np.random.default_rng(0).integers(1, TINY["vocab_size"], 50).tolist()
    assert tokens_of(tokenizer.decode(ids)) == ids
    assert len(token_texts(TINY["vocab_size"])) == tokenizer.vocab_size == TINY["vocab_size"]


def test_shapes_are_those_of_the_published_models():
    """Parameters without those that tied embeddings share, in millions, as the models' own pages round them."""
    found = {name: round(parameters(shape) / 1e6) for name, shape in SHAPES.items()}
    assert found == {
        "100M": 100,
        "SmolLM2-360M": 362,
        "Qwen3-0.6B": 596,
        "Llama-3.2-1B": 1236,
        "Qwen3-30B-A3B-4L": 2518,
    }


def test_a_file_lies_beside_its_model():
    def load(model):
        return PeerLoad(Path(model), 1, 1, 1, [], [])

    assert load("/x/Qwen3-0.6B").gguf == Path("/x/Qwen3-0.6B.gguf")
    assert load("/x/y-Q4_K_M.gguf").gguf == Path("/x/y-Q4_K_M.gguf")
    assert load("/x/y.gguf").is_file
    assert not load("/x/Qwen3-0.6B").is_file


def test_memory_of_this_process():
    before = memory.resident(os.getpid())
    if before is None:
        pytest.skip("the system does not tell")
    block = np.ones(100 * memory.MIB, np.uint8)  # so large that the allocator maps it separately
    after = memory.resident(os.getpid())
    assert 95 < after["anonymous_mib"] - before["anonymous_mib"] < 110, block.size
    assert after["anonymous_mib"] + after["file_mib"] <= after["pss_mib"] + 1
    assert after["pss_mib"] <= after["rss_mib"]
    assert after["largest_mib"] <= after["rss_mib"] <= after["peak_mib"] + 2
    del block
    assert memory.resident(os.getpid())["peak_mib"] > after["peak_mib"] - 2, "it stays known"


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_file_that_is_written_is_the_model(tmp_path, family):
    """Reads every weight back with our reader, and runs a server on the file."""
    from jaxserve.checkpoints.gguf import known_gguf

    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    config = TINY | {"model_type": family, "architectures": [architecture]}
    model = make_model(tmp_path / "tiny", config)
    path = tmp_path / "tiny.gguf"
    files.write_gguf(model, path)
    assert known_gguf(path).metadata["general.architecture"] == family
    assert files.vocabulary_size(path) == config["vocab_size"]
    assert files.parameter_count(path) == parameters(config)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")
def test_a_run_on_a_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    files.write_gguf(make_model(tmp_path / "tiny", TINY), path)
    flags = "--max-num-seqs 2 --max-num-batched-tokens 32 --kv-pages 64 --max-model-len 64"
    code = compare.main(
        [
            *("--gguf", str(path), "--engines", "jaxserve", "--concurrency", "1", "--requests", "2"),
            *("--input-len", "8", "--output-len", "4", f"--jaxserve-flags={flags}"),
            *("--json", str(tmp_path / "results.json")),
        ]
    )
    assert code == 0
    document = json.loads((tmp_path / "results.json").read_text())
    (row,) = document["medians"]
    assert row["output_tokens_per_s"] > 0
    assert row["pss_mib"] > row["anonymous_mib"] > 50
    assert document["model"] == {"file": "tiny.gguf"}
    assert document["file_mib"] == pytest.approx(path.stat().st_size / 2**20)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--shape", "no-such"], "must be one of 100M"),
        (["--gguf", "no-such.gguf"], "there is no"),
        (["--quantize", "Q8_0"], "needs --llama-quantize"),
    ],
)
def test_flags_that_cannot_be(flags, said, capsys):
    with pytest.raises(SystemExit):
        compare.parse(flags)
    assert said in capsys.readouterr().err


def test_a_quantizer_that_fails_is_named(tmp_path, capsys):
    tool = tmp_path / "llama-quantize"
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / f"{tmp_path.name}.gguf").write_text("newer than the model")
    make_model(tmp_path / tmp_path.name, TINY)
    (tmp_path / f"{tmp_path.name}.gguf").touch()
    flags = ["--shape", str(tmp_path / "config.json"), "--folder", str(tmp_path), "--quantize", "Q8_0"]
    assert compare.main([*flags, "--llama-quantize", str(tool)]) == 2
    assert "llama-quantize cannot be run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_peers(tmp_path, capsys):
    """A real server is measured, and every missing peer is named with the reason."""
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


def test_the_figures_in_the_documents_are_those_of_the_results():
    """Table and results are written by one script, so that no document shows figures that are nowhere else."""
    table = readme_figures.table(readme_figures.read())
    for document in readme_figures.DOCUMENTS:
        assert table in document.read_text(), f"{document.name}: run python benchmarks/readme_figures.py --write"
    one = readme_figures.Figure(30.0, 20.0, 5)
    assert "| 30 (1.50) |" in readme_figures.table(dict.fromkeys(readme_figures.read(), one))
