"""Fields that change an answer in other engines and are not served here, in one table for all bodies.

An answer that leaves such a field out looks right and is not. The field is refused by name, with what to use instead. A
value that asks for nothing is accepted, because programs send all fields with their defaults. Fields that only tune a
refused one, such as `dry_base`, need no entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from jaxserve.types import InvalidRequestError


class _Field(NamedTuple):
    """`harmless`: the values that ask for nothing, besides null. `instead`: what the client should use instead."""

    harmless: tuple[Any, ...] = ()
    instead: str = ""


PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}  # with the values that do nothing
_RANGE_OFPENALTIES = _Field((-1,), "penalties look at the whole text")
_FORM = _Field(("", False), "use structured_outputs")
_NEW_TOKENS = _Field((), "use max_tokens")
# llama.cpp's own order, as its page and its editor send it: what a request without the field gets.
_LLAMA_SAMPLERS = (
    "edkypmxt",
    "edskypmxt",
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["top_k", "typ_p", "top_p", "min_p", "temperature"],
)

NOT_SERVED: dict[str, _Field] = {
    # sampling
    "typical_p": _Field((1,)),
    "typical": _Field((1,)),
    "top_a": _Field((0,)),
    "tfs": _Field((1,)),
    "tfs_z": _Field((1,)),
    "top_n_sigma": _Field((-1, 0)),
    "nsigma": _Field((0,)),
    "epsilon_cutoff": _Field((0,)),
    "eta_cutoff": _Field((0,)),
    "min_keep": _Field((0, 1)),
    "mirostat": _Field((0,)),
    "mirostat_mode": _Field((0,)),
    "mirostat_target": _Field((0,)),
    "dynatemp_range": _Field((0,)),
    "dynamic_temperature": _Field((False,)),
    "temperature_last": _Field((False,)),
    "smoothing_factor": _Field((0,)),
    "adaptive_target": _Field((-1,)),
    "xtc_probability": _Field((0,)),
    "dry_multiplier": _Field((0,)),
    "penalty_alpha": _Field((0,)),
    "guidance_scale": _Field((1,)),
    "samplers": _Field(_LLAMA_SAMPLERS),
    "sampler_priority": _Field(),
    "sampler_order": _Field(),
    "do_sample": _Field((True,), "use temperature 0 for greedy sampling"),
    "watermark": _Field((False,)),
    "random_seed": _Field((), "use seed"),
    "sampling_seed": _Field((), "use seed"),
    # penalties
    "repeat_penalty": _Field((1,), "use repetition_penalty"),
    "rep_pen": _Field((1,), "use repetition_penalty"),
    "encoder_repetition_penalty": _Field((1,), "use repetition_penalty"),
    "no_repeat_ngram_size": _Field((0,), "use repetition_penalty or frequency_penalty"),
    "repetition_detection": _Field(),
    "repeat_last_n": _RANGE_OFPENALTIES,
    "repetition_range": _RANGE_OFPENALTIES,
    "repetition_penalty_range": _RANGE_OFPENALTIES,
    # which tokens and texts
    "logits_processors": _Field(([],), "use logit_bias, allowed_token_ids or structured_outputs"),
    "custom_logit_processor": _Field(("",), "use logit_bias, allowed_token_ids or structured_outputs"),
    "custom_params": _Field(({},)),
    "vllm_xargs": _Field(({},)),
    "banned_tokens": _Field(("", []), "use bad_words, or logit_bias for token ids"),
    "custom_token_bans": _Field(("", []), "use bad_words, or logit_bias for token ids"),
    "banned_strings": _Field(("", []), "use bad_words"),
    "ban_eos_token": _Field((False,), "use ignore_eos"),
    "token_healing": _Field((False,)),
    # forms
    "guided_json": _FORM,
    "guided_json_object": _FORM,
    "guided_regex": _FORM,
    "guided_choice": _FORM,
    "guided_grammar": _FORM,
    "guided_whitespace_pattern": _FORM,
    "guided_decoding": _FORM,
    "grammar_string": _FORM,
    "structural_tag": _FORM,
    # lengths and ends
    "max_new_tokens": _NEW_TOKENS,
    "max_length": _NEW_TOKENS,
    "n_predict": _Field((-1,), "use max_tokens"),
    "num_predict": _Field((-1,), "use max_tokens"),
    "min_new_tokens": _Field((0,), "use min_tokens"),
    "min_length": _Field((0,), "use min_tokens"),
    "t_max_predict_ms": _Field((0, -1)),
    "n_indent": _Field((0,)),
    "stop_regex": _Field(("", []), "use stop, or structured_outputs with a regex"),
    "no_stop_trim": _Field((False,), "use include_stop_str_in_output"),
    "truncate": _Field((), "use truncate_prompt_tokens"),
    "prompt_truncate_len": _Field((), "use truncate_prompt_tokens"),
    # beams
    "early_stopping": _Field((False,)),
    "num_beams": _Field((1,), "use use_beam_search, with n"),
    # reasoning
    "reasoning_budget": _Field((-1,), "use thinking_token_budget"),
    "thinking_budget": _Field((), "use thinking_token_budget"),
    "separate_reasoning": _Field((True,), "use include_reasoning, or the server's --reasoning-parser"),
    # adapters
    "lora": _Field(([],), "name the adapter as model"),
    "lora_path": _Field(("",), "name the adapter as model"),
    "lora_request": _Field((), "name the adapter as model"),
    "adapter_id": _Field(("",), "name the adapter as model"),
    "adapter_name": _Field(("",), "name the adapter as model"),
    # prompts
    "prompt_embeds": _Field(),
    "documents": _Field(([],), "put them into the messages"),
    "negative_prompt": _Field(("",)),
    "safe_prompt": _Field((False,), "put a system message into messages"),
    "add_bos_token": _Field((True,), "use add_special_tokens"),
    # what an answer holds
    "n_probs": _Field((0,), "use logprobs"),
    "post_sampling_probs": _Field((False,)),
    "return_hidden_states": _Field((False,)),
    "audio": _Field(),
    "modalities": _Field((["text"],)),
    "web_search_options": _Field(),
}

if TYPE_CHECKING:
    ForeignFields = msgspec.Struct
else:
    ForeignFields = msgspec.defstruct("ForeignFields", [(name, Any, None) for name in NOT_SERVED], kw_only=True)


def check_foreign(body: msgspec.Struct) -> None:
    """Raises InvalidRequestError, naming the field, if a body asks for something that is not served."""
    for name, (harmless, instead) in NOT_SERVED.items():
        if (value := getattr(body, name)) is None or value in harmless:
            continue
        if NOT_SERVED[name] is _RANGE_OFPENALTIES and not _penalizes(body):
            continue
        off = f", or set it to {msgspec.json.encode(harmless[0]).decode()}" if harmless else ""
        advice = instead or f"leave it out{off}"
        raise InvalidRequestError(f"{name} is not supported by this server; {advice}", name, "unsupported_parameter")


def _penalizes(body: msgspec.Struct) -> bool:
    return any(getattr(body, name) not in (None, nothing) for name, nothing in PENALTIES.items())
