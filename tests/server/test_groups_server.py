"""A real server whose devices form groups with sequences of their own: the same answers as from one device."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import DEMO, SMALL, running_server

MODEL = "test-model"
GROUPS = {"data_parallel_size": 2, "tensor_parallel_size": 2}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")]


def answers(server) -> list[list[str]]:
    """Of many requests at the same time, which are more than the slots of a group."""
    client = server.openai()

    def ask(i: int) -> list[str]:
        options = {"temperature": 0.8, "seed": i, "n": 2} if i % 3 == 0 else {"temperature": 0}
        prompt = f"class Thing{i % 7}:\n    def __init__(self"
        made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, **options)
        return [choice.text for choice in made.choices]

    with ThreadPoolExecutor(40) as pool:
        return list(pool.map(ask, range(40)))


def test_answers_and_metrics(tmp_path, demo_server):
    expected = answers(demo_server)
    with running_server(DEMO, tmp_path / "log", engine=None, config=SMALL | GROUPS) as server:
        assert answers(server) == expected
        text = httpx.get(f"{server.url}/metrics").text
        figures = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line[:1] not in "#"}
        assert figures["jaxserve:failed_steps_total"] == 0
        assert figures["jaxserve:generation_tokens_total"] >= 40 * 20
