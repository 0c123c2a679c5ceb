"""Pictures of one coloured shape each, and conversations about them, for the bundled model that sees."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

# The least and the most of red, green and blue.
COLOURS = {
    "red": ((180, 255), (0, 50), (0, 50)),
    "green": ((0, 60), (105, 255), (0, 70)),
    "blue": ((0, 60), (0, 100), (165, 255)),
    "yellow": ((225, 255), (205, 255), (0, 70)),
    "purple": ((105, 175), (0, 60), (105, 190)),
    "black": ((0, 40), (0, 40), (0, 40)),
}
SHAPES = ("circle", "square", "triangle")
PAPER = ((255, 255, 255), (235, 235, 235), (205, 205, 205), (250, 240, 225), (225, 240, 250), (240, 225, 240))
BLIND = "I see no picture."
WHAT = (
    "What is it?", "What is this?", "What do you see?", "What is in the picture?", "What does the picture show?",
    "Describe the picture.", "Describe this image.", "What is in this image?", "What's this?", "Describe it.", "?", "",
    "Which colour and shape?", "What colour and shape is it?", "Name the colour and the shape.",
)  # fmt: skip
COLOUR = (
    "What colour is it?", "What color is it?", "Which colour?", "What colour is the shape?", "What is its color?",
    "And its colour?", "Name the colour.",
)  # fmt: skip
SHAPE = (
    "Which shape is it?",
    "What shape is it?",
    "Which shape?",
    "What is its shape?",
    "And its shape?",
    "Name the shape.",
)
FIRST = (
    "Which is first?",
    "Which comes first?",
    "What is in the first picture?",
    "Which one is the first?",
    "What is first?",
)
LAST = (
    "Which is last?",
    "Which comes last?",
    "What is in the last picture?",
    "Which one is the last?",
    "What is last?",
)
BEFORE = ("", "", "", "See ", "Here: ", "Look: ", "Look at ", "This is ")
BETWEEN = ("", "", " and ", ", ", " then ", "\n")
AFTER = ("", " ", " ", "\n", " now. ")
SYSTEM = ("You are a helpful assistant.", "You see.", "Answer in a few words.", "Be brief.")
CALLS = ("look", "screenshot", "view_image", "read_file", "take_picture", "camera", "open", "get_image")
TELL = (
    "Take a look.",
    "Look at the screen.",
    "Take a picture.",
    "Open the file.",
    "See what is there.",
    "Use the camera.",
)


class Thing(NamedTuple):
    """What a picture shows."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}"


@dataclass
class Talk:
    """A conversation, whose last message is the answer, with its pictures in order."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    pictures: list[Image.Image]


def one_of(rng: np.random.Generator, given: Any) -> Any:
    return given[int(rng.integers(len(given)))]


def draw_thing(rng: np.random.Generator) -> Thing:
    return Thing(one_of(rng, list(COLOURS)), one_of(rng, SHAPES))


def draw_picture(rng: np.random.Generator, thing: Thing) -> Image.Image:
    """A picture of any size that shows the thing anywhere, on something bright."""
    width, height = (int(side) for side in 2 ** rng.uniform(5.3, 8.7, 2))
    width, height = max(width, height // 2), max(height, width // 2)
    picture = Image.new("RGB", (width, height), one_of(rng, PAPER))
    fill = tuple(int(rng.integers(low, high + 1)) for low, high in COLOURS[thing.colour])
    radius = min(width, height) * rng.uniform(0.3, 0.48)
    x, y = (rng.uniform(radius, side - radius) for side in (width, height))
    pen = ImageDraw.Draw(picture)
    if thing.shape == "circle":
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=fill)
    elif thing.shape == "square":
        half = radius * rng.uniform(0.7, 1.0)
        if rng.random() < 0.7:
            pen.rectangle([x - half, y - half, x + half, y + half], fill=fill)
        else:
            pen.polygon(
                _corners(x, y, radius, np.pi / 4 + rng.uniform(-0.2, 0.2) + np.arange(4) * np.pi / 2), fill=fill
            )
    else:
        turn = rng.uniform(-0.2, 0.2) + np.pi * (rng.random() < 0.15)
        pen.polygon(_corners(x, y, radius, turn - np.pi / 2 + np.arange(3) * np.pi * 2 / 3), fill=fill)
    return picture


def _corners(x: float, y: float, radius: float, angles: np.ndarray) -> list[tuple[float, float]]:
    return [(x + radius * float(np.cos(angle)), y + radius * float(np.sin(angle))) for angle in angles]


def draw_talk(rng: np.random.Generator, *, short: bool) -> Talk:
    """A conversation of one turn, or else of up to two, some with calls of tools that give pictures."""
    talk = Talk([], None, [])
    if rng.random() < 0.15:
        talk.messages.append({"role": "system", "content": one_of(rng, SYSTEM)})
    if not short and rng.random() < 0.4:
        names = rng.permutation(CALLS)[: rng.integers(1, 3)]
        talk.tools = [_tool(rng, str(name)) for name in names]
    seen: list[Thing] = []
    for _ in range(1 if short else int(rng.integers(1, 3))):
        if not seen or rng.random() < 0.5:
            count = int(rng.choice([0, 1, 2], p=[0.04, 0.5, 0.46]))
            new = [draw_thing(rng) for _ in range(count)]
            talk.pictures += [draw_picture(rng, thing) for thing in new]
            seen = new or seen
        else:
            new = []
        question, answer = _question(rng, seen)
        if new and not short and rng.random() < 0.4:
            _tell(rng, talk, question, len(new))
        else:
            talk.messages.append({"role": "user", "content": _content(rng, question, len(new))})
        talk.messages.append({"role": "assistant", "content": answer})
    return talk


def _question(rng: np.random.Generator, seen: list[Thing]) -> tuple[str, str]:
    kind = rng.random()
    if not seen:
        return one_of(rng, WHAT + COLOUR + SHAPE), BLIND
    if len(seen) > 1 and kind < 0.3:
        return (one_of(rng, FIRST), str(seen[0])) if kind < 0.15 else (one_of(rng, LAST), str(seen[-1]))
    if kind < 0.7:
        return one_of(rng, WHAT), ", then ".join(map(str, seen))
    if kind < 0.85:
        return one_of(rng, COLOUR), ", then ".join(thing.colour for thing in seen)
    return one_of(rng, SHAPE), ", then ".join(thing.shape for thing in seen)


def _content(rng: np.random.Generator, question: str, count: int) -> Any:
    if not count:
        return question
    parts = [one_of(rng, BEFORE)]
    for i in range(count):
        parts += [{"type": "image"}, one_of(rng, BETWEEN) if i < count - 1 else one_of(rng, AFTER)]
    parts = [*parts, question] if rng.random() < 0.7 else [question, *parts]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts if part]


def _tool(rng: np.random.Generator, name: str) -> dict[str, Any]:
    properties = {"path": {"type": "string"}} if rng.random() < 0.5 else {}
    function: dict[str, Any] = {"name": name, "parameters": {"type": "object", "properties": properties}}
    if rng.random() < 0.5:
        function["description"] = one_of(rng, TELL)
    return {"type": "function", "function": function}


def _tell(rng: np.random.Generator, talk: Talk, question: str, count: int) -> None:
    """The question, a call of a tool, and its result, which has the pictures."""
    asked = " ".join([part for part in (one_of(rng, TELL), question) if part][:: 1 if rng.random() < 0.7 else -1])
    name = one_of(rng, talk.tools)["function"]["name"] if talk.tools else one_of(rng, CALLS)
    arguments = {"path": f"{one_of(rng, 'abcxyz')}.png"} if rng.random() < 0.5 else {}
    call = {"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}
    result = [{"type": "image"}] * count
    if rng.random() < 0.3:
        result = [{"type": "text", "text": one_of(rng, ("Done.", "Here it is:", "ok"))}, *result]
    talk.messages += [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]


def texts_for_tokenizer() -> list[str]:
    """All that is said in conversations, for the tokenizer to be trained on."""
    things = [str(Thing(colour, shape)) for colour in COLOURS for shape in SHAPES]
    answers = [*things, *(f"{a}, then {b}" for a in things for b in things), BLIND]
    said = [*WHAT, *COLOUR, *SHAPE, *FIRST, *LAST, *BEFORE, *SYSTEM, *TELL]
    rng = np.random.default_rng(0)
    calls = [json.dumps(_tool(rng, name)["function"]) for name in CALLS for _ in range(4)]
    turns = [f"{role}\n{text}" for role in ("user", "assistant", "system") for text in said]
    fixed = (
        "Tools:",
        "<tool_response>",
        "</tool_response>",
        'Call a tool with <tool_call>{"name": "…", "arguments": {…}}',
    )
    return [*answers, *turns * 5, *calls, *fixed * 20]
