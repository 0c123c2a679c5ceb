"""Speculative decoding of a real server: its flag, its answers and its metrics."""

import re

from serving import running_server

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "kv_pages": 100,
    "forbid_compile": True,
}
BODY = {"prompt": "x = 1\nx = 1\nx = 1\n" * 8, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def answers(server):
    http = server.http()
    bodies = [BODY, BODY | {"temperature": 0.8, "seed": 5}, BODY | {"logprobs": 2, "frequency_penalty": 0.5}]
    return [http.post("/v1/completions", json=body).json()["choices"] for body in bodies]


def test_the_same_answers_and_counters(tmp_path):
    with running_server("demo", tmp_path / "log", engine=None, config=SIZES) as server:
        expected = answers(server)
        assert server.metric("spec_decode_num_drafts_total") == 0
    settings = SIZES | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 31, "prompt_lookup_min": 1}}
    with running_server("demo", tmp_path / "log2", engine=None, config=settings) as server:
        assert [[one["text"] for one in some] for some in answers(server)] == [
            [one["text"] for one in some] for some in expected
        ]
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        drafts, proposed, accepted = (server.metric(f"spec_decode_{name}_total") for name in names)
        text = server.http().get("/metrics").text
        by_position = [float(n) for n in re.findall(r"accepted_tokens_per_pos_total\{[^}]*\} (\S+)", text)]
        assert drafts <= proposed <= 31 * drafts
        assert sum(by_position) == accepted <= proposed
        assert by_position == sorted(by_position, reverse=True)
