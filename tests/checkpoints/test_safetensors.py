"""The safetensors reader: right on good files, and one clear CheckpointError, at no cost in memory, on bad ones."""

import json
import os
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.safetensors import DTYPES, read_folder, read_header

TINY = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.int8)}


def entry(shape=(2,), begin=0, end=8, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(path, header, data=b"", length=None):
    """A file with this header, whatever it says; `header` is text or what json.dumps takes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


# Good files


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 2, 3)], ids=str)
def test_reads_what_the_format_s_own_writer_wrote(file, name, shape):
    dtype = DTYPES[name]
    rng = np.random.default_rng(0)
    size = np.prod(shape, dtype=int) * dtype.itemsize
    raw = rng.integers(0, 2 if name == "BOOL" else 256, size, dtype=np.uint8).tobytes()
    save_file({"x": np.frombuffer(raw, dtype).reshape(shape), "other": TINY["a"]}, file, metadata={"made by": "a test"})
    with safe_open(file, "numpy") as reference:
        assert reference.get_slice("x").get_dtype() == name
    read = read_header(file)
    assert read["x"].dtype == dtype
    assert read["x"].shape == shape
    assert read["x"].read().tobytes() == raw
    np.testing.assert_array_equal(read["other"].read(), TINY["a"])


@pytest.mark.parametrize("max_bytes", [1, 24, 25, 71, 72, 10**9])
def test_rows_cover_the_tensor_within_the_limit(file, max_bytes):
    values = np.arange(60, dtype=np.float32).reshape(10, 2, 3)  # 24 bytes a row
    save_file({"x": values, "before": np.ones(3, np.int8)}, file)
    parts = list(read_header(file)["x"].read_rows(max_bytes))
    assert [first for first, _ in parts] == np.cumsum([0] + [len(rows) for _, rows in parts[:-1]]).tolist()
    assert all(rows.nbytes <= max(max_bytes, 24) for _, rows in parts)
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in parts]), values)


def test_a_file_that_shrinks_while_it_is_read(file):
    save_file(TINY, file)
    tensor = read_header(file)["b"]
    with file.open("r+b") as handle:
        handle.truncate(tensor.start + 2)
    with pytest.raises(CheckpointError, match="ends inside tensor 'b'"):
        tensor.read()


EMPTY = json.dumps(entry((0,), 0, 0))

# Bad files. (header, bytes after it, what the message must say)

BAD = {
    "not json": (b"{", b"", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "utf-16": ("{}".encode("utf-16"), b"", "not valid JSON"),
    "a list": (b"[]", b"", "must be a JSON object"),
    "deeply nested": (b'{"a":' * 100_000, b"", "not valid JSON"),
    "an integer of 10,000 digits": (b'{"a":' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
    "the same name twice": (f'{{"a": {EMPTY}, "b": {EMPTY}, "a": {EMPTY}}}'.encode(), b"", "'a' stands there twice"),
    "the same key twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", "'dtype' stands there twice"),
    "no fields": ({"a": {}}, b"", "'a' has no dtype"),
    "an entry of another type": ({"a": 5}, b"", "'a' has no dtype"),
    "an unknown dtype": ({"a": entry(dtype="F31")}, bytes(8), "'a' has dtype 'F31'; supported are F64"),
    "a dtype of another type": ({"a": entry(dtype=[])}, bytes(8), r"'a' has dtype \[\]"),
    "a negative size": ({"a": entry((-2,))}, bytes(8), "'a' has an invalid shape"),
    "a boolean size": ({"a": entry((True, 2))}, bytes(8), "'a' has an invalid shape"),
    "a fractional size": ({"a": entry((2.0,))}, bytes(8), "'a' has an invalid shape"),
    "nine dimensions": ({"a": entry((1,) * 8 + (2,))}, bytes(8), "'a' has an invalid shape"),
    "an empty tensor of huge rows": ({"a": entry((0, 2**60, 2**60), 0, 0)}, b"", "'a' has an invalid shape"),
    "one offset": ({"a": entry() | {"data_offsets": [8]}}, bytes(8), "'a' has invalid data_offsets"),
    "a negative offset": ({"a": entry((2,), -8, 0)}, bytes(8), "'a' has invalid data_offsets"),
    "offsets in reverse": ({"a": entry((2,), 8, 0)}, bytes(8), "which takes 8 bytes, but its offsets span -8"),
    "a shape of another size": ({"a": entry((3,))}, bytes(8), "takes 12 bytes, but its offsets span 8"),
    "a product that wraps around": ({"a": entry((2**32, 2**32), 0, 0)}, b"", "invalid shape"),
    "an end beyond the file": ({"a": entry()}, bytes(7), "the file has .*: it is truncated"),
    "10^12 elements": ({"a": entry((10**12,), 0, 4 * 10**12)}, bytes(8), "it is truncated"),
    "overlapping tensors": ({"a": entry(), "b": entry((2,), 4, 12)}, bytes(12), "'b' overlaps 'a'"),
    "equal tensors": ({"a": entry(), "b": entry()}, bytes(8), "'b' overlaps 'a'"),
    "a hole": ({"a": entry(), "b": entry((1,), 12, 16)}, bytes(16), "'b' leaves a hole after 'a'"),
    "a hole at the start": ({"a": entry((2,), 4, 12)}, bytes(12), "'a' leaves a hole after the header"),
    "bytes at the end": ({"a": entry()}, bytes(9), "1 bytes after 'a' belong to no tensor"),
}
STRICTER = ("the same name twice", "the same key twice", "nine dimensions", "an empty tensor of huge rows")


@pytest.mark.parametrize("case", BAD)
def test_refuses(file, case):
    header, data, message = BAD[case]
    write(file, header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_the_format_s_own_reader_refuses_them_too(file, case):
    if case in STRICTER:
        pytest.skip("only ours refuses it")
    write(file, *BAD[case][:2])
    with pytest.raises((SafetensorError, OverflowError, OSError)), safe_open(file, "numpy"):
        pass


def test_sizes_in_the_first_eight_bytes(file):
    for content in (b"", b"\0" * 7, (10**12).to_bytes(8, "little") + bytes(100), b"\xff" * 8):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a complete safetensors file"):
            read_header(file)


def test_a_folder_in_place_of_a_file(file):
    file.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(file)


def test_headers_that_took_long(file):
    """60,000 repeated names took 46 s, and names of any length were matched with quadratic expressions."""
    repeated = ('{"a": ' + EMPTY + (', "b": ' + EMPTY) * 60_000 + "}").encode()
    for header, says in [
        (repeated, "'b' stands there twice"),
        ({"a" * 540_000: entry((0,), 0, 0)}, "a name of more than 512 characters"),
        (b"{" + b" " * 25_000_000 + b"}", "at most 25000000 are read"),
        ({"__metadata__": {str(i): "" for i in range(70_000)}}, "more than 65536 entries"),
    ]:
        write(file, header)
        began = time.process_time()
        with pytest.raises(CheckpointError, match=says) as caught:
            read_header(file)
        assert time.process_time() - began < 2
        assert len(str(caught.value)) < 500
    with pytest.raises(CheckpointError, match="more than 2 tensors"):
        read_header(write(file, {name: entry((0,), 0, 0) for name in "abc"}), most=2)


def test_metadata_may_be_any_strings(file):
    odd = {"quotes": '{"a": [1, "}"]}', "escapes": '\\"\n\u20ac', "": ""}
    for metadata in (odd, {}, None):
        write(file, {"a": entry(), "__metadata__": metadata, "b": entry((0,), 8, 8)}, bytes(8))
        assert read_header(file).keys() == {"a", "b"}
    with pytest.raises(CheckpointError, match="a string was expected"):
        read_header(write(file, {"__metadata__": {"a": 1}}))


def test_a_pipe_in_place_of_a_file(file):
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(file)
    file.unlink()
    save_file(TINY, file)
    tensor = read_header(file)["b"]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        tensor.read()


def test_an_index_with_more_than_names(tmp_path):
    """What is not read costs no memory: 30 MB of lists took a GiB."""
    write_sharded(tmp_path, one=ONE)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"x": [' + "[]," * 10**7 + '[]], "weight_map": {"a": "one.safetensors"}}')
    tracemalloc.start()
    try:
        assert read_folder(tmp_path).keys() == {"a"}
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_claims_cost_no_memory(file):
    header = {f"t{i}": entry((10**12,), i * 4 * 10**12, (i + 1) * 4 * 10**12) for i in range(3)}
    write(file, header)
    huge = write(file.with_name("huge"), b"{}", length=99_000_000)
    tracemalloc.start()
    try:
        for path in (file, huge):
            with pytest.raises(CheckpointError):
                read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


SIZES = st.one_of(st.integers(-1, 40), st.integers(-(2**70), 2**70))
JUNK = st.recursive(
    st.none() | st.booleans() | SIZES | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3),
    max_leaves=4,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4"]) | JUNK,
        "shape": st.lists(SIZES, max_size=4) | JUNK,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | JUNK,
    },
)


@settings(max_examples=300, deadline=None)
@given(header=st.dictionaries(st.text(max_size=3), ENTRIES | JUNK, max_size=4), data=st.binary(max_size=64))
@example(header={"a": entry((2,), 0, 8)}, data=bytes(8))
def test_any_header_reads_or_is_refused(tmp_path_factory, header, data):
    path = write(tmp_path_factory.mktemp("fuzz") / "model.safetensors", header, data)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    assert sum(tensor.read().nbytes for tensor in tensors.values()) == len(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_reads_or_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file(TINY, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(raw)))
    path.write_bytes(raw[:end])
    try:
        tensors = read_folder(path.parent)
    except CheckpointError:
        return
    assert end == len(raw), "a truncated file was taken for a whole one"
    for tensor in tensors.values():
        tensor.read()


# Folders


def write_sharded(folder, weight_map=None, **files):
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    if weight_map is None:
        weight_map = {tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


ONE = {"a": TINY["a"]}
TWO = {"b": TINY["b"]}


def test_shards_by_their_index(tmp_path):
    write_sharded(tmp_path, one=ONE, two=TWO)
    save_file(ONE, tmp_path / "consolidated.safetensors")  # not in the index, so not read
    read = read_folder(tmp_path)
    assert read.keys() == TINY.keys()
    for name, values in TINY.items():
        np.testing.assert_array_equal(read[name].read(), values)


def test_shards_without_an_index(tmp_path):
    save_file(ONE, tmp_path / "x-1.safetensors")
    save_file(TWO, tmp_path / "x-2.safetensors")
    assert read_folder(tmp_path).keys() == TINY.keys()


def test_a_single_model_file_stands_for_itself(tmp_path):
    save_file(TINY, tmp_path / "model.safetensors")
    save_file(ONE, tmp_path / "adapter_model.safetensors")
    assert {tensor.path.name for tensor in read_folder(tmp_path).values()} == {"model.safetensors"}


def test_a_missing_shard(tmp_path):
    write_sharded(tmp_path, one=ONE, two=TWO)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names two\.safetensors, which is missing"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../one.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "config.json", 5, None, ["x"]], ids=str
)
def test_an_index_that_leads_elsewhere(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(ONE, tmp_path / "one.safetensors")
    write_sharded(folder, {"a": name})
    with pytest.raises(CheckpointError, match=r"no \.safetensors file of its folder|not a safetensors index"):
        read_folder(folder)


@pytest.mark.parametrize("name", ["\0.safetensors", "x" * 5000 + ".safetensors"], ids=["nul", "long"])
def test_an_index_with_impossible_names(tmp_path, name):
    write_sharded(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="missing"):
        read_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": 1}', "\ud800"], ids=repr)
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        read_folder(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    write_sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=ONE, two=TINY)
    with pytest.raises(CheckpointError, match=r"'a' is both in one\.safetensors and in two\.safetensors"):
        read_folder(tmp_path)


def test_pickles_are_refused_with_a_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin are pickles.*convert them to safetensors"):
        read_folder(tmp_path)


def test_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors files$"):
        read_folder(tmp_path)
