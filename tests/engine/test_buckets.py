"""Buckets by what steps cost on an accelerator, the cutting of plans into them, and prompts' chunks."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_engine, request
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.devices.targets import RATES, UNKNOWN_RATES, rates
from jaxserve.engine.engine import Engine
from jaxserve.execution.buckets import MAX_PADDING, MOST_DECODES, MOST_MIXED, step_shapes
from jaxserve.execution.cost import CALL_SECONDS, FEW, MeasuredChunk, StepCost, prefill_chunk
from jaxserve.execution.programs import StepPrograms
from jaxserve.execution.step_buffer import split
from jaxserve.pallas_kernels.types import QuantArray
from jaxserve.scheduling import pace
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows
from jaxserve.server.process.batch_files import answer_file

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")


def llama_8b(scheme: str, devices: int):
    """(sizes that a cost needs, parameters as shapes, split over the devices)."""
    mesh = make_mesh(devices)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("tensor")))

    def matrix(out: int, inputs: int):
        if scheme == "bf16":
            return array(jnp.bfloat16, out, inputs)
        scale = array(jnp.bfloat16, out, inputs // 128)
        return QuantArray(array(jnp.int4, out, inputs), scale, None, None, (1, 128), None)

    layer = {
        "qkv": matrix(6144, 4096),
        "out": matrix(4096, 4096),
        "up": matrix(28672, 4096),
        "down": matrix(4096, 14336),
    }
    params = {f"layers_{i}": layer | {"norm": array(jnp.bfloat16, 4096)} for i in range(32)}
    params |= {"embed": array(jnp.bfloat16, 128256, 4096), "head": array(jnp.bfloat16, 128256, 4096)}
    return SimpleNamespace(num_layers=32, num_heads=32, head_dim=128, max_position=8192), params


def cost_of(scheme: str = "bf16", device=H200, devices: int = 1, compute=jnp.bfloat16) -> StepCost:
    model, params = llama_8b(scheme, devices)
    cost = StepCost.of(params, model, device, devices, compute)
    assert cost is not None
    return cost


def sizes(shapes, decode_only: bool) -> list[int]:
    return [shape.tokens for shape in shapes if shape.decode_only is decode_only]


def rows(decodes: int, *prompts: int, scored: bool = False) -> Rows:
    count = np.asarray([1] * decodes + list(prompts), np.int32)
    slot = np.arange(len(count))
    scores = np.full(len(count), scored) & (count > 1)
    zeros = np.zeros(len(count), np.int32)
    only = not prompts
    return Rows(
        [SimpleNamespace(images=())] * len(count),
        slot,
        zeros,
        zeros,
        count,
        np.ones_like(count),
        scores,
        only_decodes=only,
    )


def tokens_of(batches) -> list[int]:
    return [batch.shape.tokens for batch in batches]


def test_the_roofline_of_an_8b_model_on_an_h200():
    """16.0 GB less the embedding table at 4.32 TB/s; 7.0 G multiplications a token at 791 TFLOP/s."""
    cost = cost_of()
    assert cost.weights == pytest.approx(15.0e9 / 4.32e12, rel=0.01)
    assert cost.token == pytest.approx(2 * 6.98e9 / 791e12, rel=0.01)
    assert cost.attention == pytest.approx(4 * 32 * 32 * 128 * 2048 / 791e12, rel=0.01)
    assert cost(1) == cost(150) < cost(256)
    assert cost_of("int4").weights == pytest.approx((6.98e9 * (0.5 + 2 / 128) + 1.05e9) / 4.32e12, rel=0.01)
    eighth = cost_of(devices=8)
    parts = (eighth.weights, eighth.token, eighth.attention)
    assert parts == pytest.approx((cost.weights / 8, cost.token / 8, cost.attention / 8))
    assert cost_of(compute=jnp.float32).token > 5 * cost.token
    assert StepCost.of({}, None, SimpleNamespace(platform="cpu"), 1, jnp.float32) is None


@pytest.mark.parametrize("quantization", ["auto", "int4"])
@pytest.mark.parametrize("case", ["tp_gqa", "qwen3_tied"])
def test_the_cost_of_a_model_that_is_loaded(model_folders, case, quantization):
    """Every weight is read but an embedding table that is no head; every matrix of a layer multiplies each token."""
    engine = make_engine(model_folders(case), quantization=quantization)
    model = engine.model
    params = engine.runner.params
    cost = StepCost.of(params, model, H200, 1, jnp.bfloat16)
    unread = 0 if model.tie_embeddings else sum(x.nbytes for x in jax.tree.leaves(params["embed"]["table"]))
    assert cost.weights * 0.9 * 4.8e12 == pytest.approx(engine.runner.weight_bytes - unread)
    heads = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    multiplications = model.num_layers * (heads + 3 * model.hidden_size * model.layers[0].mlp.size)
    assert cost.token * 0.8 * 989e12 == pytest.approx(2 * multiplications)


def test_rates_by_kind():
    kinds = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe"}
    kinds |= {kind: kind for kind in ("TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v6 lite", "TPU v6e", "TPU7x")}
    assert all(rates(SimpleNamespace(device_kind=kind)) is RATES[name] for kind, name in kinds.items())
    assert rates(SimpleNamespace(device_kind="NVIDIA L4")) is RATES["L4"]
    assert rates(SimpleNamespace(device_kind="NVIDIA L40S")) is RATES["L40S"]
    assert rates(SimpleNamespace(device_kind="something else")) is UNKNOWN_RATES


TABLE = {
    "bf16": ([1, 4, 16, 64, 256], [16, 64, 256, 384, 512, 1024, 8192]),
    "int4": ([1, 32, 96, 128, 192, 256], [32, 96, 128, 192, 256, 512, 8192]),
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", TABLE)
def test_table_of_an_8b_model_on_an_h200(scheme):
    """And what padding costs at worst, and on average over all sizes of a step: with the plans' cutting 5%. With the
    three others that have the output head, a start compiles at most 16 programs of the model."""
    cost = cost_of(scheme)
    shapes = step_shapes(256, 8192, 16, cost=cost, chunk=512)
    assert len(StepPrograms(static=False).all(shapes)) + 3 <= 16
    assert (sizes(shapes, True), sizes(shapes, False)) == TABLE[scheme]
    ratios = []
    for tokens in range(1, 8193):
        batches = list(split(rows(0, tokens), shapes, cost))
        assert sum(int(batch.rows.count.sum()) for batch in batches) == tokens
        ratios.append(sum(map(cost, tokens_of(batches))) / cost(tokens))
    assert max(ratios) <= MAX_PADDING
    assert np.mean(ratios) < {"bf16": 1.055, "int4": 1.045}[scheme]


@pytest.mark.parametrize("weights", [1e-5, 1e-3, 3.5e-3, 1e-1])
@pytest.mark.parametrize("token", [1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize(
    ("seqs", "tokens"), [(1, 1), (1, 5), (3, 17), (5, 1001), (100, 2047), (250, 8192), (2048, 4000)]
)
def test_whatever_the_limits(weights, token, seqs, tokens):
    """Each bucket suits kernels, and the largest reaches the limits. There are few, and they pad little on average over
    all numbers of rows and tokens: half more where weights are what the smallest mixed bucket takes, and about twice
    as much where so few buckets must do for steps whose time grows with every token."""
    cost = StepCost(weights, token)
    bound = 1.5 if weights >= FEW * token else 2.3
    shapes = step_shapes(seqs, tokens, 16, cost=cost)
    for decode_only, most, first in ((True, seqs, 1), (False, tokens, FEW)):
        found = sizes(shapes, decode_only)
        assert found[0] == first or not decode_only
        assert found[-1] == max(first, most if most <= 2 else 4 if most <= 4 else -(-most // 8) * 8)
        assert found == sorted(set(found))
        assert len(found) <= (MOST_DECODES if decode_only else MOST_MIXED)
        assert all(size in (1, 2, 4) or size % 8 == 0 for size in found)
        numbers = [max(round(most ** (i / 50)), 1) for i in range(51)]
        numbers = [n for n in numbers if decode_only or n >= FEW] or [FEW]
        plans = [rows(n) if decode_only else rows(0, n) for n in numbers]
        paid = [sum(map(cost, tokens_of(split(plan, shapes, cost)))) for plan in plans]
        assert np.mean([p / cost(n) for p, n in zip(paid, numbers, strict=True)]) <= bound
    assert all(shape.rows == min(shape.tokens, seqs) for shape in shapes if not shape.decode_only)


def test_decodes_and_a_prompt_go_together_where_that_is_cheaper():
    cost = cost_of()
    shapes = step_shapes(256, 8192, 16, cost=cost)
    (one,) = split(rows(200, 100), shapes, cost)
    assert (one.shape.tokens, one.shape.decode_only) == (384, False)
    assert cost(384) < 2 * cost(1)
    (one,) = split(rows(1, 9), shapes, cost)
    assert one.shape.tokens == 16
    # Nothing is saved where both are bound by their arithmetic, and nothing is lost.
    fast_memory = StepCost(1e-6, 1e-3)
    shapes = step_shapes(256, 8192, 16, cost=fast_memory)
    batches = list(split(rows(64, 3072), shapes, fast_memory))
    assert sum(map(fast_memory, tokens_of(batches))) <= fast_memory(64 + 3072) + CALL_SECONDS * len(batches)


def test_a_plan_is_never_dearer_than_in_one_batch():
    random = np.random.default_rng(5)
    for cost in (cost_of(), cost_of("int4"), StepCost(1e-5, 1e-5)):
        shapes = step_shapes(256, 2048, 16, cost=cost)
        for _ in range(200):
            decodes = int(random.integers(0, 100))
            prompts = random.integers(2, 400, random.integers(1, 5)).tolist()
            batches = list(split(rows(decodes, *prompts), shapes, cost))
            total = decodes + sum(prompts)
            found = sum(map(cost, tokens_of(batches)))
            assert found <= sum(map(cost, tokens_of(split(rows(0, total), shapes, cost)))) + 1e-12
            assert sum(int(batch.rows.count.sum()) for batch in batches) == total
            assert found <= MAX_PADDING * (cost(total) + CALL_SECONDS)


def test_scored_prompts_run_in_the_largest_bucket_whole():
    cost = cost_of()
    shapes = step_shapes(256, 2048, 16, cost=cost)
    assert tokens_of(split(rows(0, 300, scored=True), shapes, cost)) == [2048]
    assert tokens_of(split(rows(10, 300, scored=True), shapes, cost)) == [2048]


def test_1001_tokens():
    """The bucket is what kernels take; the budget stays the user's, which is the scheduler's to keep."""
    shapes = step_shapes(256, 1001, 16, cost=cost_of())
    assert sizes(shapes, False)[-1] == 1008
    assert math.gcd(*sizes(shapes, False)) == 16


@pytest.mark.parametrize(
    ("device", "devices", "scheme", "goal", "chunk"),
    [
        ("NVIDIA H200", 1, "bf16", 0.010, 512),
        ("NVIDIA H200", 1, "int4", 0.010, 512),
        ("NVIDIA H200", 1, "bf16", 0.050, 2560),
        ("NVIDIA H200", 8, "bf16", 0.010, 4096),
        ("NVIDIA H200", 1, "bf16", 0.0, 192),  # about as many as reading the weights takes anyway
        ("NVIDIA A100-SXM4-80GB", 1, "bf16", 0.010, 160),
        ("TPU v5 lite", 8, "bf16", 0.010, 768),
    ],
)
def test_a_chunk_takes_as_long_as_the_goal(device, devices, scheme, goal, chunk):
    """And has a bucket of its own, so that padding takes no part of it."""
    cost = cost_of(scheme, SimpleNamespace(platform="gpu", device_kind=device), devices)
    assert cost.chunk(goal) == chunk
    assert cost(chunk) + chunk * cost.attention <= max(goal, 1.1 * cost(1))
    assert chunk in sizes(step_shapes(256, 8192, 16, cost=cost, chunk=chunk), decode_only=False)
    config = EngineConfig(model="x", latency_goal_ms=1000 * goal)
    assert prefill_chunk(config, cost) == chunk
    assert prefill_chunk(replace(config, prefill_chunk=77), cost) == 77
    assert prefill_chunk(config, None) == 32


def host_of(count: int, *, prompt: int, output: int, streams: bool, slots: int = 256, **options) -> Scheduler:
    """A scheduler with an accelerator's limits and so many requests."""
    pages = (prompt + output) // 16 + 1
    scheduler = Scheduler(
        BlockManager(slots * pages + 1, 16, prefix_caching=False),
        max_num_seqs=slots, max_num_batched_tokens=8192, max_model_len=16 * pages, prefill_chunk=512,
        prefill_bursts=False, **options,
    )  # fmt: skip
    for i in range(count):
        one = request(str(i), [i % 500] * prompt, max_tokens=output)
        one.streams = streams
        scheduler.add(Sequence(one, 0, i, output, frozenset(), i))
    return scheduler


def advance(scheduler: Scheduler) -> Rows:
    """Runs a step, which draws zeros."""
    rows = scheduler.schedule().rows
    scheduler.commit(rows, np.where(rows.num_new[:, None] > 0, 0, -1).astype(np.int32))
    return rows


def test_offline_prompts_take_whole_steps():
    """Beside decodes, too, unless a client reads the tokens as they come."""

    def steps_with_prompts(**options) -> list[int]:
        scheduler = host_of(256, prompt=1024, output=129, **options)
        seen = []
        while not (rows := advance(scheduler)).only_decodes:
            seen.append(rows.num_tokens)
        return seen

    offline = steps_with_prompts(streams=False, prompts_first=True)
    assert 32 <= len(offline) <= 34
    assert set(offline[:-1]) == {8192}
    for others in ({"streams": True, "prompts_first": True}, {"streams": False}):
        assert len(steps_with_prompts(**others)) > 500


def test_who_gives_prompts_whole_steps(monkeypatch, tmp_path):
    """`LLM`, unless it is told otherwise, and `jaxserve batch`."""
    seen: list[EngineConfig] = []

    def take(config, *_):
        seen.append(config)
        raise InterruptedError

    monkeypatch.setattr("jaxserve.llm.load_engine", take)
    monkeypatch.setattr("jaxserve.server.process.batch_files.EngineProcess", take)
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    line = {"custom_id": "a", "url": "/v1/completions", "method": "POST", "body": {"prompt": "x"}}
    source.write_text(json.dumps(line))
    for start in (
        lambda: LLM("demo"),
        lambda: LLM("demo", prompts_first=False),
        lambda: answer_file(EngineConfig(model="demo"), source, target),
    ):
        with pytest.raises(InterruptedError):
            start()
    assert [config.prompts_first for config in seen] == [True, False, True]
    assert not EngineConfig(model="demo").prompts_first, "a server's"


def slow_device(monkeypatch, slowness: float, *, steps: int = 40, decodes: int = 16, reads: float = 0.0):
    """The chunk after some steps of prompts beside decodes, on a device that takes `slowness` times what the data sheet
    says, and `reads` seconds more for the cache."""
    cost = cost_of()
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    config = EngineConfig(model="x")
    shapes = step_shapes(256, 8192, 16, cost=cost, chunk=prefill_chunk(config, cost))
    chunk = MeasuredChunk.of(config, cost, sizes(shapes, decode_only=False))
    scheduler = host_of(decodes, prompt=16, output=1000, streams=True)
    measured = pace.Pace(0.010)
    advance(scheduler)
    for i in range(steps):
        long = request(f"long {i}", [i] * 1000, max_tokens=1)
        scheduler.add(Sequence(long, 0, i, 1, frozenset(), 1000 + i))
        rows = advance(scheduler)
        used = [batch.shape.tokens for batch in split(rows, shapes, cost)]
        estimated = chunk.estimate(used, rows.count)
        sent = clock.now
        clock.now += slowness * estimated + reads
        chunk.took(measured.arrived(sent, sent, 1), estimated)
        assert measured.is_exact
        scheduler.limit_chunk(chunk.tokens, chunk.least)
    return chunk, advance(scheduler)


def test_a_chunk_follows_the_measured_time(monkeypatch):
    assert MeasuredChunk(cost_of(), 0.010, [512]).tokens == 512, "by data sheet"
    chunk, rows = slow_device(monkeypatch, 1.0)
    assert (chunk.tokens, rows.num_tokens) == (512, 512)
    chunk, rows = slow_device(monkeypatch, 2.0)
    assert (chunk.tokens, rows.num_tokens) == (256, 256)
    assert chunk.slowdown == pytest.approx(2.0, rel=0.01)
    chunk, rows = slow_device(monkeypatch, 0.5)
    assert (chunk.tokens, rows.num_tokens) == (1024, 1024)


def test_a_measured_chunk_starves_no_prompt(monkeypatch):
    """Where decodes alone take longer than the goal, prompts get what reading the weights leaves room for, and as much
    as the estimate promised them at least. A pause of the host counts little."""
    chunk, rows = slow_device(monkeypatch, 1.0, decodes=240, reads=0.100)
    assert chunk.tokens == 256
    assert rows.count[rows.count > 1].sum() == chunk.least == 64
    paused = MeasuredChunk(cost_of(), 0.010, [64, 256, 512, 768])
    paused.took(5.0, 0.010)
    assert paused.slowdown == pytest.approx(1.2)


def test_where_the_chunk_stays_as_estimated():
    cost = cost_of()
    sizes = [64, 256, 512]
    assert MeasuredChunk.of(EngineConfig(model="x"), cost, sizes) is not None
    for settings in ({"prefill_chunk": 512}, {"pipeline_parallel_size": 2}):
        assert MeasuredChunk.of(EngineConfig(model="x", **settings), cost, sizes) is None
    assert MeasuredChunk.of(EngineConfig(model="x"), None, sizes) is None
    chunk = MeasuredChunk(cost, 0.010, sizes)
    assert chunk.estimate([64], np.ones(7, np.int32)) is None
    assert chunk.estimate([512], np.full(3, 40)) is None


def test_cpu_keeps_its_buckets():
    assert [str(shape) for shape in step_shapes(256, 2048, 16)] == [
        "decode_1", "decode_8", "decode_32", "mixed_64x32", "mixed_256x32"
    ]  # fmt: skip
    assert [str(shape) for shape in step_shapes(256, 2048, 16, padding_is_free=True)] == [
        "decode_1", "decode_32", "mixed_128x32"
    ]  # fmt: skip


@pytest.fixture
def engine(model_folders, monkeypatch):
    """Makes engines on CPU with an accelerator's buckets, or with their own."""

    def make(cost: StepCost | None) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr(StepCost, "of", lambda *_, **__: cost)
            config = EngineConfig(
                model=str(model_folders("llama3_gqa")), max_num_seqs=5, max_num_batched_tokens=101, kv_pages=400
            )
            return Engine.load(config, progress=False)

    return make


@pytest.mark.slow
def test_an_engine_with_an_accelerator_s_buckets(engine):
    """Gives the answers of any other, and keeps to the budget that was asked for, which is no bucket."""
    prompts = [np.random.default_rng(i).integers(5, 500, n).tolist() for i, n in enumerate((3, 230, 1, 60, 111, 9))]
    said = []
    for cost in (None, StepCost(weights=0.003, token=2e-4)):
        made = engine(cost)
        some = [request(str(i), prompt, max_tokens=12) for i, prompt in enumerate(prompts)]
        said.append([completion.token_ids for completion in generate(made, *some)])
    assert said[0] == said[1]
    assert [str(shape) for shape in made.shapes if shape.decode_only] == ["decode_1", "decode_2", "decode_8"]
    assert sizes(made.shapes, False) == [16, 24, 32, 48, 72, 104]
    assert made.scheduler.budget.most == 101
    assert made.counters.step_tokens.total == sum(map(len, prompts)) + 6 * 11
    assert made._chunk.slowdown != 1.0
    assert made.scheduler.budget.chunk == made._chunk.tokens, "steps beside decodes were measured"


@pytest.mark.parametrize("static", [False, True])
def test_one_program_returns_hidden_states(static):
    """Prompts whose log-probabilities are wanted run in the largest bucket. Others would return megabytes in vain, and
    their place in memory may change from step to step."""
    shapes = step_shapes(256, 8192, 16, cost=cost_of())
    kept = [program for program in StepPrograms(static=static).all(shapes) if program.keeps_hidden]
    assert [program.shape for program in kept] == [max(shapes, key=lambda shape: shape.tokens)]
