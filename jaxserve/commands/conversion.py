"""`jaxserve quantize | convert | train-eagle`: their flags. The modules that do the work are imported when a command
runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.commands.arguments import add_command, add_model, add_settings, chosen
from jaxserve.convert.settings import QuantizeConfig, TrainConfig


def add_commands(commands: Any) -> None:
    quantize = add_command(commands, "quantize", run_quantize, "write a quantized copy of a model")
    add_model(quantize)
    quantize.add_argument("out", type=Path, help="a new folder, or the folder of an interrupted run to continue")
    add_settings(quantize, QuantizeConfig)

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
    add_settings(train, TrainConfig)


def run_quantize(args: argparse.Namespace) -> int:
    from jaxserve.convert.quantize import quantize_model

    quantize_model(args.model, args.out, QuantizeConfig(**chosen(args, QuantizeConfig)))
    return 0


def run_train_eagle(args: argparse.Namespace) -> int:
    from jaxserve.convert.train_eagle import train_eagle

    train_eagle(args.model, args.data, args.out, TrainConfig(**chosen(args, TrainConfig)))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    from jaxserve.convert.convert import convert_model

    convert_model(args.model, args.out, args.format, args.tensor_parallel_size)
    return 0
