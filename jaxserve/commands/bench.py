"""`jaxserve bench serve | offline | latency | startup`: flags, and what is printed and written."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.commands.arguments import add_command, add_engine_flags, add_model, engine_config

if TYPE_CHECKING:
    from jaxserve.bench.prompts import Prompt, Vocabulary
    from jaxserve.bench.serve import Load, Target
    from jaxserve.bench.stats import RequestRecord

_BUSY = 0.8  # client's use of a core; above it, measured times may be late


def add_commands(commands: Any) -> None:
    """Adds the sub-commands of `bench`."""
    serve = add_command(commands, "serve", run_bench_serve, "put load on a running OpenAI-compatible server")
    _add_target_flags(serve)
    _add_load_flags(serve)
    _add_dataset_flags(serve)
    _add_output_flags(serve)
    serve.add_argument("--detail", action="store_true", help="write a row for every request to the JSON file")
    serve.add_argument("--plot", type=Path, metavar="PNG", help="draw distributions and a timeline (needs matplotlib)")

    offline = add_command(commands, "offline", run_bench_offline, "measure tokens per second in this process")
    add_model(offline)
    offline.add_argument("--num-prompts", type=int, default=64, metavar="N", help="prompts, all submitted at once")
    _add_shape_flags(offline)
    _add_output_flags(offline)
    add_engine_flags(offline)

    latency = add_command(commands, "latency", run_bench_latency, "measure the latency of one batch in this process")
    add_model(latency)
    latency.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences that start together")
    latency.add_argument("--iterations", type=int, default=10, metavar="N", help="batches measured, after a warm-up")
    _add_shape_flags(latency)
    _add_output_flags(latency)
    add_engine_flags(latency)

    startup = add_command(commands, "startup", run_bench_startup, "measure the time until a server is ready")
    add_model(startup)
    startup.add_argument("--cold", action="store_true", help="start twice: with an empty and with a filled cache")
    startup.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="longest time of one start")
    _add_output_flags(startup)
    add_engine_flags(startup)


def _add_target_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("target")
    group.add_argument("--url", default="http://127.0.0.1:8000", help="the server, with or without /v1")
    group.add_argument("--model", metavar="NAME", help="model to ask for; None: the first of /v1/models")
    group.add_argument("--endpoint", choices=["completions", "chat"], default="completions", help="endpoint of /v1")
    group.add_argument("--api-key", metavar="KEY", help="bearer key; also read from JAXSERVE_API_KEY")
    group.add_argument("--no-stream", dest="stream", action="store_false", help="request whole answers")
    group.add_argument("--ignore-eos", action="store_true", help="generate the full output length (an extension)")
    group.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="longest time of a request")


def _add_load_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("load")
    group.add_argument("--num-requests", type=int, default=100, metavar="N", help="requests measured")
    group.add_argument("--warmup", type=int, default=0, metavar="N", help="earlier requests that are not measured")
    when = group.add_mutually_exclusive_group()
    when.add_argument("--request-rate", type=float, default=math.inf, metavar="PER_SECOND",
                      help="mean rate of Poisson arrivals; inf: all at once")  # fmt: skip
    when.add_argument("--concurrency", type=int, metavar="N", help="instead keep this many requests open")
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                       help="count requests within all of these limits; NAME: ttft, tpot or e2e")  # fmt: skip


def _add_dataset_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("prompts")
    group.add_argument("--dataset", choices=["random", "sharegpt", "prefix"], default="random",
                       help="random tokens; recorded questions; random tokens after a common prefix")  # fmt: skip
    group.add_argument("--input-len", type=int, default=128, metavar="TOKENS", help="length of prompts without prefix")
    group.add_argument("--output-len", type=int, metavar="TOKENS",
                       help="length of outputs; None: 128, or with sharegpt that of the recorded answer")  # fmt: skip
    group.add_argument("--range-ratio", type=float, default=0.0, metavar="FRACTION",
                       help="lengths vary uniformly by up to this fraction of the given ones")  # fmt: skip
    group.add_argument("--prefix-len", type=int, default=1000, metavar="TOKENS", help="length of each common prefix")
    group.add_argument("--num-prefixes", type=int, default=1, metavar="N", help="different prefixes, used in turn")
    group.add_argument("--dataset-path", type=Path, metavar="JSON", help="a file in the ShareGPT format")
    group.add_argument("--vocab-size", type=int, metavar="TOKENS",
                       help="choose random token ids below this; None: ids of common words, or text")  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="seed of prompts and arrival times")


def _add_shape_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--input-len", type=int, default=128, metavar="TOKENS", help="random tokens in each prompt")
    command.add_argument("--output-len", type=int, default=128, metavar="TOKENS", help="tokens generated for each")


def _add_output_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", type=Path, metavar="FILE", help="write settings and results to this file")


def run_bench_serve(args: argparse.Namespace) -> int:
    from jaxserve.bench import plot, report
    from jaxserve.bench.client import run
    from jaxserve.bench.serve import Load, Target
    from jaxserve.bench.stats import parse_goodput, summarize

    limits = parse_goodput(args.goodput)
    if not args.stream and limits.keys() - {"e2e"}:
        raise ValueError("--no-stream measures the end-to-end latency alone: it allows --goodput e2e:MS only")
    if args.num_requests < 1 or args.warmup < 0 or not args.timeout > 0:
        raise ValueError("--num-requests and --timeout must be above 0, and --warmup not below 0")
    report.check_writable(args.json, args.plot)
    if args.plot is not None:
        plot.require_matplotlib()
    names = ("url", "model", "endpoint", "stream", "ignore_eos", "temperature", "timeout")
    key = args.api_key or os.environ.get("JAXSERVE_API_KEY")
    target = Target(api_key=key, **{name: getattr(args, name) for name in names})
    load = Load(args.request_rate, args.concurrency)
    facts = report.machine(device=False)
    target, prompts, records, more = run(_measure(args, target, load))
    summary = summarize(records, limits) | more
    busy = summary["client_cpu_percent"] / 100

    title = f"{target.model} at {target.url}{target.path}: {args.num_requests} requests, {load}"
    print(f"{title}; {prompts}\nclient: {report.machine_line(facts)}\n\n{report.summary_text(summary)}")
    if busy > _BUSY:
        print(
            "\nThe client was so busy that its times may be late: lower the load, or divide it among several clients."
        )
    document: dict[str, Any] = {
        "benchmark": "serve",
        "machine": facts,
        "settings": _settings(args) | {"model": target.model},
    }
    document |= {"prompts": prompts, "summary": summary}
    if args.detail:
        document["requests"] = [record.as_row() for record in records]
    report.write_json(args.json, document)
    if args.plot is not None:
        plot.plot_run(args.plot, records, title)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0 if summary["successful"] else 1


async def _measure(
    args: argparse.Namespace, target: Target, load: Load
) -> tuple[Target, str, list[RequestRecord], dict[str, float]]:
    """The target with its model, a description of the prompts, the records, and results that are not in the records."""
    import dataclasses

    from jaxserve.bench import serve
    from jaxserve.bench.client import Client

    _allow_open_files(args.num_requests + 64)
    with contextlib.closing(Client(target.url, target.api_key)) as client:
        model = target.model or await serve.first_model(client)
        target = dataclasses.replace(target, url=client.url, model=model)
        sender = serve.Sender(target, client)
        vocabulary = await serve.find_vocabulary(client, model, args.vocab_size)
        vocabulary = await serve.usable_vocabulary(sender, target, vocabulary)
        prompts, what = _prompts(args, vocabulary)
        # Requests are encoded before the clock starts.
        bodies = [(target.body(p), len(p.content) if isinstance(p.content, list) else 0) for p in prompts]
        measured = bodies[: args.num_requests]
        warmup = bodies[args.num_requests :]
        await serve.run_load(lambda i: sender.send(*_at(warmup[i], 0.0)), [0.0] * args.warmup, load.concurrency)
        starts = serve.arrival_times(args.num_requests, load.request_rate, args.seed)
        before = await serve.read_checks(client)
        clock = time.perf_counter()
        used = time.process_time()
        records = await serve.run_load(lambda i: sender.send(*_at(measured[i], clock)), starts, load.concurrency)
        busy = (time.process_time() - used) / (time.perf_counter() - clock)
        checks = (await serve.read_checks(client)).summary(before)
    return target, what, records, {"client_cpu_percent": 100 * busy} | checks


def _at(request: tuple[bytes, int], clock: float) -> tuple[bytes, float, int]:
    return request[0], clock, request[1]


def _prompts(args: argparse.Namespace, vocabulary: Vocabulary) -> tuple[list[Prompt], str]:
    """The prompts that the flags ask for, those of the warm-up last, and their description."""
    from jaxserve.bench.prompts import Lengths, prefix_prompts, random_prompts, sharegpt_prompts

    count = args.num_requests + args.warmup
    if args.dataset == "sharegpt":
        if args.dataset_path is None:
            raise ValueError("--dataset sharegpt needs the file: --dataset-path FILE")
        prompts = sharegpt_prompts(args.dataset_path, count, args.seed, args.output_len)
        return prompts, f"questions from {args.dataset_path.name}"
    lengths = Lengths(args.input_len, 128 if args.output_len is None else args.output_len, args.range_ratio)
    kind = "token ids" if vocabulary.ids is not None else "words of text"
    spread = f" ± {100 * lengths.range_ratio:g}%" if lengths.range_ratio else ""
    what = f"random {kind}, {lengths.input_len} tokens in, {lengths.output_len} out{spread}"
    if args.dataset == "random":
        return random_prompts(vocabulary, lengths, count, args.seed), what
    what += f", after shared prefixes ({args.num_prefixes}) of {args.prefix_len} tokens"
    prompts = prefix_prompts(
        vocabulary, lengths, count, args.seed, prefix_len=args.prefix_len, num_prefixes=args.num_prefixes
    )
    return prompts, what


def _allow_open_files(count: int) -> None:
    """Raises the limit on open files to `count`, or to the system's hard limit if that is lower."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_bench_offline(args: argparse.Namespace) -> int:
    from jaxserve.bench import local, report

    report.check_writable(args.json)
    summary = local.run_offline(engine_config(args), args.num_prompts, args.input_len, args.output_len)
    title = f"{args.model} offline: {args.num_prompts} prompts, {args.input_len} tokens in, {args.output_len} out"
    rows = [
        ["Duration (s)", summary["duration_s"]],
        ["Prompts per second", summary["requests_per_s"]],
        ["Output tokens per second", summary["output_tokens_per_s"]],
        ["Total tokens per second", summary["total_tokens_per_s"]],
        *([title, summary[key]] for title, key in report.SPECULATION.items() if key in summary),
    ]
    _finish(args, "offline", title, report.table(rows), summary)
    return 0


def run_bench_latency(args: argparse.Namespace) -> int:
    from jaxserve.bench import local, report

    report.check_writable(args.json)
    shape = (args.batch_size, args.input_len, args.output_len)
    summary = local.run_latency(engine_config(args), *shape, args.iterations)
    title = (
        f"{args.model}: batches of {args.batch_size}, {args.input_len} tokens in, {args.output_len} out, "
        f"{args.iterations} iterations"
    )
    titles = {"batch": "Whole batch", "ttft": "Time to first token", "tpot": "Time per output token"}
    titles |= {"itl": "Inter-token latency"}
    columns = ["p50", "mean", "p90", "p99"]
    rows: list[list[Any]] = [["Milliseconds", "median", *columns[1:]]]
    for name, what in titles.items():
        values = summary[f"{name}_ms"] or {}
        rows.append([what, *(values.get(column) for column in columns)])
    text = f"{report.table(rows)}\n\nOutput tokens per second (median): {summary['output_tokens_per_s']:,.1f}"
    text += "".join(f"\n{title}: {summary[key]:.2f}" for title, key in report.SPECULATION.items() if key in summary)
    _finish(args, "latency", title, text, summary)
    return 0


def run_bench_startup(args: argparse.Namespace) -> int:
    import dataclasses

    from jaxserve.bench import report, startup

    report.check_writable(args.json)
    starts = startup.run_startup(engine_config(args), cold=args.cold, timeout=args.timeout)
    header = ["Cache", "HTTP answers", "loading", "compiling", "programs", "the rest", "ready"]
    rows = [[s.cache, s.http_s, s.load_s, s.compile_s, s.executables, s.other_s, s.ready_s] for s in starts]
    summary = {"starts": [dataclasses.asdict(s) | {"other_s": s.other_s} for s in starts]}
    text = report.table([header, *rows]) + "\n\nSeconds; ready = loading + compiling + the rest (imports, devices)"
    _finish(args, "startup", f"{args.model}: from the process's start until ready", text, summary)
    return 0


def _finish(args: argparse.Namespace, name: str, title: str, text: str, summary: dict[str, Any]) -> None:
    """Prints and writes the results of a benchmark that ran in this process or started its own server."""
    from jaxserve.bench import report

    facts = report.machine(device=True)
    print(f"{title}\n{report.machine_line(facts)}\n\n{text}")
    document = {"benchmark": name, "machine": facts, "settings": _settings(args), "summary": summary}
    report.write_json(args.json, document)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that affect the results, without secrets."""
    return {
        name: value for name, value in vars(args).items() if name not in ("run", "api_key", "verbose", "json", "plot")
    }
