"""Models with experts: over several devices, beside other requests, quantized in every way."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_models
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict
from moe_models import MOE_CASES
from quantized_files import gptq
from safetensors.numpy import save_file

from jaxserve.checkpoints.quantize import Scheme, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.config import ConfigError
from jaxserve.convert.convert import convert_model
from jaxserve.models import load
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.config import HFConfig
from jaxserve.models.families import read_model_config
from jaxserve.models.load import Checkpoint
from jaxserve.pallas_kernels.types import PanelArray, QuantArray

pytestmark = pytest.mark.compiles

CASE = "mixtral_experts"  # 5 experts, 2 for each token


def answers(engine, count):
    prompts = [list(range(5 + i, 25 + 3 * i)) for i in range(count)]
    results = generate(engine, *(request(str(i), p, max_tokens=16) for i, p in enumerate(prompts)))
    return [results[i].token_ids for i in range(count)]


def stacks(engine):
    """The experts' weights by their paths."""
    flat = flatten_dict(engine.runner.params, sep="/")
    return {path: w for path, w in flat.items() if path.endswith(("experts_gate_up", "experts_down"))}


ALONE = ("qwen3_next_odd", "jetmoe_hub")  # with heads that two devices cannot share
USUAL = (CASE, "qwen2_moe_shared", "gpt_oss_sinks", "glm4_moe_groups")  # the others run with -m slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*USUAL, *(pytest.param(case, marks=pytest.mark.slow) for case in MOE_CASES if case not in USUAL + ALONE)]
)
def test_devices_and_neighbours_change_no_token(case, model_folders):
    folder = model_folders(case)
    alone = [answers(make_engine(folder), 1), answers(make_engine(folder), 4)]
    assert alone[0][0] == alone[1][0]
    for devices in (2, 8) if case == CASE else (2,):
        assert answers(make_engine(folder, tensor_parallel_size=devices), 4) == alone[1]


def float_copy(folder, values, out):
    """A model folder with other values of its weights, by their names."""
    for file in folder.glob("*.json"):
        (out / file.name).write_text(file.read_text())
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config))
    save_file(values, out / "model.safetensors")
    return out


@pytest.fixture(scope="module", params=["int8", "int4", "fp8"])
def rounded(request, tmp_path_factory, model_folders):
    """A scheme, and a checkpoint with the values that weights have which are rounded by it."""

    def value(name, tensor):
        if "experts" not in name and "self_attn" not in name:
            return tensor
        group = 128 if tensor.shape[1] % 128 == 0 else 64
        return dequantize(
            rtn(tensor.astype(np.float32), Scheme(request.param, group if request.param == "int4" else None))
        )

    values = {name: value(name, tensor) for name, tensor in tiny_models.tensors(CASE)}
    return request.param, float_copy(model_folders(CASE), values, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_quantized_while_loading(rounded, devices, model_folders):
    """The same tokens as from the rounded values in a file of floats."""
    scheme, values = rounded
    options = {"matmul_backend": "cpu" if devices == 1 else "auto"}  # which rounds no inputs
    engine = make_engine(model_folders(CASE), quantization=scheme, tensor_parallel_size=devices, **options)
    kinds = {type(w) for w in stacks(engine).values()}
    assert kinds == {QuantArray}
    assert {len(w.shape) for w in stacks(engine).values()} == {3}
    assert answers(engine, 4) == answers(make_engine(values), 4)


@pytest.mark.slow
def test_panels_of_experts(model_folders):
    """With --matmul-backend auto, int8 and int4 lie in panels on a CPU; inputs are rounded, which changes little."""
    for scheme in ("int8", "int4"):
        engine = make_engine(model_folders(CASE), quantization=scheme)
        assert {type(w) for w in stacks(engine).values()} == {PanelArray}
        assert len({tuple(ids) for ids in answers(engine, 4)}) > 1


@pytest.fixture
def gguf_files():
    return pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind"), [(CASE, "Q8_0"), (CASE, "F16"), ("qwen2_moe_gguf", "Q8_0"), ("wide", "Q4_K"), ("wide", "Q6_K")]
)
def test_gguf(case, kind, tmp_path, model_folders, gguf_files):
    """Stacks of experts in a GGUF file: the tokens of the same values in files of floats, on one device and two."""
    folder = model_folders(case) if case in tiny_models.CASES else other_case(case, tmp_path / "case")
    kinds = gguf_files.Kind[kind], gguf_files.Kind.F32
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", lambda name: kinds["experts" not in name])
    file = Checkpoint.open(path)
    stored = {name: dequantized(file, name) for name in file.tensors}
    (tmp_path / "floats").mkdir()
    plain = answers(make_engine(float_copy(folder, stored, tmp_path / "floats")), 4)
    engine = make_engine(path, matmul_backend="cpu", dtype="float32")
    assert {type(w) for w in stacks(engine).values()} == {PanelArray}
    assert answers(engine, 4) == plain
    if kind == "Q4_K":
        assert answers(make_engine(path, tensor_parallel_size=2), 4) == plain


def uneven(name):
    """The types of a file in which the gates of experts have another type than their ups."""
    return ("Q6_K" if "w1" in name else "Q4_K") if "experts" in name else "F32"


@pytest.mark.slow
@pytest.mark.parametrize("types", [lambda name: "Q4_K" if "experts" in name else "F32", uneven], ids=["even", "uneven"])
def test_gguf_in_blocks(types, tmp_path, gguf_files, monkeypatch):
    """As on GPUs, stacks keep the file's width, here in plain XLA: the tokens that panels give, on one device and two;
    the plan tells the forms. Without a type that gates and ups share, both are widened."""
    folder = other_case("wide", tmp_path / "case")
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", lambda name: gguf_files.Kind[types(name)])
    expected = answers(make_engine(path, matmul_backend="cpu", dtype="float32"), 4)
    for module in ("abstract_weights", "load", "quantized"):
        monkeypatch.setattr(f"jaxserve.models.{module}.keeps_blocks", lambda mesh: True)
    monkeypatch.setattr(load.Packing, "of", lambda config, mesh: None)
    for devices in (1, 2):
        engine = make_engine(path, tensor_parallel_size=devices)
        kept = {path.split("/")[-1]: getattr(w, "kind", None) for path, w in stacks(engine).items()}
        assert kept == {"experts_gate_up": None if types is uneven else "Q4_K", "experts_down": "Q4_K"}
        planned = abstract_weights(engine.runner.model, path, engine.runner.mesh, engine.config)
        loaded = flatten_dict(engine.runner.params, sep="/")
        assert {name: form(x) for name, x in planned.items()} == {name: form(x) for name, x in loaded.items()}
        assert answers(engine, 4) == expected


def dequantized(file, name):
    tensor = file.tensors[name]
    return np.ascontiguousarray(tensor.read().astype(np.float32))


def other_case(name, folder):
    """Cases that transformers did not compute."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 3}
    base = tiny_models.CASES[CASE] if name == "wide" else tiny_models.CASES["qwen2_moe_shared"]
    changed = (
        wide if name == "wide" else {"mlp_only_layers": [], "moe_intermediate_size": 64, "use_sliding_window": False}
    )
    tiny_models.CASES[name] = replace(base, config=base.config | changed)
    return tiny_models.build(name, folder)


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("devices", [1, 2])
def test_dummy_weights(scheme, devices, model_folders):
    options = {"quantization": scheme, "load_format": "dummy", "tensor_parallel_size": devices}
    engine = make_engine(model_folders(CASE), **options)
    floats = [x.dtype for x in jax.tree.leaves(stacks(engine)) if x.ndim == 3 and x.dtype in ("float32", "bfloat16")]
    assert len(floats) <= len(stacks(engine)), "only scales are floats"
    assert len({tuple(ids) for ids in answers(engine, 4)}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(act_order, tmp_path, model_folders):
    """Experts in GPTQ's tensors, each expert its own; with act-order each has its own order of inputs."""
    quantized = {}
    plain = {}
    order = {}
    rng = np.random.default_rng(4)
    for name, tensor in tiny_models.tensors(CASE):
        if ".experts." not in name:
            quantized[name] = plain[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        inputs = tensor.shape[1]
        groups = np.arange(inputs, dtype=np.int32) // 32
        key = stem.rsplit(".", 1)[0] if stem.endswith(("w1", "w3")) else stem
        of_input = order.setdefault(key, rng.permutation(groups) if act_order else groups)
        parts, plain[name] = gptq(tensor.astype(np.float32), of_input)
        quantized |= {f"{stem}.{part}": value for part, value in parts.items()}
    folders = [tmp_path / "gptq", tmp_path / "floats"]
    for folder, values in zip(folders, (quantized, plain), strict=True):
        folder.mkdir()
        float_copy(model_folders(CASE), values, folder)
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": act_order}
    (folders[0] / "config.json").write_text(json.dumps(config))
    expected = answers(make_engine(folders[1]), 4)
    engine = make_engine(folders[0], matmul_backend="cpu")
    assert all(isinstance(w, QuantArray) and (w.order is not None) == act_order for w in stacks(engine).values())
    assert answers(engine, 4) == expected
    if act_order:
        with pytest.raises(ConfigError, match="desc_act are served by one device only"):
            make_engine(folders[0], tensor_parallel_size=2)
    else:
        assert answers(make_engine(folders[0], tensor_parallel_size=2), 4) == expected


def mxfp4_folders(case, folder, out):
    """A checkpoint as gpt-oss is published, with stacks of experts in MXFP4, [experts, out, in / 32, 16], beside
    floats; and one with the same values in floats. `folder` has the case's config."""
    rng = np.random.default_rng(6)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    quantized = {}
    plain = {}
    for name, tensor in tiny_models.tensors(case):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantized[name] = plain[name] = tensor
            continue
        experts, inputs, rows = tensor.shape
        blocks = rng.integers(0, 256, (experts, rows, inputs // 32, 16), np.uint8)
        scales = rng.integers(121, 125, (experts, rows, inputs // 32), np.uint8)
        values = np.stack([table[blocks & 15], table[blocks >> 4]], -1).reshape(*scales.shape, 32)
        values = (values * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(experts, rows, inputs)
        plain[name] = np.ascontiguousarray(values.swapaxes(1, 2))
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folders = [out / "mxfp4", out / "floats"]
    for made, values in zip(folders, (quantized, plain), strict=True):
        made.mkdir()
        float_copy(folder, values, made)
    config = json.loads((folders[0] / "config.json").read_text())
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_mxfp4(devices, tmp_path, model_folders):
    case = "gpt_oss_sinks"
    folders = mxfp4_folders(case, model_folders(case), tmp_path)
    engine = make_engine(folders[0], matmul_backend="cpu" if devices == 1 else "auto", tensor_parallel_size=devices)
    assert {type(w) for w in stacks(engine).values()} == ({PanelArray} if devices == 1 else {QuantArray})
    assert answers(engine, 4) == answers(make_engine(folders[1]), 4)


def as_published(values, transposed):
    """The experts of a layer in two stacks, whose matrices may be transposed."""
    made = {}
    experts = {}
    for name, value in values.items():
        layer, found, rest = name.partition(".experts.")
        if not found:
            made[name] = value
        elif rest.startswith(("gate_up", "down")):
            experts[layer, rest] = value
        else:
            number, role = rest.removesuffix(".weight").split(".")
            experts.setdefault((layer, role), {})[int(number)] = value
    for (layer, role), given in experts.items():
        stack = np.stack([given[e] for e in range(len(given))])
        if role == "up_proj":
            continue
        if role == "gate_proj":
            ups = experts[layer, "up_proj"]
            stack = np.concatenate([stack, np.stack([ups[e] for e in range(len(ups))])], 1)
        name = "gate_up_proj" if role.startswith("gate") else role
        made[f"{layer}.experts.{name}"] = np.ascontiguousarray(stack.swapaxes(1, 2)) if transposed else stack
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("case", "transposed"), [("qwen3_5_moe_whole", False), ("qwen3_vl_moe_wide", True)])
def test_stacks_as_published(case, transposed, tmp_path, model_folders):
    folder = model_folders(case)
    stacked = float_copy(folder, as_published(dict(tiny_models.tensors(case)), transposed), tmp_path)
    assert answers(make_engine(stacked), 2) == answers(make_engine(folder), 2)


def form(x) -> list:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_plans_and_conversions(devices, tmp_path, model_folders, gguf_files):
    """The plan tells the forms of stacks before they are loaded, and stacks survive conversion to Orbax and back."""
    folder = model_folders(CASE)
    kinds = gguf_files.Kind.Q8_0, gguf_files.Kind.F32
    gguf = gguf_files.write_gguf(folder, tmp_path / "model.gguf", lambda name: kinds["experts" not in name])
    for path, options in ((gguf, {}), (folder, {}), (folder, {"load_format": "dummy", "quantization": "int4"})):
        engine = make_engine(path, tensor_parallel_size=devices, **options)
        planned = abstract_weights(engine.runner.model, path, engine.runner.mesh, engine.config)
        loaded = flatten_dict(engine.runner.params, sep="/")
        assert {name: form(x) for name, x in planned.items()} == {name: form(x) for name, x in loaded.items()}
    convert_model(str(folder), tmp_path / "orbax", "orbax", devices)
    convert_model(str(tmp_path / "orbax"), tmp_path / "back", "safetensors")
    expected = answers(make_engine(folder), 4)
    for converted in ("orbax", "back"):
        assert answers(make_engine(tmp_path / converted, tensor_parallel_size=devices), 4) == expected


def test_the_rotary_base_of_dbrx():
    """Published files have it in attn_config, where transformers 5 does not read it."""
    values = MOE_CASES["dbrx_hub"].config
    published = values["attn_config"] | {"rope_theta": 5e5}

    def read(**more):
        return read_model_config(HFConfig(values | {"attn_config": published} | more))

    assert read().ropes["default"].theta == 5e5
    assert read(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}) == read()
    with pytest.raises(ConfigError, match=r"rope_theta=500000\.0 contradicts rope_theta=10000\.0 of rope_parameters"):
        read(rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
