"""The settings of `jaxserve quantize` and `jaxserve train-eagle`. Importing them imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.setting import ConfigError, check_settings, documented, one_of, setting

SCHEMES = ("int8", "int4", "fp8", "int8-dynamic", "fp8-dynamic")
GROUP_SIZES = (128, 64, 32)
TOPIC = "conversion"  # --help of these commands has no topics, but a setting without one has no flag


@documented
@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Settings of a quantization."""

    scheme: str = setting(
        "int4", "type of the weights; -dynamic rounds the inputs of products to it too", topic=TOPIC,
        more="fp8 is e4m3fn. The dynamic ones (W8A8) have a scale per token.", rule=one_of(*SCHEMES),
    )  # fmt: skip
    method: str = setting(
        "rtn", "rtn rounds to nearest; gptq and awq measure the layers' inputs on a text", topic=TOPIC,
        rule=one_of("rtn", "gptq", "awq"),
    )  # fmt: skip
    group_size: int | None = setting(
        None, "inputs that share a scale: 128, 64, 32, or 0 for all; None: the largest that fits for int4, else 0",
        topic=TOPIC, metavar="INPUTS",
    )  # fmt: skip
    symmetric: bool = setting(True, "store zero points", topic=TOPIC, flag="--asymmetric")
    layout: str = setting(
        "compressed-tensors", "layout of the files", topic=TOPIC, rule=one_of("compressed-tensors", "awq")
    )
    calibration: str | None = setting(
        None, "text, or JSON lines with a 'text' each, for gptq and awq; None: calibration.txt of the model's folder",
        topic=TOPIC, metavar="FILE",
    )  # fmt: skip
    samples: int = setting(128, "most pieces of the text to use", topic=TOPIC, metavar="N")
    length: int = setting(512, "length of each piece", topic=TOPIC, metavar="TOKENS")
    act_order: bool = setting(
        True, "gptq rounds columns in their own order, not those with large inputs first", topic=TOPIC,
        flag="--no-act-order",
    )  # fmt: skip
    quantize_head: bool = setting(
        False, "quantize the output head too", topic=TOPIC, more="Not possible where it is the embedding."
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.group_size not in (None, 0, *GROUP_SIZES):
            raise ConfigError(f"group_size must be 0 or one of {GROUP_SIZES}, got {self.group_size}")
        if (self.scheme == "fp8" or self.scheme.endswith("-dynamic")) and (self.group_size or not self.symmetric):
            raise ConfigError(f"{self.scheme} has one scale per output channel: leave out group_size and zero points")
        if self.layout == "awq" and self.scheme != "int4":
            raise ConfigError(f"the awq layout holds int4 only, not {self.scheme}; use compressed-tensors")
        if self.samples < 1 or self.length < 1:
            raise ConfigError(f"samples and length must be positive, got {self.samples} and {self.length}")


@documented
@dataclass(frozen=True)
class TrainConfig:
    """Settings of the training of a draft head."""

    vocabulary: int = setting(
        32000, "size of the draft's vocabulary: the tokens that occur most in the text", topic=TOPIC, metavar="TOKENS"
    )
    passes: int = setting(3, "tokens to propose one after another", topic=TOPIC, metavar="TOKENS")
    minutes: float = setting(60.0, "time of the training", topic=TOPIC, more="The learning rate follows it.")
    rows: int = setting(4, "pieces of the text in a step", topic=TOPIC, metavar="PIECES")
    length: int = setting(256, "length of a piece", topic=TOPIC, metavar="TOKENS")
    rate: float = setting(
        0.02, "highest learning rate", topic=TOPIC, more="Of matrices (Muon); other weights have a tenth of it (Adam)."
    )
    generate: int = setting(
        0, "train on so many pieces of which the model writes the second half; 0: on the text as it is", topic=TOPIC,
        metavar="WINDOWS",
    )  # fmt: skip
    seed: int = setting(0, "seed of the weights and of the order of pieces", topic=TOPIC)
