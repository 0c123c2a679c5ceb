"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`. The engine runs in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.detokenizer import ChoiceDelta, OutputProcessor
from jaxserve.engine import Engine
from jaxserve.tokenizer import load_tokenizer
from jaxserve.types import FinishReason, InvalidRequestError, Request, SamplingParams, TokenLogprob

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion. `stop_reason` is the stop string or token id that ended it, None at the model's own end."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(kw_only=True)
class RequestOutput:
    """A prompt with its completions. `prompt_logprobs` has None for the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class LLM:
    """A model to generate with, in this process.

    Keyword arguments are EngineConfig's: `max_model_len`, `tensor_parallel_size`, `kv_pages`, `seed` and so on.
    Raises ConfigError or CheckpointError when the model cannot be loaded as asked.
    """

    def __init__(self, model: str, **config: Any):
        self.engine = Engine.load(EngineConfig(model=str(model), **config))
        self.tokenizer = load_tokenizer(self.engine.model_folder)
        self._ids = (f"offline-{i}" for i in itertools.count())

    def default_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, with 16 new tokens."""
        defaults = self.tokenizer.generation_defaults
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(defaults, name)) is not None}
        return SamplingParams(**given)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt: a string, a list of token ids, or {"prompt": ...} or {"prompt_token_ids": ...}.

        One SamplingParams serves all prompts, or there is one for each. Results are in the order of the prompts.
        Raises InvalidRequestError, naming the prompt's place, before anything runs.
        """
        if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        requests, texts = self._requests(prompts, sampling_params)  # type: ignore[arg-type]
        processors = {request.request_id: OutputProcessor(self.tokenizer, request) for request in requests}
        choices = {(r.request_id, i): ChoiceDelta(index=i) for r in requests for i in range(r.params.n)}
        with tqdm(total=len(requests), desc="generating", unit="prompt", disable=not progress) as bar:
            for delta_id, delta in self._run(requests, processors, bar):
                choices[delta_id, delta.index].extend(delta)
        return [
            self._output(r, text, processors[r.request_id], choices) for r, text in zip(requests, texts, strict=True)
        ]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}; `template` goes to the chat template.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self.tokenizer.render_chat(one, **template) for one in conversations]  # type: ignore[arg-type]
        prompts = [
            {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}
            for text in texts
        ]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[ChoiceDelta]:
        """Continues one prompt, yielding its text as it comes. Leaving early aborts it."""
        requests, _ = self._requests([prompt], params)
        processor = OutputProcessor(self.tokenizer, requests[0])
        for _, delta in self._run(requests, {requests[0].request_id: processor}):
            yield delta

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[Request], list[str | None]]:
        if params is None:
            params = self.default_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts, but {len(each)} sampling parameters", "sampling_params")
        requests, texts = [], []
        for place, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            text, ids = self._encode(prompt)
            own = self.tokenizer.with_eos(own, self.engine.eos_token_ids)
            request = Request(request_id=next(self._ids), prompt_token_ids=ids, params=own)
            try:
                self.engine.check_request(request)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {place}: {error}", error.param, error.code) from None
            requests.append(request)
            texts.append(text)
        return requests, texts

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if (ids := prompt.get("prompt_token_ids")) is not None:
                return prompt.get("prompt"), list(ids)
            if isinstance(prompt.get("prompt"), str):
                return self._encode(prompt["prompt"])
        elif isinstance(prompt, Sequence) and all(type(token) is int for token in prompt):
            return None, list(prompt)
        raise InvalidRequestError(
            f"a prompt must be a string, a list of token ids, or a dict with one of these, got {prompt!r:.80}", "prompt"
        )

    def _run(
        self, requests: list[Request], processors: dict[str, OutputProcessor], bar: tqdm | None = None
    ) -> Iterator[tuple[str, ChoiceDelta]]:
        """Feeds the requests to the engine and yields what they gain until all have ended."""
        for request in requests:
            self.engine.add_request(request)
        running = set(processors)
        try:
            while running:
                for update in self.engine.step():
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
