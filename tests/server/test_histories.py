"""Histories that clients send: what a server has said, and what clients make of it, is taken back."""

from __future__ import annotations

import pytest
from test_clients import MODEL, TOOL

CALL_ID = "call_1"
CALLED = {"id": CALL_ID, "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}
CUSTOM = {"id": CALL_ID, "type": "custom", "custom": {"name": "x", "input": "y"}}
USER = {"role": "user", "content": "Weather?"}


def calling(**function) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [CALLED | {"function": CALLED["function"] | function}]}


class TestHistories:
    @pytest.mark.parametrize(
        ("message", "shown"),
        [
            ({"role": "assistant", "content": None}, "<|im_start|>assistant\n<|im_end|>"),
            ({"role": "assistant", "content": None, "tool_calls": []}, "<|im_start|>assistant\n<|im_end|>"),
            ({"role": "assistant"}, "<|im_start|>assistant\n<|im_end|>"),
            (calling(), '{"city": "Rom"}'),
            (calling(arguments={"city": "Rom"}), '{"city": "Rom"}'),
            (calling(arguments='{"city": "Rom", "when": {"day": "to'), '{"city": "Rom", "when": {"day": "to"}}'),
            (calling(arguments='{"city": "Rom", "wh'), '{"city": "Rom"}'),
            (calling(arguments=""), '"arguments": {}}'),
            (calling(arguments=None), '"arguments": {}}'),
            (calling(arguments="Rom"), '{"arguments": "Rom"}'),
            (calling(arguments='{"city": "\\ud83d"}'), '{"city": "\ufffd"}'),
            (
                {"role": "assistant", "tool_calls": [CUSTOM]},
                '{"name": "x", "arguments": {"input": "y"}}',
            ),
            ({"role": "assistant", "content": None, "function_call": CALLED["function"]}, '{"city": "Rom"}'),
            ({"role": "function", "name": "get_weather", "content": "rain"}, "<|im_start|>tool\nrain"),
            ({"role": "tool", "tool_call_id": CALL_ID, "content": [{"type": "text", "text": "rain"}]}, "rain"),
            ({"role": "tool", "tool_call_id": CALL_ID, "content": None}, "<|im_start|>tool\n<|im_end|>"),
            ({"role": "assistant", "content": None, "refusal": "I will not."}, "I will not."),
            ({"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
            ({"role": "assistant", "content": [{"type": "output_text", "text": "Sun."}]}, "Sun."),
            ({"role": "developer", "content": "Be brief.", "name": None}, "<|im_start|>system\nBe brief."),
        ],
    )  # fmt: skip
    def test_it_is_taken_back(self, parrot, message, shown):
        nulls = dict.fromkeys(["refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning"])
        with parrot.http() as http:
            body = {"model": MODEL, "messages": [USER, nulls | message, USER], "tools": [TOOL], "max_tokens": 1}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            ids = http.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
            assert shown in http.post("/detokenize", json={"tokens": ids}).json()["prompt"]

    @pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
    def test_reasoning(self, scripted, field):
        messages = [USER, {"role": "assistant", "content": None, field: "Hm."}, USER]
        with scripted.http() as http:
            ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
            assert "<think>Hm.</think>" in http.post("/detokenize", json={"tokens": ids}).json()["prompt"]

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "user", "content": None},
            {"role": "system"},
            {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "assistant", "tool_calls": [{"id": "c"}]},
            {"role": "user", "content": "x", "tool_calls": [CALLED]},
        ],
    )
    def test_what_stays_refused(self, parrot, message):
        body = {"model": MODEL, "messages": [USER, message, USER], "max_tokens": 1}
        response = parrot.http().post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


# As Qwen 3.5 and Mistral have it: one system message, user and assistant by turns.
STRICT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "{% if m.role == 'user' and (loop.previtem or {}).role == 'user' %}{{ raise_exception('user twice') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("template", [STRICT_TEMPLATE, FORGETFUL_TEMPLATE])
def test_templates_that_know_one_system_message(template):
    """Coding agents send several system messages, some of them late, and several of the user's in a row."""
    import tokenizers_for_tests as kinds

    from server.conversation import encode_chat
    from server.messages import Ready
    from server.schemas_chat import Conversation, Message

    tokenizer = kinds.byte_level(template)
    turns = [
        ("system", "A."),
        ("developer", "B."),
        ("user", "C."),
        ("user", "D."),
        ("assistant", "E."),
        ("system", "F."),
    ]
    conversation = Conversation(messages=[Message(role, text) for role, text in turns])
    sizes = {"vocab_size": 1000, "max_model_len": 1000, "page_size": 16, "max_num_seqs": 1}
    info = Ready(model_folder="", dtype="", eos_token_ids=(0,), **sizes)
    text = tokenizer.decode(encode_chat(tokenizer, info, conversation))
    assert text == "[system]A.\n\nB.[user]C.\n\nD.[assistant]E.[user]<system>\nF.\n</system>"
