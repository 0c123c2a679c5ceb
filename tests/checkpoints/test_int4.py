"""int4 weights stay two in a byte until they are on the devices, in every format, and on every mesh."""

import gguf
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from quantized_files import WEIGHT, load, read

from jaxserve.checkpoints.formats.gguf_blocks import decode
from jaxserve.checkpoints.gguf import TYPES, _Header
from jaxserve.checkpoints.gguf_model import open_gguf
from jaxserve.checkpoints.int4 import INT4, PackedInt4, signed_bytes
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.engine.engine import Engine
from jaxserve.models.quantized import place
from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.int4 import int4_of_bytes
from jaxserve.pallas_kernels.types import QuantArray
from jaxserve.text.tokenizer import load_tokenizer


def random_weight(out=16, inputs=256, seed=0):
    rng = np.random.default_rng(seed)
    codes = PackedInt4(rng.integers(0, 256, (out, inputs // 2), np.uint8))
    return QuantArray(codes, rng.random((out, inputs // 32), np.float32), block=(1, 32))


def plainly(data):
    """One by one: the low half of a byte first, as two's complement."""
    codes = [[byte >> shift & 15 for byte in row for shift in (0, 4)] for row in data.tolist()]
    return np.array([[code - 16 * (code > 7) for code in row] for row in codes])


def test_what_is_in_a_byte():
    data = np.arange(256, dtype=np.uint8).reshape(2, 128)
    packed = PackedInt4(data)
    assert (packed.shape, packed.dtype) == ((2, 256), INT4)
    np.testing.assert_array_equal(np.asarray(packed).astype(np.int8), plainly(data))
    np.testing.assert_array_equal(np.asarray(int4_of_bytes(jnp.asarray(data))).astype(np.int8), plainly(data))
    words = np.array([[0xFEDCBA98, 0x76543210]], np.uint32)  # codes 8, 9, ..., 15, 0, 1, ..., 7
    assert np.asarray(signed_bytes(words)).astype(np.int8)[0].tolist() == [*range(8), *range(-8, 0)]


def test_by_bitcast_as_by_kernel(monkeypatch):
    data = random_weight().codes.data
    ours = np.asarray(int4_of_bytes(jnp.asarray(data)))
    monkeypatch.setattr(cpu, "available", lambda name: False)
    np.testing.assert_array_equal(ours, np.asarray(int4_of_bytes(jnp.asarray(data))))


@pytest.mark.parametrize("spec", [("tensor", None), (None, "tensor"), (None, None)])
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("kernels", [True, False])
def test_on_the_devices(spec, devices, kernels, monkeypatch):
    sent = []
    monkeypatch.setattr(jax, "device_put", lambda x, *rest, put=jax.device_put: sent.append(x) or put(x, *rest))
    if not kernels:
        monkeypatch.setattr(cpu, "available", lambda name: False)
    w = random_weight()
    placed = place("x/kernel", w, NamedSharding(make_mesh(devices), PartitionSpec(*spec)))
    assert placed.codes.dtype == jnp.int4
    assert placed.codes.sharding.spec == PartitionSpec(*spec)
    np.testing.assert_array_equal(dequantize(placed), dequantize(w))
    assert any(x.dtype == np.uint8 and x.shape == (16, 128) for x in sent) == kernels
    assert any(x.dtype == INT4 for x in sent) != kernels


def test_devices_that_would_share_a_byte_get_whole_numbers():
    w = QuantArray(PackedInt4(np.arange(12, dtype=np.uint8).reshape(2, 6)), np.ones((2, 4), np.float32), block=(1, 3))
    placed = place("x/kernel", w, NamedSharding(make_mesh(4), PartitionSpec(None, "tensor")))
    np.testing.assert_array_equal(dequantize(placed), dequantize(w))


@pytest.mark.parametrize("case", ["awq", "gptq_4", "gptq_4_asymmetric", "gptq_4_v2", "ct_w4", "ct_w4_asymmetric"])
def test_readers_leave_them_packed(case, tmp_path):
    config, shape, arrays, _, _ = load(case)
    assert isinstance(read(tmp_path / "model.safetensors", config, arrays, shape, WEIGHT).codes, PackedInt4)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_blocks_of_gguf_are_packed_anew(name):
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    raw = np.random.default_rng(0).integers(0, 256, 8 * 512 // kind.size * kind.nbytes, np.uint8)
    raw.reshape(-1, kind.nbytes)[:, 1:4:2] &= 0x3B  # scales that are numbers
    w = decode(raw, kind, (8, 512))
    assert isinstance(w.codes, PackedInt4)
    want = gguf.quants.dequantize(raw.reshape(8, -1), getattr(gguf.GGMLQuantizationType, name))
    np.testing.assert_array_equal(dequantize(w), want)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1])
def test_rows_of_heads_are_moved_as_they_are(kind, model_folders, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write_gguf(
        model_folders("llama_head128"), path, lambda n: kind if "k_proj" in n else gguf_files.Kind.F32
    )
    tensor = open_gguf(path).tensors["model.layers.0.self_attn.k_proj.weight"]
    w = tensor.read_blocks()
    assert isinstance(w.codes, PackedInt4)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.fromfile(path, np.uint8, offset=tensor.start)[: w.shape[0] * w.shape[1] // size * nbytes]
    want = gguf.quants.dequantize(raw.reshape(w.shape[0], -1), kind)
    np.testing.assert_array_equal(dequantize(w), gguf_files.from_pairs(want, w.shape[0] // tensor.head_dim))


def test_a_header_is_parsed_once(model_folders, tmp_path, monkeypatch):
    path = gguf_files.write_gguf(model_folders("llama_head128"), tmp_path / "model.gguf")
    parsed = []
    monkeypatch.setattr(_Header, "read", lambda self, read=_Header.read: parsed.append(self.path) or read(self))
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "kv_pages": 16}
    engine = Engine.load(EngineConfig(model=str(path), **options), progress=False)
    engine.grammars.vocabulary.result()
    load_tokenizer(path)
    assert parsed == [path]
    path.write_bytes(path.read_bytes() + b"\0")  # another file in its place is read anew
    open_gguf(path)
    assert parsed == [path, path]
