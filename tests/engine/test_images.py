"""Answers to prompts with pictures equal those of Hugging Face transformers, recorded in tests/goldens/images."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_engine, request
from picture_prompts import PROCESSORS, PROMPTS, build, prompt_of
from PIL import Image
from simulation import PICTURE, TOKENS_PER_CALL, Simulation
from tiny_models import fingerprint

from jaxserve.images.processing import ImageProcessor
from jaxserve.images.prompts import with_images
from jaxserve.models.vision.attention import segment_attention

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens" / "images"
TOKEN_IDS = {"[IMG_BREAK]": 506, "[IMG_END]": 507}  # of Mistral 3


def asked(engine, case, golden, slot):
    """The request with the prompt of a slot and its pictures."""
    processor = ImageProcessor.of(engine.model_folder, engine.sees)
    tokens, pictures = prompt_of(case, slot, int(golden[f"seed_{slot}"]))
    processed = [processor(Image.fromarray(picture)) for picture in pictures]
    tokens, images = with_images(tokens, processed, engine.sees, TOKEN_IDS.__getitem__)
    made = request(str(slot), tokens, max_tokens=len(golden[f"tokens_{slot}"]), logprobs=0)
    made.images = images
    return made


def check(engine, case, golden, turn):
    results = generate(engine, *(asked(engine, case, golden, slot) for slot in range(len(PROMPTS))))
    for slot, result in enumerate(results):
        assert result.token_ids == golden[f"tokens_{slot}"].tolist(), (turn, slot)
        ours = [entry.logprob for entry in result.logprobs]
        np.testing.assert_allclose(ours, golden[f"logprobs_{slot}"], atol=2e-3, err_msg=f"{turn} {slot}")


@pytest.mark.parametrize("case", PROCESSORS)
def test_tokens_and_logprobs(case, tmp_path):
    """Steps of 24 tokens end within pictures; the second time all but the last tokens are in the prefix cache."""
    golden = np.load(GOLDENS / f"{case}.npz")
    assert str(golden["fingerprint"]) == fingerprint(case), "the weights differ from the recorded ones"
    engine = make_engine(build(case, tmp_path / "model"), tokens=24)
    check(engine, case, golden, "first")
    encoded = engine.stats().images_encoded
    assert encoded == sum(isinstance(part, tuple) for prompt in PROMPTS for part in prompt)
    assert 0 < sum(engine.stats().step_seconds["encoder"].counts) <= encoded  # several go through it together
    check(engine, case, golden, "cached")
    if engine.model.recurrent is None:  # else snapshots of states are too far apart
        assert engine.stats().images_encoded <= encoded + 1  # the first prompt fills no page; its rows went to others


def test_padding_has_no_part_in_pictures():
    """Products leave out padding, in whose place anything may stand."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 2, *more, 8), np.float32) for more in ((1,), (), ()))
    segment = np.array([0, 0, 0, 1, 1, 1], np.int32)
    expected = segment_attention(*map(jnp.asarray, (q, k, v, segment)), 0.5)
    padded = [np.concatenate([x, np.full_like(x[:2], np.nan)]) for x in (q, k, v)]
    segment = np.append(segment, [-1, -1]).astype(np.int32)
    found = segment_attention(*map(jnp.asarray, (*padded, segment)), 0.5)
    np.testing.assert_allclose(found[:6], expected, rtol=1e-5, atol=1e-6)


OPTIONS = {
    "two devices": {"tensor_parallel_size": 2},
    "preempted": {"kv_pages": 13, "page_size": 16},
    "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "no prefix cache": {"prefix_caching": False},
    "one token at a time": {"decode_steps": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_with_other_features(name, tmp_path):
    case = "qwen3_vl_wide"
    golden = np.load(GOLDENS / f"{case}.npz")
    engine = make_engine(build(case, tmp_path / "model"), tokens=24, **OPTIONS[name])
    check(engine, case, golden, "first")
    check(engine, case, golden, "again")
    assert (engine.scheduler.num_preemptions > 0) == (name == "preempted")


@pytest.mark.parametrize("overlapped", [False, True])
def test_pictures_in_random_schedules(overlapped):
    """The device asserts that each row reads the features of its own pictures, which share prefixes, rows and room."""
    events = Counter()
    reused = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows = int(rng.integers(9, 24))
        sizes = {"num_pages": int(rng.integers(12, 22)), "page_size": 4, "max_num_seqs": int(rng.integers(2, 6))}
        simulation = Simulation(**sizes, budget=int(rng.integers(5, 20)), image_rows=rows)
        for _ in range(8):
            prompt = []
            pictures = []
            for _ in range(rng.integers(0, 4)):
                prompt += [0, 1][: rng.integers(3)]
                count = int(rng.choice([2, 5, 9]))
                pictures.append((len(prompt), count, bytes([count, int(rng.integers(2))])))
                prompt += [PICTURE] * count
            prompt += rng.integers(0, 6, 2).tolist()
            most = min(int(rng.integers(1, 12)), simulation.longest - len(prompt))
            simulation.add(prompt, n=int(rng.integers(1, 3)), max_tokens=most, pictures=pictures)
            for tokens_per_call in rng.choice(TOKENS_PER_CALL, rng.integers(0, 6)).tolist():
                if rng.random() < 0.2:
                    simulation.propose(int(rng.integers(1, 4)), int(rng.integers(0, 4)))
                simulation.overlapped_step(tokens_per_call) if overlapped else simulation.step(tokens_per_call)
        simulation.drain(overlapped=overlapped)
        events += simulation.events
        reused += simulation.scheduler.images.num_reused
    least = {"preemptions": 20, "prefix hits": 60, "waits for rows": 40, "tokens of pictures": 2000}
    assert {name: n for name, n in least.items() if events[name] < n} == {}, events
    assert reused > 50


def test_pictures_count_against_the_tokens_of_a_step():
    """Sequences that decode wait for the encoder: beside them a step encodes no more patches than it may have tokens,
    or one picture, and prompts get what is left."""
    chunk = 16
    simulation = Simulation(max_num_seqs=8, budget=64, chunk=chunk, image_rows=64)
    simulation.scheduler.limit_chunk(chunk, 2)
    simulation.scheduler._budget = replace(simulation.scheduler.budget, bursts=False)
    simulation.add([1, 2], max_tokens=60)
    simulation.step()
    for number in range(4):
        pictures = [(1 + 6 * i, 5, bytes([number, i])) for i in range(4)]
        simulation.add([0, *([PICTURE] * 5 + [3]) * 4], max_tokens=2, pictures=pictures)
    simulation.add([4, *[PICTURE] * 30, 5], max_tokens=2, pictures=[(1, 30, b"large")])
    encoded = []
    while simulation.scheduler.waiting or any(seq.images for seq in simulation.scheduler.running):
        plan = simulation.step()
        patches = [job.image.num_patches for job in plan.images]
        encoded.append(patches)
        decodes = int(np.count_nonzero((plan.rows.count == 1) & (plan.rows.num_new > 0)))
        prompts = int(plan.rows.count.sum()) - decodes
        if decodes:
            assert len(patches) <= 1 or sum(patches) <= chunk - decodes, patches
            assert prompts <= max(chunk - decodes - sum(patches), 2), (patches, prompts)
    assert sum(map(len, encoded)) == 17
    assert [30] in encoded
    assert [5, 5] in encoded
    simulation.drain()
