"""Bad pictures, sent to a running server beside a stream of plain text.

  python benchmarks/pictures.py                    each kind five times, one after the other
  python benchmarks/pictures.py --times 1 --json FILE
  python benchmarks/pictures.py --speed            the CPU time of reading and processing good ones instead

It starts `jaxserve serve demo-vision`, which may fetch pictures from this machine by name and from public hosts. Each
request must be refused with its status and a message that names the limit or the reason. Meanwhile a client streams
text. The longest pause between two of its tokens, and what the processes of the server take of memory, are measured
for each kind. The pause must stay below STALL, beyond the longest one without pictures, and the memory below GROWTH.
Nothing that the pictures hold may stand in the log.

Prints a table in Markdown, and exits with 1 if any check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import http.client
import io
import json
import multiprocessing
import os
import random
import re
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image
from serving import MEGABYTE, Server, serve

from jaxserve.images.processing import ImageProcessor
from jaxserve.images.reading import open_picture
from jaxserve.types import ImageTokens

STALL = 0.1  # seconds; longest pause of a stream of text beside a bad picture
GROWTH = 64  # MiB of all processes together while a bad picture is refused
MARK = "c0ffee-in-a-picture"  # stands in the bad files


def png(width: int, height: int, rows: int | None = None, text: int = 0) -> bytes:
    """A black picture, of which the first `rows` rows are there, all if that is None, with a comment that has so many
    bytes when it is unpacked."""
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0),
        b"tEXt": f"x\0{MARK}".encode(),
        b"zTXt": b"y\0\0" + zlib.compress(bytes(text)),
        b"IDAT": zlib.compress(bytes((height if rows is None else rows) * (width + 1))),
        b"IEND": b"",
    }
    chunks = (
        struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def photograph(size: tuple[int, int]) -> bytes:
    data = io.BytesIO()
    Image.frombytes("RGB", size, random.Random(0).randbytes(3 * size[0] * size[1])).save(data, "JPEG", comment=MARK)
    return data.getvalue()


def animation(frames: int) -> bytes:
    """A GIF with so many frames."""
    data = io.BytesIO()
    first, second = Image.new("RGB", (640, 480), "red"), Image.new("RGB", (640, 480), "blue")
    first.save(data, "GIF", save_all=True, append_images=[second], duration=10, comment=MARK)
    whole = data.getvalue()
    last = whole.rindex(b"\x21\xf9\x04")  # the control block of the second frame
    return whole[:last] + whole[last:-1] * (frames - 1) + b";"


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def bad(port: int) -> dict[str, tuple[int, str, Callable[[], list[str]]]]:
    """Kind -> status, what the message says, and the addresses of the request's pictures. `port`: of `Elsewhere`."""
    here = f"http://localhost:{port}"
    svg = f"<svg xmlns='http://www.w3.org/2000/svg'><text>{MARK}</text></svg>".encode()
    pdf = b"%PDF-1.7\n1 0 obj <</Type /Catalog>> endobj\n" + MARK.encode()
    return {
        "60,000 x 60,000 pixels in 117 KB": (400, "--max-image-pixels", lambda: [data_url(png(60_000, 60_000, 2_000))]),
        "4,096 x 4,097 pixels": (400, "4096 x 4097 .* at most 16777216", lambda: [data_url(png(4096, 4097))]),
        "a comment of 200 MB in 200 KB": (
            400, "header cannot be read", lambda: [data_url(png(8, 8, text=200 * MEGABYTE))]),
        "1 x 900 pixels": (400, "200 times as long", lambda: [data_url(png(1, 900))]),
        "truncated": (400, "cannot be decoded", lambda: [data_url(photograph((2000, 1500))[:200_000], "image/jpeg")]),
        "GIF of 10,000 frames, of which the first counts": (
            200, "", lambda: [data_url(animation(10_000), "image/gif")]),
        "SVG": (400, "no file of the formats PNG, JPEG, WEBP, GIF", lambda: [data_url(svg, "image/svg+xml")]),
        "SVG named a PNG": (400, "no file of the formats PNG, JPEG, WEBP, GIF", lambda: [data_url(svg)]),
        "PDF": (400, "must hold a picture", lambda: [data_url(pdf, "application/pdf")]),
        "PDF named a PNG": (400, "no file of the formats PNG, JPEG, WEBP, GIF", lambda: [data_url(pdf)]),
        "TIFF": (400, "no file of the formats PNG, JPEG, WEBP, GIF", lambda: [data_url(b"II*\0" + svg, "image/tiff")]),
        "20 MB of zeros": (400, "no file of the formats", lambda: [data_url(bytes(20 * MEGABYTE))]),
        "20 MB that are not base64": (400, "not base64", lambda: ["data:image/png;base64," + "#" * 20 * MEGABYTE]),
        "private address": (400, "private address", lambda: [f"http://127.0.0.1:{port}/secret"]),
        "private address of the cloud": (400, "private address", lambda: ["http://169.254.169.254/latest/meta-data"]),
        "redirect to a private address": (400, "private address", lambda: [f"{here}/to/http://127.0.0.1:{port}/secret"]),
        "redirect to a file": (400, "http or https", lambda: [f"{here}/to/file:///etc/passwd"]),
        "redirects without end": (400, "redirected more than 3 times", lambda: [f"{here}/again"]),
        "address with 100 MB": (400, "more than 33554432 bytes", lambda: [f"{here}/endless"]),
        "file of this machine": (400, "http or https", lambda: ["file:///etc/passwd"]),
        "body of 100 MB": (413, "longer than 33554432 bytes", lambda: [data_url(bytes(75 * MEGABYTE))]),
        "1,000 pictures of 1 x 1": (400, "at most 16 are allowed", lambda: [data_url(png(1, 1))] * 1000),
    }  # fmt: skip


class Elsewhere(BaseHTTPRequestHandler):
    """Another server on this machine."""

    secrets = 0  # requests for what nobody may fetch

    def do_GET(self) -> None:
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(bytes(MEGABYTE))
            return
        if self.path == "/secret":
            type(self).secrets += 1
        to = "/again" if self.path == "/again" else self.path.removeprefix("/to/")
        self.send_response(302)
        self.send_header("Location", to)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def elsewhere() -> Iterator[int]:
    """A context with `Elsewhere` at a port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def resident(processes: list[int]) -> int:
    """Bytes that these processes hold, without pages of files."""
    total = 0
    for one in processes:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{one}/status").read_text()
            total += 1024 * sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)))
    return total


class Memory(threading.Thread):
    """Notes the most memory of processes until it is stopped, in bytes."""

    def __init__(self, root: int):
        super().__init__(daemon=True)
        self._processes = tree(root)
        self.before = self.most = resident(self._processes)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.02):
            self.most = max(self.most, resident(self._processes))

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return self.most - self.before


@dataclass
class Row:
    kind: str
    requests: int = 0
    statuses: list[int] = field(default_factory=list)
    megabytes: float = 0.0  # MiB of the request
    seconds: float = 0.0  # of the slowest answer
    stall: float = 0.0  # longest pause of the stream meanwhile, in seconds
    grown: float = 0.0  # MiB
    wrong: list[str] = field(default_factory=list)


class Stream:
    """A client, in a process of its own, that streams text without end, and the longest pause between two tokens since
    `begin`."""

    def __init__(self, server: Server):
        context = multiprocessing.get_context("spawn")
        self._last = context.Value("d", time.perf_counter())  # the clock is the same in all processes
        self._longest = context.Value("d", 0.0)
        given = server.client.url, server.model, self._last, self._longest
        self._process = context.Process(target=_stream, args=given, daemon=True)
        self._process.start()

    def begin(self) -> None:
        self._longest.value = 0.0

    @property
    def longest(self) -> float:
        return max(self._longest.value, time.perf_counter() - self._last.value)

    def end(self) -> None:
        assert self._process.is_alive()
        self._process.kill()


def _stream(url: str, model: str, last: Any, longest: Any) -> None:
    body = {"model": model, "prompt": "What", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    while True:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        while line := answer.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                longest.value = max(longest.value, now - last.value)
                last.value = now
        connection.close()


async def ask(server: Server, urls: list[str]) -> tuple[int, dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": server.model, "messages": [{"role": "user", "content": parts}], "max_tokens": 16, "temperature": 0}
    answer = await server.client.request("POST", "/v1/chat/completions", json.dumps(body).encode())
    return answer.status, json.loads(answer.body)


async def measure(
    server: Server, stream: Stream, kind: str, expected: tuple[int, str], urls: list[str], times: int
) -> Row:
    row = Row(kind, megabytes=sum(map(len, urls)) / MEGABYTE)
    status, message = expected
    for _ in range(times):
        memory = Memory(server.process.pid)
        memory.start()
        stream.begin()
        start = time.perf_counter()
        got, answer = await ask(server, urls)
        row.seconds = max(row.seconds, time.perf_counter() - start)
        await asyncio.sleep(0.2)
        row.stall = max(row.stall, stream.longest)
        row.grown = max(row.grown, memory.stop() / MEGABYTE)
        row.requests += 1
        row.statuses.append(got)
        said = str(answer.get("error", answer))
        if got != status or not re.search(message, said):
            row.wrong.append(f"{got} {said[:300]}")
    return row


async def alone(server: Server, stream: Stream, seconds: float) -> Row:
    memory = Memory(server.process.pid)
    memory.start()
    stream.begin()
    await asyncio.sleep(seconds)
    return Row("none", stall=stream.longest, grown=memory.stop() / MEGABYTE)


async def run(times: int, seconds: float) -> list[Row]:
    with elsewhere() as port:
        async with serving() as server:
            stream = Stream(server)
            good = data_url(photograph((1500, 1000)), "image/jpeg")
            for i in range(8):  # so that every worker has read one
                status, answer = await ask(server, [good] * (1 + i % 4))
                assert status == 200, answer
            await asyncio.sleep(2.0)
            rows = [await alone(server, stream, seconds)]
            for kind, (status, message, urls) in bad(port).items():
                given = await asyncio.to_thread(urls)
                row = await measure(server, stream, kind, (status, message), given, times)
                if row.stall > STALL + rows[0].stall:  # other programs may hold up the stream, too
                    row.wrong.append(f"a stream stalls for {1e3 * row.stall:.0f} ms")
                if row.grown > GROWTH:
                    row.wrong.append(f"{row.grown:.0f} MiB more")
                rows.append(row)
                print(f"{kind}: {row.wrong or 'as it must be'}", file=sys.stderr, flush=True)
            stream.end()
            log = server.log.so_far
    if Elsewhere.secrets:
        rows[-1].wrong.append("a private address was asked")
    hidden = base64.b64encode(MARK.encode()).decode()[:16]
    if found := [word for word in (MARK, hidden, "base64,", "/etc/passwd", "/secret") if word in log]:
        rows[-1].wrong.append(f"the log has {found}")
    return rows


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    async with serve("demo-vision", "--allow-image-urls", "*,localhost", "--max-num-seqs", "8") as server:
        yield server


COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "do_normalize": True}
# The settings that published models have, as far as time depends on them.
_QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
_SPLIT = {"do_resize": True, "do_pad": True, "do_image_splitting": True}
PROCESSORS: dict[str, tuple[ImageTokens, dict[str, Any]]] = {
    "Qwen2.5-VL": (ImageTokens(0, 14, 2), _QWEN | {"patch_size": 14}),
    "Qwen3-VL": (ImageTokens(0, 16, 2), _QWEN | {"patch_size": 16}),
    "GLM-4.1V": (
        ImageTokens(0, 14, 2),
        {"image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        | {"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
    ),
    "Gemma 3": (
        ImageTokens(0, 14, 4, fixed=896),
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}, "resample": 2},
    ),
    "Gemma 4": (
        ImageTokens(0, 16, 3),
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 16, "pooling_kernel_size": 3}
        | {"max_soft_tokens": 280},
    ),
    "Pixtral": (
        ImageTokens(0, 16, 1),
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024}, "resample": 3}
        | {"patch_size": {"height": 16, "width": 16}},
    ),
    "Mistral Small 3.1": (
        ImageTokens(0, 14, 2),
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}, "resample": 3}
        | {"patch_size": {"height": 14, "width": 14}},
    ),
    "InternVL3": (
        ImageTokens(0, 14, 2, layout="enclosed"),
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}, "resample": 3}
        | {"min_patches": 1, "max_patches": 12},
    ),
    "Llama 4": (
        ImageTokens(0, 14, 2, layout="tiles"),
        {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 336, "width": 336}, "resample": 2}
        | {"max_patches": 16},
    ),
    "LLaVA-OneVision": (
        ImageTokens(0, 14, 1, most_tiles=9),
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 384, "width": 384}, "resample": 3}
        | {"image_grid_pinpoints": [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)], "do_pad": True},
    ),
    "Idefics 3": (
        ImageTokens(0, 14, 2, layout="numbered_tiles"),
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 1456}, "resample": 1}
        | {"max_image_size": {"longest_edge": 364}} | _SPLIT,
    ),
    "SmolVLM": (
        ImageTokens(0, 16, 4, layout="numbered_tiles"),
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 2048}, "resample": 1}
        | {"max_image_size": {"longest_edge": 512}} | _SPLIT,
    ),
    "LFM2-VL": (
        ImageTokens(0, 16, 2, layout="marked_tiles"),
        {"image_processor_type": "Lfm2VlImageProcessorFast", "size": {"height": 512, "width": 512}, "resample": 2}
        | {"downsample_factor": 2, "encoder_patch_size": 16, "tile_size": 512, "min_tiles": 2, "max_tiles": 10}
        | {"use_thumbnail": True, "min_image_tokens": 64, "max_image_tokens": 256} | _SPLIT,
    ),
    "Kimi K2.5": (
        ImageTokens(0, 14, 2),
        {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 14, "merge_size": 2, "max_patches": 16384}
        | {"size": {"max_height": 512, "max_width": 512}},
    ),
}  # fmt: skip


def speed(count: int = 30) -> str:
    """The CPU time of a picture of a megapixel, in milliseconds, median of `count`: other programs do not count."""
    lines = ["| processor | file | decode ms | process ms | patches |", "|---|---|---|---|---|"]
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (41, 61, 3), np.uint8))
    picture = noise.resize((1224, 817), Image.Resampling.BICUBIC)  # smooth, as photographs are

    def median(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(count):
            begin = time.process_time()
            work()
            times.append(time.process_time() - begin)
        return 1e3 * float(np.median(times))

    for name, (kind_of_tokens, settings) in PROCESSORS.items():
        with tempfile.TemporaryDirectory() as place:
            Path(place, "preprocessor_config.json").write_text(json.dumps(COLOURS | settings))
            processor = ImageProcessor.of(Path(place), kind_of_tokens)
            assert processor is not None
            processor.load()
        for kind in ("JPEG", "PNG", "WEBP") if name == "Qwen3-VL" else ("JPEG",):
            file = io.BytesIO()
            picture.save(file, kind)
            data = file.getvalue()
            opened = open_picture(data)
            decode, process = median(partial(open_picture, data)), median(partial(processor, opened))
            patches = len(processor(opened).patches)
            lines.append(f"| {name} | {kind}, {len(data) >> 10} KiB | {decode:.0f} | {process:.0f} | {patches:,} |")
    return "\n".join(lines)


def markdown(rows: list[Row]) -> str:
    lines = ["| picture | MiB | status | answer ms | longest pause ms | MiB more |", "|---|---|---|---|---|---|"]
    for row in rows:
        statuses = ", ".join(map(str, sorted(set(row.statuses))))
        answered = f"{1e3 * row.seconds:.0f}" if row.requests else ""
        sent = f"{row.megabytes:.1f}" if row.megabytes > 0.05 else ""
        lines.append(f"| {row.kind} | {sent} | {statuses} | {answered} | {1e3 * row.stall:.0f} | {row.grown:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="each kind; default: %(default)s")
    parser.add_argument("--alone", type=float, default=5.0, metavar="SECONDS", help="of the stream without pictures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--speed", action="store_true", help="the CPU time of good pictures instead")
    args = parser.parse_args()
    if args.speed:
        print(speed())
        return 0
    rows = asyncio.run(run(args.times, args.alone))
    print(markdown(rows))
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
