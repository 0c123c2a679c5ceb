"""Compares jaxserve and its peers under the same load, one after the other: tokens per second, latencies, ratios.

  python benchmarks/compare.py                                  jaxserve alone; names the peers that are missing
  python benchmarks/compare.py --torch-python PATH --llama-server PATH --gguf-python PATH --repeat 3 --json
  python benchmarks/compare.py --llama-server PATH --shape Qwen3-0.6B --quantize Q4_K_M --repeat 5
  python benchmarks/compare.py --llama-server PATH --shape LFM2-1.2B --quantize Q8_0 --concurrency 1 8 --repeat 5
  python benchmarks/compare.py --llama-server PATH --gguf FILE.gguf

The load is a number of requests of so many random prompt tokens and so many greedy output tokens, of which
`--concurrency` are under way at any time. All engines get the same weights. These are random ones which this script
makes: of a Llama of 100 million parameters in float32, or of the `--shape` of a published model or a config.json; with
`--quantize` they are brought into a GGUF file by llama.cpp's llama-quantize, which ours and llama.cpp then read. The
shapes of `peers/gguf_shapes.py` are only made as such files. Or the weights are those of any `--gguf` file. Each engine
is started, warmed up, measured and stopped, and no two run at the same time. With `--repeat` the engines take turns,
and medians are quoted.

  output tok/s   output tokens over the time of the whole load, prefill included
  decode tok/s   the same over those times in which all requests were between their first and last token
  TTFT, TPOT     time to the first token, and per token after it
  memory         what a server's processes hold after the load, shared pages once; and how much of it is no file's
  peak           the most that each of these processes has held since it began, added up

The peers, each in its own environment, outside of this one:

  transformers   a virtual environment with torch (a build for the device to be measured) and transformers >= 5.17,
                 named with --torch-python. Static: `generate` on batches of the concurrency, at its best here, where
                 all prompts and answers are equally long. Continuous: its own continuous batching. Both run in a
                 process of theirs without HTTP.
  llama.cpp      its `llama-server`, named with --llama-server. From a source tree (the source distribution of
                 llama-cpp-python holds one in vendor/llama.cpp):
                   cmake -S . -B BUILD -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
                         -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DBUILD_SHARED_LIBS=OFF
                   cmake --build BUILD --target llama-server llama-quantize
                 It reads the weights as GGUF, which a Python with gguf and safetensors writes: --gguf-python, by
                 default this one. Its cache is float32 for float32 weights, else float16, as it is by default.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers import figures as figures_of
from peers import files, gguf_shapes
from peers.engines import EngineFailed, Jaxserve, LlamaCpp, Outcome, PeerEngine, PeerLoad, Transformers
from peers.model import SHAPES, make_model, parameters

from jaxserve.bench import report

RESULTS = Path(__file__).parent / "results" / "compare-cpu.json"
ENGINES = ("jaxserve", "static", "continuous", "llama")
QUIET_SECONDS = 120.0  # longest wait before a run
QUIET_TRIES = 3  # most runs
SETTINGS = (  # flags that affect the results
    *("concurrency", "requests", "waves", "input_len", "output_len", "repeat"),
    *("shape", "quantize", "threads", "quiet", "jaxserve_flags", "llama_flags", "llama_kv"),
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="requests at a time")
    load.add_argument("--requests", type=int, default=32, metavar="N", help="requests of each run")
    load.add_argument(
        "--waves", type=int, default=8, metavar="N", help="at most so many times the concurrency: fewer requests then"
    )
    load.add_argument("--input-len", type=int, default=128, metavar="TOKENS", help="of each prompt")
    load.add_argument("--output-len", type=int, default=128, metavar="TOKENS", help="of each answer")
    load.add_argument("--check", type=int, default=4, metavar="N", help="greedy answers that are compared")
    load.add_argument("--repeat", type=int, default=1, metavar="N", help="runs of each engine, of which the median")
    load.add_argument("--quiet", type=float, metavar="CORES",
                      help="wait, and measure again, where other processes keep more than that busy")  # fmt: skip
    engines = parser.add_argument_group("engines")
    engines.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="which of them")
    engines.add_argument("--torch-python", metavar="PATH", help="a Python with torch and transformers")
    engines.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server")
    engines.add_argument("--llama-quantize", type=Path, metavar="PATH", help="by default the one beside the server")
    engines.add_argument("--gguf-python", default=sys.executable, metavar="PATH", help="a Python with gguf")
    engines.add_argument("--flash", nargs="+", choices=["off", "on"], default=["off", "on"],
                         help="llama.cpp without and with flash attention")  # fmt: skip
    engines.add_argument("--llama-kv", choices=["f32", "f16", "bf16", "q8_0"], help="type of llama.cpp's cache")
    engines.add_argument("--threads", type=int, metavar="N", help="cores for each; None: all that this process may use")
    engines.add_argument("--jaxserve-flags", default="", metavar="FLAGS", help="added to jaxserve serve")
    engines.add_argument("--llama-flags", default="", metavar="FLAGS", help="added to llama-server")
    model = parser.add_argument_group("model")
    model.add_argument("--shape", "--config", default="100M", metavar="NAME|JSON",
                       help=f"{', '.join(SHAPES)}; or config.json (Llama, Qwen3, Qwen3-MoE), tied; "
                       f"with --quantize {', '.join(gguf_shapes.SHAPES)}")  # fmt: skip
    model.add_argument("--quantize", metavar="TYPE", help="as a GGUF file of this type: Q4_K_M, Q8_0, F16, BF16")
    model.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file instead")
    model.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "jaxserve-compare"),
                       help="where the weights are made, and kept")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, nargs="?", const=RESULTS, metavar="FILE", help=f"results; FILE: {RESULTS}")
    output.add_argument("--plot", type=Path, metavar="PNG", help="bars of tokens a second (needs matplotlib)")
    args = parser.parse_args(argv)
    if min([args.requests, args.waves, args.input_len, args.output_len, args.repeat, *args.concurrency]) < 1:
        parser.error("requests, waves, lengths, repeats and concurrencies must be at least 1")
    if args.shape not in (*SHAPES, *gguf_shapes.SHAPES) and not Path(args.shape).is_file():
        names = ", ".join((*SHAPES, *gguf_shapes.SHAPES))
        parser.error(f"--shape must be one of {names} or a config.json, not {args.shape}")
    if args.shape in gguf_shapes.SHAPES and not args.gguf and not args.quantize:
        parser.error(f"--shape {args.shape} needs --quantize: it is only made as a GGUF file")
    if args.gguf and not args.gguf.is_file():
        parser.error(f"there is no {args.gguf}")
    if args.quantize and not args.gguf and not (args.llama_quantize or args.llama_server):
        parser.error("--quantize needs --llama-quantize, or --llama-server beside which it lies")
    return args


@dataclass(frozen=True)
class Model:
    """The model: a folder or a GGUF file, and its description."""

    path: Path
    name: str
    vocab_size: int
    parameters: int
    config: dict[str, Any] | None  # None: a given file
    tokenizer: Path | None = None  # a folder; None: the model's own


def find_model(args: argparse.Namespace) -> Model:
    """The requested model, made if it does not exist. Raises NoFile."""
    if args.gguf:
        counts = files.vocabulary_size(args.gguf), files.parameter_count(args.gguf)
        return Model(args.gguf, args.gguf.name, *counts, None)
    tool = args.llama_quantize or (args.llama_server and args.llama_server.with_name("llama-quantize"))
    if args.shape in gguf_shapes.SHAPES:
        shape = gguf_shapes.SHAPES[args.shape]
        path = files.quantized_shape(args.shape, args.folder, args.quantize, tool, args.gguf_python)
        name = f"{args.shape}, {args.quantize}"
        return Model(path, name, shape.vocab_size, files.parameter_count(path), shape.keys)
    name = args.shape if args.shape in SHAPES else Path(args.shape).parent.name or "model"
    config = SHAPES[name] if args.shape in SHAPES else json.loads(Path(args.shape).read_text())
    folder = path = make_model(args.folder / name, config)
    if args.quantize:
        path = files.quantized_gguf(folder, args.quantize, tool, args.gguf_python)
    name = f"{name}, {args.quantize or config['torch_dtype']}"
    return Model(path, name, config["vocab_size"], parameters(config), config, folder if args.quantize else None)


def all_engines(args: argparse.Namespace) -> list[PeerEngine]:
    """The requested engines, whether or not they are installed."""
    kv = args.llama_kv or ("f16" if args.gguf or args.quantize else "f32")
    flags = args.llama_flags.split()
    made: dict[str, list[PeerEngine]] = {
        "jaxserve": [Jaxserve(args.jaxserve_flags.split())],
        "static": [Transformers(args.torch_python, "static")],
        "continuous": [Transformers(args.torch_python, "continuous")],
        "llama": [LlamaCpp(args.llama_server, args.gguf_python, flash, flags, kv) for flash in args.flash],
    }
    return [engine for name in ENGINES if name in args.engines for engine in made[name]]


def make_load(args: argparse.Namespace, model: Model, concurrency: int, repeat: int) -> PeerLoad:
    """The load of one turn. Each turn has new prompts, so that no prefix cache has them. Greedy answers are compared in
    the first turn, if this script made the tokenizer."""
    random = np.random.default_rng([concurrency, repeat])

    def draw(count: int) -> list[list[int]]:
        return random.integers(1, model.vocab_size, (count, args.input_len)).tolist()

    return PeerLoad(
        model=model.path,
        tokenizer=model.tokenizer,
        threads=args.threads,
        concurrency=concurrency,
        output_len=args.output_len,
        prompts=draw(min(args.requests, args.waves * concurrency)),
        warmup=draw(concurrency),
        check=draw(args.check if repeat == 0 and model.config else 0),
    )


def busy_seconds() -> float:
    """Seconds that all cores together were busy since the machine started; 0 if unknown."""
    try:
        fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def wait_until_quiet(cores: float) -> None:
    """Waits until other programs keep fewer than `cores` cores busy, or until QUIET_SECONDS have passed."""
    deadline = time.perf_counter() + QUIET_SECONDS
    while True:
        start = time.perf_counter()
        busy = busy_seconds()
        own = own_seconds()
        time.sleep(2.0)
        others = (busy_seconds() - busy - own_seconds() + own) / (time.perf_counter() - start)
        if others <= cores or time.perf_counter() > deadline:
            return


def measure_quietly(engine: PeerEngine, load: PeerLoad, quiet: float | None) -> tuple[Outcome, float]:
    """Repeats a turn until others keep at most `quiet` cores busy; returns the least disturbed one. None: once."""
    best: tuple[Outcome, float] | None = None
    for _ in range(1 if quiet is None else QUIET_TRIES):
        if quiet is not None:
            wait_until_quiet(quiet)
        outcome, others = measure(engine, load)
        if best is None or others < best[1]:
            best = outcome, others
        if quiet is not None and others <= quiet:
            break
    assert best is not None
    return best


def measure(engine: PeerEngine, load: PeerLoad) -> tuple[Outcome, float]:
    """One turn of an engine, and how many cores others kept busy meanwhile. Raises EngineFailed."""
    start = time.perf_counter()
    busy = busy_seconds()
    own = own_seconds()
    outcome = engine.measure(load)
    outcome.seconds = time.perf_counter() - start
    return outcome, max(0.0, (busy_seconds() - busy - own_seconds() + own) / outcome.seconds)


def run_all(
    args: argparse.Namespace, engines: Sequence[PeerEngine], model: Model, missing: dict[str, str]
) -> tuple[list[dict[str, Any]], dict[tuple[int, str], Outcome]]:
    """Each run's figures, and the outcomes of the first repeat. Engines that fail are added to the missing ones."""
    runs = []
    first = {}
    for repeat in range(args.repeat):
        for concurrency in args.concurrency:
            load = make_load(args, model, concurrency, repeat)
            for engine in engines:
                if engine.name in missing:
                    continue
                try:
                    outcome, others = measure_quietly(engine, load, args.quiet)
                except EngineFailed as error:
                    missing[engine.name] = f"failed at {concurrency} at a time: {error}"
                    continue
                if repeat == 0:
                    first[concurrency, engine.name] = outcome
                run = {"engine": engine.name, "concurrency": concurrency, "repeat": repeat, "others_cores": others}
                run |= figures_of.figures(outcome.records, concurrency) | (outcome.memory or {})
                runs.append(run | {"seconds": outcome.seconds, "versions": outcome.versions})
                print(f"{engine.name}, {concurrency} at a time: {run['output_tokens_per_s']:,.1f} tok/s, "
                      f"others used {others:.2f} cores", file=sys.stderr, flush=True)  # fmt: skip
    return runs, first


def agreements(outcomes: dict[tuple[int, str], Outcome]) -> list[dict[str, Any]]:
    """Compares each peer's greedy answers with ours, at each concurrency."""
    rows = []
    for (concurrency, name), theirs in outcomes.items():
        ours = outcomes.get((concurrency, figures_of.OURS))
        if ours is None or name == figures_of.OURS or not ours.check:
            continue
        rows.append(
            {"peer": name, "concurrency": concurrency} | figures_of.agreement(ours.check, theirs.check, ours.gaps)
        )
    return rows


def plot(path: Path, results: dict[tuple[int, str], dict[str, float | None]], title: str) -> None:
    """Plots bars of tokens per second: a group for each concurrency, a colour for each engine."""
    from jaxserve.bench.plot import require_matplotlib

    require_matplotlib()
    from matplotlib.figure import Figure

    concurrencies = sorted({concurrency for concurrency, _ in results})
    names = list(dict.fromkeys(name for _, name in results))
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    for axes, figure_name, what in zip(
        figure.subplots(1, 2), figures_of.FIGURES, ("whole load", "decode alone"), strict=False
    ):
        for i, name in enumerate(names):
            heights = [(results.get((c, name)) or {}).get(figure_name) or 0.0 for c in concurrencies]
            places = np.arange(len(concurrencies)) + 0.8 * (i - (len(names) - 1) / 2) / len(names)
            axes.bar(places, heights, 0.8 / len(names), label=name)
        axes.set(title=what, ylabel="output tokens / s", xticks=range(len(concurrencies)))
        axes.set_xticklabels([f"{c} at a time" for c in concurrencies])
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.savefig(path, dpi=120, format="png")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    report.check_writable(args.json, args.plot)
    cores = sorted(os.sched_getaffinity(0))
    args.threads = min(args.threads or len(cores), len(cores))
    os.sched_setaffinity(0, cores[: args.threads])  # children inherit it
    try:
        model = find_model(args)
    except files.NoFile as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    engines = all_engines(args)
    missing = {engine.name: reason for engine in engines if (reason := engine.absent()) is not None}
    runs, outcomes = run_all(args, engines, model, missing)
    results = figures_of.medians(runs)
    facts = report.machine(device=False)
    title = (
        f"{model.name}, {model.parameters / 1e6:,.1f} M parameters, {args.threads} cores: requests of "
        f"{args.input_len} tokens in, {args.output_len} out; median of {args.repeat}"
    )
    same = agreements(outcomes)
    print(f"{title}\n{report.machine_line(facts)}\n\n{figures_of.results_table(results)}\n")
    for row in same:
        print(figures_of.agreement_line(f"{row['peer']}, {row['concurrency']} at a time", row))
    for name, reason in missing.items():
        print(f"absent: {name}: {reason}")
    if (others := max((run["others_cores"] for run in runs), default=0.0)) > 0.1:
        print(f"\nOther processes kept up to {others:.1f} cores busy during a run: the figures are doubtful.")
    document = {
        "benchmark": "compare",
        "machine": facts,
        "settings": {name: vars(args)[name] for name in SETTINGS},
        "model": model.config or {"file": model.path.name},
        "file_mib": model.path.stat().st_size / 2**20 if model.path.is_file() else None,
        "medians": [{"concurrency": c, "engine": name} | values for (c, name), values in results.items()],
        "ratios": figures_of.ratios(results),
        "agreement": same,
        "absent": missing,
        "runs": runs,
    }
    report.write_json(args.json, document)
    if args.plot is not None:
        plot(args.plot, results, title)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0 if runs else 1


if __name__ == "__main__":
    sys.exit(main())
