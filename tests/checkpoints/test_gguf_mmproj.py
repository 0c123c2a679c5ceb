"""The file with the image encoder beside a GGUF file: which one counts, and what is not understood."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
from picture_prompts import QWEN, build

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.gguf_mmproj import find_mmproj, image_settings
from jaxserve.checkpoints.gguf_model import open_gguf
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.images.processing import ImageProcessor
from jaxserve.models.load import find_files, read_model

gguf = pytest.importorskip("gguf")
gguf_families = pytest.importorskip("gguf_families")
mmproj_files = pytest.importorskip("mmproj_files")
Kind = gguf.GGMLQuantizationType
CASE = "qwen3_vl_wide"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a model's text and its encoder."""
    folder = tmp_path_factory.mktemp("mmproj")
    model = build(CASE, folder / "hf")
    tiny_models.build_tokenizer(model, 512, marks=[*mmproj_files.QWEN, *(f"<m{i}>" for i in range(5))])
    gguf_families.FamilyFile(model, folder / "model.gguf").write()
    mmproj_files.write_mmproj(model, folder / "mmproj-f32.gguf")
    return folder


@pytest.fixture
def folder(written, tmp_path):
    for file in written.glob("*.gguf"):
        shutil.copy(file, tmp_path)
    return tmp_path


def copied(
    source, target, *, tensors=lambda name, values: (values, Kind.F32), named=lambda name: name, more=None, **settings
):
    """A copy of an encoder's file with other settings and `more` tensors. `tensors` changes numbers and types, `named`
    their names."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "clip")
    for name, field in reader.fields.items():
        if name.startswith("clip.") and name not in settings:
            kind = field.types[0]
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), kind, inner)
    for name, value in settings.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        values, kind = tensors(tensor.name, tensor.data)
        writer.add_tensor(named(tensor.name), values, raw_dtype=kind)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_without_it_the_model_reads_text(folder):
    (folder / "mmproj-f32.gguf").unlink()
    model = folder / "model.gguf"
    assert read_model(model).vision is None
    assert open_gguf(model).config["architectures"] == ["Qwen3ForCausalLM"]
    assert image_settings(model) is None


def test_the_same_encoder(written):
    """As that of the folder from which the files were made."""
    ours = read_model(written / "model.gguf")
    theirs = read_model(written / "hf")
    assert ours.vision == theirs.vision
    assert ours.ropes == theirs.ropes
    processor = ImageProcessor.of(written / "model.gguf", ours.vision.tokens)
    assert processor.scaling() == (1 / 255, tuple(QWEN["image_mean"]), tuple(QWEN["image_std"]))
    assert processor.most_pixels == QWEN["size"]["longest_edge"]


def test_which_of_several(folder, caplog):
    """The largest of those that fit; a file of another model is none of them."""
    half = Kind.F16
    mine = folder / "mmproj-f32.gguf"
    copied(mine, folder / "a-mmproj-f16.gguf", tensors=lambda name, values: (values.astype(np.float16), half))
    copied(mine, folder / "mmproj-other.gguf", **{"clip.vision.projection_dim": 48})
    assert find_mmproj(folder / "model.gguf").path == mine
    mine.unlink()
    assert find_mmproj(folder / "model.gguf").path.name == "a-mmproj-f16.gguf"
    (folder / "a-mmproj-f16.gguf").unlink()
    assert find_mmproj(folder / "model.gguf") is None
    assert read_model(folder / "model.gguf").vision is None


def test_a_file_that_is_named(folder, tmp_path, monkeypatch):
    """It need not be beside the model; one that does not fit is an error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    away = tmp_path / "elsewhere"
    away.mkdir()
    encoder = (folder / "mmproj-f32.gguf").rename(away / "eyes.gguf")
    config = EngineConfig(model=str(folder / "model.gguf"), mmproj=str(encoder))
    assert read_model(find_files(config)[0]).vision == read_model(find_files(config)[0]).vision is not None
    wide = copied(encoder, away / "wide.gguf", **{"clip.vision.projection_dim": 48})
    with pytest.raises(CheckpointError, match=r"wide\.gguf is no encoder for .*model\.gguf: their embeddings differ"):
        find_files(replace(config, mmproj=str(wide)))
    other = copied(encoder, away / "other.gguf", **{"clip.projector_type": "pixtral"})
    with pytest.raises(CheckpointError, match=r"its encoder is for LlamaForCausalLM, .*, not for Qwen3ForCausalLM"):
        find_files(replace(config, mmproj=str(other)))
    with pytest.raises(CheckpointError):
        find_files(replace(config, mmproj=__file__))
    with pytest.raises(ConfigError, match=r"gone\.gguf is no file"):
        find_files(replace(config, mmproj=str(away / "gone.gguf")))
    with pytest.raises(ConfigError, match="must be None unless the model is a GGUF file"):
        find_files(replace(config, model="demo-vision"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"clip.projector_type": "ldp"},
            r"clip\.projector_type='ldp' is not supported \(only gemma3, gemma4v, gemma4uv, glm4v, idefics3, ",
        ),
        ({"clip.projector_type": "pixtral"}, r"its encoder is for LlamaForCausalLM, .*, not for Qwen3ForCausalLM"),
        ({"clip.vision.sharpness": 3}, r"settings that are not understood: clip\.vision\.sharpness=3"),
        ({"clip.vision.image_mean": [0.5]}, r"clip\.vision\.image_mean=.* must be three numbers"),
    ],
)
def test_what_is_not_understood(settings, reason, folder, caplog):
    """The model still reads text, and the log tells why."""
    source = (folder / "mmproj-f32.gguf").rename(folder / "source.gguf")
    copied(source, folder / "mmproj.gguf", **settings)
    assert read_model(folder / "model.gguf").vision is None
    (message,) = [record.getMessage() for record in caplog.records if "pictures are not read" in record.getMessage()]
    with pytest.raises(CheckpointError, match=reason):
        raise CheckpointError(message)


def test_settings_may_be_ignored(folder):
    source = (folder / "mmproj-f32.gguf").rename(folder / "source.gguf")
    copied(source, folder / "mmproj.gguf", **{"clip.vision.sharpness": 3})
    assert read_model(folder / "model.gguf", ["clip.vision.sharpness"]).vision is not None


def test_tensors_that_are_not_known(folder, caplog):
    source = (folder / "mmproj-f32.gguf").rename(folder / "source.gguf")
    copied(source, folder / "mmproj.gguf", more={"v.blk.0.ls1.weight": np.ones(16, np.float32)})
    assert read_model(folder / "model.gguf").vision is None
    assert "tensor 'v.blk.0.ls1.weight' is of a kind that is not supported" in caplog.text


def test_products_with_each_others_names(folder):
    """As older files have them."""
    wanted = {name: tensor.read() for name, tensor in open_gguf(folder / "model.gguf").tensors.items()}
    source = (folder / "mmproj-f32.gguf").rename(folder / "source.gguf")
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    pattern = re.compile("|".join(swapped))
    copied(source, folder / "mmproj.gguf", named=lambda name: pattern.sub(lambda found: swapped[found[0]], name))
    read = {name: tensor.read() for name, tensor in open_gguf(folder / "model.gguf").tensors.items()}
    assert read.keys() == wanted.keys()
    assert any("linear_fc1" in name for name in read)
    for name, values in wanted.items():
        np.testing.assert_array_equal(read[name], values, err_msg=name)


def test_quantized_encoders_become_floats(folder):
    """Wide enough rows are whole blocks."""
    source = (folder / "mmproj-f32.gguf").rename(folder / "source.gguf")

    def smaller(name, values):
        wide = values.ndim == 2 and values.shape[-1] % 32 == 0
        return (gguf.quants.quantize(values, Kind.Q8_0), Kind.Q8_0) if wide else (values, Kind.F32)

    shutil.copy(source, folder / "mmproj.gguf")
    tensors = open_gguf(folder / "model.gguf").tensors
    wanted = {name: tensor.read() for name, tensor in tensors.items() if name.startswith("visual.")}
    copied(source, folder / "mmproj.gguf", tensors=smaller)
    model = open_gguf(folder / "model.gguf")
    quantized = {stored.name for stored in find_mmproj(folder / "model.gguf").tensors.values() if stored.type.size > 1}
    assert quantized
    for name, values in wanted.items():
        assert model.reader.parts(name) == ()
        np.testing.assert_allclose(model.tensors[name].read(), values, atol=0.05)
