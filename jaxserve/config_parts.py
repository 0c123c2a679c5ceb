"""Parts of the operator's settings: the error of a wrong one, speculative decoding, adapters."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

MAX_PROPOSALS = 31  # most tokens that speculative decoding proposes for a sequence in a step
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}")  # metrics list such names, separated by commas


class ConfigError(ValueError):
    """An invalid setting; the message names what was given, what is allowed and what to change."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding, with vLLM's names. Raises ConfigError.

    Attributes:
      method: "ngram" proposes what followed the last tokens where they stood earlier in the prompt or the output,
        "suffix" also what followed them in recent outputs for the same tenant. "draft_model" samples from a smaller
        model with the same vocabulary. "eagle3" samples from an EAGLE-3 draft, "mtp" from the model's own head for
        multi-token prediction.
      model: folder or hub id of the draft model or EAGLE-3 draft.
      num_speculative_tokens: most tokens that are proposed for a sequence in a step, 1 to 31. Fewer are proposed where
        they do not pay.
      prompt_lookup_min, prompt_lookup_max: how many of the last tokens must have stood earlier. More are preferred.
    """

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"] = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 16

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """From a JSON object, as in vLLM's flag --speculative-config."""
        allowed = cls.__dataclass_fields__
        if unknown := [name for name in given if name not in allowed]:
            raise ConfigError(f"speculative_config must have only {', '.join(allowed)}, got {', '.join(unknown)}")
        return cls(**given)

    def __post_init__(self) -> None:
        methods = typing.get_args(typing.get_type_hints(SpeculativeConfig)["method"])
        if self.method not in methods:
            raise ConfigError(f"speculative_config's method must be {' or '.join(methods)}, got {self.method!r}")
        if (self.method in ("draft_model", "eagle3")) != (self.model is not None):
            raise ConfigError(f"speculative_config's model names a draft model, got {self.model!r} for {self.method}")
        if not isinstance(self.model, str | None) or self.model == "":
            raise ConfigError(f"speculative_config's model must be a folder or a hub id, got {self.model!r}")
        for name, low, high in (
            ("num_speculative_tokens", 1, MAX_PROPOSALS),
            ("prompt_lookup_min", 1, 64),
            ("prompt_lookup_max", self.prompt_lookup_min, 64),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"speculative_config's {name} must be between {low} and {high}, got {value!r}")


class LoRAModule(NamedTuple):
    """An adapter that is loaded at start, with vLLM's names.

    Attributes:
      name: the name under which requests ask for it.
      path: folder in PEFT's layout, or GGUF file.
      base_model_name: the parent that `/v1/models` shows; None: the served model's name.
      required: whether an adapter that cannot be loaded is an error. If not, it is left out.
    """

    name: str
    path: str
    base_model_name: str | None = None
    required: bool = True

    @classmethod
    def of(cls, given: Any) -> LoRAModule:
        """From `name=path`, or from a JSON object as in vLLM's flag --lora-modules. Raises ConfigError."""
        if isinstance(given, str):
            name, _, path = given.partition("=")
            given = {"name": name, "path": path}
        if isinstance(given, Mapping):
            if unknown := [name for name in given if name not in ("name", "path", "base_model_name")]:
                raise ConfigError(f"an adapter must have only name, path and base_model_name, got {unknown[0]!r}")
            given = given.get("name"), given.get("path"), given.get("base_model_name")
        module = cls(*given)
        if not isinstance(module.name, str) or not ADAPTER_NAME.fullmatch(module.name):
            what = "letters, digits and . _ : / @ + -, at most 256"
            raise ConfigError(f"an adapter's name must consist of {what}, got {str(module.name)[:300]!r}")
        if not isinstance(module.path, str) or not module.path:
            raise ConfigError(f"the adapter {module.name!r} needs a path, as in {module.name}=PATH")
        if not isinstance(module.base_model_name, str | None):
            raise ConfigError(f"base_model_name of {module.name!r} must be a string, got {module.base_model_name!r}")
        return module
