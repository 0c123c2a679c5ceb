"""Whether an engine with these settings sees."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.images.processing import FILES, ImageProcessor
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.sources import Names
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.spec import VisionConfig

log = logging.getLogger(__name__)


def with_eyes(config: EngineConfig, folder: Path, model: ModelConfig) -> ModelConfig:
    """The model, which reads text only if the settings or its files do not go with pictures. The log tells why.

    Raises ConfigError for settings of its image processor that are not valid.
    """
    if model.vision is None:
        return model
    reason = why_blind(config)
    if reason is None and config.load_format != "dummy":
        files = Checkpoint.open(folder, ignored=config.ignore_config_keys)
        if named_in(files, model.vision.names)["patch.weight"] not in files.tensors:
            reason = "the files have no image encoder"
    vision: VisionConfig = model.vision
    processor = ImageProcessor.of(folder, vision.tokens)
    if reason is None and processor is None:
        reason = f"{folder} has no {' or '.join(FILES)}"
    if reason is None and processor is not None and vision.encoder.reads_tiles:
        side = (processor.tile or 0) // vision.tokens.patch
        if side != vision.encoder.table:
            table = vision.encoder.table
            reason = f"tiles must have {table} x {table} patches, those of its image processor have {side} x {side}"
    if reason is not None or processor is None:
        log.info("pictures are not read: %s", reason)
        return replace(model, vision=None)
    factor, mean, std = processor.scaling()
    scaling = replace(vision.encoder.scaling, factor=factor, mean=mean, std=std)
    encoder = replace(vision.encoder, scaling=scaling)
    return replace(model, vision=replace(vision, encoder=encoder))


def why_blind(config: EngineConfig) -> str | None:
    """The setting with which pictures are not combined; None: there is none."""
    reasons = {
        "--pipeline-parallel-size": config.pipeline_parallel_size > 1,
        "--data-parallel-size": config.data_parallel_size > 1,
        "--cpu-offload-gib": bool(config.cpu_offload_gib),
        "several hosts": config.num_hosts > 1,
    }
    found = next((name for name, given in reasons.items() if given), None)
    return None if found is None else f"they are not combined with {found}"


def named_in(files: Checkpoint, names: Names) -> Names:
    """The names that the encoder's tensors have in these files: transformers 5 writes "model." before them. Before, it
    wrote "vision_model." within some towers."""
    for begin in ("", "model."):
        for tower in ("vision_tower.", "vision_tower.vision_model."):
            found = {role: begin + name.replace("vision_tower.", tower, 1) for role, name in names.items()}
            if found["patch.weight"] in files.tensors:
                return found
    return names
