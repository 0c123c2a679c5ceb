"""The command line: `jaxserve serve`, `generate`, `quantize`, `bench` and the others that `make_parser` lists.

The composition root: the only module outside of `jaxserve.server` that imports it, in the commands that need it.
Nothing heavy is imported before the arguments are parsed, so that help and usage errors are instant.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.commands import bench, conversion, deployment, planning
from jaxserve.commands.arguments import add_command, add_engine_flags, add_model, engine_config
from jaxserve.commands.help import CommandParser
from jaxserve.commands.serve_flags import add_record_flags, read_serve
from jaxserve.config import PAGE_SIZE_HELP, EngineConfig

TARGET_HELP = "devices other than those of this machine, such as h200x8, a100x1 or v5e-4"
TUNABLE = ["decode", "prompts", "matmul"]  # operations with block sizes to choose


def main(argv: list[str] | None = None, *, engine: subprocess.Popen[bytes] | None = None) -> int:
    """Runs one command; returns the process's exit code. `engine` is a process for `serve`, see `jaxserve.start`."""
    given = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(given)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("jaxserve").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    try:
        reads_more = hasattr(args, "serve_parser")  # from files, and from a bundle
        args = read_serve(args.serve_parser, given[1:]) if reads_more else args
        args.engine = engine
        return args.run(args)
    except (ValueError, OSError, RuntimeError) as error:
        # ConfigError, CheckpointError, InvalidRequestError, and JAX's errors for missing or exhausted devices.
        if args.verbose:
            raise
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    from jaxserve import __version__
    from jaxserve.server.process.flags import add_server_flags

    parser = CommandParser(prog="jaxserve", description="Serve open-weight language models with JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add_serve_flags(command: argparse.ArgumentParser) -> None:
        add_model(command, nargs="?")
        command.add_argument("--model", dest="named_model", metavar="MODEL", help="the model, as in vLLM's server")
        add_server_flags(command)
        add_record_flags(command)
        add_engine_flags(command)
        command.set_defaults(serve_parser=command)

    serve = add_command(commands, "serve", run_serve, "serve a model over an OpenAI-compatible HTTP endpoint")
    add_serve_flags(serve)
    deployment.add_commands(commands, add_serve_flags)

    generate = add_command(commands, "generate", run_generate, "continue a prompt, printing text as it is generated")
    add_model(generate)
    generate.add_argument("prompt", help="the text to continue; '-' reads standard input")
    _add_sampling_flags(generate)
    add_engine_flags(generate)

    chat = add_command(commands, "chat", run_chat, "talk to a model in the terminal")
    add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _add_sampling_flags(chat)
    add_engine_flags(chat)

    batch = add_command(commands, "batch", run_batch, "answer a file of requests in the OpenAI batch format")
    batch.add_argument("input", type=Path, help="JSON lines: custom_id, method, url and body of each request")
    batch.add_argument(
        "output",
        type=Path,
        help="JSON lines with an answer for each request, as it ends; a file from an interrupted run is continued",
    )
    batch.add_argument(
        "--model", help="folder, hub id, or 'demo'; None: the model that the requests name (otherwise ignored)"
    )
    add_engine_flags(batch)

    again = add_command(
        commands, "replay", run_replay, "run recorded requests again, and show the first bit that differs"
    )
    again.add_argument(
        "record", nargs="+", type=Path, help="files of `jaxserve serve --record`, also of several servers"
    )
    again.add_argument("--model", help="folder or hub id in place of the recorded one")
    again.add_argument("--set", nargs=2, action="append", default=[], metavar=("NAME", "JSON"),
                       help="replace a setting of the engine, for example --set max_num_seqs 1")  # fmt: skip
    again.add_argument("--limit", type=int, metavar="N", help="run only the first N records; None: all")

    kernels = add_command(commands, "kernels", run_kernels, "show which kernels a device runs, and why not the others")
    kernels.add_argument("--target", metavar="NAME", help=TARGET_HELP)
    for name, default, help_ in (("head-dim", 128, "size of an attention head"),
                                 ("group", 4, "query heads per key-value head"),
                                 ("page-size", None, PAGE_SIZE_HELP)):  # fmt: skip
        kernels.add_argument(f"--{name}", type=int, default=default, metavar="N", help=help_)

    tune = add_command(commands, "tune", run_tune, "measure which kernels are the fastest on this device")
    add_model(tune, nargs="?")
    tune.add_argument("--op", nargs="+", choices=TUNABLE, default=TUNABLE, help="operations to measure")
    tune.add_argument("--sizes", choices=["small", "full"], default="full", help="without a model; full: those of "
                      "Llama 3 8B and 70B")  # fmt: skip
    tune.add_argument("--out", type=Path, metavar="JSON", help="table to write; None: in the user's cache folder")
    tune.add_argument("--minutes", type=float, metavar="N", help="end after so long with what has been measured; "
                      "None: 3 with a model, else no limit")  # fmt: skip
    add_engine_flags(tune)

    models = add_command(commands, "models", run_models, "list the models on this machine, or inspect one")
    models.set_defaults(folder=[], json=False)
    about = models.add_subparsers(title="commands", metavar="COMMAND")
    listing = add_command(about, "list", run_models, "list the models on this machine and the supported architectures")
    listing.add_argument("folder", nargs="*", type=Path, help="further folders to look in")
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    inspect = add_command(about, "inspect", run_inspect, "show a model's use of device memory, without loading it")
    add_model(inspect)
    inspect.add_argument("--target", metavar="NAME", help=TARGET_HELP)
    add_engine_flags(inspect)

    planning.add_plan(commands)
    top = add_command(commands, "top", run_top, "watch a server: its queue, batch, pages and latencies")
    top.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="address of the server")
    top.add_argument("--api-key", metavar="KEY", help="bearer key; with several API keys, the admin or metrics key; "
                     "also read from JAXSERVE_API_KEY")  # fmt: skip
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two frames")
    top.add_argument("--once", action="store_true", help="print one frame and exit")

    on_ray = commands.add_parser("ray", help="run replicas on a Ray cluster")
    deploying = on_ray.add_subparsers(title="commands", metavar="COMMAND", required=True)
    deploy = add_command(deploying, "deploy", run_ray_deploy, "deploy replicas, or change those that are deployed")
    deploy.add_argument("config", type=Path, help="YAML file with the settings; see docs/ray.md")
    deploy.add_argument("--address", default="auto", help="address of the cluster; auto: the one on this machine")
    deploy.add_argument("--host", default="127.0.0.1", help="address to listen on, on every node")
    deploy.add_argument("--port", type=int, default=8000, help="port to listen on")

    conversion.add_commands(commands)
    measure = commands.add_parser("bench", help="measure a server, the engine, or a start")
    bench.add_commands(measure.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True))
    return parser


def _add_sampling_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=128, metavar="TOKENS", help="most new tokens")
    group.add_argument("--temperature", type=float, help="0: greedy; None: the model's recommendation, else 1")
    group.add_argument("--top-p", type=float, help="in [0, 1]; None: the model's recommendation, else 1")
    group.add_argument("--top-k", type=int, help="0: all; None: the model's recommendation, else all")
    group.add_argument("--sampling-seed", type=int, help="makes the output repeatable")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="text that ends the output; may be given several times")  # fmt: skip


def run_serve(args: argparse.Namespace) -> int:
    from jaxserve.server.process.flags import server_options

    options = server_options(args)
    if args.several is not None:
        from jaxserve.server.models.flags import serve_catalog

        if args.engine is not None:  # it waits to be told of one model
            args.engine.stdin.close()
        return serve_catalog(args.several, options)
    from jaxserve.server.process.run import serve

    config = engine_config(args)
    options |= {"deployment": deployment.locked(args), "engine": args.engine}
    return _follow(config) if config.host_id else serve(config, **options)


def run_generate(args: argparse.Namespace) -> int:
    llm, params = _load_llm(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    deltas = llm.stream(prompt, params)
    print(prompt, end="", flush=True)
    for delta in deltas:
        print(delta.text, end="", flush=True)
    print()
    return 0


def run_chat(args: argparse.Namespace) -> int:
    from jaxserve.types import InvalidRequestError

    llm, params = _load_llm(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    if sys.stdin.isatty():
        print("Type a message; /reset starts over, /exit or Ctrl-D ends.", file=sys.stderr)
    while (line := _ask()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        if line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
            except InvalidRequestError as error:  # for example too long a conversation; the user may type /reset
                print(f"jaxserve: {error}", file=sys.stderr)
                messages.pop()
    return 0


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(llm: Any, messages: list[dict[str, str]], params: Any) -> str:
    """Prints the answer as it is generated; returns it without gpt-oss's reasoning and the marks of its messages."""
    import msgspec

    from jaxserve.server.chat.output_parser import OutputParser
    from jaxserve.server.reasoning import harmony

    prompt = llm.tokenizer.encode(llm.tokenizer.render_chat(messages), add_special_tokens=False)
    splitter = None
    if harmony.matches(llm.tokenizer.chat_template or ""):
        splitter = harmony.splitter(llm.tokenizer.decode(prompt[-16:], skip_special_tokens=False))
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    parser = OutputParser(splitter, None)
    text = ""
    shown = ""
    try:
        for delta in llm.stream(prompt, params):
            if (piece := parser.push(delta)) is not None:
                gap = "\n\n" if piece.content and shown and not text else ""  # between the reasoning and the answer
                print(piece.reasoning + gap + piece.content, end="", flush=True)
                text = text + piece.content
                shown = shown + piece.reasoning
    except KeyboardInterrupt:  # ends this answer but not the conversation
        pass
    print()
    return text


def run_ray_deploy(args: argparse.Namespace) -> int:
    from jaxserve.ray.settings import read_settings
    from jaxserve.server.process.flags import server_options

    settings = read_settings(args.config)
    served = make_parser().parse_args(["serve", settings.model, *settings.flags])
    server_options(served), engine_config(served)  # wrong flags are reported before anything starts
    try:
        from jaxserve.ray.application import deploy
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{error.name} is missing; pip install 'jaxserve[ray]'") from None
    deploy(settings, args.address, args.host, args.port)
    print(f"{settings.name} serves {settings.model} at http://{args.host}:{args.port}{settings.route_prefix}")
    return 0


def run_replay(args: argparse.Namespace) -> int:
    from jaxserve.commands.replay import replay

    try:
        settings = {name: json.loads(value) for name, value in args.set}
    except ValueError as error:
        raise ValueError(
            f"--set needs a name and JSON, such as max_num_seqs 1 or dtype '\"float32\"': {error}"
        ) from None
    return replay(args.record, model=args.model, settings=settings, limit=args.limit)


def run_batch(args: argparse.Namespace) -> int:
    from jaxserve.server.process.batch_files import answer_file, model_of

    args.model = args.model or model_of(args.input)
    config = engine_config(args)
    return _follow(config) if config.host_id else answer_file(config, args.input, args.output)


def _follow(config: EngineConfig) -> NoReturn:
    """What every command does on the hosts of a replica behind the first."""
    from jaxserve.engine.worker_host import follow, leave

    leave(follow(config))


def run_kernels(args: argparse.Namespace) -> int:
    import jax

    from jaxserve.devices.kernel_report import describe
    from jaxserve.devices.targets import target_devices
    from jaxserve.pallas_kernels.registry import Device

    device = (target_devices(args.target) if args.target else jax.devices())[0]
    print("\n".join(describe(Device.of(device), args.head_dim, args.group, args.page_size)))
    return 0


def run_tune(args: argparse.Namespace) -> int:
    from jaxserve.bench.tune import tune

    seconds = None if args.minutes is None else 60 * args.minutes
    config = None if args.model is None else engine_config(args)
    return tune(args.op, args.sizes, args.page_size, args.out, config=config, seconds=seconds)


def run_models(args: argparse.Namespace) -> int:
    from jaxserve.commands.model_list import lines, listing

    found = listing(args.folder)
    print(json.dumps(found, indent=2) if args.json else "\n".join(lines(found)))
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    from jaxserve.commands.model_report import describe_model
    from jaxserve.devices.targets import target_devices

    devices = target_devices(args.target) if args.target else None
    if devices and args.tensor_parallel_size == args.data_parallel_size == 1:
        args.tensor_parallel_size = len(devices)
    print("\n".join(describe_model(engine_config(args), devices)))
    return 0


def run_top(args: argparse.Namespace) -> int:
    from jaxserve.commands.top import run

    key = args.api_key or os.environ.get("JAXSERVE_API_KEY")
    return run(args.url, key=key, interval=args.interval, once=args.once)


def _load_llm(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its sampling parameters; wrong flags are reported before anything is loaded."""
    import msgspec

    from jaxserve.types import SamplingParams

    given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "seed": args.sampling_seed}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"max_tokens": args.max_tokens, "stop": tuple(args.stop)}
    SamplingParams(**given)
    config = engine_config(args)
    from jaxserve.llm import LLM

    llm = LLM(**config.__dict__)
    return llm, msgspec.structs.replace(llm.default_params(), **given)
