"""Layers whose weights stay in host memory, compiled ahead of time at the size of a 70B model: what a layer's program
takes on a device, and how long a step is at least. Nothing runs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from flax.traverse_util import flatten_dict
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from test_launches import SHAPES
from test_steps import cache_copies, copied_parameters, make_runner

from jaxserve.config import ConfigError
from jaxserve.devices.jax_versions import NARROWEST_FROM_HOST
from jaxserve.devices.launches import launches
from jaxserve.engine.streaming import check_copies
from jaxserve.execution.cost import LINK
from jaxserve.execution.layer_uploads import HOST
from jaxserve.execution.memory import stored_bytes
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.streamed_layers import BEGIN, HostLayer, StreamedLayers
from jaxserve.models.stages import Part
from jaxserve.scheduling.step_plan import Sampler

LLAMA_70B = {
    "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
}  # fmt: skip
GIB = 2**30
PLATFORMS = {"h200x1": ("mosaic_gpu", 16), "v6e-4": ("mosaic_tpu", 128)}


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def streaming_runner(folder, target: str, scheme: str, layers: int = 4) -> ModelRunner:
    """A runner of the shape that has all layers but the first in host memory."""
    whole, params = make_runner(folder, target, *PLATFORMS[target], layers, scheme, **LLAMA_70B)
    tree = whole.forms
    resident = {name: part for name, part in tree.items() if name == "layers_0" or not name.startswith("layers_")}
    hosted = [HostLayer.of(i, whole.model, tree[f"layers_{i}"]) for i in range(1, layers)]
    decoder = whole.model.clone(stage=Part(range(1), around=True))
    runner = ModelRunner(
        decoder, resident, whole.mesh, whole.num_slots, 64, max_tokens_per_call=1, streamed=StreamedLayers(hosted)
    )
    runner.set_cache_size(whole.layout, whole.max_len // whole.layout.page_size)
    assert len(flatten_dict(tree)) == len(params)
    return runner


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.int4, jnp.float4_e2m1fn])
@pytest.mark.parametrize("target", ["v5e-1", "v6e-1"])
def test_what_a_tpu_cannot_copy_from_the_host_is_refused(target, dtype):
    """The copy is that of `LayerUploads`. What is refused is what does not compile, with each version of JAX."""
    place = NamedSharding(mesh_of(target), PartitionSpec())
    host, device = (Format(Layout((0, 1)), at) for at in (place.with_memory_kind(HOST), place))
    x = jax.ShapeDtypeStruct((512, 1024), dtype, sharding=host)

    def compile_copy():
        return jax.jit(lambda x: x, out_shardings=device).lower(x).compile()

    if jax.dtypes.itemsize_bits(dtype) >= NARROWEST_FROM_HOST:
        compile_copy()
        check_copies([x])
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="CopyDone"):
            compile_copy()
        with pytest.raises(ConfigError, match=f"must be 0 on a TPU for weights in {np.dtype(dtype).name}"):
            check_copies([x, jax.ShapeDtypeStruct((8,), jnp.float32)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "scheme", "step"),
    [
        ("h200x1", "bf16", "decode"),
        ("h200x1", "bf16", "mixed"),
        ("h200x1", "int4", "decode"),
        ("v6e-4", "bf16", "decode"),
        ("v6e-4", "int8", "decode"),
    ],
)
def test_programs(target, scheme, step, tmp_path):
    """A layer's program takes the weights of one layer, and updates its cache in place; the others take none of it."""
    runner = streaming_runner(tmp_path, target, scheme)
    shape = SHAPES[step]
    assert len(runner.streamed.kinds) == 1
    layer = runner.streamed.layers[0].device_bytes
    layout = runner.layout
    array = layout.abstract(runner.mesh)[0].data  # has the pages of all layers
    parts = array.size // math.prod(array.sharding.shard_shape(array.shape))
    pages, cache = stored_bytes(array) // parts, array.size // parts
    of_layer = runner.lower(StepProgram(shape, Sampler.NONE, 1, keeps_hidden=False, part=0)).compile()
    begin = runner.lower(StepProgram(shape, Sampler.NONE, 1, keeps_hidden=False, part=BEGIN)).compile()
    last = runner.lower(runner.programs.choose(shape, Sampler.GREEDY, 1, scores=False)).compile()
    figures = of_layer.memory_analysis()
    text = of_layer.as_text()
    print(
        f"\n{target} {scheme} {step}: a layer of {layer / GIB:.3f} GiB on a device, temporaries of its program "
        f"{figures.temp_size_in_bytes / 2**20:.1f} MiB, code {figures.generated_code_size_in_bytes / 2**20:.2f} MiB, "
        f"{len(launches(text)) if target.startswith('h200') else 0} launches; begin "
        f"{begin.memory_analysis().temp_size_in_bytes / 2**20:.1f} MiB, last "
        f"{last.memory_analysis().temp_size_in_bytes / 2**20:.1f} MiB; copying a layer takes at least "
        f"{layer / LINK * 1e3:.1f} ms"
    )
    assert figures.argument_size_in_bytes >= layer
    assert figures.alias_size_in_bytes >= pages
    assert not cache_copies(text, cache // 4)
    assert not copied_parameters(text)
    assert figures.temp_size_in_bytes < layer / 4
    assert last.memory_analysis().alias_size_in_bytes < pages
