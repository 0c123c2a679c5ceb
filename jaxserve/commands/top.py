"""`jaxserve top`: a server's queue, batch, pages and latencies in the terminal, read from its /metrics and /pool.

Of a server with several models it shows each model's state, requests, rate and memory. Also works for other servers
whose metrics have the same names after the colon; /pool may be missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

WINDOW_SECONDS = 60.0  # latencies and rates are shown for this long
_SAMPLE = re.compile(r"(?:\w+:)?(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LATENCIES = {
    "first token": "time_to_first_token_seconds",
    "between tokens": "inter_token_latency_seconds",
    "in the queue": "request_queue_time_seconds",
    "whole request": "e2e_request_latency_seconds",
}
_ENCODER = {"image encoder": "step_seconds encoder"}  # of models that see
_QUANTILES = (0.5, 0.9, 0.99)
_FREE, _CACHED, _SHARED, _LISTED = range(4)  # codes of `jaxserve.scheduling.page_snapshot`
_HUES = (75, 208, 43, 176, 149, 203, 111, 180, 80, 218, 185, 141)  # owners' colours, of the terminal's 256
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_STATES = {"ready": "32", "starting": "33", "unloading": "33", "waiting": "33", "failed": "31", "unloaded": "2"}
_BAR = 20  # columns of a bar


@dataclass
class Sample:
    """A server's metrics at one moment: values summed over labels, and histograms' bucket counts by upper bound. Those
    of a phase have its name behind that of the histogram.

    Attributes:
      model: the name of the model, or of the last one of several.
      states: of each of several models by name; empty for a server with one.
      of_models: the values by the model's name.
      limits: bytes that several models may take of each device.
    """

    seconds: float  # time of the monotonic clock
    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    model: str = "?"
    states: dict[str, str] = field(default_factory=dict)
    of_models: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    limits: list[float] = field(default_factory=list)
    pool: dict[str, Any] | None = None


def parse_metrics(text: str, seconds: float) -> Sample:
    """Parses Prometheus's text format; names lose their prefix up to the colon."""
    sample = Sample(seconds)
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or line.startswith("#"):
            continue
        name = match[1]
        labels = dict(_LABEL.findall(match[2] or ""))
        value = float(match[3])
        sample.model = model = labels.get("model_name", sample.model)
        if name.endswith("_bucket"):
            name = f"{name.removesuffix('_bucket')} {labels.get('phase', '')}".rstrip()
            sample.buckets[name][float(labels["le"])] += value
        else:
            sample.values[name] += value
            sample.of_models[model][name] += value
        if name == "model_state" and value:
            sample.states[model] = labels["state"]
        if name == "models_memory_limit_bytes":
            sample.limits.append(value)
    return sample


def fetch(url: str, key: str | None) -> Sample:
    """Reads a server's metrics. Raises OSError when it does not answer, ValueError for an invalid address."""

    def get(path: str) -> str:
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()

    try:
        sample = parse_metrics(get("/metrics"), time.monotonic())
    except urllib.error.URLError as error:
        raise OSError(f"{url}/metrics: {error.reason}; is a server there, and is --api-key right?") from error
    with contextlib.suppress(urllib.error.HTTPError):  # another engine's server, or one that is loading its model
        sample.pool = json.loads(get("/pool"))
    return sample


def quantile(q: float, counts: dict[float, float]) -> float | None:
    """The q-quantile of cumulative bucket counts by upper bound, interpolated within a bucket; None without counts.

    A quantile beyond the last finite bound is that bound, as in Prometheus's histogram_quantile.
    """
    total = counts.get(float("inf"), 0.0)
    if total <= 0:
        return None
    rank = q * total
    low = 0.0
    below = 0.0
    for bound in sorted(counts):
        if counts[bound] >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / max(counts[bound] - below, 1e-9)
        low = bound
        below = counts[bound]
    return low


class View:
    """Frames of text from the samples of the last WINDOW_SECONDS."""

    def __init__(self, url: str, color: bool):
        self._url = url
        self._color = color
        self._samples: deque[Sample] = deque()
        self._hues: dict[tuple[str, int], int] = {}

    def take(self, sample: Sample) -> None:
        self._samples.append(sample)
        while sample.seconds - self._samples[0].seconds > WINDOW_SECONDS:
            self._samples.popleft()
        owners = [(o["request_id"], o["index"]) for o in (sample.pool or {}).get("owners", ())]
        self._hues = {key: hue for key, hue in self._hues.items() if key in set(owners)}
        free = (hue for hue in range(len(owners) + len(self._hues)) if hue not in set(self._hues.values()))
        self._hues |= {key: next(free) for key in owners if key not in self._hues}

    def frame(self, width: int, height: int) -> list[str]:
        """At most `height` lines for a terminal of `width` columns."""
        now = self._samples[-1]
        values = self._samples[-1].values
        ready = list(now.states.values()).count("ready")
        what = f"{len(now.states)} models, {ready} ready" if now.states else now.model
        title = f"{self._style('jaxserve top', '1')}  {what}  {self._style(self._url, '2')}"
        lines = [title, "", self._load(values), self._rates(width)]
        lines += self._memory(now) if now.states else [self._cache(values)]
        lines += [*self._speculation(values), *self._pictures(values), ""]
        latencies = self._latencies()
        if now.states:
            lines += [*self._models(now, width, rows=max(3, height - len(lines) - len(latencies) - 1)), ""]
        if now.pool and now.pool["cells"]:
            lines += self._pool(now.pool, width, rows=max(2, min(8, height - len(lines) - len(latencies) - 4)))
        lines += latencies
        if now.pool and now.pool["owners"]:
            lines += ["", *self._requests(now.pool, width)]
        return lines[:height]

    def _memory(self, now: Sample) -> list[str]:
        """What the models take of the memory that all may take, as far as that is known."""
        if not now.limits:
            return []
        most = max(now.limits)
        if len(now.limits) > 1:
            return [f"memory      {_size(most)} of each of {len(now.limits)} devices for models"]
        used = now.values["model_memory_bytes"]
        return [f"memory      {_size(used)} of {_size(most)} for models   {used / most:.0%}"]

    def _models(self, now: Sample, width: int, rows: int) -> list[str]:
        """A line for each model: those that are in memory or wait first, in at most `rows` lines with the head."""
        order = list(_STATES)
        names = sorted(now.states, key=lambda name: order.index(now.states[name]))
        shown = names if len(names) < rows else names[: rows - 2]
        room = min(max(map(len, [*shown, "model"])), max(width - 68, 12))
        columns = max(0, min(_BAR, width - 60 - room))
        head = f"{'model':<{room}}  {'state':<10}{'running':>8}{'waiting':>8}{'tokens/s':>10}{'pages':>8}   memory"
        lines = [self._style(head, "2")]
        before = self._samples[-2] if len(self._samples) > 1 else now
        most = max(now.limits, default=math.inf)
        for name in shown:
            values = now.of_models[name]
            state = now.states[name]
            waiting = values["num_requests_waiting"] + values["model_requests_waiting"]
            gained = values["generation_tokens_total"] - before.of_models[name]["generation_tokens_total"]
            rate = max(0.0, gained) / max(now.seconds - before.seconds, 1e-9)
            memory = values["model_memory_bytes"]
            done = round(columns * memory / most)
            bar = "█" * done + self._style("░" * (columns - done), "2")
            line = f"{_cut(name, room):<{room}}  " + self._style(f"{state:<10}", _STATES[state])
            line += f"{values['num_requests_running']:>8.0f}{waiting:>8.0f}"
            pages = f"{values['kv_cache_usage_perc']:.0%}" if memory else "–"
            line += f"{rate:>10.0f}{pages:>8}   " + (f"{bar} {_size(memory)}" if memory else "–")
            lines.append(line)
        if len(shown) < len(names):
            lines.append(self._style(f"and {len(names) - len(shown)} more", "2"))
        return lines

    def _load(self, values: dict[str, float]) -> str:
        shown = {
            "running": "num_requests_running",
            "waiting": "num_requests_waiting",
            "done": "request_success_total",
            "preempted": "num_preemptions_total",
            "turned away": "admission_rejections_total",
        }
        counts = {what: values[name] for what, name in shown.items()}
        counts["waiting"] += values["model_requests_waiting"]  # for one of several models to start
        return "requests    " + "   ".join(f"{count:.0f} {what}" for what, count in counts.items())

    def _rates(self, width: int) -> str:
        def rates(name: str) -> list[float]:
            pairs = zip(self._samples, list(self._samples)[1:], strict=False)
            return [max(0.0, b.values[name] - a.values[name]) / (b.seconds - a.seconds) for a, b in pairs]

        new = rates("generation_tokens_total")
        read = rates("prompt_tokens_total")
        if not new:
            last = self._samples[-1].values
            generated = last["generation_tokens_total"]
            prompts = last["prompt_tokens_total"]
            return f"tokens      {generated:.0f} generated   {prompts:.0f} of prompts"
        curve = new[-max(0, min(40, width - 56)) :]
        top = max(curve, default=0.0) or 1.0
        drawn = "".join(_BLOCKS[round(rate / top * (len(_BLOCKS) - 1))] for rate in curve)
        return f"tokens/s    {new[-1]:.0f} generated   {read[-1]:.0f} of prompts   {self._style(drawn, '38;5;75')}"

    def _cache(self, values: dict[str, float]) -> str:
        line = f"KV pages    {values['kv_cache_usage_perc']:.1%} in use"
        if pool := self._samples[-1].pool:
            line += f" ({pool['pages_used']} of {pool['pages']})   {pool['pages_shared']} shared   "
            line += f"{pool['pages_cached']} cached"
        if queries := values["prefix_cache_queries_total"]:
            line += f"   {values['prefix_cache_hits_total'] / queries:.0%} of prompt tokens found"
        return line

    def _speculation(self, values: dict[str, float]) -> list[str]:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        drafts, proposed, accepted = (values.get(f"spec_decode_{name}_total", 0.0) for name in names)
        if not drafts:
            return []
        return [f"speculation {1 + accepted / drafts:.2f} tokens a check   {accepted / proposed:.0%} of proposals kept"]

    def _pictures(self, values: dict[str, float]) -> list[str]:
        encoded, reused = (values.get(f"images_{name}_total", 0.0) for name in ("encoded", "reused"))
        return [f"pictures    {encoded:.0f} encoded   {reused:.0f} found"] if encoded else []

    def _pool(self, pool: dict[str, Any], width: int, rows: int) -> list[str]:
        columns = min(width, 100)
        group = -(-len(pool["cells"]) // (columns * rows))  # cells per character
        codes = [max(pool["cells"][i : i + group]) for i in range(0, len(pool["cells"]), group)]
        signs = [self._sign(code, pool["owners"]) for code in codes]
        lines = ["".join(signs[i : i + columns]) for i in range(0, len(signs), columns)]
        owned = "■" if self._color else "a–z"
        pages = group * pool["pages_per_cell"]
        size = f"{pages} pages" if pages > 1 else "a page"
        return [*lines, self._style(f"{owned} owned  ▣ shared  □ cached  · free; {size} each", "2"), ""]

    def _sign(self, code: int, owners: list[dict[str, Any]]) -> str:
        if code < _LISTED:
            return self._style("·□▣"[code], ("2", "2", "1")[code])
        return self._owner(owners[code - _LISTED]) if code - _LISTED < len(owners) else "■"

    def _owner(self, owner: dict[str, Any]) -> str:
        hue = self._hues[owner["request_id"], owner["index"]]
        return self._style("■" if self._color else _LETTERS[hue % len(_LETTERS)], f"38;5;{_HUES[hue % len(_HUES)]}")

    def _latencies(self) -> list[str]:
        first = self._samples[0]
        last = self._samples[-1]
        is_single = first is last
        span = "since start" if is_single else f"last {last.seconds - first.seconds:.0f} s"
        lines = [self._style(f"{span:<16}" + "".join(f"{f'p{q * 100:g}':>10}" for q in _QUANTILES), "2")]
        shown = _LATENCIES | (_ENCODER if last.values.get("images_encoded_total") else {})
        for title, name in shown.items():
            counts = last.buckets[name]
            earlier = {} if is_single else first.buckets[name]
            recent = {bound: count - earlier.get(bound, 0.0) for bound, count in counts.items()}
            lines.append(f"{title:<16}" + "".join(f"{_duration(quantile(q, recent)):>10}" for q in _QUANTILES))
        return lines

    def _requests(self, pool: dict[str, Any], width: int) -> list[str]:
        lines = []
        for owner in pool["owners"]:
            name = owner["request_id"].rpartition("/")[2][:8] + (f"·{owner['index']}" if owner["index"] else "")
            done = round(_BAR * owner["computed_tokens"] / max(owner["max_tokens"], 1))
            bar = "█" * done + self._style("░" * (_BAR - done), "2")
            phase = "prompt" if owner["computed_tokens"] < owner["prompt_tokens"] else "decode"
            lines.append(
                f"{self._owner(owner)} {name:<12} {phase}  {bar} {owner['tokens']:>7} tokens {owner['pages']:>6} pages"
                f"  {owner.get('adapter', '')}".rstrip()
            )
        return lines

    def _style(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._color else text


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _size(count: float) -> str:
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def run(url: str, *, key: str | None = None, interval: float = 1.0, once: bool = False) -> int:
    """Shows frames until `q` or Ctrl-C; `once` prints one frame. Raises OSError when the first request fails."""
    url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    terminal = sys.stdout.isatty()
    view = View(url, color=terminal and "NO_COLOR" not in os.environ)
    view.take(fetch(url, key))
    size = shutil.get_terminal_size((100, 40))
    if once or not terminal:
        print("\n".join(view.frame(size.columns, size.lines - 1)))
        return 0
    with _screen():
        trouble = ""
        while True:
            size = shutil.get_terminal_size()
            lines = [*view.frame(size.columns, size.lines - 2), trouble or "\x1b[2mq quits\x1b[0m"]
            sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
            sys.stdout.flush()
            if select.select([sys.stdin], [], [], interval)[0] and os.read(sys.stdin.fileno(), 64)[:1] in b"qQ":
                return 0
            try:
                view.take(fetch(url, key))
                trouble = ""
            except OSError as error:
                trouble = str(error)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Switches to the terminal's alternate screen, without a cursor, with keys delivered as they are pressed."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[?7l")
        yield
    finally:
        sys.stdout.write("\x1b[?7h\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
