"""The body of the endpoint that replaces the weights, with SGLang's fields."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Version = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:-]+$")]


class UpdateWeightsRequest(msgspec.Struct):
    """Attributes:
    model_path: a folder or file with the same model below --weights-root; may be relative to it.
    weight_version: the weights' name in answers; None: the number of the update.
    mode: "wait" until running requests have ended, while new ones are held back; or "abort" the running ones.
    abort_all_requests: the same as mode "abort".
    timeout: seconds after which the update is given up if requests are still running.
    flush_cache: may only be true, because cached pages belong to the old weights.
    """

    model_path: str
    weight_version: Version | None = None
    mode: Literal["wait", "abort"] = "wait"
    abort_all_requests: bool = False
    timeout: Seconds = 300.0
    flush_cache: bool = True
