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
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.panels import is_matrix
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.cpu_panels import PanelType
from jaxserve.pallas_kernels.types import MixedArray, PanelArray

gguf_files = pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)
pytestmark = [pytest.mark.skipif(not cpu_panels.available(), reason="no C++ compiler"), pytest.mark.compiles]

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


def multiplies_bfloat16() -> bool:
    """Whether this processor has products of pairs of bfloat16."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "avx512_bf16" in info.read_text()


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


@pytest.mark.slow
def test_16_bits_stay_and_give_the_bits_of_float32(wide):
    short = load(DEMO)
    long = load(wide)
    assert all(types_of(w) == {PanelType.BF16} for w in matrices(short).values())
    assert all(types_of(w) == {PanelType.F32} for w in matrices(long).values())
    assert short.runner.weight_bytes < 0.52 * long.runner.weight_bytes
    found = likelihoods(short)
    expected = likelihoods(long)
    np.testing.assert_array_equal(found[:GIVEN], expected[:GIVEN])
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # XLA compiles the sampler's sums anew for each program
    differences = np.abs(likelihoods(load(DEMO, dtype="bfloat16")) - found)[:GIVEN]
    assert differences.max() < 0.2
    assert bool(differences.max() > 0) == multiplies_bfloat16()  # only then inputs are rounded to bfloat16


def mixed(name: str) -> Kind:
    """As llama-quantize mixes types: 704 inputs are no blocks of 256, values are finer than queries and keys."""
    if "down_proj" in name:
        return Kind.Q5_0
    return Kind.Q6_K if "v_proj" in name or "embed" in name else Kind.Q4_K


def split(name: str) -> Kind:
    """Gate and up, whose rows alternate, in different types."""
    return Kind.Q8_0 if "up_proj" in name else Kind.Q4_0


KINDS = {
    "mixed": mixed,
    "split": split,
    "Q5_1": lambda name: Kind.Q5_1,
    "MXFP4": lambda name: Kind.Q8_0 if "embed" in name else Kind.MXFP4,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_gguf_file_gives_the_bits_of_its_values(kind, tmp_path):
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", kind)
    exact = load(path, matmul_backend="cpu")
    floats = load(path, dequantize=True)
    np.testing.assert_array_equal(likelihoods(exact), likelihoods(floats))
    found = [part for w in matrices(exact).values() for part in (w.parts if isinstance(w, MixedArray) else [w])]
    assert all(isinstance(w, PanelArray) for w in found)
    assert sum(w.data.nbytes for w in found) < 1.03 * path.stat().st_size
    if kind is split:
        gate_up = matrices(exact)["layers_0/mlp/gate_up/kernel"]
        assert [types_of(part) for part in gate_up.parts] == [{PanelType.Q4_0}, {PanelType.Q8_0}]
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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_4_bit_floats_take_4_bits(scheme):
    """As the plan says; the exact arithmetic is that of plain XLA."""
    engine = load(DEMO, load_format="dummy", quantization=scheme)
    layers = {name: w for name, w in matrices(engine).items() if name.startswith("layers_")}
    assert {kind for w in layers.values() for kind in types_of(w)} == {PanelType[scheme.upper()]}
    bits = 8 * sum(w.data.nbytes for w in layers.values()) / sum(np.prod(w.shape) for w in layers.values())
    assert bits < (4.5 if scheme == "mxfp4" else 4.9)  # 704 inputs take the room of 768
    planned = abstract_weights(engine.runner.model, DEMO, engine.runner.mesh, engine.config)
    for name, w in layers.items():
        assert [x.shape for x in jax.tree.leaves(planned[name])] == [x.shape for x in jax.tree.leaves(w)]
    exact, plain = (
        load(DEMO, load_format="dummy", quantization=scheme, matmul_backend=name) for name in ("cpu", "xla")
    )
    np.testing.assert_allclose(likelihoods(exact)[:GIVEN], likelihoods(plain)[:GIVEN], rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_integers_by_default_come_close(kind, tmp_path):
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", KINDS.get(kind, lambda name: Kind.Q8_0))
    found = likelihoods(load(path))
    exact = likelihoods(load(path, matmul_backend="cpu"))
    assert 0 < np.abs(found - exact)[:GIVEN].max() < 0.1
