"""Weights that are put aside while an engine sleeps, and replaced while it lives: answers as of an engine made anew."""

import gc
import json
import shutil
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from engines import generate, make_engine, request
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.config import ConfigError
from jaxserve.engine.held_weights import HeldWeights, HostCopy
from jaxserve.types import InvalidRequestError, QueueFullError

pytestmark = pytest.mark.compiles

CASE = "llama3_gqa"
SLOW = pytest.mark.slow
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
PROMPTS = [list(range(5 + i, 40 + 3 * i)) for i in range(3)]


def answers(engine):
    results = generate(engine, *(request(str(i), p, max_tokens=8) for i, p in enumerate(PROMPTS)))
    return [one.token_ids for one in results]


def runners_of(engine):
    return getattr(engine.runner, "stages", [engine.runner])


def test_weights_are_copied_to_the_host_once():
    """JAX copies int4 from a CPU, as all numbers from other devices, and holds the copy; of others it gives a view."""
    copied, viewed = (jnp.arange(-4, 4).astype(dtype) for dtype in (jnp.int4, jnp.float32))
    for x in (copied, viewed):
        (part,) = HostCopy.of(x).parts.values()
        assert np.shares_memory(part, np.asarray(x)) == (x is copied)
        expected = np.asarray(x).tolist()
        x.delete()
        assert part.tolist() == expected


def other_weights(folder, out, **changes):
    """A folder with other weights of the same model, in which some tensors have been changed or left out (None)."""
    out.mkdir()
    for file in folder.glob("*.json"):
        shutil.copy(file, out)
    values = {name: (tensor[::-1] * np.float32(1.1)).astype(tensor.dtype) for name, tensor in tiny_models.tensors(CASE)}
    values = {name: np.ascontiguousarray(value) for name, value in (values | changes).items() if value is not None}
    save_file(values, out / "model.safetensors")
    return out


@pytest.fixture(scope="module")
def other(model_folders, tmp_path_factory):
    return other_weights(model_folders(CASE), tmp_path_factory.mktemp("weights") / "other")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int8"},
        {"tensor_parallel_size": 2, "quantization": "int8"},
        {"speculative_config": NGRAM, "kv_offload_gib": 0.01},
        {"pipeline_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "quantization": "int4"}, marks=SLOW),
        pytest.param({"data_parallel_size": 2, "tensor_parallel_size": 2}, marks=SLOW),
    ],
    ids=["plain", "panels", "int8 on two devices", "speculation and lower tiers", "stages", "int4 stages", "groups"],
)
def test_other_weights(options, model_folders, other):
    engine = make_engine(model_folders(CASE), **options)
    before = answers(engine)
    compiled = engine.runner.num_executables
    engine.weights.update(other)
    after = answers(engine)
    assert after == answers(make_engine(other, **options)) != before
    engine.weights.update(model_folders(CASE))
    assert answers(engine) == before
    assert (engine.runner.num_executables, engine.weights.version) == (compiled, 2)


def test_new_weights_take_the_memory_of_the_cache(model_folders, other, tmp_path, monkeypatch):
    """Which on an accelerator fills what the old ones leave."""
    engine = make_engine(model_folders(CASE))
    before = answers(engine)
    caches = []
    read = HeldWeights._read

    def reading(held, *args):
        caches.append("cache" in vars(engine.runner))
        return read(held, *args)

    monkeypatch.setattr(HeldWeights, "_read", reading)
    short = other_weights(model_folders(CASE), tmp_path / "short", **{"model.norm.weight": None})
    with pytest.raises(CheckpointError):
        engine.weights.update(short)
    assert answers(engine) == before  # computed anew: the cache is empty
    engine.weights.update(other)
    assert answers(engine) != before
    assert caches == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "quantization": "int4"}, marks=SLOW),
        pytest.param({"data_parallel_size": 2}, marks=SLOW),
    ],
    ids=["alone", "two devices", "stages", "int4 stages", "groups"],
)
def test_sleep(level, options, model_folders, other):
    others = jax.live_arrays()  # of other tests; kept in a list, so that no new array gets the id of one of them
    engine = make_engine(model_folders(CASE), **options)
    before = answers(engine)
    compiled = engine.runner.num_executables
    held = engine.runner.weights + jax.tree.leaves([one.cache for one in runners_of(engine)])
    for _ in range(2):
        engine.weights.sleep(level)
        engine.weights.sleep(level)
        assert all(x.is_deleted() for x in held)
        gc.collect()
        assert sum(x.nbytes for x in jax.live_arrays() if all(x is not one for one in others)) < 10_000
        with pytest.raises(QueueFullError, match="sleeps"):
            engine.add_request(request("x", [5]))
        engine.weights.wake_up()
        assert answers(engine) == before
    engine.weights.sleep(level)
    engine.weights.update(other)
    assert answers(engine) != before
    assert engine.runner.num_executables == compiled


@pytest.mark.parametrize("stages", [1, 2])
def test_what_cannot_be_used_changes_nothing(stages, model_folders, other, tmp_path):
    """What is missing is read by the last stage, after the first one has read its weights."""
    folder = model_folders(CASE)
    engine = make_engine(folder, pipeline_parallel_size=stages)
    before = answers(engine)
    short = other_weights(folder, tmp_path / "short", **{"model.norm.weight": None})
    longer = other_weights(folder, tmp_path / "longer", **{"model.norm.weight": np.ones(7, np.float32)})
    cut = other_weights(folder, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    odd = other_weights(folder, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    for level in (0, 1, 2):
        if level:
            engine.weights.sleep(level)
        for one in (short, longer, cut, tmp_path / "none"):
            with pytest.raises((CheckpointError, ConfigError)):
                engine.weights.update(one)
        with pytest.raises(ConfigError, match="another model than the one that is served: it differs in"):
            engine.weights.update(odd)
        assert engine.weights.level == level
        engine.weights.wake_up()
        assert answers(engine) == before
    assert engine.weights.version == 0


def test_refusals(model_folders, other):
    engine = make_engine(model_folders(CASE))
    with pytest.raises(InvalidRequestError, match="level must be 1 or 2, got 3"):
        engine.weights.sleep(3)
    engine.add_request(request("x", [5, 6, 7], max_tokens=4))
    for call in (engine.weights.sleep, lambda: engine.weights.update(other)):
        with pytest.raises(InvalidRequestError, match="needs an engine without requests"):
            call()
    while engine.has_work:
        engine.step()
    engine.weights.sleep()


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel_size": 2, "quantization": "int8"}, {"pipeline_parallel_size": 2}]
)
def test_weights_from_arrays(options, model_folders, other):
    """Arrays by the names of a checkpoint's tensors serve like the files with them. Each is asked for by itself."""
    arrays = {name: jax.numpy.asarray(tensor.read()) for name, tensor in read_folder(other).items()}
    asked = []

    class Trainer(Mapping):
        def __getitem__(self, name):
            asked.append(name)
            return arrays[name]

        def __iter__(self):
            return iter(arrays)

        def __len__(self):
            return len(arrays)

    engine = make_engine(model_folders(CASE), **options)
    before = answers(engine)
    engine.weights.update(other)
    after = answers(engine)
    engine.weights.update(model_folders(CASE))
    compiled = engine.runner.num_executables
    engine.weights.update(Trainer())
    assert answers(engine) == after != before
    assert set(asked) == set(arrays)
    with pytest.raises(InvalidRequestError, match="level must be 1 after an update from arrays"):
        engine.weights.sleep(2)
    engine.weights.sleep()
    engine.weights.update(model_folders(CASE))
    assert answers(engine) == before
    assert engine.runner.num_executables == compiled


def test_arrays_that_cannot_be_used_change_nothing(model_folders, other):
    engine = make_engine(model_folders(CASE))
    before = answers(engine)
    arrays = {name: tensor.read() for name, tensor in read_folder(other).items()}
    name = "model.norm.weight"
    for wrong in (arrays[name][1:], arrays[name].astype(np.int32), [1.0]):
        with pytest.raises(CheckpointError, match=name):
            engine.weights.update(arrays | {name: wrong})
    with pytest.raises(CheckpointError, match="lacks 1 tensor"):
        engine.weights.update({key: value for key, value in arrays.items() if key != name})
    assert answers(engine) == before
