"""The sampling parameters of requests that name none: what a model's authors recommend, and what an operator sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxserve import limits
from jaxserve.checkpoints.files import read_json


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters that generation_config.json recommends; None for those that it does not set."""

    temperature: limits.Temperature | None = None
    top_k: limits.TopK | None = None
    top_p: limits.Fraction | None = None
    min_p: limits.Fraction | None = None
    repetition_penalty: limits.RepetitionPenalty | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """Reads `folder`/generation_config.json; a missing file recommends nothing, a broken one is a ValueError.

        `do_sample: false` recommends greedy sampling.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            data = read_json(path)
            eos = data.get("eos_token_id")
            data |= {"temperature": 0.0} if data.get("do_sample") is False else {}
            known = {name: data[name] for name in cls.__struct_fields__ if data.get(name) is not None}
            known["eos_token_ids"] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
            return msgspec.convert(known, cls)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} cannot be used: {error}") from error

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are set, by name."""
        given = ((name, getattr(self, name)) for name in SAMPLING)
        return {name: value for name, value in given if value is not None}


SAMPLING = tuple(name for name in GenerationDefaults.__struct_fields__ if name != "eos_token_ids")


def check_override(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an `EngineConfig.override_generation_config` that `generation_defaults` cannot use."""
    if not isinstance(given, Mapping):
        raise ValueError(f"it must be an object of sampling parameters, got {given!r}")
    if unknown := [name for name in given if name not in SAMPLING]:
        raise ValueError(f"it may have {', '.join(SAMPLING)}, got {', '.join(map(str, unknown))}")
    msgspec.convert(dict(given), GenerationDefaults)


def generation_defaults(model: Path, source: str, override: Mapping[str, Any] | None) -> GenerationDefaults:
    """Those of a model's folder or GGUF file, with `EngineConfig.generation_config` as the source and what overrides
    it. Tokens that end a sequence are always the model's. Raises ValueError for files that cannot be used."""
    chosen = of_model = _recommended_by(model)
    if source in ("none", "vllm"):
        chosen = GenerationDefaults(eos_token_ids=of_model.eos_token_ids)
    elif source != "auto":
        folder = Path(source).expanduser()
        if not (folder / "generation_config.json").is_file():
            allowed = "auto, none or a folder with generation_config.json"
            raise ValueError(f"generation_config must be {allowed}, got {source}")
        chosen = msgspec.structs.replace(GenerationDefaults.load(folder), eos_token_ids=of_model.eos_token_ids)
    return msgspec.structs.replace(chosen, **(override or {}))


def _recommended_by(model: Path) -> GenerationDefaults:
    if model.suffix != ".gguf":
        return GenerationDefaults.load(model)
    from jaxserve.checkpoints.gguf import end_ids, known_gguf
    from jaxserve.text.gguf_tokenizer import recommended_sampling

    metadata = known_gguf(model).metadata
    try:
        return msgspec.convert(
            recommended_sampling(metadata) | {"eos_token_ids": end_ids(metadata)}, GenerationDefaults
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"{model} recommends sampling that cannot be used: {error}") from error
