"""`jaxserve train-eagle`: the training computes what the engine does, and its drafts can be served."""

import json
from pathlib import Path

import draft_heads
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from engines import make_engine, request, run_all

from jaxserve.commands.cli import main
from jaxserve.config import ConfigError
from jaxserve.convert import train_eagle
from jaxserve.convert.train_eagle import TrainConfig, Training
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.decoder import Decoder
from jaxserve.models.draft_files import open_eagle
from jaxserve.models.drafter import Drafter
from jaxserve.models.load import load_params, read_model

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "draft_heads.json").read_text())["llama3_gqa"]
CASE = "llama3_gqa"
KNOWN = 25


@pytest.mark.slow
def test_passes_are_proposals(model_folders, tmp_path):
    """The passes of a training, on known tokens and then proposals of transformers' modules, propose the same."""
    folder = model_folders(CASE)
    mesh = make_mesh(1)
    target = read_model(folder)
    draft = draft_heads.write_eagle(tmp_path / "draft", tiny_models.CASES[CASE].config)
    shape, spec, files = open_eagle(draft, target)
    drafter = Drafter(spec, shape, shape.num_kv_heads, shape.vocab_size, target.vocab_size, target.vocab_size)
    decoder = Decoder(target, target.num_kv_heads, target.vocab_size)
    params = load_params(decoder, folder, mesh, progress=False)
    own = load_params(drafter, draft, mesh, progress=False, source=files)
    proposed = GOLDEN["proposals"][KNOWN - 20]
    tokens = jnp.array(GOLDEN["tokens"][:KNOWN] + proposed, jnp.int32)
    states, _ = train_eagle._states(decoder, params, tokens, spec.layers)
    logits = train_eagle.proposals(drafter, own | {"embed": params["embed"]}, states, tokens, len(proposed))
    ours = [int(files.ids[logits[i, KNOWN - 2 + i].argmax()]) for i in range(len(proposed))]
    assert ours == proposed


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    words = ["the", "then", "there", "other", "an", "and", "in", "on", "one", "are"]
    path.write_text(" ".join(rng.choice(words, 6000)))
    return path


@pytest.mark.slow
def test_a_draft_is_trained_and_served(model_folders, text, tmp_path):
    folder = model_folders(CASE)
    out = tmp_path / "draft"
    command = ["train-eagle", str(folder), str(text), str(out), "--minutes", "0.05", "--vocabulary", "200"]
    assert main([*command, "--length", "32", "--generate", "64", "--rows", "2", "--rate", "0.01"]) == 0
    settings = {"rows": 2, "tokens": 32, "max_model_len": 96}
    speculation = {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    quick = make_engine(folder, speculative_config=speculation, **settings)
    plain = make_engine(folder, **settings)
    asked = request("a", range(5, 30), max_tokens=20)
    assert run_all(quick, asked) == run_all(plain, asked)
    assert quick.counters.spec_proposed > 0


@pytest.mark.slow
def test_training_learns(model_folders, text):
    folder = model_folders(CASE)
    windows = train_eagle.read_windows(text, train_eagle.load_tokenizer(folder), 200, 32)
    config = TrainConfig(vocabulary=200, minutes=0.1, length=32, passes=1, rate=0.01)
    training = Training(read_model(folder), folder, windows, config)
    losses = training.run()
    assert len(losses) > 20
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1


def test_too_little_text(model_folders, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the other one " * 100)
    with pytest.raises(ConfigError, match="training needs at least 20"):
        train_eagle.train_eagle(str(model_folders(CASE)), text, tmp_path / "out", TrainConfig(length=64))
