"""Bodies of Triton's repository and generate endpoints.

https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.schemas.common import TOKEN_ID

# Names of Triton's backends for parameters of /v1/completions that have others.
OTHER_NAMES = {"stop_words": "stop", "random_seed": "seed", "min_length": "min_tokens", "end_id": "stop_token_ids"}
# The path says whether the answer is streamed, and nothing is padded.
IGNORED = ("id", "stream", "pad_id")
# The parameters of /v1/completions that /generate takes.
PARAMETERS = frozenset(
    {
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "bad_words", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "priority",
        "skip_special_tokens", "truncate_prompt_tokens", "cache_salt",
    }
)  # fmt: skip


class IndexRequest(msgspec.Struct):
    """Body of /v2/repository/index. With `ready`, only models that are ready are listed."""

    ready: bool = False


class LoadParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There are none here."""


class LoadRequest(msgspec.Struct):
    """Body of /v2/repository/models/{name}/load."""

    parameters: LoadParameters = LoadParameters()


class UnloadParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    unload_dependents: bool = False


class UnloadRequest(msgspec.Struct):
    """Body of /v2/repository/models/{name}/unload. Models have no dependents here."""

    parameters: UnloadParameters = UnloadParameters()


def generate_schemas(completion: dict[str, Any]) -> dict[str, Any]:
    """The JSON schemas of the bodies of /generate and /generate_stream. completion: the schema of /v1/completions."""
    known = completion["properties"]
    parameters = {name: known[name] for name in sorted(PARAMETERS)}
    parameters |= {name: known[other] for name, other in OTHER_NAMES.items()}
    parameters["end_id"] = TOKEN_ID | {"description": "Ends the answer"}
    parameters |= {name: {"description": "Has no effect"} for name in IGNORED}
    parameters["exclude_input_in_output"] = {"type": "boolean", "description": "Leaves the prompt out of the answer"}
    own = {"text_input": {"type": "string"}}
    whole = {"$ref": "#/components/schemas/GenerateParameters"}
    return {
        "GenerateParameters": {"type": "object", "properties": parameters, "additionalProperties": False},
        "GenerateRequest": {
            "description": "Parameters may be in `parameters`, or beside `text_input`.",
            "type": "object",
            "properties": {**own, "parameters": whole, **parameters},
            "required": ["text_input"],
            "additionalProperties": False,
        },
    }
