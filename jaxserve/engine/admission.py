"""Checks of new requests: the model can serve them, and the queue has room. Seeds for those that bring none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.constraints import Constraints
from jaxserve.limits import MAX_STOP_TOKENS
from jaxserve.models.spec import ModelConfig
from jaxserve.scheduling.beam import Beams
from jaxserve.scheduling.image_prompts import ImagePrompt, read_prompt
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.types import InvalidRequestError, QueueFullError, Request, SamplingParams


class Admission:
    """The checks of one engine. The requests of a call share one SamplingParams, which is checked once."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        max_model_len: int,
        scheduler: Scheduler,
        constraints: Constraints,
        beams: Beams,
        *,
        pools: bool = False,
    ):
        """`pools`: the model embeds or scores, and generates nothing."""
        self._pools = pools
        self._config = config
        self._max_model_len = max_model_len
        self._vocab_size = model.vocab_size
        self._vision = model.vision
        self._eos_token_ids = model.eos_token_ids
        self._scheduler = scheduler
        self._constraints = constraints
        self._beams = beams

    def check_queue(self, requests: Sequence[Request]) -> None:
        """Raises QueueFullError if the queue has no room. An empty queue takes requests of any size."""
        here = self._scheduler.waiting.num_completions + self._constraints.num_completions
        more = sum(request.params.n for request in requests)
        if (most := self._config.max_waiting) is not None and here and here + more > most:
            raise QueueFullError(f"{here} completions are waiting, of at most {most}; try again later")
        here = self._scheduler.waiting.num_tokens
        more = sum(len(request.prompt_token_ids) for request in requests)
        if (most := self._config.max_waiting_tokens) is not None and here and here + more > most:
            raise QueueFullError(f"prompts of {here} tokens are waiting already; try again later")

    def check(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Returns the token ids that end these requests' outputs. Raises InvalidRequestError for requests that the
        model cannot serve."""
        params = requests[0].params
        stop_ids = self._check_params(params)
        for request in requests:
            if request.request_id in self._scheduler or request.request_id in self._constraints:
                raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
            prompt = request.prompt_token_ids
            if request.pools and not self._pools:
                raise InvalidRequestError("this model generates; it is not served for embeddings or scores", "model")
            if self._pools and not (request.pools and params.max_tokens == 0 and params.n == 1):
                raise InvalidRequestError(
                    "this model is served for embeddings or scores; it does not generate", "model"
                )
            self._check_prompt(prompt)
            if params.use_beam_search:
                self._check_groups()
                room = self._max_model_len - len(prompt)
                self._beams.check(request, len(prompt) + min(room, params.max_tokens or room), len(stop_ids))
        return stop_ids

    def seen(self, request: Request) -> ImagePrompt | None:
        """The request's prompt with its pictures; None: it has none. Raises InvalidRequestError for pictures that the
        model cannot see."""
        images = request.images
        if not images:
            return None
        if self._vision is None:
            raise InvalidRequestError("this model reads text only, no pictures", "images")
        if request.params.prompt_logprobs is not None:
            raise InvalidRequestError(
                "log-probabilities of prompts are not served for prompts with pictures", "logprobs"
            )
        if request.params.use_beam_search:
            raise InvalidRequestError("beam search is not served for prompts with pictures", "use_beam_search")
        most = self._scheduler.images.count if self._scheduler.images is not None else 0
        if (largest := max(image.count for image in images)) > most:
            raise InvalidRequestError(f"a picture has {largest} tokens; at most {most} are served", "images")
        return read_prompt(request.prompt_token_ids, images, request.cache_salt, self._vision.tokens)

    def _check_groups(self) -> None:
        if self._config.data_parallel_size > 1:
            raise InvalidRequestError("beam search is not served with --data-parallel-size above 1", "use_beam_search")

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt is empty; it must have at least one token", "prompt")
        if len(prompt) >= self._max_model_len + self._pools:  # a prompt that is pooled needs no room for an answer
            raise InvalidRequestError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your prompt has "
                f"{len(prompt)} tokens, which leaves no room for an answer. Please shorten the prompt.",
                "prompt",
                "context_length_exceeded",
            )
        tokens = np.asarray(prompt)
        if (low := int(tokens.min())) < 0 or (high := int(tokens.max())) >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequestError(f"token id {wrong} is outside the vocabulary [0, {self._vocab_size})", "prompt")

    def _check_params(self, params: SamplingParams) -> tuple[int, ...]:
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name) or 0) > (most := self._config.max_logprobs):
                raise InvalidRequestError(f"{name} is {asked}; this server gives at most {most}", name)
        fields = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids")
        ids = {name: getattr(params, name) or () for name in fields}
        ids["bad_words"] = [token for word in params.bad_words for token in word]
        for name, tokens in ids.items():
            if (wrong := max(tokens, default=0)) >= self._vocab_size:
                raise InvalidRequestError(
                    f"{name}: token id {wrong} is outside the vocabulary [0, {self._vocab_size})", name
                )
        eos = () if params.ignore_eos else self._eos_token_ids
        stop_ids = tuple(dict.fromkeys(eos + params.stop_token_ids))
        if len(stop_ids) > MAX_STOP_TOKENS:
            raise InvalidRequestError(
                f"stop_token_ids and the model's own end tokens are {len(stop_ids)}; at most {MAX_STOP_TOKENS} are "
                "allowed",
                "stop_token_ids",
            )
        return stop_ids


class Seeds:
    """Seeds for requests without one. They are drawn in the order of arrival. The answers of a deterministic engine
    must not depend on this order. It makes them of its own seed and the request, so equal requests get equal answers.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._drawn = np.random.default_rng(config.seed)

    def of(self, request: Request) -> int:
        """The request's seed, from 0 on."""
        if request.params.seed is not None:
            return request.params.seed
        if not self._config.deterministic:
            return int(self._drawn.integers(2**63))
        content = self._config.seed, list(request.prompt_token_ids), request.params, request.adapter_digest
        return int.from_bytes(hashlib.sha256(msgspec.msgpack.encode(content)).digest()[:8], "little") >> 1
