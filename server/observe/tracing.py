"""OpenTelemetry traces: a span per request, with queue, prefill and decode as child spans. Needs the extra `otel`.

The spans are written when the request is over, from the times in its record. Their attributes follow the semantic
conventions for generative AI, version 1.37 (https://opentelemetry.io/docs/specs/semconv/gen-ai/).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jaxserve.server.observe.request_record import RequestRecord, Times

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_PROMPTS = 32  # prompts of one request that get child spans
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}


class Tracer:
    """Sends spans to an OpenTelemetry collector from a thread, in batches; the last batch is sent at exit."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None):
        """Spans go to `exporter` if one is given, otherwise to `endpoint`/v1/traces by OTLP over HTTP. Raises
        ValueError if `endpoint` is not a URL, or if the OpenTelemetry packages are missing."""
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise ValueError(f"--otlp-endpoint must be a URL such as http://localhost:4318, got {endpoint!r}")
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError("--otlp-endpoint needs OpenTelemetry: pip install 'jaxserve[otel]'") from error
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "jaxserve")})
        exporter = exporter or OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self.provider = TracerProvider(resource=resource)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("jaxserve")
        self._api, self._propagator = trace, TraceContextTextMapPropagator()

    def record(self, record: RequestRecord, model: str) -> None:
        """Writes the spans of a request that generates text. If its headers name a span, that span is the parent."""
        path = record.scope["path"]
        if path not in _OPERATIONS or record.scope["method"] != "POST":
            return
        parent = self._propagator.extract(record.headers)
        attributes = _attributes(record, _OPERATIONS[path], model)
        name = f"{_OPERATIONS[path]} {model}"
        kind = self._api.SpanKind.SERVER
        shift = record.began_utc - record.began  # spans carry UTC; the record's times are monotonic

        def stamp(seconds: float) -> int:
            return int((seconds + shift) * 1e9)

        span = self._tracer.start_span(name, parent, kind, attributes, start_time=stamp(record.began))
        below = self._api.set_span_in_context(span, parent)

        def write(times: Times) -> None:
            for phase, begin, end, own in _phases(times):
                child = self._tracer.start_span(phase, below, attributes=own, start_time=stamp(begin))
                child.end(stamp(end))

        record.on_late = write
        for times in record.generations[:MAX_PROMPTS]:
            if times.ended or record.status != 200:  # otherwise it continues in the background; see `on_late`
                write(times)
        if record.status >= 500:
            span.set_status(self._api.StatusCode.ERROR)
        span.end(stamp(record.ended))


def _phases(times: Times) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """(name, begin, end, attributes) of each child span of one prompt; none if no token has come."""
    if times.first is None:
        return
    placed = min(times.arrival + times.queued, times.first)
    yield "queue", times.arrival, placed, {}
    yield "prefill", placed, times.first, {"gen_ai.usage.input_tokens": times.num_prompt_tokens}
    yield "decode", times.first, times.latest, {"gen_ai.usage.output_tokens": times.num_output_tokens}


def _attributes(record: RequestRecord, operation: str, model: str) -> dict[str, Any]:
    generations = record.generations
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": model,
        "http.request.method": record.scope["method"],
        "url.path": record.scope["path"],
        "http.response.status_code": record.status,
        "http.response.header.x-request-id": [record.request_id],
    }
    if record.status >= 400:
        attributes["error.type"] = str(record.status)
    if not generations:
        return attributes
    params = generations[0].params
    asked = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or None,
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "choice.count": params.n if params.n > 1 else None,
        "stop_sequences": list(params.stop) or None,
        "frequency_penalty": params.frequency_penalty or None,
        "presence_penalty": params.presence_penalty or None,
    }
    attributes |= {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
    return attributes | {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [reason for times in generations for reason in times.finish_reasons],
        "gen_ai.usage.input_tokens": sum(times.num_prompt_tokens for times in generations),
        "gen_ai.usage.output_tokens": sum(times.num_output_tokens for times in generations),
    }
