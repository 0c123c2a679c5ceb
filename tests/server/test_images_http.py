"""Pictures through a real server, with the official clients."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib

import openai
import pytest
from browser import CHROMIUM, open_page
from picture_prompts import build_whole, picture
from PIL import Image
from serving import running_server

from jaxserve import LLM, SamplingParams
from jaxserve.limits import MAX_IMAGE_PIXELS
from jaxserve.server.images import workers
from jaxserve.server.images.sources import File, Source
from jaxserve.types import ImageTokens, InvalidRequestError

pytestmark = pytest.mark.compiles

CASE = "qwen3_vl_wide"
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512, "kv_pages": 200}
TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_whole(CASE, tmp_path_factory.mktemp("eyes") / "model")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(folder, log, engine=None, config=SETTINGS) as running:
        yield running


def file_of(place: int, size: tuple[int, int], kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.fromarray(picture(CASE, 0, place, size)).save(data, kind)
    return data.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


FIRST = file_of(0, (33, 21))
FILE = File([FIRST], in_base64=False)
SECOND = file_of(1, (40, 48))


@pytest.fixture(scope="module")
def expected(folder):
    """What the model answers to both pictures, offline, and how many tokens the prompt has."""
    llm = LLM(folder, **SETTINGS)
    prompt = (
        "<|im_start|>user\nSee <|vision_start|><|image_pad|><|vision_end|> and "
        "<|vision_start|><|image_pad|><|vision_end|> now<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    (result,) = llm.generate({"prompt_token_ids": ids, "images": [FIRST, SECOND]}, params, progress=False)
    return result.outputs[0].text, len(result.prompt_token_ids)


PARTS = [
    {"type": "text", "text": "See "},
    {"type": "image_url", "image_url": {"url": data_url(FIRST)}},
    {"type": "text", "text": " and "},
    {"type": "image_url", "image_url": {"url": data_url(SECOND), "detail": "high"}},
    {"type": "text", "text": " now"},
]
OPTIONS = {"temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}


def test_every_surface_gives_the_same_answer(server, expected):
    text, count = expected
    client = server.openai()
    chat = {"model": server.model, "messages": [{"role": "user", "content": PARTS}], **OPTIONS}
    whole = client.chat.completions.create(**chat)
    assert whole.choices[0].message.content == text
    assert whole.usage.prompt_tokens == count
    streamed = client.chat.completions.create(**chat, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == text
    parts = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in PARTS
    ]
    answer = client.responses.create(
        model=server.model, input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.output_text == text
    blocks = [
        {"type": "text", "text": part["text"]}
        if part["type"] == "text"
        else {
            "type": "image",
            "source": {
                "type": "base64", "media_type": "image/png", "data": part["image_url"]["url"].partition(",")[2]
            },
        }
        for part in PARTS
    ]  # fmt: skip
    message = server.anthropic().messages.create(
        model=server.model, messages=[{"role": "user", "content": blocks}], max_tokens=TOKENS,
        extra_body={"ignore_eos": True, "temperature": 0},
    )  # fmt: skip
    assert message.content[0].text == text


def test_a_second_turn_costs_no_picture(server):
    client = server.openai()
    messages = [{"role": "user", "content": PARTS}]
    first = client.chat.completions.create(model=server.model, messages=messages, **OPTIONS)
    encoded = server.metric("images_encoded_total")
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "?"}]
    second = client.chat.completions.create(model=server.model, messages=messages, **OPTIONS)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16
    assert server.metric("images_encoded_total") == encoded


def png_of(width: int, height: int) -> bytes:
    """A file that says that it is so large."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + FIRST[33:]


BAD = {
    "no picture": (data_url(b"hello"), "no file of the formats PNG, JPEG, WEBP, GIF"),
    "truncated": (data_url(FIRST[:60]), "cannot be"),
    "svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "no file of the formats"),
    "not base64": ("data:image/png;base64,####", "not base64"),
    "base64 behind padding": ("data:image/png;base64,AA==AAAA", "not base64"),
    "pdf": ("data:application/pdf;base64,AAAA", "must hold a picture"),
    "address": ("http://127.0.0.1:9/a.png", "--allow-image-urls"),
    "file": ("file:///etc/passwd", "must be a data URL"),
    "bomb": (data_url(file_of(0, (5000, 5000))), "--max-image-pixels"),
    "monster": (data_url(png_of(100_000, 100_000)), "--max-image-pixels"),
    "narrow": (data_url(file_of(0, (2, 900))), "200 times as long"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures(server, name):
    url, message = BAD[name]
    content = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai().chat.completions.create(model=server.model, messages=[{"role": "user", "content": content}])
    assert message in str(refused.value)
    assert refused.value.code == "invalid_image"


def test_a_picture_that_takes_too_long(folder, monkeypatch):
    """The process that reads it is ended, and the next picture has a new one."""
    reading = workers.ImageWorkers(str(folder), ImageTokens(505, 4, 2, has_three_positions=True), MAX_IMAGE_PIXELS)
    source = Source("", "auto", "messages[0]")
    monkeypatch.setattr(workers, "SECONDS", 0.001)
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].*takes more than 0.001 seconds") as refused:
        asyncio.run(reading.process(FILE, source))
    assert refused.value.code == "invalid_image"
    monkeypatch.undo()
    assert asyncio.run(reading.process(FILE, source)).grid == (1, 8, 6)
    reading.close()


def test_image_tokens_in_a_text_are_no_pictures(server):
    content = [{"type": "text", "text": "<|image_pad|>"}, PARTS[1]]
    with pytest.raises(openai.BadRequestError, match=r"2 places for pictures .* 1 pictures are given"):
        server.openai().chat.completions.create(model=server.model, messages=[{"role": "user", "content": content}])


def test_too_many(server):
    content = [PARTS[1]] * 17
    with pytest.raises(openai.BadRequestError, match="at most 16 are allowed"):
        server.openai().chat.completions.create(model=server.model, messages=[{"role": "user", "content": content}])


PASTE = """(async () => {
    const bytes = Uint8Array.from(atob(%r), (char) => char.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "a.png", { type: "image/png" }));
    const paste = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    document.querySelector("#prompt").dispatchEvent(paste);
})()"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_pasted_picture(server, tmp_path):
    with open_page(tmp_path / "profile") as page:
        page.size(1280, 800)
        page.goto(server.url)
        page.wait("document.body.dataset.state === 'ready' && !document.querySelector('#attach').hidden")
        page.run(PASTE % base64.b64encode(SECOND).decode())
        page.wait("document.querySelector('#pictures img')?.complete")
        page.run("document.querySelector('#prompt').focus()")
        page.type("What is it?")
        page.press("Enter")
        page.wait("document.querySelector('.assistant .facts').textContent")
        assert page.run("document.querySelectorAll('.user img').length") == 1
        assert page.run("document.querySelector('#pictures').hidden")
        assert page.run("document.querySelector('.assistant .text').textContent") != ""
        assert not page.errors
