"""The settings in a GGUF file's metadata: each is read once and checked, and those that nobody read are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.gguf_blocks import FLOATS
from jaxserve.checkpoints.gguf import GGUFFile
from jaxserve.checkpoints.safetensors import read_numbers

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"


class Keys:
    """The metadata of a file's architecture. `left` holds the keys that were not read yet; `finish` rejects them."""

    def __init__(self, file: GGUFFile, known: Collection[str], ignored: Collection[str]):
        self.file = file
        given = file.metadata.get("general.architecture")
        if not isinstance(given, str) or given not in known:
            raise self.refuse(f"general.architecture {given!r:.80} is not supported (only {', '.join(known)})")
        self.architecture = given
        prefix = f"{given}."
        mine = {key.removeprefix(prefix): x for key, x in file.metadata.items() if key.startswith(prefix)}
        self.left = {key: x for key, x in mine.items() if not {key, prefix + key} & set(ignored)}

    def refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {why}")

    def take(self, key: str, allowed: Callable[[Any], bool], default: Any = None) -> Any:
        """A value, or the common value of an array (one per layer). The key must exist if `default` is None."""
        value = self.left.pop(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray | list) or value is None or not allowed(value):
            raise self.refuse(f"{self.architecture}.{key}={value!r:.80} is not supported")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        return self.take(key, lambda value: type(value) is int and 0 < value < 2**31, default)

    def of_layers(self, key: str, default: int | None = None) -> int:
        """A size that an array may have for each layer, with 0 for layers without the part. All others agree."""
        value = self.left.get(key)
        if isinstance(value, np.ndarray) and value.any():
            self.left[key] = value[value != 0]
        return self.size(key, default)

    def count(self, key: str) -> int:
        """A size that may be 0; a missing key means 0, too."""
        return self.take(key, lambda value: type(value) is int and 0 <= value < 2**31, 0)

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number: the shortest decimal that rounds to the file's float32, such as 1e-05."""
        value = self.take(key, lambda value: type(value) in (int, float) and 0 < value < 1e30, default)
        return shortest(value)

    def flag(self, key: str, default: bool) -> bool:
        return self.take(key, lambda value: type(value) is bool, default)

    def expect(self, key: str, *allowed: Any) -> None:
        """Checks that the key is absent or one of `allowed`; other values are not supported."""
        self.take(key, lambda value: value in allowed, allowed[0])

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def finish(self) -> None:
        """Rejects keys that were not read, unless their value is 0 or false, which means that a feature is absent."""
        left = {key: x for key, x in self.left.items() if not isinstance(x, int | float) or x}
        if left:
            listed = ", ".join(f"{self.architecture}.{key}={value!r:.80}" for key, value in sorted(left.items()))
            raise self.refuse(
                f"settings that are not understood: {listed}. Where you know that they do not change what the model "
                f"computes: --ignore-config-keys {','.join(sorted(left))}"
            )


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the float32 nearest to a value."""
    return float(str(np.float32(value)))


def read_rope_scaling(keys: Keys, config: dict[str, Any], turned: int) -> dict[str, Any] | None:
    """The rope_scaling of a config that has `max_position_embeddings` and `rope_theta`. `turned` is the number of
    channels of a head that turn. None: positions are not stretched."""
    kind = keys.take("rope.scaling.type", lambda value: value in ("none", "linear", "yarn", "longrope"), "linear")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    original = keys.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    if keys.has(LONG_FACTORS) and keys.has(SHORT_FACTORS):
        return _longrope(keys, original, config["max_position_embeddings"], turned)
    if kind == "longrope":
        raise keys.refuse(f"{keys.architecture}.rope.scaling.type='longrope' is not supported without {LONG_FACTORS}")
    if keys.has(ROPE_FACTORS):
        if kind == "yarn" or factor != 1.0:
            raise keys.refuse(f"{ROPE_FACTORS} beside rope.scaling.type {kind!r} by {factor} is not supported")
        return _llama3_scaling(keys, config["rope_theta"], turned)
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    if kind == "yarn":
        betas = {
            key: keys.real(f"rope.scaling.yarn_{key}", at) for key, at in (("beta_fast", 32.0), ("beta_slow", 1.0))
        }
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
        attention = keys.real("rope.scaling.attn_factor", 1.0) * keys.real("rope.scaling.yarn_attn_factor", 1.0)
        return scaling if attention == 1.0 else scaling | {"attn_factor": attention}
    keys.expect("rope.scaling.attn_factor", 1.0)
    keys.expect("rope.scaling.yarn_attn_factor", 1.0)
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None


def _longrope(keys: Keys, original: int, length: int, turned: int) -> dict[str, Any]:
    """LongRoPE's factors for short and for long texts. Their attention factor follows from the two context lengths,
    unless the file has another one."""
    factors = {
        f"{which}_factor": read_divisors(keys, f"rope_factors_{which}.weight", turned) for which in ("long", "short")
    }
    found: dict[str, Any] = {name: [shortest(x) for x in some] for name, some in factors.items()}
    usual = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original > 1 else 1.0
    attention = keys.real("rope.scaling.attn_factor", usual)
    if not math.isclose(attention, usual, rel_tol=1e-5):
        found["attention_factor"] = attention
    return {"rope_type": "longrope", "original_max_position_embeddings": original, **found}


def read_divisors(keys: Keys, name: str, turned: int) -> np.ndarray:
    """float32 [turned / 2]: by how much the frequency of each pair of channels is divided."""
    stored = keys.file.tensors[name]
    if stored.shape != (turned // 2,) or stored.type.name != "F32":
        raise keys.refuse(f"tensor {name!r} is {stored.type.name} {list(stored.shape)}, not F32 [{turned // 2}]")
    return read_numbers(stored.path, name, FLOATS["F32"], turned // 2, stored.start)


def _llama3_scaling(keys: Keys, theta: float, turned: int) -> dict[str, Any] | None:
    """Finds the parameters of Llama 3.1's rope scaling. The file has only the frequencies' divisors [turned / 2].

    In all known models the low and high frequency factors are 1 and 4, in Llama 4 both are 1, and the context length is
    a power of two.
    """
    divisors = read_divisors(keys, ROPE_FACTORS, turned).astype(np.float64)
    factor = float(divisors.max())
    if (divisors == 1).all():
        return None
    turns = theta ** (-np.arange(0, turned, 2) / turned) / (2 * np.pi)  # per position
    for high in (4.0, 1.0):
        for original in (2**n for n in range(4, 24 if 1 < factor < 1e6 else 0)):
            ramp = (original * turns - 1.0) / (high - 1.0) if high > 1 else original * turns >= 1.0
            smooth = np.clip(ramp, 0, 1)
            if np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise keys.refuse(f"{ROPE_FACTORS} holds no scaling of Llama 3.1's kind: {divisors.tolist()}")
