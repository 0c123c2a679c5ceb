"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`. The engine runs in this process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from tqdm import tqdm

from jaxserve import heap
from jaxserve.checkpoints import gguf
from jaxserve.config import MAX_TOKENS_PER_CALL, EngineConfig
from jaxserve.hosts.host_environment import found_hosts
from jaxserve.images.prompts import with_images
from jaxserve.images.reading import as_picture
from jaxserve.images.videos import VideoProcessor, as_clip
from jaxserve.models.pooling import Pooler, probability, unit
from jaxserve.offline import (
    CompletionOutput,
    Conversation,
    LoRARequest,
    Prompt,
    RequestOutput,
    Video,
    encode_prompt,
    images_of,
    load_engine,
    prompt_list,
    serve_adapter,
    taken_pictures,
    takes_use_tqdm,
)
from jaxserve.text.detokenizer import ChoiceDelta, OutputProcessor
from jaxserve.text.score_prompt import ended, prompt_of
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import Image, InvalidRequestError, Request, SamplingParams, SequenceUpdate


class LLM:
    """A model to generate with, in this process.

    Keyword arguments are EngineConfig's: `max_model_len`, `tensor_parallel_size`, `kv_pages`, `seed` and so on.
    vLLM's names for the same settings are accepted.
    Raises ConfigError or CheckpointError when the model cannot be loaded with these settings.

    With several hosts, each runs the same script. On all but the first, the constructor does not return: it follows the
    first host until that has finished, then ends the process.
    """

    def __init__(self, model: str, **config: Any):
        settings = {"prompts_first": True} | EngineConfig.usual_names(config)
        self.engine = load_engine(found_hosts(EngineConfig(model=str(model), **settings)))
        self.tokenizer = load_tokenizer(
            self.engine.model_folder,
            source=self.engine.tokenizer_folder,
            placeholder=self.engine.config.load_format == "dummy",
            generation_config=self.engine.config.generation_config,
            override_generation_config=self.engine.config.override_generation_config,
        )
        self._ids = (f"offline-{i}" for i in itertools.count())
        # Request id -> the queue of its caller (a stream may be open while another call generates), and the number of
        # tokens that make an update. Tokens short of that number are in `_pending`, by request id and completion.
        self._inboxes: dict[str, tuple[deque[SequenceUpdate], int]] = {}
        self._pending: dict[tuple[str, int], list[int]] = {}
        self._trimmed = -1  # number of compiled programs at the last `_trim`
        gguf.forget()
        self._trim()

    def _trim(self) -> None:
        """Returns the memory that loading, and compiling since the last call, have left behind."""
        if self._trimmed != (programs := self.engine.runner.num_executables):
            self._trimmed = programs
            heap.trim()
            heap.leave_libraries()

    def sleep(self, level: int = 1) -> None:
        """Frees the devices' memory until `wake_up`, for example for a trainer that shares the devices. Level 1 keeps
        the weights in host memory, level 2 reads them from their files again. Raises InvalidRequestError while a stream
        is open."""
        self.engine.weights.sleep(level)

    def wake_up(self) -> None:
        """Ends `sleep`."""
        self.engine.weights.wake_up()

    def update_weights(self, source: str | Path | Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Replaces the weights; nothing is compiled. Raises CheckpointError or ConfigError for weights that cannot be
        used, and then keeps the old ones.

        source: a folder or file with the same model; or arrays, of NumPy or JAX, by the names of the tensors in the
        model's checkpoint, as a mapping or in pairs. A mapping is asked for one array at a time. Pairs are collected
        first, because a weight may consist of several of them.
        """
        if isinstance(source, str | Path):
            source = Path(source)
        elif not isinstance(source, Mapping):
            source = dict(source)
        self.engine.weights.update(source)

    def default_params(self) -> SamplingParams:
        """The sampling parameters that the model's generation_config.json recommends; 16 new tokens."""
        return SamplingParams(**self.tokenizer.generation_defaults.sampling())

    @takes_use_tqdm
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt: a string, a list of token ids, or {"prompt": ...} or {"prompt_token_ids": ...}, the
        latter two also with "images", a list of pictures (see `images.reading.as_picture`), for each of which the
        prompt has one image token.

        `sampling_params` is one for all prompts, or a list with one for each, and so is `lora_request`, the adapter to
        use. Results are in the order of the prompts. Raises InvalidRequestError with the prompt's index before anything
        runs, and CheckpointError or ConfigError for an adapter that cannot be loaded.
        """
        requests, texts = self._requests(prompt_list(prompts), sampling_params, lora_request)
        processors = {request.request_id: OutputProcessor(self.tokenizer, request) for request in requests}
        choices = {(r.request_id, i): ChoiceDelta(index=i) for r in requests for i in range(r.params.n)}
        with tqdm(total=len(requests), desc="generating", unit="prompt", disable=not progress) as bar:
            for delta_id, delta in self._run(requests, processors, bar):
                choices[delta_id, delta.index].extend(delta)
        self._trim()
        return [
            self._output(r, text, processors[r.request_id], choices) for r, text in zip(requests, texts, strict=True)
        ]

    @takes_use_tqdm
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int = 4,
        *,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The `beam_width` most likely outputs that beam search finds for each prompt, the best first.

        Outputs are ranked by `cumulative_logprob` / length ** length_penalty; see `jaxserve.scheduling.beam`.
        """
        params = SamplingParams(
            use_beam_search=True,
            n=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            ignore_eos=ignore_eos,
            logprobs=0,
        )
        return self.generate(prompts, params, progress=progress)

    @takes_use_tqdm
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}. A content is a text, or a list of parts: {"type":
        "text", "text": ...}, pictures as {"type": "image", "image": ...} (see `images.reading.as_picture`), and videos
        as {"type": "video", "video": ..., "fps": ...} (see `images.videos.as_clip`), or all as requests to the server
        have them. `template` are variables of the chat template, and so are those in
        `chat_template_kwargs`.
        """
        template |= chat_template_kwargs or {}
        if not isinstance(messages, Sequence) or (messages and isinstance(messages[0], Mapping)):
            messages = [messages]  # type: ignore[assignment]
        prompts: list[Prompt] = []
        for place, conversation in enumerate(messages):
            try:
                text, pictures = self._render(conversation, template)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"conversation {place}: {error}", error.param, error.code) from None
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids, "images": pictures})
        return self.generate(prompts, sampling_params, progress=progress, lora_request=lora_request)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> Generator[ChoiceDelta, None, None]:
        """Continues one prompt, yielding its text as it is generated. Closing the iterator aborts the request."""
        requests, _ = self._requests([prompt], params, lora_request)  # not in the generator: this call raises
        requests[0].streams = True
        processors = {requests[0].request_id: OutputProcessor(self.tokenizer, requests[0])}
        return (delta for _, delta in self._run(requests, processors))

    @takes_use_tqdm
    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, progress: bool = True
    ) -> np.ndarray:
        """An embedding for each prompt, float32 [prompts, size]; for a model that embeds (`task="embed"`). With
        `dimensions`, as many leading numbers of each, scaled to length 1."""
        size = self._pooler("embed").size
        if dimensions is not None and not 1 <= dimensions <= size:
            raise InvalidRequestError(f"dimensions must be between 1 and {size}, got {dimensions}", "dimensions")
        given = (encode_prompt(self.tokenizer, prompt) for prompt in prompt_list(prompts))
        texts = [ids if text is None else ended(self.tokenizer, ids) for text, ids in given]
        vectors = self._pool(texts, progress)
        if dimensions is not None:
            vectors = [unit(vector[:dimensions]) for vector in vectors]
        return np.stack(vectors) if vectors else np.zeros((0, dimensions or size), np.float32)

    @takes_use_tqdm
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
        progress: bool = True,
    ) -> list[float]:
        """How well each document fits the query, or the query beside it in a list of the same length: a probability, or
        without `use_activation` its log-odds; for a model that scores (`task="score"`)."""
        pooler = self._pooler("score")
        firsts, seconds = ([texts] if isinstance(texts, str) else list(texts) for texts in (queries, documents))
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            raise InvalidRequestError(f"{len(firsts)} queries, but {len(seconds)} documents", "queries")
        pairs = zip(firsts, seconds, strict=True)
        prompts = [prompt_of(self.tokenizer, pooler.prompt, *pair, instruction) for pair in pairs]
        odds = [float(result[0]) for result in self._pool(prompts, progress)]
        return [probability(one) for one in odds] if use_activation else odds

    def _pooler(self, task: Literal["embed", "score"]) -> Pooler:
        pooler = self.engine.pooler
        if pooler is None or pooler.task != task:
            raise InvalidRequestError(f"the model was not loaded with task={task!r}", "model")
        return pooler

    def _pool(self, prompts: Sequence[list[int]], progress: bool) -> list[np.ndarray]:
        """The engine's result for each prompt, float32."""
        params = SamplingParams(max_tokens=0, ignore_eos=True)
        requests = []
        for place, ids in enumerate(prompts):
            requests.append(Request(request_id=next(self._ids), prompt_token_ids=ids, params=params, pools=True))
            try:
                self.engine.check_request(requests[-1])
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {place}: {error}", error.param, error.code) from None
        inbox: deque[SequenceUpdate] = deque()
        self._inboxes |= {request.request_id: (inbox, 1) for request in requests}
        results: dict[str, np.ndarray] = {}
        try:
            for request in requests:
                self.engine.add_request(request)
            with tqdm(total=len(requests), desc="computing", unit="prompt", disable=not progress) as bar:
                while len(results) < len(requests):
                    self._step()
                    while inbox:
                        update = inbox.popleft()
                        if update.pooled is None:
                            raise RuntimeError(f"the engine gave up on a prompt: {update.error}")
                        results[update.request_id] = np.frombuffer(update.pooled, "<f4")
                        bar.update()
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
                del self._inboxes[request.request_id]
        self._trim()
        return [results[request.request_id] for request in requests]

    def _render(self, conversation: Any, template: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """The conversation's text, and its pictures."""
        messages = conversation if isinstance(conversation, Sequence) else ()
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            what = f'a list of {{"role": ..., "content": ...}}, got {conversation!r:.80}'
            raise InvalidRequestError(f"a conversation must be {what}", "messages")
        messages, pictures = taken_pictures(messages)
        return self.tokenizer.render_chat(messages, **template), pictures

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> tuple[list[Request], list[str | None]]:
        if params is None:
            params = self.default_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts, but {len(each)} sampling parameters", "sampling_params")
        loras = [lora] * len(prompts) if isinstance(lora, LoRARequest | None) else list(lora)
        if len(loras) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts, but {len(loras)} adapters", "lora_request")
        adapters = {one: serve_adapter(self.engine.adapters, one) for one in set(loras)}
        requests = []
        texts = []
        for place, (prompt, own, wanted) in enumerate(zip(prompts, each, loras, strict=True)):
            try:
                if not isinstance(own, SamplingParams):
                    raise InvalidRequestError(f"expected SamplingParams, got {own!r:.80}", "sampling_params")
                text, ids = encode_prompt(self.tokenizer, prompt)
                ends = self.tokenizer.with_eos(own.stop_token_ids, self.engine.eos_token_ids)
                if ends != own.stop_token_ids and not own.ignore_eos:
                    own = msgspec.structs.replace(own, stop_token_ids=ends)
                ids, images = self._with_images(ids, images_of(prompt))
                request = Request(request_id=next(self._ids), prompt_token_ids=ids, params=own, images=images)
                if (adapter := adapters[wanted]) is not None:
                    request.adapter = adapter.name
                    request.adapter_digest = adapter.digest
                self.engine.check_request(request)
                if own.grammar is not None:
                    self.engine.grammars.check(own.grammar)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {place}: {error}", error.param, error.code) from None
            requests.append(request)
            texts.append(text)
        return requests, texts

    def _with_images(self, ids: list[int], pictures: Sequence[Any]) -> tuple[list[int], list[Image]]:
        """A prompt with its pictures, processed; see `images.prompts.with_images`."""
        if not pictures:
            return ids, []
        vision = self.engine.model.vision
        if vision is None:
            raise InvalidRequestError("this model reads text only, no pictures", "images")
        process = self.engine.image_processor
        assert process is not None  # else the model would not see
        clips = [as_clip(*one) for one in pictures if isinstance(one, Video)]
        processed = [process(as_picture(one)) for one in pictures if not isinstance(one, Video)]
        if clips and vision.tokens.video is None:
            raise InvalidRequestError("this model sees no videos", "images")
        seen = []
        if clips:
            seen = list(map(VideoProcessor.of(self.engine.model_folder, process, vision.tokens.video), clips))
        return with_images(ids, processed, vision.tokens, self.tokenizer, seen)

    def _run(
        self, requests: list[Request], processors: dict[str, OutputProcessor], bar: tqdm | None = None
    ) -> Iterator[tuple[str, ChoiceDelta]]:
        """Submits the requests and yields (request id, delta) until all have finished."""
        inbox: deque[SequenceUpdate] = deque()
        self._inboxes |= {
            request.request_id: (inbox, 1 if request.streams else MAX_TOKENS_PER_CALL) for request in requests
        }
        running = set(processors)
        try:
            for request in requests:
                self.engine.add_request(request)
            while running:
                if not inbox:
                    self._step()
                while inbox:
                    update = inbox.popleft()
                    processor = processors[update.request_id]
                    delta = processor.process(update)
                    if delta is None:
                        continue
                    if delta.abort:
                        self.engine.abort(update.request_id, update.index)
                    if processor.finished:
                        running.discard(update.request_id)
                        if bar is not None:
                            bar.update()
                    yield update.request_id, delta
        finally:
            for request_id in running:
                self.engine.abort(request_id)
            for request in requests:
                del self._inboxes[request.request_id]
                for index in range(request.params.n):
                    self._pending.pop((request.request_id, index), None)

    def _step(self) -> None:
        output = self.engine.step()
        for request_id, index, tokens in zip(output.request_ids, output.indices, output.tokens, strict=True):
            if request_id in self._inboxes:
                pending = self._pending.setdefault((request_id, index), [])
                pending += tokens
                if len(pending) >= self._inboxes[request_id][1]:
                    output.updates.append(SequenceUpdate(request_id, index, []))
        for update in output.updates:
            if update.request_id in self._inboxes:
                update.token_ids = self._pending.pop((update.request_id, update.index), []) + update.token_ids
                self._inboxes[update.request_id][0].append(update)

    def _output(
        self,
        request: Request,
        text: str | None,
        processor: OutputProcessor,
        choices: dict[tuple[str, int], ChoiceDelta],
    ) -> RequestOutput:
        outputs = []
        for index in range(request.params.n):
            choice = choices[request.request_id, index]
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=choice.text,
                    token_ids=choice.token_ids,
                    logprobs=choice.logprobs if request.params.logprobs is not None else None,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
            )
        return RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            prompt_logprobs=processor.prompt_logprobs,
            num_cached_tokens=processor.num_cached_tokens,
        )
