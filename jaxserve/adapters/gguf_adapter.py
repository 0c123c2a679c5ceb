"""Reads LoRA adapters in llama.cpp's GGUF layout."""

from __future__ import annotations

from pathlib import Path

from jaxserve.models.adapter_targets import AdapterTargets, LowRank


def read_gguf_adapter(path: Path, targets: AdapterTargets) -> dict[str, LowRank]:
    """As `peft.read_peft`."""
    raise NotImplementedError
