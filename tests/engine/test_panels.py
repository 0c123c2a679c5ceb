"""Models whose matrices lie in panels on one CPU: what they take of memory, and the same answers to the bit."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxserve import checkpoints
from jaxserve.commands.model_report import abstract_weights
from jaxserve.models.panels import is_matrix
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.cpu_panels import PanelType
from jaxserve.pallas_kernels.types import PanelArray, QuantArray

gguf_files = pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not cpu_panels.available(), reason="no C++ compiler")

Kind = gguf_files.Kind
DEMO = Path(checkpoints.__file__).parent / "demo"
PROMPT = np.random.default_rng(0).integers(1, 4000, 40).tolist()
GIVEN = len(PROMPT) - 1  # likelihoods of the prompt; those of drawn tokens follow


def load(folder, **options):
    return make_engine(folder, decode_steps=False, **options)


def likelihoods(engine) -> np.ndarray:
    """Of a prompt's tokens, and of a few drawn after it."""
    [answer] = generate(engine, request("0", PROMPT, max_tokens=4, prompt_logprobs=0, logprobs=0))
    assert answer.prompt_logprobs is not None
    return np.array([entry.logprob for entry in answer.prompt_logprobs[1:] + answer.logprobs if entry is not None])


def matrices(engine) -> dict:
    return {path: w for path, w in flatten_dict(engine.runner.params, sep="/").items() if is_matrix(path)}


def types_of(w: PanelArray) -> set[PanelType]:
    return {PanelType(kind) for kind in np.asarray(w.table)[:, 1].tolist()}


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """The demo model, which is bfloat16, in float32."""
    folder = tmp_path_factory.mktemp("wide")
    for path in DEMO.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, folder)
    tensors = {name: x.astype(np.float32) for name, x in load_file(DEMO / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return folder


def test_16_bits_stay_and_give_the_bits_of_float32(wide):
    short, long = load(DEMO), load(wide)
    assert all(types_of(w) == {PanelType.BF16} for w in matrices(short).values())
    assert all(types_of(w) == {PanelType.F32} for w in matrices(long).values())
    assert short.runner.weight_bytes < 0.52 * long.runner.weight_bytes
    found = likelihoods(short)
    expected = likelihoods(long)
    np.testing.assert_array_equal(found[:GIVEN], expected[:GIVEN])
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # XLA compiles the sampler's sums anew for each program
    assert 0 < np.abs(likelihoods(load(DEMO, dtype="bfloat16")) - found)[:GIVEN].max() < 0.2


def mixed(name: str) -> Kind:
    """As llama-quantize mixes types: 704 inputs are no blocks of 256, values are finer than queries and keys."""
    if "down_proj" in name:
        return Kind.Q5_0
    return Kind.Q6_K if "v_proj" in name or "embed" in name else Kind.Q4_K


def split(name: str) -> Kind:
    """Gate and up, whose rows alternate, in different types."""
    return Kind.Q8_0 if "up_proj" in name else Kind.Q4_0


@pytest.mark.parametrize("kind", [mixed, split, lambda name: Kind.Q5_1], ids=["mixed", "split", "one"])
def test_a_gguf_file_gives_the_bits_of_its_values(kind, tmp_path):
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", kind)
    exact, floats = load(path, matmul_backend="cpu"), load(path, dequantize=True)
    if kind is split:  # whose rows of mixed types have kernels that add up otherwise
        np.testing.assert_allclose(likelihoods(exact), likelihoods(floats), rtol=1e-4)
    else:
        np.testing.assert_array_equal(likelihoods(exact), likelihoods(floats))
    in_panels = [w for w in matrices(exact).values() if isinstance(w, PanelArray)]
    stored = sum(w.data.nbytes for w in in_panels)
    if kind is split:
        assert any(isinstance(w, QuantArray) for w in matrices(exact).values())
    else:
        assert len(in_panels) == len(matrices(exact))
        assert stored < 1.03 * path.stat().st_size
    if kind is mixed:
        assert types_of(matrices(exact)["layers_0/attention/qkv/kernel"]) == {PanelType.Q4_K, PanelType.Q6_K}
        assert types_of(matrices(exact)["embed/table"]) == {PanelType.Q6_K}


def test_a_plan_tells_the_form_of_each_weight(tmp_path):
    """llama-quantize gives a tensor more bits in some layers than in others: equal shapes, other widths."""
    finer = ("layers.0.", "layers.2.")

    def kind(name: str) -> Kind:
        return Kind.Q6_K if "v_proj" in name and any(layer in name for layer in finer) else mixed_without_v(name)

    def mixed_without_v(name: str) -> Kind:
        return Kind.Q4_K if "v_proj" in name else mixed(name)

    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", kind)
    engine = load(path)
    config = engine.config
    planned = abstract_weights(engine.runner.model, path, engine.runner.mesh, config)
    loaded = flatten_dict(engine.runner.params, sep="/")
    assert planned.keys() == loaded.keys()

    def form(x) -> list:
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x)]

    assert {name: form(x) for name, x in planned.items()} == {name: form(x) for name, x in loaded.items()}
    sizes = {form(loaded[f"layers_{i}/attention/qkv/kernel"])[0] for i in range(3)}
    assert len(sizes) == 2, "the layers differ"


def test_integers_by_default_come_close(tmp_path):
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", lambda name: Kind.Q8_0)
    found, exact = likelihoods(load(path)), likelihoods(load(path, matmul_backend="cpu"))
    assert 0 < np.abs(found - exact)[:GIVEN].max() < 0.1
