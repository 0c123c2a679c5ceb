"""What agents and chat programs send, against a real server: bodies as they stand in agent_bodies/, several turns."""

from __future__ import annotations

from serving import DEMO
from test_clients import TOOL, needs_demo

MODEL = "test-model"


@needs_demo
class TestDemo:
    """First contact with the bundled model must not be a 400."""

    def test_tools_of_an_agent(self, demo_server):
        """The model may choose by itself, and is told which tools there are."""
        with demo_server.http() as http:
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
            body = {"model": MODEL, "messages": messages, "tools": [TOOL], "max_tokens": 8, "temperature": 0}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            call = {"name": "get_weather", "arguments": '{"city": "Rom"}'}
            messages += [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "rain"},
            ]
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            ids = http.post("/tokenize", json={"messages": messages, "tools": [TOOL]}).json()["tokens"]
            text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert '{"name": "get_weather", "description": "The weather"' in text
        assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}}</tool_call>' in text
        assert "Be brief." in text

    def test_chats_without_tools_are_as_before(self):
        """The model was trained on ChatML without tools; such prompts must not change by a character."""
        from jaxserve.tokenizer import load_tokenizer

        turns = [("system", "Be brief."), ("user", " hi\n"), ("assistant", "ho"), ("tool", "x")]
        messages = [{"role": role, "content": content} for role, content in turns]
        text = load_tokenizer(DEMO).render_chat(messages)
        chat = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        assert text == chat + "<|im_start|>assistant\n"
