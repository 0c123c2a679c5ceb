"""Models whose matrices stay GGUF's blocks, as on GPUs: here in plain XLA, on CPU devices."""

from pathlib import Path

import jax
import numpy as np
import pytest
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec

from jaxserve import checkpoints
from jaxserve.commands.model_report import abstract_weights
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.models import load, quantized
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import make_decoder, read_model
from jaxserve.pallas_kernels.types import BlockArray

gguf_files = pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)

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


def test_a_model_in_blocks(tmp_path, monkeypatch):
    """What is alike stays in blocks, also where rows are fused, or split over two devices; the answers are the same."""
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", kind_of)
    want, before = likelihoods(path, 2)
    assert not any(isinstance(w, BlockArray) for w in before.values())
    for module in (load, quantized):
        monkeypatch.setattr(module, "keeps_blocks", lambda mesh: True)
    found, params = likelihoods(path, 2)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-4)
    kept = {name.split("/", 1)[1]: w.kind for name, w in params.items() if isinstance(w, BlockArray)}
    assert kept == {"table": "Q5_0", "attention/qkv/kernel": "Q5_0", "mlp/down/kernel": "Q5_1"}
    down = params["layers_0/mlp/down/kernel"]
    assert down.shape == before["layers_0/mlp/down/kernel"].shape
    assert down.low.sharding.spec == PartitionSpec(None, "tensor")
    assert down.low.sharding.shard_shape(down.low.shape)[1] == down.low.shape[1] // 2


def test_the_plan_tells_what_loading_makes(tmp_path, monkeypatch):
    path = gguf_files.write_gguf(DEMO, tmp_path / "model.gguf", kind_of)
    for module in ("jaxserve.commands.model_report", "jaxserve.models.load"):
        monkeypatch.setattr(f"{module}.keeps_blocks", lambda mesh: True)
    mesh, config = make_mesh(2), EngineConfig(model=str(path), tensor_parallel_size=2)
    decoder: Decoder = make_decoder(read_model(path), mesh, "float32")
    planned = abstract_weights(decoder, path, mesh, config)
    loaded = flatten_dict(load.load_params(decoder, path, mesh, progress=False, blocks=True), sep="/")

    def form(x):
        return x.shape, x.dtype, x.sharding

    for name, w in loaded.items():
        assert jax.tree.structure(w) == jax.tree.structure(planned[name]), name
        assert jax.tree.map(form, w) == jax.tree.map(form, planned[name]), name


def test_blocks_that_devices_would_cut():
    """As many blocks as devices, or a multiple, or the weight does not stay in blocks."""
    from jaxserve.checkpoints.quantized import StoredRows

    data = gguf_files.random_blocks(Kind.Q6_K, 4, 512)
    rows, mesh = StoredRows([("Q6_K", data)], np.arange(4), 512), make_mesh(4)
    for inputs, kept in (("tensor", False), (None, True)):
        place = jax.sharding.NamedSharding(mesh, PartitionSpec(None, inputs))
        assert (quantized.as_blocks(rows, place) is not None) == kept
