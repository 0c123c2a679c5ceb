"""The GGUF reader: exact on good files, and one clear CheckpointError, at no cost in memory, on bad ones."""

import struct
import tracemalloc

import gguf
import gguf_files
import numpy as np
import pytest
from gguf_files import Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats import gguf_blocks
from jaxserve.checkpoints.formats.gguf_fields import block_array
from jaxserve.checkpoints.gguf import TYPES, read_gguf
from jaxserve.checkpoints.gguf_model import GGUFTensor, open_gguf
from jaxserve.checkpoints.quantized import StoredRows, dequantize
from jaxserve.pallas_kernels.quant_matmul.blocks import dequantize as dequantize_blocks
from jaxserve.pallas_kernels.types import BLOCK_KINDS, QuantArray

BY_PACKAGE = [kind.name for kind in TYPES.values() if kind.name.startswith("IQ") and kind.name[:3] != "IQ4"]
QUANTIZED = [kind.name for kind in TYPES.values() if kind.name not in (*gguf_blocks.FLOATS, *BY_PACKAGE)]


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.gguf"


def stored(path, **tensors):
    """A file with these tensors (type, bytes [rows, bytes of a row]), as tensors that read as floats."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    gguf_files.write(writer, path)
    dtype = np.dtype(np.float32)
    return {t.name: GGUFTensor(t.name, path, dtype, t.shape, t.start, t.type) for t in read_gguf(path).tensors.values()}


# Values


def test_sizes_are_those_of_the_package():
    for number, kind in TYPES.items():
        assert Kind(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (kind.size, kind.nbytes)


@pytest.mark.quick
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_bit_of_a_quantized_weight(file, name):
    data = gguf_files.random_blocks(Kind[name], 12, 768)
    want = gguf.quants.dequantize(data, Kind[name])
    assert np.isfinite(want).mean() > 0.9
    tensor = stored(file, w=(Kind[name], data))["w"]
    read = tensor.read_blocks()
    assert isinstance(read, QuantArray)
    assert read.shape == (12, 768)
    assert read.scale.shape == (12, 768 // read.block[1])
    rows = np.concatenate([part for _, part in tensor.read_rows(768 * 4 * 5)])
    for values in (dequantize(read), tensor.read(), rows):
        values = values + np.float32(0) if name == "MXFP4" else values  # the package's table has no negative zero
        np.testing.assert_array_equal(bits(values), bits(want))


@pytest.mark.quick
@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_blocks_as_devices_store_them(name):
    data = gguf_files.random_blocks(Kind[name], 12, 768)
    stored_blocks = block_array(StoredRows([(name, data)], np.arange(12), 768))
    np.testing.assert_array_equal(dequantize_blocks(stored_blocks), gguf.quants.dequantize(data, Kind[name]))


@pytest.mark.parametrize("name", BY_PACKAGE)
def test_types_that_only_the_package_knows_are_floats(file, name, monkeypatch):
    data = gguf_files.random_blocks(Kind[name], 4, 512)
    tensor = stored(file, w=(Kind[name], data))["w"]
    np.testing.assert_array_equal(bits(tensor.read_blocks()), bits(gguf.quants.dequantize(data, Kind[name])))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=rf"{name} are read by the gguf package: pip install jaxserve\[gguf\]"):
        tensor.read()


@pytest.mark.parametrize("name", gguf_blocks.FLOATS)
def test_floats(file, name):
    dtype = gguf_blocks.FLOATS[name]
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
    data = values.view(np.uint16).view(np.uint8) if name == "BF16" else values
    tensor = stored(file, w=(Kind[name], data))["w"]
    np.testing.assert_array_equal(tensor.read_blocks(), values)
    assert tensor.read_blocks().dtype == dtype


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "Q4_1", "Q4_K", "F16"])
def test_rows_in_pairs_come_back_in_halves(file, name):
    head_dim = 8
    data = gguf_files.random_blocks(Kind[name], 32, 256)
    tensor = stored(file, w=(Kind[name], data))["w"]
    tensor = GGUFTensor(**vars(tensor) | {"head_dim": head_dim})
    want = gguf_files.from_pairs(gguf.quants.dequantize(data, Kind[name]), 32 // head_dim)
    read = tensor.read_blocks()
    np.testing.assert_array_equal(bits(dequantize(read) if isinstance(read, QuantArray) else read), bits(want))
    for most in (1, 256 * 4 * 9, 10**6):
        rows = np.concatenate([part for _, part in tensor.read_rows(most)])
        np.testing.assert_array_equal(bits(rows), bits(want))


# Headers

METADATA = {
    "uint8": 200,
    "int8": -5,
    "uint16": 60000,
    "int16": -6,
    "uint32": 2**32 - 1,
    "int32": -7,
    "float32": 0.5,
    "uint64": 2**63,
    "int64": -8,
    "float64": 0.1,
    "bool": True,
    "string": "Grüße",
}


def small(path, **options):
    writer = gguf.GGUFWriter(path, "llama", **options)
    for kind, value in METADATA.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("a.strings", ["x", "", "ü"])
    writer.add_array("a.ints", [1, 2, -3])
    writer.add_array("a.bools", [True, False])
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full((2, 32), i, np.float32))
    return gguf_files.write(writer, path)


def test_metadata(file):
    metadata = read_gguf(small(file)).metadata
    assert {kind: metadata[f"a.{kind}"] for kind in METADATA} == METADATA
    assert metadata["a.strings"] == ["x", "", "ü"]
    assert metadata["a.ints"].tolist() == [1, 2, -3]
    assert metadata["a.bools"].tolist() == [True, False]


def test_version_2_and_alignment(file):
    small(file)
    raw = bytearray(file.read_bytes())
    raw[4] = 2
    file.write_bytes(raw)
    assert len(read_gguf(file).tensors) == 3
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_custom_alignment(4096)
    writer.add_tensor("t", np.ones((1, 1), np.float32))
    gguf_files.write(writer, file)
    assert read_gguf(file).tensors["t"].start == 4096


def test_parts(tmp_path):
    small(tmp_path / "m.gguf", split_max_tensors=1)
    first, second = (tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2))
    read = read_gguf(first)
    assert read.metadata["a.string"] == "Grüße"
    assert sorted(read.tensors) == ["t0", "t1", "t2"]
    assert {tensor.path.name for tensor in read.tensors.values()} == {f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)}
    with pytest.raises(CheckpointError, match="one of 3 parts: give the first, NAME-00001-of-00003"):
        read_gguf(second)
    second.write_bytes((tmp_path / "m-00003-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"tensor 't2' is in .*|'t2' is in m-00002"):
        read_gguf(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf cannot be read: No such file"):
        read_gguf(first)


# Bad files


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def info(name="t", shape=(32,), kind=0, start=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def header(*, infos=(), entries=(), tensors=None, count=None, version=3, data=bytes(256)):
    """A file of these pieces; the counts may claim something else."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos) if tensors is None else tensors, count or len(entries))
    head += b"".join(entries) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


def entry(key, kind, raw):
    return text(key) + struct.pack("<I", kind) + raw


HUGE = struct.pack("<Q", 2**60)
BAD = {
    "empty": (b"", "the magic claims 4 bytes"),
    "another format": (b"PK\3\4" + bytes(100), "not a GGUF file: it begins with b'PK"),
    "version 1": (header(version=1), "of version 1; versions 2 and 3"),
    "big-endian": (header(version=3 << 24), "GGUF file big-endian"),
    "10^12 tensors": (header(tensors=10**12), "the tensors: 1000000000000 are claimed"),
    "2^64 - 1 keys": (header(count=2**64 - 1), "the metadata: 18446744073709551615 are claimed"),
    "more tensors than there are": (header(tensors=9, data=bytes(400)), "has 0 dimensions"),
    "a key of 2^60 bytes": (header(entries=[HUGE]), "a metadata key claims 1152921504606846976 bytes, more than 65535"),
    "a string of 2^60 bytes": (header(entries=[entry("k", 8, HUGE)]), "'k' claims 1152921504606846976 bytes, more"),
    "a string longer than the file": (
        header(entries=[entry("k", 8, struct.pack("<Q", 999))]),
        "'k' claims 999 bytes, but",
    ),
    "10^12 strings": (header(entries=[entry("k", 9, struct.pack("<IQ", 8, 10**12))]), "'k': 1000000000000 are claimed"),
    "2^62 numbers": (header(entries=[entry("k", 9, struct.pack("<IQ", 12, 2**62))]), "'k' claims 36893488147419103232"),
    "an array of arrays": (header(entries=[entry("k", 9, struct.pack("<IQ", 9, 1))]), "'k' is an array of arrays"),
    "an unknown value type": (header(entries=[entry("k", 13, b"")]), "'k' has the unknown type 13"),
    "a boolean of 2": (header(entries=[entry("k", 7, b"\2")]), "'k' is neither true nor false"),
    "a key twice": (header(entries=[entry("k", 7, b"\1")] * 2), "'k' stands there twice"),
    "a string not in UTF-8": (header(entries=[entry("k", 8, text(b"\xff"))]), "'k' is not valid UTF-8"),
    "an alignment of 0": (header(entries=[entry("general.alignment", 4, bytes(4))]), "must be a power of two"),
    "an alignment of 24": (header(entries=[entry("general.alignment", 4, b"\x18\0\0\0")]), "power of two .*, got 24"),
    "an alignment in words": (header(entries=[entry("general.alignment", 8, text("32"))]), "power of two .*, got '32'"),
    "no dimensions": (header(infos=[info(shape=())]), "'t' has 0 dimensions"),
    "2^32 - 1 dimensions": (header(infos=[text("t") + b"\xff" * 4]), "'t' has 4294967295 dimensions"),
    "a dimension of 0": (header(infos=[info(shape=(0, 32))]), "'t' has an invalid shape"),
    "dimensions that overflow": (header(infos=[info(shape=(2**32, 2**32))]), "'t' has an invalid shape"),
    "an unknown tensor type": (header(infos=[info(kind=4)]), r"'t' has the unknown type 4; known are 0 \(F32\)"),
    "rows of broken blocks": (header(infos=[info(shape=(40, 32), kind=2)]), "'t' has rows of 40, no multiple of Q4_0"),
    "an unaligned tensor": (header(infos=[info(start=8)]), "'t' begins 8 bytes into the data, unaligned"),
    "a start behind the end": (header(infos=[info(start=2**63)]), "'t' begins .* behind the file's end"),
    "a truncated tensor": (header(infos=[info(shape=(65,))]), "truncated: tensor 't' ends at byte"),
    "an overlap": (header(infos=[info("a", (9,)), info("b", (8,), start=32)]), "'b' overlaps 'a'"),
    "a tensor twice": (header(infos=[info("a", (8,)), info("a", (8,), start=32)]), "'a' stands there twice"),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", BAD)
def test_refuses(file, case):
    raw, message = BAD[case]
    file.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            read_gguf(file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert str(file) in str(caught.value)


def test_many_strings(file):
    """12 million took 44 s."""
    many = entry("k", 9, struct.pack("<IQ", 8, 12_000_000) + bytes(8 * 12_000_000))
    file.write_bytes(header(entries=[many]))
    with pytest.raises(CheckpointError, match="12000000 are claimed, and at most 2097152 are read"):
        read_gguf(file)
    words = ["a", "", "\u20ac" * 1000]
    some = entry("k", 9, struct.pack("<IQ", 8, 3) + b"".join(map(text, words)))
    file.write_bytes(header(entries=[some, entry("after", 7, b"\1")]))
    assert read_gguf(file).metadata == {"k": words, "after": True}
    cut = struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 10**6)
    file.write_bytes(header(entries=[entry("k", 9, cut)]))
    with pytest.raises(CheckpointError, match="claims 1000000 bytes, more than the header has left"):
        read_gguf(file)


def test_a_good_file_of_the_same_pieces(file):
    file.write_bytes(header(infos=[info("a", (9,)), info("b", (8,), start=64)], entries=[entry("k", 7, b"\1")]))
    read = read_gguf(file)
    assert read.metadata == {"k": True}
    assert {name: tensor.shape for name, tensor in read.tensors.items()} == {"a": (9,), "b": (8,)}


def test_a_missing_file(file):
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_gguf(file)


def test_a_file_that_shrinks_while_it_is_read(file):
    tensor = stored(file, w=(Kind.Q8_0, gguf_files.random_blocks(Kind.Q8_0, 2, 32)))["w"]
    with file.open("r+b") as handle:
        handle.truncate(tensor.start + 2)
    with pytest.raises(CheckpointError, match="ends inside tensor 'w'"):
        tensor.read()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_folders):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    kinds = iter([Kind.F16, Kind.Q8_0, Kind.Q4_1] * 20)
    return gguf_files.write_gguf(model_folders("llama31_scaled"), path, lambda name: next(kinds)).read_bytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_damage_reads_or_is_refused(tmp_path_factory, whole, data):
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 1200) | st.integers(0, len(raw) - 9))
        raw[at : at + data.draw(st.sampled_from([1, 4, 8]))] = data.draw(st.binary(min_size=0, max_size=9))
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    path.write_bytes(raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))])
    tracemalloc.start()
    try:
        with np.errstate(all="ignore"):
            for tensor in open_gguf(path).tensors.values():
                assert tensor.read().shape == tensor.shape
    except CheckpointError:
        pass
    finally:
        assert tracemalloc.get_traced_memory()[1] < 16 * len(whole)
        tracemalloc.stop()
