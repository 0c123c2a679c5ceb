"""Models with windows: sequences give up the pages that no layer sees any more, and nothing else changes."""

import json
import shutil

import numpy as np
import pytest
from engines import generate, make_engine, request, run_all

pytestmark = pytest.mark.compiles

WINDOW = 256
LONG = 32_000
PAGE = 16
STEP = 1024
MODELS = {  # a test model, what to change in its config, and the windows of its groups of layers
    "all": ("mistral_window", {}, (WINDOW,)),
    "alternating": ("qwen2_layer_types", {}, (WINDOW, None)),
    "few_full": ("qwen2_window", {"max_window_layers": 1}, (None, WINDOW, WINDOW, WINDOW)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return request.param


@pytest.fixture(scope="module")
def folder(model, model_folders, tmp_path_factory):
    """A model that was made for long prompts."""
    name, changes, _ = MODELS[model]
    path = tmp_path_factory.mktemp(model) / "model"
    shutil.copytree(model_folders(name), path)
    config = json.loads((path / "config.json").read_text())
    changed = config | {"sliding_window": WINDOW, "max_position_embeddings": 2 * LONG} | changes
    (path / "config.json").write_text(json.dumps(changed))
    return path


def pages_held(model, tokens: int, in_window: int) -> int:
    """Of a sequence of so many tokens that holds `in_window` pages in each group with a window."""
    return sum(in_window if window else -(-tokens // PAGE) for window in MODELS[model][2])


def run(engine, *requests):
    """Tokens by request, and the most pages that were in use after any step."""
    for one in requests:
        engine.add_request(one)
    most = 0
    tokens = {one.request_id: [] for one in requests}
    while engine.has_work:
        for update in engine.step():
            assert update.error is None
            tokens[update.request_id] += update.token_ids
        most = max(most, engine.blocks.num_used)
    engine.scheduler.check_integrity()
    return tokens, most


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(5, 500, length).tolist()


@pytest.mark.slow
def test_a_long_prompt_holds_the_window_alone(model, folder):
    """Pages in use at 32,000 tokens fall by the ratio that arithmetic predicts, and the answer stays."""
    settings = {"page_size": PAGE, "tokens": STEP, "rows": 2, "max_model_len": LONG + 64}
    windows = MODELS[model][2]
    last = LONG + 40 - 1  # tokens whose keys and values are computed
    whole = make_engine(folder, kv_pages=len(windows) * (LONG // PAGE + 10), **settings)
    whole.blocks.windows = (None,) * len(windows)  # as if all layers saw everything
    expected, most_whole = run(whole, request("a", prompt(LONG), max_tokens=40))
    small = make_engine(folder, kv_pages=pages_held(model, LONG + 64, 2 * STEP // PAGE) + 1, **settings)
    assert small.blocks.windows == windows
    found, most = run(small, request("a", prompt(LONG), max_tokens=40))
    assert found == expected
    assert most_whole == len(windows) * -(-last // PAGE)
    # The window behind the first token of a step, the tokens of the step, and a page that both may begin in. The last
    # step of the prompt is shorter, so where a group keeps everything, the most is held a step earlier or at the end.
    held = (WINDOW + STEP) // PAGE
    assert pages_held(model, last - STEP, held - 1) <= most <= pages_held(model, last, held + 1)
    assert (most_whole / most > 24) is (None not in windows)


def test_decoding_holds_the_window_alone(model, folder):
    engine = make_engine(folder, page_size=PAGE, tokens=64, rows=2, kv_pages=400, max_model_len=4096)
    engine.add_request(request("a", prompt(40), max_tokens=800))
    used = []
    while engine.has_work:
        engine.step()
        used.append(engine.blocks.num_used)
    assert max(used) <= pages_held(model, 840, WINDOW // PAGE + 2)


@pytest.mark.slow
def test_a_prefix_is_found_by_the_pages_of_its_window(model, folder):
    """Of an earlier prompt only the last pages need to be cached in the groups with a window."""
    pages = pages_held(model, 5016, 150)
    engine = make_engine(folder, page_size=PAGE, tokens=STEP, rows=2, kv_pages=pages, max_model_len=5016)
    first = prompt(5000)
    alone = generate(engine, request("a", first + [7, 8, 9], max_tokens=12))[0]
    again = generate(engine, request("b", first + [7, 8, 9], max_tokens=12))[0]
    assert again.token_ids == alone.token_ids
    assert again.num_cached == 5000 // PAGE * PAGE
    assert engine.blocks.num_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_call", [False, True])
def test_many_with_siblings_and_beams(model, folder, tokens_per_call):
    """Under preemption, forks and beams: the same answers as with pages enough and no window's give and take."""
    settings = {"page_size": 8, "tokens": 128, "rows": 6, "decode_steps": tokens_per_call, "max_model_len": 2048}

    def requests():
        return [
            *(request(f"p{i}", prompt(300 + 90 * i, seed=i), max_tokens=200, n=1 + i % 2) for i in range(5)),
            request("beams", prompt(290), max_tokens=24, n=3, use_beam_search=True),
        ]

    windows = MODELS[model][2]
    whole = make_engine(folder, kv_pages=2500 * len(windows), **settings)
    whole.blocks.windows = (None,) * len(windows)
    expected = run_all(whole, *requests())
    tight = make_engine(folder, kv_pages=170 + 300 * windows.count(None) + 50 * (len(windows) - 1), **settings)
    found = run_all(tight, *requests())
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}
    assert tight.scheduler.num_preemptions > 0
