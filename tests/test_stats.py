"""The engine's statistics, summed over engines."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.scheduling.engine_stats import EngineStats, Histogram
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.observe.metrics import _FROM_STATS, Metrics


def stats(count: int) -> EngineStats:
    """Statistics with every counter at `count` and every gauge at 3."""
    seconds = Histogram.of_seconds()
    result = EngineStats(pages_total=10, pages_used=3, num_running=3, num_waiting=3, executables=3)
    result.step_seconds = {"schedule": seconds}
    for name in ("preemptions", "prefix_queries", "prefix_hits", "steps", "prompt_tokens", "generation_tokens"):
        setattr(result, name, count)
    for _ in range(count):
        result.step_tokens.observe(5)
        seconds.observe(0.01)
    return result


def values(metrics: Metrics) -> tuple[dict, dict]:
    """Counters with the buckets of histograms, and gauges, by name and labels."""
    counters = {}
    gauges = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found = gauges if family.type == "gauge" else counters
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return counters, gauges


def test_counters_go_on_when_another_engine_starts():
    metrics = Metrics("m")
    metrics.totals.on_stats(stats(7))
    before, _ = values(metrics)
    for round_ in (1, 2):
        metrics.totals.on_restart()
        after, gauges = values(metrics)
        assert all(after[key] >= value for key, value in before.items()), "a counter went backwards"
        assert not any(value for (name, _), value in gauges.items() if "num_requests" in name)
        metrics.totals.on_stats(stats(2))
        metrics.totals.on_stats(stats(5))
        before, gauges = values(metrics)
        labels = (("engine", "0"), ("model_name", "m"))
        assert before["jaxserve:generation_tokens_total", labels] == 7 + 5 * round_
        assert before["jaxserve:iteration_tokens_total_count", labels] == 7 + 5 * round_
        assert before["jaxserve:engine_restarts_total", labels] == round_
        assert gauges["jaxserve:num_requests_running", labels] == 3


# Words by which a text would lean on another one, which a dashboard does not show beside it.
REFERRING = re.compile(
    r"\b(likewise|them|they|their|these|those|there|such|same|above|below|former|latter|ditto|it)\b", re.IGNORECASE
)


def test_each_help_text_stands_alone():
    metrics = Metrics("m")
    metrics.totals.front_restarts = 0
    sizes = {"max_model_len": 64, "vocab_size": 512, "page_size": 16, "max_num_seqs": 4, "max_loras": 2}
    metrics.on_ready(Ready(model_folder="m", tokenizer_folder="m", dtype="float32", eos_token_ids=(1,), **sizes))
    texts = dict(re.findall(r"^# HELP jaxserve:(\w+) (.*)$", metrics.render().decode(), re.MULTILINE))
    texts = {name: text for name, text in texts.items() if not name.endswith("_created")}
    assert {name.removesuffix("_total") for name in texts} >= {name for name, *_ in _FROM_STATS}
    assert {name: text for name, text in texts.items() if len(text.split()) < 2 or REFERRING.search(text)} == {}
    assert len(set(texts.values())) == len(texts)
    for name, text in texts.items():
        unit = name.removesuffix("_total").rpartition("_")[2]
        assert unit not in ("seconds", "bytes") or unit in text.lower(), name
