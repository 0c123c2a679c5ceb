"""The image encoder's time for one picture of 448 x 448 pixels, beside llama.cpp's; the first token of second turns.

  python benchmarks/encoders.py --llama-mtmd-cli PATH                    the shapes of SmolVLM-500M and Qwen3-VL-2B
  python benchmarks/encoders.py --model SmolVLM-2.2B --pictures 5        ours alone

The encoders have the published shapes and random weights in float16 (`peers/seeing.py`); llama.cpp reads the same as
GGUF. compare.py says how it is built; the target is llama-mtmd-cli. Both have two threads, one after the other. Each
picture is another one. Our server tells the encoder's time in its metrics (`step_seconds` of the phase `encoder`),
llama.cpp in its log ("encoding done in"). SmolVLM sees a picture as one tile.

`--turns` measures the time to the first token of a second turn about a picture, and of one about a text with as many
tokens. Medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import re
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

from peers.seeing import SHAPES, make
from PIL import Image
from serving import Server, serve

EDGE = 448
PLACE = Path(os.environ.get("TMPDIR", "/tmp"), "jaxserve-encoders")


def picture(number: int) -> str:
    """A PNG in base64."""
    small = Image.frombytes("RGB", (28, 28), random.Random(number).randbytes(28 * 28 * 3))
    data = io.BytesIO()
    small.resize((EDGE, EDGE), Image.Resampling.BICUBIC).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def llama(program: Path, folder: Path, count: int, threads: int) -> list[float]:
    """Milliseconds of each picture, after the first one."""
    files = [folder / f"{number}.png" for number in range(count + 1)]
    for number, file in enumerate(files):
        file.write_bytes(base64.b64decode(picture(number)))
    given = {"-m": folder / "model.gguf", "--mmproj": folder / "mmproj.gguf", "-t": threads, "-c": 4096, "-n": 1}
    command = [str(program), *(str(part) for pair in given.items() for part in pair), "--chat-template", "chatml"]
    command += [*(part for file in files for part in ("--image", str(file))), "-p", "What is it?", "-lv", "4"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    times = [float(found) for found in re.findall(r"(?:slice encoded|encoding done) in (\d+) ms", done.stdout)]
    if done.returncode or not times:
        end = done.stdout[-2000:]
        raise SystemExit(f"{program} ended with {done.returncode}:\n{end}")
    each = len(times) // (count + 1)  # slices of a picture
    return [sum(times[i : i + each]) / each for i in range(each, len(times), each)]


def body_of(messages: list[dict[str, Any]], tokens: int = 1) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def asked(*parts: str) -> dict[str, Any]:
    """A message of texts and data URLs."""

    def part(text: str) -> dict[str, Any]:
        is_url = text.startswith("data:")
        return {"type": "image_url", "image_url": {"url": text}} if is_url else {"type": "text", "text": text}

    return {"role": "user", "content": [part(text) for text in parts]}


async def ours(server: Server, count: int) -> list[float]:
    """Milliseconds of each picture."""
    times = []
    for number in range(count + 1):
        before = [await server.metric(f"step_seconds_{what}", phase="encoder") for what in ("sum", "count")]
        url = f"data:image/png;base64,{picture(number)}"
        status, answer = await server.post(body_of([asked(url, "b")]), "/v1/chat/completions")
        assert status == 200, answer
        while (after := [await server.metric(f"step_seconds_{what}", phase="encoder") for what in ("sum", "count")])[
            1
        ] == before[1]:
            await asyncio.sleep(0.05)
        assert after[1] == before[1] + 1
        times.append(1e3 * (after[0] - before[0]))
    return times[1:]


async def turns(server: Server, count: int) -> dict[str, float]:
    """Milliseconds to the first token of second turns: about a picture, and about a text with as many tokens."""

    async def first_token(messages: list[dict[str, Any]]) -> float:
        start = time.perf_counter()
        status, answer = await server.post(body_of(messages), "/v1/chat/completions")
        assert status == 200, answer
        return 1e3 * (time.perf_counter() - start)

    async def second(question: dict[str, Any]) -> tuple[float, int]:
        status, answer = await server.post(body_of([question], 4), "/v1/chat/completions")
        assert status == 200, answer
        said = {"role": "assistant", "content": json.loads(answer)["choices"][0]["message"]["content"]}
        used = json.loads(answer)["usage"]["prompt_tokens"]
        later = [question, said, asked("And what else?")]
        return await first_token(later), used

    found: dict[str, list[float]] = {"picture": [], "text": []}
    lengths: dict[str, int] = {}
    for number in range(100, 100 + count):
        url = f"data:image/png;base64,{picture(number)}"
        ms, length = await second(asked(url, f"What is {number}?"))
        found["picture"].append(ms)
        lengths["picture"] = length
        rng = random.Random(number)
        words = "".join(rng.choice("abcdefgh ") for _ in range(length - len("<>user\n<>\n<>assistant\n") + 9))
        ms, lengths["text"] = await second(asked(words))
        found["text"].append(ms)
    return {name: median(times) for name, times in found.items()} | {f"{k} tokens": v for k, v in lengths.items()}


async def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    folder = make(name, args.folder / name)
    result: dict[str, Any] = {"model": name}
    if args.llama_mtmd_cli:
        times = llama(args.llama_mtmd_cli, folder, args.pictures, args.threads)
        result |= {"llama.cpp ms": median(times), "llama.cpp all": times}
    flags = ["--max-num-seqs", "2", "--max-model-len", "4096", "--kv-pages", "600", *args.flags.split()]
    async with serve(str(folder), *flags) as server:
        times = await ours(server, args.pictures)
        result |= {"ms": median(times), "all": times}
        if args.turns:
            result["second turn ms"] = await turns(server, args.turns)
    if args.llama_mtmd_cli:
        result["ratio"] = result["llama.cpp ms"] / result["ms"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(SHAPES), help="may be given several times")
    parser.add_argument("--llama-mtmd-cli", type=Path, metavar="PATH")
    parser.add_argument("--pictures", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=0, metavar="N", help="second turns of each kind")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=PLACE, help="of the models (default: %(default)s)")
    parser.add_argument("--flags", default="", help="further flags of jaxserve serve, in one argument")
    args = parser.parse_args()
    for name in args.model or ["SmolVLM-500M", "Qwen3-VL-2B"]:
        print(json.dumps(asyncio.run(measure(name, args))), flush=True)


if __name__ == "__main__":
    main()
