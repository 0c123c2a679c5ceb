"""Model families, one file each: how its config.json reads, and what its tensors are called.

A file in this folder that defines `FAMILY`, or several `FAMILIES`, is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.spec import ModelConfig
from jaxserve.models.weights import Names

BARE = {"model.": ""}  # files of a model without its head, as sentence-transformers writes them
HEADLESS = ("Model", "ForSequenceClassification")  # ends of names of architectures whose decoder has another's name


@dataclass(frozen=True)
class Family:
    """Data about one family; `read_config` takes every key it understands from the config."""

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[HFConfig], ModelConfig]
    names: Names
    ignored: tuple[str, ...] = ()  # ends of tensor names that carry nothing to load
    more_layers: bool = False  # files hold layers behind the last one, which predict several tokens at a time
    variant: Callable[[ModelConfig], Names] = lambda config: {}  # names that differ between models of the family
    layouts: tuple[Mapping[str, str], ...] = ()  # other beginnings of names in some files, by the usual ones
    unread: tuple[str, ...] = ()  # beginnings of names of tensors of which nothing is served

    def roles(self, config: ModelConfig, has: Callable[[str], bool] = lambda name: False) -> Names:
        """The names of a model's tensors, in the layout of files that have tensors of these names."""
        usual = {**self.names, **self.variant(config)}
        for layout in ({}, *self.layouts, BARE):
            names = {role: _begun(name, layout) for role, name in usual.items()}
            if has(names["embed.weight"]):
                return names
        return usual


def _begun(name: str, layout: Mapping[str, str]) -> str:
    """The name with another beginning."""
    usual = next((usual for usual in layout if name.startswith(usual)), None)
    return name if usual is None else layout[usual] + name.removeprefix(usual)


@cache
def families() -> tuple[Family, ...]:
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    found = (getattr(module, "FAMILIES", None) or [getattr(module, "FAMILY", None)] for module in modules)
    return tuple(family for some in found for family in some if family is not None)


def find_family(hf: HFConfig) -> Family:
    """The family of a config's architecture. Raises ConfigError that names the nearest one and what differs from it."""
    given = hf.take("architectures", None) or []
    by_name = {name: family for family in families() for name in family.architectures}
    for name in given:
        for alias in (name, *(name.removesuffix(end) + "ForCausalLM" for end in HEADLESS if name.endswith(end))):
            if alias in by_name:
                return by_name[alias]
    raise ConfigError(
        f"{hf.source}: architectures={given} is not supported{_nearest(hf, given, by_name)}. `jaxserve models list` "
        "lists what is"
    )


def _nearest(hf: HFConfig, given: Sequence[str], by_name: Mapping[str, Family]) -> str:
    """The supported architecture with the most similar name, and what it does not understand of the config."""

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
    """Raises ConfigError that names the file and the key."""
    family = find_family(hf)
    try:
        config = family.read_config(hf)
    except ConfigError as error:
        if str(error).startswith(hf.source):
            raise
        raise ConfigError(f"{hf.source}: {error}") from None
    hf.take("quantization_config", None)  # which `jaxserve.checkpoints.formats` understands, or refuses
    hf.finish()
    return config
