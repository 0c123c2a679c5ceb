"""Weights of some layers in host memory: the tokens of an engine that has all weights on its devices."""

import pytest
from engines import make_engine
from test_pipeline import PLAIN, SLOW, TIGHT, check_equal, deep_folders  # noqa: F401

SOME = {"cpu_offload_gib": 1e-6}  # three layers
ALL = {"cpu_offload_gib": 1.0}


@pytest.mark.parametrize(
    ("case", "layers", "options"),
    [
        (PLAIN, 5, SOME),
        (PLAIN, 5, ALL),
        ("qwen3_moe_plain", 4, SOME),
    ],
)
def test_the_same_answers(case, layers, options, deep_folders):  # noqa: F811
    engine = check_equal(deep_folders(case, layers), options, {})
    assert len(engine.runner.layers) == (3 if options is SOME else layers)
