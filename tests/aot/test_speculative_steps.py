"""Steps that check proposals, and an EAGLE-3 draft's, compiled for devices that are not here, with two layers of an 8B
shape."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict
from test_host_free_steps import VOCAB, host_waits, sorts
from test_steps import LLAMA_8B, cache_copies, make_runner

from jaxserve.devices.mesh import replicated
from jaxserve.execution.cache_kinds import cache_kind
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.config import HFConfig
from jaxserve.models.drafter import Drafter, DraftSpec
from jaxserve.models.families import read_model_config
from jaxserve.models.load import make_decoder
from jaxserve.models.weights import abstract_params
from jaxserve.scheduling.step_plan import Sampler

ROWS = 64
PROPOSALS = 4
TOKENS = 384


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.mark.parametrize(
    ("target", "backend", "page_size", "sampler"),
    [
        ("h200x1", "mosaic_gpu", 16, Sampler.FULL),
        pytest.param("h200x1", "mosaic_gpu", 16, Sampler.GREEDY, marks=pytest.mark.slow),
        pytest.param("h200x1", "mosaic_gpu", 16, Sampler.FILTERED, marks=pytest.mark.slow),
        pytest.param("h200x8", "mosaic_gpu", 16, Sampler.FULL, marks=pytest.mark.slow),
        pytest.param("v6e-1", "mosaic_tpu", 128, Sampler.ANY, marks=pytest.mark.slow),
        pytest.param("v6e-8", "mosaic_tpu", 128, Sampler.ANY, marks=pytest.mark.slow),
    ],
)
def test_proposals_are_checked_in_one_pass(target, backend, page_size, sampler, tmp_path):
    """One pass of two layers, logits for the draws alone, and nothing that waits for the host."""
    runner, _ = make_runner(tmp_path, target, backend, page_size, 2)
    shape = StepShape.of(TOKENS, ROWS, page_size, decode_only=False)
    program = StepProgram(shape, sampler, 1, keeps_hidden=False, proposals=PROPOSALS)
    text = runner.lower(program).compile().as_text()
    if target.startswith("h200"):
        assert host_waits(text) == []
    assert sorts(text) == []
    cache = runner.layout.num_pages * runner.layout.page_bytes // runner.mesh.size
    assert cache_copies(text, cache // 2 // 2) == []
    draws = ROWS * (PROPOSALS + 1)
    logits = {int(n) for n in re.findall(rf"f32\[(\d+),{VOCAB}\]", text)}
    assert logits <= {draws, ROWS, draws // runner.mesh.size, ROWS // runner.mesh.size}
    assert draws // runner.mesh.size in logits


DRAFT_VOCAB = 32000


def with_head(runner, params, backend, page_size):
    """The same runner with an EAGLE-3 draft of the published shape for Llama-3.1-8B."""
    mesh = runner.mesh
    target = runner.model
    layout = runner.layout
    shape = read_model_config(HFConfig(LLAMA_8B | {"num_hidden_layers": 1, "vocab_size": DRAFT_VOCAB}))
    like = make_decoder(shape, mesh, jnp.bfloat16, page_size=page_size, kv_dtype=jnp.bfloat16, attention=backend)
    sizes = like.kv_heads, like.vocab_rows, VOCAB, target.vocab_rows
    drafter = Drafter(DraftSpec((0, 1, 2), 4096, own_head=True), like.config, *sizes, jnp.bfloat16, like.ops)
    own = {f"draft/{path}": array for path, array in abstract_params(drafter, mesh).items()}
    own["draft/ids"] = jax.ShapeDtypeStruct((DRAFT_VOCAB,), jnp.int32, sharding=replicated(mesh))
    whole = unflatten_dict(params | own, sep="/")
    made = ModelRunner(target, whole, mesh, runner.num_slots, penalty_rows=64, proposals=PROPOSALS, drafter=drafter)
    kind = cache_kind(drafter.config, drafter.kv_heads, jnp.bfloat16, mesh.devices.flat[0].platform)
    made.set_cache_size(replace(layout, draft=kind), 8192 // page_size)
    return made


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("target", "backend", "page_size"),
    [
        ("h200x1", "mosaic_gpu", 16),
        pytest.param("h200x8", "mosaic_gpu", 16, marks=pytest.mark.slow),
        pytest.param("v6e-1", "mosaic_tpu", 128, marks=pytest.mark.slow),
        pytest.param("v6e-4", "mosaic_tpu", 128, marks=pytest.mark.slow),
    ],
)
def test_a_draft_on_hidden_states(target, backend, page_size, tmp_path):
    """A step that checks proposals, one that decodes, and a call that proposes: nothing waits for the host, no cache is
    copied, and the steps have logits of the draft nowhere."""
    plain, params = make_runner(tmp_path, target, backend, page_size, 2)
    runner = with_head(plain, params, backend, page_size)
    mixed = StepShape.of(TOKENS, ROWS, page_size, decode_only=False)
    decodes = StepShape.of(ROWS, ROWS, page_size, decode_only=True)
    programs = runner.programs
    names = [programs.choose_checking(mixed, Sampler.GREEDY), programs.choose(decodes, Sampler.GREEDY, 1, scores=False)]
    # Filters take libtpu minutes to compile.
    samplers = (Sampler.GREEDY, Sampler.FILTERED) if target.startswith("h200") else (Sampler.GREEDY,)
    names += [AuxProgram("propose", ROWS, sampler, PROPOSALS) for sampler in samplers]
    cache = runner.layout.num_pages * runner.layout.page_bytes // runner.mesh.size
    for name in names:
        text = runner.lower(name).compile().as_text()
        if target.startswith("h200") and runner.programs.static:
            assert host_waits(text) == [], name
        assert sorts(text) == [], name
        assert cache_copies(text, cache // 3 // 2) == [], name
        shares = DRAFT_VOCAB // runner.mesh.size
        assert bool(re.search(rf"\[\d+,{shares}\]", text)) == isinstance(name, AuxProgram), name
