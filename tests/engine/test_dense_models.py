"""Dense families: their recorded answers also come in chunks, from the prefix cache, after preemption, and on several
devices. One family stands for each choice; the others run with -m slow."""

from pathlib import Path

import numpy as np
import pytest
from dense_models import DENSE_CASES
from engines import generate, make_engine, request

GOLDENS = Path(__file__).parent.parent / "goldens"
ON_DEVICES = (
    "cohere_qk_norm",
    "olmo2_post",
    "gemma3_older",
    "deepseek_v3_groups",
)  # norms split over devices, and norms that need all of them
IN_PARTS = ("gemma3_older", "opt_350m", "deepseek_v3_groups")


def cases(usual):
    return [pytest.param(case, marks=[] if case in usual else [pytest.mark.slow]) for case in DENSE_CASES]


def answers(engine, case, tag=""):
    """Completions of the recorded prompts; checks that their tokens are the recorded ones."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        prompts, expected = ([golden[f"{what}_{i}"].tolist() for i in range(4)] for what in ("prompt", "tokens"))
    found = generate(engine, *(request(f"{tag}{i}", p, max_tokens=64) for i, p in enumerate(prompts)))
    assert [one.token_ids for one in found] == expected
    return found


@pytest.mark.parametrize("case", cases(ON_DEVICES))
def test_on_two_devices(case, model_folders):
    engine = make_engine(model_folders(case), tokens=320, tensor_parallel_size=2, **DENSE_CASES[case].options)
    answers(engine, case)


@pytest.mark.parametrize("case", cases(IN_PARTS))
def test_in_parts(case, model_folders):
    """In chunks and with too few pages for all, then once more from the cache."""
    options = {"max_model_len": 256} | DENSE_CASES[case].options
    pages = 30 if case.startswith("gemma3") else 22  # several groups of layers, each with pages of its own
    engine = make_engine(model_folders(case), tokens=16, kv_pages=pages, page_size=16, **options)
    answers(engine, case)
    assert engine.stats().preemptions > 0
    engine = make_engine(model_folders(case), tokens=48, **options)
    answers(engine, case)
    assert sum(one.num_cached for one in answers(engine, case, "again-")) >= 128
