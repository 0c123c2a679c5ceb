"""A model's files before their weights are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.checkpoints import orbax
from jaxserve.checkpoints.formats import QuantReader, find_format
from jaxserve.checkpoints.formats.beside import with_settings
from jaxserve.checkpoints.load import Pieces
from jaxserve.checkpoints.mistral_native import is_native, open_native
from jaxserve.checkpoints.safetensors import TensorInfo, read_folder
from jaxserve.checkpoints.stacks import unstacked
from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family, find_family
from jaxserve.models.quantized import SCHEMES
from jaxserve.models.weights import of_stage, weight_pieces

CLASSIFIER = ("score.weight", "score.bias")  # tensors that `jaxserve.models.pooling_files` reads, not the decoder


@dataclass(frozen=True)
class Checkpoint:
    """A model's files before the weights are read: the config, its family, the tensors and the format's reader."""

    hf: HFConfig
    family: Family
    tensors: Mapping[str, TensorInfo]
    reader: QuantReader | None  # reads the weights that are quantized; None: no weight is

    @classmethod
    def open(cls, path: Path, quantization: str = "auto", ignored: Collection[str] = ()) -> Checkpoint:
        """Opens a folder or a GGUF file; `ignored` keys of its config count as absent. Raises CheckpointError for
        broken files, and ConfigError when `quantization` names a format that the files do not have."""
        tensors: Mapping[str, TensorInfo]
        reader: QuantReader | None
        names: Mapping[str, str] = {}
        if orbax.is_saved(path):
            hf = HFConfig.read(path, ignored)
            tensors = {}
            reader = None
        elif path.suffix == ".gguf":
            from jaxserve.checkpoints.gguf_model import open_gguf  # not imported where no file is a GGUF file

            file = open_gguf(path, ignored)
            hf = HFConfig(file.config, str(path), ignored)
            names = file.names
            of_gguf = unstacked(file.tensors, names.values() if names else find_family(hf).every_name)
            tensors = of_gguf
            reader = dataclasses.replace(file.reader, tensors=of_gguf)
        elif is_native(path):
            native = open_native(path)
            hf = HFConfig(native.config, native.source, ignored)
            tensors = native.tensors
            reader = None
        else:
            hf = HFConfig.read(path, ignored)
            tensors = unstacked(read_folder(path), find_family(hf).every_name, find_family(hf).joined(hf))
            reader = find_format(with_settings(hf.values, path), tensors)
        if quantization not in ("auto", reader.name if reader else None) and (reader or quantization not in SCHEMES):
            has = f"is quantized as {reader.name}" if reader else "is not quantized"
            raise ConfigError(f"quantization {quantization} was asked for, but {path} {has}")
        family = find_family(hf)
        if names:
            family = dataclasses.replace(family, names=names, variant=lambda config: {}, layouts=())
        return cls(hf, family, tensors, reader)

    def pieces(self, decoder: Any) -> dict[str, Pieces]:
        """Path in the parameters of a Decoder -> the tensors that make it up."""
        return of_stage(decoder, self._all_pieces(decoder))

    def _all_pieces(self, decoder: Any) -> dict[str, Pieces]:
        return weight_pieces(decoder, self.family.roles(decoder.config, self._has), self._has)

    def bytes_of(self, decoder: Any) -> dict[str, int]:
        """Path in the parameters of a Decoder -> bytes of its tensors in the files."""
        names = {path: {piece.name for piece in some} for path, some in self._all_pieces(decoder).items()}
        parts = {path: [p for name in some for p in self._parts(name)] for path, some in names.items()}
        return {path: sum(self.tensors[p].nbytes for p in some if p in self.tensors) for path, some in parts.items()}

    def _parts(self, weight: str) -> Collection[str]:
        """The tensors of a weight of this name."""
        parts: Any = self.reader.parts(weight) if self.reader is not None else ()
        return parts or (weight,)

    def _has(self, weight: str) -> bool:
        return weight in self.tensors or (self.reader is not None and bool(self.reader.parts(weight)))

    def ignored(self, decoder: Any) -> Callable[[str], bool]:
        """A predicate of tensor names: whether the tensor may stay unused without a warning in the log."""
        names = self.family.roles(decoder.config, self._has)
        tied_head = {names.get("head.weight", "lm_head.weight")} if decoder.config.tie_embeddings else set()
        family = self.family
        elsewhere: set[str] = set()
        if getattr(decoder, "stage", None) is not None:  # other stages read other tensors
            pieces = self._all_pieces(decoder).values()
            elsewhere = {part for some in pieces for piece in some for part in self._parts(piece.name)}
        shared = tuple(
            names[f"{role}.weight"].removesuffix("weight").format(i=i)
            for i, layer in enumerate(decoder.config.layers)
            if getattr(layer.attention, "shares_kv", False)
            for role in ("k", "v", "k_norm")
        )
        before = names["attention_norm.weight"].partition("{i}")[0] if family.more_layers else None

        def is_of_more_layers(name: str) -> bool:
            layer = name.removeprefix(before).partition(".")[0] if before and name.startswith(before) else ""
            return layer.isdecimal() and int(layer) >= decoder.config.num_layers

        def is_unread(name: str) -> bool:
            return name.endswith(family.ignored) or name.startswith((*family.unread, *shared)) or name in CLASSIFIER

        return lambda name: name in tied_head or name in elsewhere or is_unread(name) or is_of_more_layers(name)
