"""`jaxserve models list` agrees with the registry of families and with the published configs."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.checkpoints.gguf_architectures import ARCHITECTURES, gguf_names
from jaxserve.commands.model_list import WIDTH, example_device, lines, listing
from jaxserve.commands.published import PUBLISHED
from jaxserve.devices.mesh import make_mesh
from jaxserve.execution import memory
from jaxserve.models.config import HFConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families import families, read_model_config
from jaxserve.models.quantized import quantized_abstract
from jaxserve.models.spec import AttentionSpec
from jaxserve.models.weights import abstract_params

HERE = Path(__file__).parent
CONFIGS = {
    name: config
    for file in ("published_configs.json", "published_dense.json", "published_experts.json")
    for name, config in json.loads((HERE / file).read_text()).items()
}


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_figures_are_those_of_the_config(model):
    config = read_model_config(HFConfig(dict(CONFIGS[model.name]), model.name, ("dual_chunk_attention_config",)))
    assert model.family == config.family
    decoder = Decoder(config, config.num_kv_heads, config.vocab_size, np.dtype("bfloat16"))
    with jax.numpy_dtype_promotion("standard"):  # as in use; Llama 4 multiplies bfloat16 by float32
        plain = dict(abstract_params(decoder, make_mesh(1, jax.devices("cpu"))))
    assert model.parameters == sum(int(np.prod(x.shape)) for x in plain.values())
    assert model.int4_bytes == sum(memory.bytes_by_dtype(quantized_abstract(plain, "int4")).values())
    assert len(config.attentions) + config.num_recurrent == config.num_layers
    assert model.token_bytes == sum(
        4 * spec.num_kv_heads * spec.head_dim
        if isinstance(spec, AttentionSpec)
        else 2 * (spec.rank + spec.rope_dim + (spec.indexer.dim if spec.indexer else 0))
        for spec in (config.attentions[i] for i in set(config.kv_sources))
    )


def test_every_family_is_listed(tmp_path):
    found = listing([tmp_path])
    assert [family["name"] for family in found["families"]] == [family.name for family in families()]
    assert [family["architectures"] for family in found["families"]] == [list(f.architectures) for f in families()]
    sizes = [size["name"] for family in found["families"] for size in family["sizes"]]
    assert sorted(sizes) == sorted(model.name for model in PUBLISHED), "each size belongs to a family"
    assert {name for family in found["families"] for name in family["gguf"]} == ARCHITECTURES.keys()
    assert {"safetensors", "gguf", "awq", "gptq", "mxfp4"} <= set(found["formats"])


def test_gguf_names():
    assert gguf_names("MixtralForCausalLM") == ["llama"]
    assert gguf_names("Olmo3ForCausalLM") == ["olmo2"]
    assert gguf_names("OPTForCausalLM") == []


def test_fits_a_terminal(tmp_path):
    text = list(lines(listing([tmp_path]) | {"models": []}))
    assert max(map(len, text)) <= WIDTH
    assert any("google/gemma-2-9b-it" in line and "17.2" in line for line in text)


@pytest.mark.parametrize(
    ("gib", "device"),
    [(10, "L4"), (60, "H100"), (130, "B200"), (800, "8 x H200"), (1500, "16 x H200"), (4000, "more than 16 x H200")],
)
def test_examples_of_devices(gib, device):
    assert example_device(gib << 30, 1024) == device
