"""Whether an engine with these settings sees."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxserve.bundles.container import ENCODER, is_bundle
from jaxserve.config import EngineConfig
from jaxserve.execution.memory import max_batched_tokens
from jaxserve.images.processing import FILES, ImageProcessor
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.families import begun
from jaxserve.models.sources import Names
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.files import EncoderFiles
from jaxserve.models.vision.spec import VisionConfig

log = logging.getLogger(__name__)


class Eyes(NamedTuple):
    """What a model that sees has beside its shape: the processing of its pictures, and the encoder's files; None: its
    weights are not read from files."""

    processor: ImageProcessor
    files: EncoderFiles | None


def with_eyes(config: EngineConfig, folder: Path, model: ModelConfig) -> tuple[ModelConfig, Eyes | None]:
    """The model, which reads text only if the settings or its files do not go with pictures. The log tells why.

    Raises ConfigError for settings of its image processor that are not valid.
    """
    if model.vision is None:
        return model, None
    vision: VisionConfig = model.vision
    reason = why_blind(config, joint=bool(vision.joint))
    files = None
    if reason is None and is_bundle(config.model):
        if not (Path(config.model).expanduser() / ENCODER).is_file():
            reason = "the bundle has no image encoder"
    elif reason is None and config.load_format != "dummy":
        opened = Checkpoint.open(folder, ignored=config.ignore_config_keys)
        files = EncoderFiles.of(opened, named_in(opened, vision))
        if files.names["patch.weight"] not in files.tensors:
            reason = "the files have no image encoder"
    processor = ImageProcessor.of(folder, vision.tokens)
    if reason is None and processor is None:
        reason = f"{folder} has no {' or '.join(FILES)}"
    if reason is None and processor is not None:
        reason = processor.why_not() or _why_no_tiles(processor, vision) or _why_no_room(config, processor, vision)
    if reason is not None or processor is None:
        log.info("pictures are not read: %s", reason)
        return replace(model, vision=None), None
    factor, mean, std = processor.scaling()
    scaling = replace(vision.encoder.scaling, factor=factor, mean=mean, std=std)
    encoder = replace(vision.encoder, scaling=scaling)
    return replace(model, vision=replace(vision, encoder=encoder)), Eyes(processor, files)


def why_blind(config: EngineConfig, *, joint: bool) -> str | None:
    """The setting with which pictures are not combined; None: there is none. joint: tokens of a picture see each
    other."""
    reasons = {
        "--pipeline-parallel-size": config.pipeline_parallel_size > 1,
        "--data-parallel-size": config.data_parallel_size > 1,
        "--cpu-offload-gib": bool(config.cpu_offload_gib),
        "several hosts": config.num_hosts > 1,
        "--decode-context-parallel-size": joint and config.decode_context_parallel_size > 1,
        "--deterministic": joint and config.deterministic,
    }
    found = next((name for name, given in reasons.items() if given), None)
    return None if found is None else f"they are not combined with {found}"


def _why_no_room(config: EngineConfig, processor: ImageProcessor, vision: VisionConfig) -> str | None:
    """Why steps have no room for pictures whose tokens are computed in one step; None: they have."""
    count = max(processor.most_pixels // (vision.tokens.patch * vision.tokens.side) ** 2, 1)
    most = max_batched_tokens(config)
    needed = config.max_num_seqs + count
    if not vision.tokens.whole or most >= needed:
        return None
    return (
        f"max_num_batched_tokens must be at least {needed}, got {most}: one for each of "
        f"max_num_seqs={config.max_num_seqs} sequences, and all {count} tokens of a picture, which see each other"
    )


def _why_no_tiles(processor: ImageProcessor, vision: VisionConfig) -> str | None:
    """Why the encoder cannot see the tiles of this processor; None: it can."""
    side = (processor.tile or 0) // vision.tokens.patch
    table = vision.encoder.table
    if not vision.encoder.reads_tiles or side == table:
        return None
    return f"tiles must have {table} x {table} patches, those of its image processor have {side} x {side}"


def named_in(files: Checkpoint, vision: VisionConfig) -> Names:
    """The names that the encoder's tensors have in these files."""
    for layout in vision.layouts:
        names = {role: begun(name, layout) for role, name in vision.names.items()}
        if names["patch.weight"] in files.tensors:
            return names
    return vision.names
