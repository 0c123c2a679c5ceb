"""Models whose matrices stay GGUF's blocks, as on GPUs: here in plain XLA, on CPU devices."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec

from jaxserve import checkpoints
from jaxserve.checkpoints.gguf_model import open_gguf
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import make_mesh, spec
from jaxserve.execution.memory import bytes_by_dtype
from jaxserve.models import load, quantized
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import make_decoder, read_model
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import BlockArray, MixedArray, QuantArray

gguf_files = pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)

pytestmark = pytest.mark.compiles

Kind = gguf_files.Kind
DEMO = Path(checkpoints.__file__).parent / "demo"
PROMPT = np.random.default_rng(0).integers(1, 4000, 40).tolist()
KINDS = {"q": Kind.Q5_0, "k": Kind.Q5_0, "v": Kind.Q5_0, "gate": Kind.Q4_1, "up": Kind.Q5_1, "down": Kind.Q5_1}


def kind_of(name: str) -> Kind:
    """One kind for queries, keys and values, and for what gets the MLP's result; gates and ups are of two kinds."""
    return KINDS.get(name.split(".")[-2].removesuffix("_proj"), Kind.Q5_0 if "embed" in name else Kind.Q8_0)


def likelihoods(path, devices) -> tuple[np.ndarray, dict]:
    engine = make_engine(path, decode_steps=False, tensor_parallel_size=devices)
    [answer] = generate(engine, request("0", PROMPT, max_tokens=4, prompt_logprobs=0, logprobs=0))
    found = [entry.logprob for entry in answer.prompt_logprobs[1:] + answer.logprobs if entry is not None]
    return np.array(found), flatten_dict(engine.runner.params, sep="/")


@pytest.mark.slow
def test_a_model_in_blocks(tmp_path, monkeypatch):
    """Everything stays in blocks, also where rows are fused, or split over two devices; the answers are the same."""
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", kind_of)
    want, before = likelihoods(path, 2)
    assert not any(isinstance(w, BlockArray) for w in before.values())
    for module in (load, quantized):
        monkeypatch.setattr(module, "keeps_blocks", lambda mesh: True)
    found, params = likelihoods(path, 2)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-4)
    kept = {name.split("/", 1)[1]: w.kind for name, w in params.items() if isinstance(w, BlockArray)}
    assert kept == {"table": "Q5_0", "attention/qkv/kernel": "Q5_0", "mlp/down/kernel": "Q5_1"}
    gate_up = params["layers_0/mlp/gate_up/kernel"]
    assert isinstance(gate_up, MixedArray)
    assert ([part.kind for part in gate_up.parts], gate_up.widths) == (["Q4_1", "Q5_1"], (1, 1))
    assert gate_up.shape == before["layers_0/mlp/gate_up/kernel"].shape
    assert gate_up.parts[0].low.sharding.spec == spec("mlp", None)
    down = params["layers_0/mlp/down/kernel"]
    assert down.shape == before["layers_0/mlp/down/kernel"].shape
    assert down.low.sharding.spec == spec(None, "mlp")
    assert down.low.sharding.shard_shape(down.low.shape)[1] == down.low.shape[1] // 2


def as_llama_quantize(name: str) -> Kind:
    """Its Q4_K_M in those layers where values and what gets the MLP's result are finer; 704 inputs are no blocks of
    256, for which it takes Q8_0."""
    if "down_proj" in name:
        return Kind.Q8_0
    return Kind.Q6_K if "v_proj" in name or "embed" in name else Kind.Q4_K


def odd(name: str) -> Kind:
    """Its Q4_K_M where no width is a multiple of 256; and keys of a third type."""
    if "k_proj" in name:
        return Kind.F16
    return Kind.Q8_0 if "v_proj" in name or "up_proj" in name or "embed" in name else Kind.Q5_0


MIXED = {
    as_llama_quantize: [("Q4_K", "Q6_K"), "Q4_K"],
    odd: [("Q5_0", "float32", "int8"), ("Q5_0", "int8")],
}


def form_of(w) -> str | tuple:
    if isinstance(w, MixedArray):
        return tuple(form_of(part) for part in w.parts)
    return w.kind if isinstance(w, BlockArray) else str(w.codes.dtype if isinstance(w, QuantArray) else w.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXED, ids=lambda kind: kind.__name__)
def test_each_part_of_a_weight_has_the_width_of_the_file(kind, tmp_path, monkeypatch):
    """In bytes of the device for each number of the matrices, against those of the file; answers as from floats."""
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", kind)
    for module in (load, quantized):
        monkeypatch.setattr(module, "keeps_blocks", lambda mesh: True)
    monkeypatch.setattr(load.Packing, "of", lambda config, mesh: None)
    found, params = likelihoods(path, 1)
    layer = [form_of(params[f"layers_0/{name}/kernel"]) for name in ("attention/qkv", "mlp/gate_up")]
    assert layer == MIXED[kind]
    tensors = {name: t for name, t in open_gguf(path).tensors.items() if len(t.shape) == 2}
    in_file = sum(np.prod(t.shape) // t.type.size * t.type.nbytes for t in tensors.values())
    in_file += sum(2 * np.prod(t.shape) for t in tensors.values() if t.type.name == "F16")  # float32 in this memory
    held = sum(sum(bytes_by_dtype(w).values()) for w in params.values() if len(w.shape) == 2)
    numbers = sum(np.prod(t.shape) for t in tensors.values())
    assert held / numbers <= 1.03 * in_file / numbers
    want = likelihoods_of_floats(path)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=2e-4)  # blocks at random make logits of 1e5


def likelihoods_of_floats(path) -> np.ndarray:
    engine = make_engine(path, decode_steps=False, dequantize=True)
    [answer] = generate(engine, request("0", PROMPT, max_tokens=4, prompt_logprobs=0, logprobs=0))
    return np.array([e.logprob for e in answer.prompt_logprobs[1:] + answer.logprobs if e is not None])


@pytest.mark.parametrize("kind", [kind_of, *MIXED], ids=lambda kind: kind.__name__)
def test_the_plan_tells_what_loading_makes(kind, tmp_path, monkeypatch):
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", kind)
    for module in ("jaxserve.models.abstract_weights", "jaxserve.models.load"):
        monkeypatch.setattr(f"{module}.keeps_blocks", lambda mesh: True)
    mesh = make_mesh(2)
    config = EngineConfig(model=str(path), tensor_parallel_size=2)
    decoder: Decoder = make_decoder(read_model(path), mesh, "float32")
    planned = abstract_weights(decoder, path, mesh, config)
    loaded = flatten_dict(load.load_params(decoder, path, mesh, progress=False, blocks=True, keep_mixed=True), sep="/")

    def form(x):
        return x.shape, x.dtype, x.sharding

    for name, w in loaded.items():
        assert jax.tree.structure(w) == jax.tree.structure(planned[name]), name
        assert jax.tree.map(form, w) == jax.tree.map(form, planned[name]), name


def test_rows_in_turn_need_no_other_device():
    """Partials whose rows are split over devices give a product that is split likewise, without anything sent."""
    mesh = make_mesh(4)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((8 * width, 32)).astype(np.float32) for width in (3, 1)]
    split = jax.sharding.NamedSharding(mesh, PartitionSpec("tensor"))
    w = MixedArray(tuple(jax.device_put(v, split) for v in values), (3, 1))
    x = rng.standard_normal((5, 32)).astype(np.float32)
    product = jax.jit(lambda x, w: Ops().linear(x, w, ("kv_heads", "embed"))).lower(x, w).compile()
    assert not re.findall(r" (all-\w+|collective-\w+)\(", product.as_text())
    y = product(x, w)
    assert y.sharding.shard_shape(y.shape) == (5, 8)
    whole = np.concatenate([v.reshape(8, -1, 32) for v in values], axis=1).reshape(32, 32)
    np.testing.assert_allclose(y, x @ whole.T, rtol=1e-5, atol=1e-5)


def test_blocks_that_devices_would_cut():
    """As many blocks as devices, or a multiple, or the weight does not stay in blocks."""
    from jaxserve.checkpoints.quantized import StoredRows

    data = gguf_files.random_blocks(Kind.Q6_K, 4, 512)
    rows = StoredRows([("Q6_K", data)], np.arange(4), 512)
    mesh = make_mesh(4)
    for inputs, kept in (("tensor", False), (None, True)):
        place = jax.sharding.NamedSharding(mesh, PartitionSpec(None, inputs))
        assert (quantized.as_blocks(rows, place) is not None) == kept
