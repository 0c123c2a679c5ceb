"""Loads the image encoder of a model that sees."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, cast

from flax.traverse_util import unflatten_dict

from jaxserve.config import EngineConfig
from jaxserve.engine.eyes import named_in
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.execution.encoder_runner import EncoderRunner
from jaxserve.images.processing import ImageProcessor
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.load import make_params
from jaxserve.models.vision.encoder import ImageEncoder
from jaxserve.models.vision.files import EncoderFiles
from jaxserve.models.weights import abstract_params

log = logging.getLogger(__name__)

PICTURES = 2  # largest pictures whose features have room at a time


def load_encoder(config: EngineConfig, plan: ModelPlan) -> EncoderRunner | None:
    """The encoder on the devices of a plan; None for a model that reads text only. Raises CheckpointError."""
    vision = plan.model.vision
    if vision is None:
        return None
    start = time.perf_counter()
    encoder = encoder_of(plan)
    files = None
    if config.load_format != "dummy":
        opened = Checkpoint.open(plan.folder, ignored=config.ignore_config_keys)
        files = EncoderFiles.of(opened, named_in(opened, vision.names))
    own = replace(config, quantization="auto")
    params = make_params(encoder, plan.folder, plan.mesh, own, progress=False, source=files)  # type: ignore[arg-type]
    log.info("loaded the image encoder of %s in %.1f s", config.model, time.perf_counter() - start)
    return _runner(plan, encoder, params)


def abstract_encoder(plan: ModelPlan) -> EncoderRunner | None:
    """As `load_encoder`, without weights: shapes suffice for what it needs of the devices' memory."""
    if plan.model.vision is None:
        return None
    encoder = encoder_of(plan)
    return _runner(plan, encoder, unflatten_dict(abstract_params(cast(Any, encoder), plan.mesh), sep="/"))


def _runner(plan: ModelPlan, encoder: ImageEncoder, params: Any) -> EncoderRunner:
    shape = encoder.config
    processor = ImageProcessor.of(plan.folder, plan.model.vision.tokens)
    assert processor is not None  # `with_eyes` has seen it
    patches = max(processor.most_pixels // shape.patch_shape[-1] ** 2, shape.joined)
    patches = min(patches, plan.longest * shape.joined)
    rows = PICTURES * -(-patches // shape.joined)
    return EncoderRunner(encoder, params, plan.mesh, most_patches=patches, rows=rows)


def encoder_of(plan: ModelPlan) -> ImageEncoder:
    """The encoder of a model that sees, with the operations of its decoder."""
    shape = plan.model.vision.encoder
    heads = shape.layers[0].attention.num_heads
    return ImageEncoder(shape, heads, plan.dtype, replace(plan.decoder.ops, trials=None))
