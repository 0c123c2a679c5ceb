"""Record, or with --check compare, small quantized weights and what their formats' own tools make of them.

Each file of formats/ has the tensors of one Linear called "m", in `expected` its weight [out, in] in float32, or these
`rows` of it, and as metadata its config.json. Needs a CPU build of torch and, in an environment of their own:

    pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 bitsandbytes==0.50.2 accelerate datasets
    pip install threadpoolctl device-smi pypcre logbar protobuf pillow dill
    pip install --no-deps tokenicer defuser torchao
    BUILD_CUDA_EXT=0 pip install --no-deps --no-build-isolation gptqmodel==7.7.0 autoawq==0.2.9
"""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from awq.utils.packing_utils import dequantize_gemm
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

FOLDER = Path(__file__).resolve().parent / "formats"
PACKAGES = ("torch", "transformers", "compressed-tensors", "bitsandbytes", "gptqmodel", "autoawq")


def random_weight(out, inputs):
    """Normal, its columns of different sizes, and a few large ones."""
    weight = torch.randn(out, inputs) * torch.rand(inputs).add(0.1) * 0.05
    weight[::7, ::13] *= 8
    return weight


def random_words(*shape):
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def awq(group=32, out=32, inputs=128):
    tensors = {
        "qweight": random_words(inputs, out // 8),
        "qzeros": random_words(inputs // group, out // 8),
        "scales": (torch.rand(inputs // group, out) * 0.01).half(),
    }
    expected = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, group)
    settings = {"bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return {"quant_method": "awq", **settings}, tensors, expected.T


def gptq(bits, group=32, sym=True, desc_act=False, v2=False, out=32, inputs=64):
    weight = random_weight(out, inputs)
    levels = 2**bits - 1
    size = inputs if group == -1 else group
    place = torch.randperm(inputs) if desc_act else torch.arange(inputs)
    g_idx = (place // size).to(torch.int32)
    low = torch.stack([weight[:, g_idx == i].amin(1) for i in range(inputs // size)], 1).clamp(max=0)
    high = torch.stack([weight[:, g_idx == i].amax(1) for i in range(inputs // size)], 1).clamp(min=0)
    if sym:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / levels).half().float()
    zeros = torch.full_like(scales, (levels + 1) / 2) if sym else (-low / scales).round().clamp(0, levels)
    if not sym:
        zeros[0, 0] = 0  # which borrows from its neighbours in v1
    layer = torch.nn.Linear(inputs, out, bias=False)
    layer.weight.data = weight
    module = TorchLinear(bits=bits, group_size=group, sym=sym, desc_act=desc_act, in_features=inputs, out_features=out)
    module.pack_original(layer, scales, zeros, g_idx)
    if not v2:
        settings = type("Settings", (), {"bits": bits, "pack_dtype": torch.int32})
        convert_gptq_v2_to_v1_format_module(module, settings)
    tensors = {name: getattr(module, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    if not v2:
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    module.post_init()
    module.scales = module.scales.float()
    settings = {"bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    return (
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2" if v2 else "gptq", **settings},
        tensors,
        module.train().dequantize_weight().T,
    )


def compressed(layout, activations=None, out=16, inputs=128, **weights):
    """By the compressor of this layout; the scales are stored in bfloat16, and used in float32."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations, format=layout)
    weight = random_weight(out, inputs)
    rows, size = {
        "tensor": (out, inputs),
        "channel": (1, inputs),
        "group": (1, args.group_size),
        "block": tuple(args.block_structure or ()),
    }[args.strategy]
    blocks = weight.reshape(out // rows, rows, inputs // size, size)
    low = blocks.amin((1, 3))
    high = blocks.amax((1, 3))
    scale, zero = calculate_qparams(low, high, args)
    if args.strategy == "tensor":
        scale = scale.reshape(1)
        zero = zero.reshape(1)
    mx = layout.startswith("mx")
    state = {"weight": weight, "weight_scale": scale if mx else scale.bfloat16().float(), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(layout)
    state = compressor.compress(state, scheme)
    expected = compressor.decompress(state, scheme)["weight"].float()
    if not mx:
        state["weight_scale"] = state["weight_scale"].bfloat16()
    groups = {"group_0": json.loads(scheme.model_dump_json())}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}
    return config, state, expected


def fp8(scale_shape, name="weight_scale_inv", method="fp8", dtype=torch.float32, out=32, inputs=64, **settings):
    weight = random_weight(out, inputs).mul(100).to(torch.float8_e4m3fn)
    scale = (torch.rand(scale_shape) * 0.01).to(dtype)
    grid = scale if scale.ndim == 2 else scale.reshape(-1, 1)
    expected = Fp8Dequantize(None)._dequantize_one(weight, grid, output_dtype=torch.float32)
    return {"quant_method": method, **settings}, {"weight": weight, name: scale}, expected


def bnb_int8(out=32, inputs=64):
    codes, scb, _ = bnb.int8_vectorwise_quant(random_weight(out, inputs).half())
    tensors = {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    return config, tensors, bnb.int8_vectorwise_dequant(codes, scb)


def bnb_4bit(kind, nested, out=32, inputs=128):
    weight = random_weight(out, inputs)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {"weight": packed, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return config, tensors, bnb.dequantize_4bit(packed, state)


def mxfp4(experts=2, out=16, inputs=64):
    blocks = torch.randint(0, 256, (experts, out, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(0, 250, (experts, out, inputs // 32), dtype=torch.uint8)
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    return {"quant_method": "mxfp4"}, {"_blocks": blocks, "_scales": scales}, expected.reshape(-1, inputs)


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
FP8 = {**INT8, "type": "float"}
CASES = {
    "awq": awq,
    "gptq_4": lambda: gptq(4),
    "gptq_4_act_order": lambda: gptq(4, desc_act=True, sym=False),
    "gptq_4_asymmetric": lambda: gptq(4, sym=False),
    "gptq_4_v2": lambda: gptq(4, sym=False, v2=True),
    "gptq_8": lambda: gptq(8, group=-1),
    "gptq_8_act_order": lambda: gptq(8, desc_act=True, sym=False),
    "gptq_3": lambda: gptq(3, sym=False),
    "gptq_2": lambda: gptq(2, sym=False, v2=True),
    "ct_w4": lambda: compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct_w4_asymmetric": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "ct_w4_channel": lambda: compressed("pack-quantized", num_bits=4, strategy="channel", symmetric=False, inputs=100),
    "ct_w8": lambda: compressed("pack-quantized", num_bits=8, strategy="channel"),
    "ct_int8": lambda: compressed("int-quantized", INT8, num_bits=8, strategy="channel"),
    "ct_int8_asymmetric": lambda: compressed(
        "int-quantized", INT8, num_bits=8, strategy="group", group_size=64, symmetric=False
    ),
    "ct_int8_tensor": lambda: compressed("int-quantized", INT8, num_bits=8, strategy="tensor", symmetric=False),
    "ct_fp8": lambda: compressed("float-quantized", FP8, num_bits=8, type="float", strategy="channel"),
    "ct_fp8_tensor": lambda: compressed("float-quantized", FP8, num_bits=8, type="float", strategy="tensor"),
    "ct_fp8_block": lambda: compressed(
        "float-quantized", FP8, num_bits=8, type="float", strategy="block", block_structure=[8, 64]
    ),
    "ct_mxfp4": lambda: compressed(
        "mxfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    ),
    "fp8_block": lambda: fp8((4, 2), weight_block_size=[8, 32]),
    "fp8_block_bfloat16": lambda: fp8((4, 2), dtype=torch.bfloat16, weight_block_size=[8, 32]),
    "fp8_tensor": lambda: fp8((), "weight_scale", activation_scheme="static"),
    "fp8_fbgemm": lambda: fp8((32, 1), "weight_scale", "fbgemm_fp8", modules_to_not_convert=["lm_head"]),
    "bnb_int8": bnb_int8,
    "bnb_nf4": lambda: bnb_4bit("nf4", False),
    "bnb_nf4_nested": lambda: bnb_4bit("nf4", True, inputs=1024),  # two blocks of 256 absmax
    "bnb_fp4": lambda: bnb_4bit("fp4", False),
    "bnb_fp4_nested": lambda: bnb_4bit("fp4", True),
    "mxfp4": mxfp4,
}
ROWS = 3  # every third is stored, which meets each place in a word
FEW = {"bnb_nf4_nested": [0, 15, 16, 31]}


def make(name):
    """(tensors, metadata) of a case; the same each time."""
    torch.manual_seed(sorted(CASES).index(name))
    with torch.no_grad():
        config, tensors, expected = CASES[name]()
    assert expected.dtype == torch.float32, (name, expected.dtype)
    made = {f"m.{key}" if not key.startswith("_") else f"m{key}": value for key, value in tensors.items()}
    made["rows"] = torch.tensor(FEW.get(name, range(0, len(expected), ROWS)))
    made["expected"] = expected[made["rows"]]
    made = {key: value.detach().contiguous().clone() for key, value in made.items()}
    return made, {"config": json.dumps({"quantization_config": config}), "shape": json.dumps(list(expected.shape))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    wrong = []
    for name in args.cases or CASES:
        tensors, metadata = make(name)
        path = FOLDER / f"{name}.safetensors"
        if not args.check:
            save_file(tensors, path, metadata)
            continue
        stored = load_file(path)
        same = stored.keys() == tensors.keys() and all(
            stored[key].dtype == x.dtype and stored[key].shape == x.shape
            and stored[key].view(-1).view(torch.uint8).equal(x.view(-1).view(torch.uint8))
            for key, x in tensors.items()
        )  # fmt: skip
        wrong += [] if same else [name]
    if not args.check:
        versions = {package: importlib.metadata.version(package) for package in PACKAGES}
        (FOLDER / "VERSIONS.json").write_text(json.dumps(versions, indent=2) + "\n")
    sys.exit(f"differs: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
