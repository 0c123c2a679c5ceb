"""Loads the image encoder of a model that sees."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, cast

from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import num_shards, unsplit
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.prepared import Prepared
from jaxserve.execution.encoder_runner import EncoderRunner
from jaxserve.execution.mixing_encoder import MixingEncoder
from jaxserve.images.area import most_features
from jaxserve.models.load import make_params, ops_on
from jaxserve.models.vision.encoder import ImageEncoder
from jaxserve.models.weights import abstract_params
from jaxserve.pallas_kernels.ops import Ops

log = logging.getLogger(__name__)

PICTURES = 2  # largest pictures whose features have room at a time
TILES = 4  # of a picture that go through the encoder together


def load_encoder(
    config: EngineConfig, plan: ModelPlan, ops: Ops, prepared: Prepared | None = None
) -> EncoderRunner | None:
    """The encoder on the devices of a plan, with the operations of its decoder, which have been checked; None for a
    model that reads text only. prepared: the bundle that has the weights. Raises CheckpointError."""
    if plan.eyes is None:
        return None
    start = time.perf_counter()
    encoder = encoder_of(plan, ops)
    mesh = mesh_of(plan)
    if mesh is not plan.mesh:
        log.warning(
            "each device has the whole image encoder, whose heads or MLPs %d do not divide",
            num_shards(plan.mesh, "mlp"),
        )
    if prepared is not None:
        params = prepared.encoder(mesh)
    else:
        own: Any = replace(config, quantization="auto")
        files: Any = plan.eyes.files
        params = make_params(cast(Any, encoder), plan.folder, mesh, own, progress=False, source=files)
    log.info("loaded the image encoder of %s in %.1f s", config.model, time.perf_counter() - start)
    return _runner(plan, encoder, params)


def abstract_encoder(plan: ModelPlan) -> EncoderRunner | None:
    """As `load_encoder`, without weights: shapes suffice for what it needs of the devices' memory."""
    if plan.model.vision is None:
        return None
    encoder = encoder_of(plan, plan.decoder.ops)
    return _runner(plan, encoder, unflatten_dict(abstract_params(cast(Any, encoder), mesh_of(plan)), sep="/"))


def _runner(plan: ModelPlan, encoder: ImageEncoder, params: Any) -> EncoderRunner:
    shape = encoder.config
    assert plan.eyes is not None
    processor = plan.eyes.processor
    patches = most_patches(plan)
    rows = PICTURES * -(-patches // shape.joined)
    fewest = 1
    if processor.tile is not None:
        fewest = (processor.tile // shape.patch_shape[-1]) ** 2 + shape.further
        patches = min(TILES, processor.most_tiles) * fewest
    if not shape.newline:
        return EncoderRunner(encoder, params, mesh_of(plan), fewest=fewest, most=patches, rows=rows)
    tiles = processor.most_tiles
    kind = plan.model.vision.tokens
    rows = PICTURES * min(most_features(shape.table or 0, kind.most_tiles, tiles - 1), plan.longest)
    return MixingEncoder(encoder, params, mesh_of(plan), fewest=fewest, most=patches, rows=rows, tiles=tiles)


def most_patches(plan: ModelPlan) -> int:
    """Patches of the largest picture that a model sees."""
    shape = plan.model.vision.encoder
    assert plan.eyes is not None
    processor = plan.eyes.processor
    patches: int = max(processor.most_pixels // shape.patch_shape[-1] ** 2, shape.joined)
    return min(patches, plan.longest * shape.joined)


def whole_tokens(plan: ModelPlan) -> int:
    """Tokens of the largest picture of a model that computes all tokens of a picture in one step; 0: it does not."""
    vision = plan.model.vision
    return 0 if vision is None or not vision.tokens.whole else -(-most_patches(plan) // vision.encoder.joined)


def encoder_of(plan: ModelPlan, ops: Ops) -> ImageEncoder:
    """The encoder of a model that sees, with the operations of its decoder."""
    shape = plan.model.vision.encoder
    heads = shape.layers[0].attention.num_heads if shape.layers else 1
    mesh = mesh_of(plan)
    ops = ops if mesh is plan.mesh else ops_on(mesh, ops)
    return ImageEncoder(shape, heads, plan.dtype, replace(ops, trials=None))


def mesh_of(plan: ModelPlan) -> Mesh:
    """The devices of the plan as the encoder uses them. Where they cannot share it evenly, each has all of it."""
    return plan.mesh if plan.model.vision.encoder.divides(num_shards(plan.mesh, "mlp")) else unsplit(plan.mesh)
