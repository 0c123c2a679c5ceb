"""Model families, one file each: how to read a family's config.json, and the names of its tensors.

Each file in this folder that defines `FAMILY`, or several `FAMILIES`, is imported automatically.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.sources import Names
from jaxserve.models.spec import LayerSpec, ModelConfig, RecurrentSpec

BARE = {"model.": ""}  # in files of a model without its head, as sentence-transformers writes them
HEADLESS = ("Model", "ForSequenceClassification")  # architectures that end so have the decoder of ...ForCausalLM


def last_attention(config: ModelConfig, hf: HFConfig) -> LayerSpec:
    """The last of a model's layers that has attention."""
    return next(layer for layer in reversed(config.layers) if not isinstance(layer.attention, RecurrentSpec | None))


@dataclass(frozen=True)
class Family:
    """One family. `read_config` takes every key that it understands from the config; keys that are left are refused."""

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[HFConfig], ModelConfig]
    names: Names
    ignored: tuple[str, ...] = ()  # ends of the names of tensors that need no loading, such as buffers
    more_layers: bool = False  # files hold layers behind the last one, for predicting several tokens; they are not read
    variant: Callable[[ModelConfig], Names] = lambda config: {}  # names that differ between models of the family
    layouts: tuple[Mapping[str, str], ...] = ()  # usual beginning of names -> the beginning that some files have
    told_by: str = "embed.weight"  # the role whose tensor tells the layout of files
    mtp: Mapping[str, str] = field(default_factory=dict)  # names of the head for multi-token prediction
    mtp_layer: Callable[[ModelConfig, HFConfig], LayerSpec] = last_attention  # the layer of this head
    mtp_normed: bool = False  # see `DraftSpec.normed`
    joined: Callable[[HFConfig], int] = lambda hf: 0  # experts whose rows stacks join, see `stacks.unstacked`
    unread: tuple[str, ...] = ()  # beginnings of the names of tensors that serving does not use, such as images'

    @property
    def every_name(self) -> set[str]:
        """The names of tensors in all layouts of files."""
        layouts = ({}, *self.layouts, BARE)
        return {begun(name, layout) for layout in layouts for name in self.names.values()} | set(self.mtp.values())

    def roles(self, config: ModelConfig, has: Callable[[str], bool] = lambda name: False) -> Names:
        """Role -> name of a model's tensors, in the first layout in which the files have `told_by` (`has`)."""
        usual = {**self.names, **self.variant(config)}
        for layout in ({}, *self.layouts, BARE):
            names = {role: begun(name, layout) for role, name in usual.items()}
            if any(has(names[self.told_by].format(i=i)) for i in range(config.num_layers)):
                return names
        return usual


def begun(name: str, layout: Mapping[str, str]) -> str:
    """The name with its usual beginning replaced by that of the layout."""
    usual = next((usual for usual in layout if name.startswith(usual)), None)
    return name if usual is None else layout[usual] + name.removeprefix(usual)


@cache
def families() -> tuple[Family, ...]:
    return tuple(family for info in pkgutil.iter_modules(__path__) for family in _families_in(info.name))


@cache
def _families_in(name: str) -> list[Family]:
    module = importlib.import_module(f"{__name__}.{name}")
    found = getattr(module, "FAMILIES", None) or [getattr(module, "FAMILY", None)]
    return [family for family in found if family is not None]


def _family_of(architecture: str) -> Family | None:
    """The family of an architecture. Imports only the modules whose source has its name, as there are forty."""
    for path in sorted(Path(__path__[0]).glob("*.py")):
        if path.stem != "__init__" and f'"{architecture}"' in path.read_text(encoding="utf-8"):
            for family in _families_in(path.stem):
                if architecture in family.architectures:
                    return family
    return next((family for family in families() if architecture in family.architectures), None)


def find_family(hf: HFConfig) -> Family:
    """The family of a config's architecture.

    Raises ConfigError for an unknown architecture. The message names the nearest known one, and what differs from it.
    """
    given = hf.take("architectures", None) or []
    for name in given:
        for alias in (name, *(name.removesuffix(end) + "ForCausalLM" for end in HEADLESS if name.endswith(end))):
            if (family := _family_of(alias)) is not None:
                return family
    by_name = {name: family for family in families() for name in family.architectures}
    raise ConfigError(
        f"{hf.source}: architectures={given} is not supported{_nearest(hf, given, by_name)}. `jaxserve models list` "
        "lists what is"
    )


def _nearest(hf: HFConfig, given: Sequence[str], by_name: Mapping[str, Family]) -> str:
    """Text about the supported architecture with the most similar name, and the settings that it would not accept."""

    def core(name: str) -> str:
        return name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").lower()

    cores = {core(name): name for name in by_name}
    found = [cores[near] for name in given for near in get_close_matches(core(name), cores, n=1, cutoff=0.5)]
    if not found:
        return ""
    try:
        like = HFConfig(hf.values | {"architectures": found[:1]}, "its config.json")
        read_model_config(like)
        differs = "its config.json reads like one of that architecture, but the name says that the model differs"
    except ConfigError as error:
        differs = f"beyond that: {error}"
    return f"; the nearest is {found[0]} ({differs})"


def read_model_config(hf: HFConfig) -> ModelConfig:
    """The shape of a config's model. Raises ConfigError, whose message names the file and the key."""
    family = find_family(hf)
    try:
        config = family.read_config(hf)
    except ConfigError as error:
        if str(error).startswith(hf.source):
            raise
        raise ConfigError(f"{hf.source}: {error}") from None
    hf.take("quantization_config", None)  # `jaxserve.checkpoints.formats` reads or refuses it
    hf.finish()
    return config
