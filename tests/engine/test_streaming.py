"""Weights of some layers in host memory: the tokens of an engine that has all weights on its devices."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import generate, make_engine, request
from safetensors.numpy import save_file
from same_answers import PROMPTS, answers, check_equal

from jaxserve import checkpoints
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.commands.bundling import make_bundle
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.layouts import device_bytes
from jaxserve.engine.engine import Engine
from jaxserve.engine.streaming import GIB, check_host
from jaxserve.execution import memory
from jaxserve.execution.layer_uploads import HOST, LayerUploads, move_to_host
from jaxserve.jax_pools import HOST_POOL
from jaxserve.plan.deployment import Deployment

pytestmark = pytest.mark.compiles

PLAIN = "llama3_gqa"
SOME = {"cpu_offload_gib": 1e-9}  # as few layers as possible: three
ALL = {"cpu_offload_gib": 1.0}
TIGHT = {"kv_pages": 9, "max_model_len": 96, "prefill_chunk": 16}
TP2 = {"tensor_parallel_size": 2}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(deep_folders):
    """An engine with three of five layers in host memory, with chunked prompts and preemptions, that is ready."""
    made = make_engine(deep_folders(PLAIN, 5), **SOME, **TIGHT, forbid_compile=True)
    made.compile()
    return made


@pytest.mark.slow
def test_the_same_answers(engine, deep_folders, monkeypatch):
    """And at most two layers are on the devices: the one that computes, and the next one. Nothing compiles."""
    alone = answers(make_engine(deep_folders(PLAIN, 5), **TIGHT))
    bring = LayerUploads._bring
    compiled = engine.programs.compilations
    sent = []  # for each layer that is sent for: its number
    alive = []  # the layers' arrays that are on the devices

    def noting(uploads, number):
        made = bring(uploads, number)
        sent.append((number, made.arrays))
        alive.append([i for i, arrays in sent if not any(x.is_deleted() for x in arrays)])
        return made

    monkeypatch.setattr(LayerUploads, "_bring", noting)
    made = answers(engine)
    assert made[0] == alone[0]
    np.testing.assert_allclose(made[1], alone[1], atol=1e-5)
    cached = generate(engine, request("cached", PROMPTS[3], max_tokens=4))[0]
    assert (cached.token_ids, cached.num_cached > 0) == (alone[0]["again", 0], True)
    assert engine.scheduler.num_preemptions > 0
    assert engine.programs.compilations == compiled
    assert alive[:7] == [[0], [0, 1], [1, 2], [2, 0], [0, 1], [1, 2], [2, 0]]
    assert max(map(len, alive)) == 2
    assert len(sent) > 100


def test_where_weights_are(engine):
    """The first layers are on the devices, the last ones in host memory, and the sum of memory says so."""
    runner = engine.runner
    assert [layer.number for layer in runner.streamed.layers] == [2, 3, 4]
    assert {x.sharding.memory_kind for layer in runner.streamed.layers for x in layer.arrays} == {HOST}
    held = {name for name in runner.params if name.startswith("layers_")}
    assert held == {"layers_0", "layers_1"}
    layer = sum(map(device_bytes, runner.streamed.layers[0].arrays))
    assert runner.streamed_bytes == 3 * layer
    assert runner.weight_bytes == sum(map(device_bytes, runner.weights)) - layer  # two of three layers
    assert engine._sizing.budget.weights == runner.weight_bytes
    assert len(runner.streamed.kinds) == 1  # equal layers share a program


def test_after_a_failed_step(engine):
    """A step that fails at a layer leaves the wrong layers on the devices; the next one begins at the first again."""
    asked = [request(str(i), prompt[:30], max_tokens=8) for i, prompt in enumerate(PROMPTS)]
    expected = [one.token_ids for one in generate(engine, *asked)]
    take = engine.runner.streamed.uploads.take
    calls = 0
    failed = engine.counters.failed_steps

    def failing(number):
        nonlocal calls
        calls += 1
        if calls == 11:  # the second layer of a step
            raise RuntimeError("a device failed")
        return take(number)

    engine.reset_prefix_cache()
    engine.runner.streamed.uploads.take = failing
    made = generate(engine, *asked)
    del engine.runner.streamed.uploads.take
    assert engine.counters.failed_steps == failed + 1
    assert [one.token_ids for one in made] == expected


@pytest.mark.slow
def test_weights_are_put_aside_and_replaced(engine, deep_folders, tmp_path):
    """At level 1 the layers in host memory stay where they are, at level 2 they are freed too. Nothing compiles."""
    folder = deep_folders(PLAIN, 5)
    runner = engine.runner
    asked = request("0", PROMPTS[1], max_tokens=8)
    before = generate(engine, asked)[0].token_ids
    compiled = runner.num_executables
    for level in (1, 2):
        on_devices = [*runner._arrays, *jax.tree.leaves(runner.cache), *runner.streamed.uploads._present[-1].arrays]
        on_host = [x for layer in runner.streamed.layers for x in layer.arrays]
        engine.weights.sleep(level)
        assert all(x.is_deleted() for x in on_devices)
        assert {x.is_deleted() for x in on_host} == {level == 2}
        with pytest.raises(CheckpointError):
            engine.weights.update(other_folder(folder, tmp_path / f"cut{level}", cut=True))
        engine.weights.wake_up()
        assert generate(engine, asked)[0].token_ids == before
    other = other_folder(folder, tmp_path / "other")
    engine.weights.update(other)
    after = generate(engine, asked)[0].token_ids
    assert after == generate(make_engine(other, **SOME, **TIGHT), asked)[0].token_ids != before
    with pytest.raises(CheckpointError):
        engine.weights.update(tmp_path / "cut1")
    assert generate(engine, asked)[0].token_ids == after
    engine.weights.sleep()
    engine.weights.update(folder)
    assert generate(engine, asked)[0].token_ids == before
    assert {x.sharding.memory_kind for layer in runner.streamed.layers for x in layer.arrays} == {HOST}
    assert (runner.num_executables, engine.weights.version) == (compiled, 2)


def other_folder(folder, out, *, cut: bool = False):
    """A folder with other weights of a model, of which the file ends too early if `cut` is set."""
    shutil.copytree(folder, out)
    values = {name: tensor.read()[::-1] for name, tensor in read_folder(folder).items()}
    save_file({name: np.ascontiguousarray(value) for name, value in values.items()}, out / "model.safetensors")
    if cut:
        data = (out / "model.safetensors").read_bytes()
        (out / "model.safetensors").write_bytes(data[: len(data) // 2])
    return out


def test_uploads_of_sharded_arrays():
    """Each device copies its own part, and an array comes back as it was, whatever its dtype."""
    mesh = jax.make_mesh((2,), ("tensor",))
    place = jax.NamedSharding(mesh, jax.P(None, "tensor"))
    for dtype in (np.float32, jax.numpy.bfloat16, jax.numpy.int4, jax.numpy.float8_e4m3fn):
        x = jax.device_put(jax.numpy.arange(-8, 8).reshape(2, 8).astype(dtype), place)
        expected = np.array(x)
        host = move_to_host(x)
        assert x.is_deleted()
        assert host.sharding == place.with_memory_kind(HOST)
        uploads = LayerUploads([[host]] * 3, [[place]] * 3)
        (made,) = uploads.take(0)
        assert made.sharding == place
        np.testing.assert_array_equal(np.array(made), expected)


@SLOW
@pytest.mark.parametrize(
    ("case", "layers", "options"),
    [
        (PLAIN, 5, ALL),
        (PLAIN, 5, SOME | TP2),
        (PLAIN, 4, ALL | {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
        ("llama32_tied", 5, SOME),
        ("qwen3_moe_plain", 5, SOME),
        ("qwen3_moe_plain", 4, SOME | TP2 | {"enable_expert_parallel": True}),
        ("deepseek_v3_groups", 3, SOME),
        ("deepseek_v3_groups", 3, SOME | TP2),
        ("gemma2_caps", 3, SOME),
        ("gpt_oss_sinks", 4, SOME),
        ("gpt_oss_sinks", 4, SOME | TP2),
    ],
)
def test_other_models(case, layers, options, deep_folders):
    made = check_equal(deep_folders(case, layers), options, {})
    assert len(made.runner.streamed.layers) == (layers if options["cpu_offload_gib"] == 1 else 3)


@SLOW
@pytest.mark.parametrize(
    "others",
    [
        {"static_steps": True},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4", "tensor_parallel_size": 2},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=lambda others: " ".join(map(str, others.values())),
)
def test_with_other_settings(others, deep_folders):
    check_equal(deep_folders(PLAIN, 5), SOME, others)


@SLOW
@pytest.mark.parametrize("devices", [1, 2])
def test_layers_in_two_forms(devices, tmp_path):
    """A GGUF file whose layers are quantized differently: each form has a program of its own."""
    gguf_files = pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)
    kinds = gguf_files.Kind
    form = lambda name: kinds.Q8_0 if ".3." in name or "embed" in name else kinds.Q5_0  # noqa: E731
    path = gguf_files.write_gguf(Path(checkpoints.__file__).parent / "demo", tmp_path / "model.gguf", form)
    engine = check_equal(path, SOME, {"tensor_parallel_size": devices})
    # Several devices have no blocks: there both forms become 8-bit codes with equal groups.
    assert engine.runner.streamed._parts_of == ([0, 1, 0] if devices == 1 else [0, 0, 0])


@SLOW
@pytest.mark.parametrize("case", ["qwen3_next_groups", "falcon_h1_multipliers"])
def test_recurrent_layers(case, model_folders):
    """In the place of attention, and beside it."""
    folder = model_folders(case)
    assert answers(make_engine(folder, **SOME))[0] == answers(make_engine(folder))[0]


@SLOW
def test_experts_are_counted(deep_folders):
    """The layers in host memory count like the others."""
    counts = []
    for options in ({}, SOME):
        engine = make_engine(deep_folders("qwen3_moe_plain", 5), **options, decode_steps=False)
        generate(engine, request("0", PROMPTS[1], max_tokens=6))
        stats = engine.stats()
        counts.append((stats.moe_routed_tokens, stats.moe_busiest_tokens, stats.moe_active_experts))
    assert counts[0] == counts[1] > (0, 0, 0)


def test_too_little_host_memory(deep_folders, monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"needs .* of host memory for all devices, but 1000 B are free: lower it"):
        Engine.load(EngineConfig(model=str(deep_folders(PLAIN, 5)), **ALL), progress=False)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2**40)
    check_host(65 * GIB, "tpu")
    with pytest.raises(ConfigError, match=f"at most 64.00 GiB for GPUs: set {HOST_POOL} to 194 before JAX starts"):
        check_host(65 * GIB, "gpu")


def test_commands_that_refuse_it(tmp_path):
    config = EngineConfig(model="demo", **ALL)
    with pytest.raises(ConfigError, match="plan does not count weights in host memory"):
        Deployment.of(config, "cpu")
    with pytest.raises(ConfigError, match="leave out --cpu-offload-gib"):
        make_bundle(config, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, "cannot be combined with enable_lora True: leave enable_lora at False"),
        ({"kv_offload_gib": 1.0}, "cannot be combined with kv_offload_gib 1.0"),
        ({"speculative_config": {"method": "ngram"}}, "cannot be combined with speculative_config"),
        ({"num_hosts": 2, "coordinator": "a:1"}, "cannot be combined with num_hosts 2"),
        ({"pipeline_parallel_size": 2}, "cannot be combined with pipeline_parallel_size 2"),
        ({"data_parallel_size": 2}, "cannot be combined with data_parallel_size 2"),
        ({"deterministic": True}, "cannot be combined with deterministic True"),
        ({}, "must be 0 for a model of 2 layers: 2 layers are on the devices at a time in any case"),
        ({"cpu_offload_gib": -1}, "must be between 0 and"),
    ],
)
def test_refusals(options, message, model_folders):
    with pytest.raises(ConfigError, match=message):
        Engine.load(EngineConfig(**{"model": str(model_folders(PLAIN)), **ALL, **options}), progress=False)
