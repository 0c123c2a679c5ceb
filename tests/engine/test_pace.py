"""How long calls are, by what those before took."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from engines import generate, make_engine, request

from jaxserve.engine.in_flight import InFlightStep
from jaxserve.scheduling.pace import Pace

PROMPT = list(range(5, 25))


def test_a_token_takes_what_a_pass_of_the_model_takes(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    pace = Pace(goal=0.1)
    for _ in range(60):
        asked = now
        now = now + 0.04
        pace.arrived(asked, asked, 4)
    assert pace.step_seconds == pytest.approx(0.01, rel=1e-3)
    assert (
        pace.tokens_per_call(range(1, 17), watched=True, holds_up=False) == 9
    )  # 10, but for what is left of the guess


def test_passes_of_a_flight():
    def step(*only_decodes):
        return InFlightStep([SimpleNamespace(rows=SimpleNamespace(only_decodes=is_)) for is_ in only_decodes], 4, 0.0)

    tokens = [np.array([[5, 7], [6, -1], [-1, -1], [-1, -1]]), np.array([[5], [6], [7], [-1]])]
    assert step(True, True).passes(tokens, static=False) == 3
    assert step(True, True).passes(tokens, static=True) == 4  # programs of a fixed length do not end early
    assert step(True, False).passes(tokens, static=False) == 2  # the second checked proposals, in one pass
    assert step(False).passes([np.array([[-1, -1]])], static=False) == 1  # the midst of prompts


def test_a_loop_ends_with_its_last_row(model_folders):
    """Passes after it would take as long, for nothing; and what a pass takes is told by those that ran."""
    engine = make_engine(model_folders("llama3_gqa"))
    [greedy] = generate(engine, request("whole", PROMPT, max_tokens=12))
    stop = greedy.token_ids[3]
    engine.pace.tokens_per_call = lambda lengths, **_: lengths[-1]
    heard = []
    arrived = engine.pace.arrived
    engine.pace.arrived = lambda asked, dispatched, passes: heard.append(passes) or arrived(asked, dispatched, passes)
    [ended] = generate(engine, request("ends", PROMPT, max_tokens=12, stop_token_ids=(stop,)))
    length = greedy.token_ids.index(stop) + 1
    assert ended.token_ids == greedy.token_ids[:length]
    assert max(heard) == max(length - 1, 1)  # the prompt's step drew the first
    assert max(heard) < 11, "as many as were planned"
