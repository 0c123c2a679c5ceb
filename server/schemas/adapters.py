"""Bodies of the endpoints that load and unload LoRA adapters, with vLLM's fields."""

from __future__ import annotations

import msgspec


class LoadAdapterRequest(msgspec.Struct):
    """Attributes:
    lora_name: the name under which requests ask for the adapter.
    lora_path: a folder in PEFT's layout, or a GGUF file, below --lora-root; may be relative to it.
    load_inplace: replace an adapter of this name.
    base_model_name: its `parent` in /v1/models; None: the served model.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadAdapterRequest(msgspec.Struct):
    """`lora_int_id` is accepted and has no effect."""

    lora_name: str
    lora_int_id: int | None = None
