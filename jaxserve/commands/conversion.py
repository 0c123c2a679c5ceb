"""`jaxserve quantize | convert | train-eagle`: their flags. The modules that do the work are imported when a command
runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.commands.arguments import add_command, add_model


def add_commands(commands: Any) -> None:
    quantize = add_command(commands, "quantize", run_quantize, "write a quantized copy of a model")
    add_model(quantize)
    quantize.add_argument("out", type=Path, help="a new folder, or the folder of an interrupted run to continue")
    quantize.add_argument("--scheme", choices=["int8", "int4", "fp8", "int8-dynamic", "fp8-dynamic"], default="int4",
                          help="type of the weights; -dynamic rounds the inputs of products to it too")  # fmt: skip
    quantize.add_argument("--method", choices=["rtn", "gptq", "awq"], default="rtn",
                          help="rtn rounds to nearest; gptq and awq measure the layers' inputs on a text")  # fmt: skip
    quantize.add_argument("--group-size", type=int, metavar="INPUTS",
                          help="inputs that share a scale: 128, 64, 32, or 0 for all; None: the largest that fits for "
                          "int4, else 0")  # fmt: skip
    quantize.add_argument("--asymmetric", dest="symmetric", action="store_false", help="store zero points")
    quantize.add_argument("--layout", choices=["compressed-tensors", "awq"], default="compressed-tensors",
                          help="layout of the files")  # fmt: skip
    quantize.add_argument("--calibration", metavar="FILE", help="text, or JSON lines with a 'text' each, for gptq and "
                          "awq; None: calibration.txt of the model's folder")  # fmt: skip
    quantize.add_argument("--samples", type=int, default=128, metavar="N", help="most pieces of the text to use")
    quantize.add_argument("--length", type=int, default=512, metavar="TOKENS", help="length of each piece")
    quantize.add_argument("--no-act-order", dest="act_order", action="store_false",
                          help="gptq rounds columns in their own order, not those with large inputs first")  # fmt: skip
    quantize.add_argument("--quantize-head", action="store_true", help="quantize the output head too")

    convert = add_command(commands, "convert", run_convert, "write a copy of a model in another format")
    add_model(convert)
    convert.add_argument("out", type=Path, help="a new folder")
    convert.add_argument("--format", choices=["orbax", "safetensors"], required=True,
                         help="orbax: each device of a mesh reads only its own part; safetensors: for other engines "
                         "too, with quantized weights as compressed-tensors")  # fmt: skip
    convert.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="DEVICES",
                         help="most devices that will load the orbax checkpoint; matters if they are more than the "
                         "model's key-value heads")  # fmt: skip

    train = add_command(commands, "train-eagle", run_train_eagle, "train an EAGLE-3 draft for a model")
    add_model(train)
    train.add_argument("data", type=Path, help="text, or JSON lines with a 'text' each, like what will be served")
    train.add_argument("out", type=Path, help="a new folder")
    train.add_argument("--minutes", type=float, default=60.0, help="time of the training")
    train.add_argument("--vocabulary", type=int, default=32000, metavar="TOKENS",
                       help="size of the draft's vocabulary: the tokens that occur most in the text")  # fmt: skip
    train.add_argument("--generate", type=int, default=0, metavar="WINDOWS",
                       help="train on so many pieces of which the model writes the second half; 0: on the text as it "
                       "is")  # fmt: skip
    train.add_argument("--passes", type=int, default=3, metavar="TOKENS", help="tokens to propose one after another")
    train.add_argument("--rows", type=int, default=4, metavar="PIECES", help="pieces of the text in a step")
    train.add_argument("--length", type=int, default=256, metavar="TOKENS", help="length of a piece")
    train.add_argument("--rate", type=float, default=0.02, help="highest learning rate")
    train.add_argument("--seed", type=int, default=0)


def run_quantize(args: argparse.Namespace) -> int:
    from jaxserve.convert.quantize import QuantizeConfig, quantize_model

    given = {name: getattr(args, name) for name in QuantizeConfig.__dataclass_fields__}
    quantize_model(args.model, args.out, QuantizeConfig(**given))
    return 0


def run_train_eagle(args: argparse.Namespace) -> int:
    from jaxserve.convert.train_eagle import TrainConfig, train_eagle

    given = {name: getattr(args, name) for name in TrainConfig.__dataclass_fields__}
    train_eagle(args.model, args.data, args.out, TrainConfig(**given))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    from jaxserve.convert.convert import convert_model

    convert_model(args.model, args.out, args.format, args.tensor_parallel_size)
    return 0
