"""The bundled model that sees answers what pictures show, right, through every surface.

It was trained for that, so a picture that comes too late, twice, in another order or turned shows in the answer.
"""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import openai
import pytest
from browser import needs_browser
from PIL import Image, ImageDraw
from serving import ROOT, running_server

from jaxserve import LLM, SamplingParams
from jaxserve.commands.cli import main

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, "kv_pages": 100}
FILL = {
    "red": "red", "green": "green", "blue": "blue", "yellow": "yellow", "purple": "purple", "black": "black"
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
THINGS = list(product(FILL, SHAPES))
FIRST, SECOND = ("red", "circle"), ("blue", "square")
BOTH = "a red circle, then a blue square"


def drawn(thing: tuple[str, str], size: tuple[int, int] = (150, 120)) -> Image.Image:
    colour, shape = thing
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    x, y, r = size[0] // 2, size[1] // 2, min(size) // 3
    if shape == "circle":
        pen.ellipse([x - r, y - r, x + r, y + r], fill=FILL[colour])
    elif shape == "square":
        pen.rectangle([x - r, y - r, x + r, y + r], fill=FILL[colour])
    else:
        pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=FILL[colour])
    return picture


def file_of(thing: tuple[str, str], kind: str = "PNG", size: tuple[int, int] = (150, 120)) -> str:
    """A file in base64."""
    data = io.BytesIO()
    drawn(thing, size).save(data, kind)
    return base64.b64encode(data.getvalue()).decode()


def part(thing: tuple[str, str], kind: str = "PNG") -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{file_of(thing, kind)}"}}


def text(said: str) -> dict:
    return {"type": "text", "text": said}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(ROOT / "checkpoints" / "demo-vision", log, engine=None, config=SETTINGS) as running:
        yield running


def ask(server, *content, **options) -> str:
    messages = [{"role": "user", "content": list(content)}]
    made = server.openai().chat.completions.create(
        model=server.model, messages=messages, temperature=0, max_tokens=32, **options
    )
    return made.choices[0].message.content


def test_chat(server):
    assert ask(server, part(FIRST), text("What is it?")) == "a red circle"
    assert ask(server, part(FIRST), part(SECOND), text("What do you see?")) == BOTH
    assert ask(server, part(SECOND), part(FIRST), text("What do you see?")) == "a blue square, then a red circle"
    assert ask(server, text("Which is first?"), part(SECOND), text(" and "), part(FIRST)) == "a blue square"
    assert ask(server, part(FIRST), part(SECOND), text("What colour is it?")) == "red, then blue"


def test_every_colour_and_shape_at_once(server):
    """Pictures of 18 requests go through the encoder together, in formats and sizes of their own."""

    def one(number: int) -> str:
        return ask(server, part(THINGS[number], ("PNG", "JPEG", "WEBP")[number % 3]), text("What is it?"))

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(one, range(len(THINGS))))
    assert answers == [f"a {colour} {shape}" for colour, shape in THINGS]


def test_streams(server):
    content = [part(FIRST), part(SECOND), text("What do you see?")]
    stream = server.openai().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": content}], temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == BOTH
    blocks = [block(FIRST), block(SECOND), text("What do you see?")]
    given = {"model": server.model, "max_tokens": 32, "extra_body": {"temperature": 0}}
    with server.anthropic().messages.stream(messages=[{"role": "user", "content": blocks}], **given) as stream:
        assert "".join(stream.text_stream) == BOTH


def animated(kind: str, thing: tuple[str, str]) -> str:
    """A data URL of an animation of two seconds, in which a dot moves."""
    first, *others = frames = [drawn(thing) for _ in range(4)]
    for place, frame in enumerate(frames):
        frame.putpixel((place, 0), (0, 0, 0))
    data = io.BytesIO()
    first.save(data, kind, save_all=True, append_images=others, duration=500, lossless=True)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def test_videos(server):
    """The model has never seen videos: only what it tells of one thing is compared, and that every form of a video has
    the same answer."""
    given = {"model": server.model, "temperature": 0, "max_tokens": 32}
    frames = [file_of(thing) for thing in (FIRST, FIRST, FIRST, FIRST)]
    urls = [f"data:image/png;base64,{frame}" for frame in frames]
    parts = [
        {"type": "video_url", "video_url": {"url": "data:video/png;base64," + ",".join(frames)}},
        {"type": "video", "video": urls},
        {"type": "video", "video": [{"type": "image_url", "image_url": {"url": url}} for url in urls], "fps": 2},
    ]

    def made(*parts):
        messages = [{"role": "user", "content": [*parts, text("What is it?")]}]
        return server.openai().chat.completions.create(messages=messages, **given)

    answers = [made(part) for part in parts]
    said = {answer.choices[0].message.content for answer in answers}
    assert len(said) == 1
    assert all("red" in one for one in said)
    (count,) = {answer.usage.prompt_tokens for answer in answers}
    assert count > 2 * 9
    urls = [animated(kind, FIRST) for kind in ("GIF", "WEBP", "PNG")]
    moving = [made({"type": "video_url", "video_url": {"url": url}}) for url in urls]
    assert {(one.choices[0].message.content, one.usage.prompt_tokens) for one in moving} == {(*said, count)}
    mp4 = base64.b64encode(b"\0\0\0\x18ftypmp42" + bytes(64)).decode()
    with pytest.raises(openai.BadRequestError, match=r"MP4 is not read"):
        made({"type": "video_url", "video_url": {"url": f"data:image/png;base64,{mp4}"}})
    with pytest.raises(openai.BadRequestError, match=r"video/mp4 is not"):
        made({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}})
    with pytest.raises(openai.BadRequestError, match=r"at most 4 are allowed \(--limit-videos-per-request\)"):
        made(*parts[1:2] * 5)


def test_turns(server):
    """Later turns ask about pictures of earlier ones, and bring others."""
    messages = [{"role": "user", "content": [part(FIRST), text("What is it?")]}]

    def turn(content) -> str:
        if content:
            messages.append({"role": "user", "content": content})
        made = server.openai().chat.completions.create(model=server.model, messages=messages, temperature=0)
        messages.append({"role": "assistant", "content": made.choices[0].message.content})
        return messages[-1]["content"]

    assert turn(None) == "a red circle"
    assert turn("Which shape is it?") == "circle"
    assert turn([part(SECOND), text("What is it?")]) == "a blue square"


def test_responses(server):
    def shown(thing):
        return {"type": "input_image", "image_url": f"data:image/png;base64,{file_of(thing)}", "detail": "auto"}

    content = [shown(FIRST), shown(SECOND), {"type": "input_text", "text": "What do you see?"}]
    given = {"model": server.model, "temperature": 0, "max_output_tokens": 32}
    made = server.openai().responses.create(input=[{"role": "user", "content": content}], **given)
    assert made.output_text == BOTH
    items = [
        {"role": "user", "content": "Look at the screen. What is it?"},
        {"type": "function_call", "call_id": "1", "name": "screenshot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [shown(SECOND)]},
    ]
    assert server.openai().responses.create(input=items, **given).output_text == "a blue square"


def block(thing: tuple[str, str]) -> dict:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": file_of(thing)}}


def test_messages(server):
    given = {"model": server.model, "max_tokens": 32, "extra_body": {"temperature": 0}}
    content = [block(FIRST), block(SECOND), text("What do you see?")]
    made = server.anthropic().messages.create(messages=[{"role": "user", "content": content}], **given)
    assert made.content[0].text == BOTH
    call = {"type": "tool_use", "id": "toolu_1", "name": "screenshot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(SECOND)]}
    messages = [
        {"role": "user", "content": "Look at the screen. What is it?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tool = {"name": "screenshot", "input_schema": {"type": "object", "properties": {}}}
    made = server.anthropic().messages.create(messages=messages, tools=[tool], **given)
    assert made.content[0].text == "a blue square"


def test_a_tools_result(server):
    call = {"id": "1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look at the screen. What is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [part(FIRST)]},
    ]
    made = server.openai().chat.completions.create(model=server.model, messages=messages, temperature=0)
    assert made.choices[0].message.content == "a red circle"


@needs_browser
def test_the_page(server, page, tmp_path):
    """Pictures by button, drop and paste are shown and answered; the next turn has them, too."""
    page.goto(server.url)
    page.wait("document.body.dataset.state === 'ready' && !document.querySelector('#attach').hidden")
    first, second, other = (tmp_path / name for name in ("first.png", "second.jpeg", "other.pdf"))
    drawn(FIRST).save(first)
    drawn(SECOND, (300, 240)).save(second)
    other.write_bytes(b"%PDF-1.7")

    def wait_for(chosen: int) -> None:
        page.wait(f"document.querySelectorAll('#pictures img').length === {chosen}")

    page.choose("#files", second)
    wait_for(1)
    page.run("document.querySelector('#pictures button').click()")
    wait_for(0)
    page.choose("#files", first)
    wait_for(1)
    page.drop("#messages", other, second)
    wait_for(2)
    page.wait("document.querySelector('#left-out').checkVisibility()")
    assert "other.pdf" in page.run("document.querySelector('#left-out').textContent")
    page.type("What do you see?")
    page.press("Enter")

    def answer(turn: int) -> str:
        page.wait(f"document.querySelectorAll('.facts')[{turn}]?.textContent")
        return page.run(f"document.querySelectorAll('.assistant .text')[{turn}].textContent")

    assert answer(0) == BOTH
    sizes = "[...document.querySelectorAll('.user img')].map(image => [image.naturalWidth, image.naturalHeight])"
    assert page.run(sizes) == [[150, 120], [300, 240]]
    page.type("Which is last?")
    page.press("Enter")
    assert answer(1) == "a blue square"
    page.run("document.querySelector('#clear').click()")
    page.paste_png(first.read_bytes())
    wait_for(1)
    page.press("Enter")  # without a text
    assert answer(0) == "a red circle"


@pytest.mark.compiles
def test_offline():
    llm = LLM("demo-vision", **SETTINGS)
    talks = [
        [{"role": "user", "content": [{"type": "image", "image": drawn(thing, size)}, text("What is it?")]}]
        for thing, size in zip(THINGS, [(64, 64), (90, 120), (640, 480)] * 6, strict=True)
    ]
    both = [{"type": "image", "image": drawn(FIRST)}, {"type": "image", "image": drawn(SECOND)}]
    talks.append([{"role": "user", "content": [*both, text("Which is last?")]}])
    results = llm.chat(talks, SamplingParams(temperature=0.0, max_tokens=32), progress=False)
    answers = [result.outputs[0].text for result in results]
    assert answers == [*(f"a {colour} {shape}" for colour, shape in THINGS), "a blue square"]


@pytest.mark.compiles
def test_a_batch(tmp_path):
    lines = [
        {"custom_id": shape, "method": "POST", "url": "/v1/chat/completions", "body": {
            "messages": [{"role": "user", "content": [part(("green", shape)), part(FIRST), text("What do you see?")]}],
            "temperature": 0, "max_tokens": 32, "model": "demo-vision",
        }}
        for shape in SHAPES
    ]  # fmt: skip
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["batch", str(source), str(target), "--model", "demo-vision", *flags]) == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert {
        one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answers
    } == {shape: f"a green {shape}, then a red circle" for shape in SHAPES}  # fmt: skip
