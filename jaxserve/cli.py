"""The command line: `jaxserve serve`, `generate`, `quantize`, `bench` and the others that `make_parser` lists.

The composition root: the one place below `server` that knows it, and imports it only for the commands that need it.
Nothing heavy is imported before the arguments have been understood, so that help and mistakes are instant.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.config import POOL_FRACTION, EngineConfig
from pallas_kernels.registry import BACKENDS

TUNABLE = ["decode", "prompts", "matmul"]  # operations with block sizes to choose
PAGE_SIZE_HELP = "tokens per page of the cache; None: 128 on TPU, else 16"


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit code."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("jaxserve").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    try:
        return args.run(args)
    except (ValueError, OSError, RuntimeError) as error:
        # ConfigError, CheckpointError, InvalidRequestError, and what JAX says of missing or exhausted devices
        if args.verbose:
            raise
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    from jaxserve import __version__
    from server.flags import add_server_flags

    parser = argparse.ArgumentParser(prog="jaxserve", description="Serve open-weight language models with JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    serve = _command(commands, "serve", run_serve, "serve a model over an OpenAI-compatible HTTP endpoint")
    _add_model(serve)
    add_server_flags(serve)
    _add_engine_flags(serve)

    generate = _command(commands, "generate", run_generate, "continue a prompt and print the text as it comes")
    _add_model(generate)
    generate.add_argument("prompt", help="the text to continue; '-' reads standard input")
    _add_sampling_flags(generate)
    _add_engine_flags(generate)

    chat = _command(commands, "chat", run_chat, "talk to a model in the terminal")
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _add_sampling_flags(chat)
    _add_engine_flags(chat)

    batch = _command(commands, "batch", run_batch, "answer a file of requests in the OpenAI batch format")
    batch.add_argument("input", type=Path, help="JSON lines: custom_id, method, url and body of each request")
    batch.add_argument(
        "output",
        type=Path,
        help="JSON lines, one answer a request as it ends; a file from an interrupted run is continued",
    )
    batch.add_argument(
        "--model", help="folder, hub id, or 'demo'; None: the one that the requests name (otherwise that is ignored)"
    )
    _add_engine_flags(batch)

    kernels = _command(commands, "kernels", run_kernels, "what a device would run, and why not the rest")
    kernels.add_argument("--target", metavar="NAME", help="devices that are not here, such as h200x8, a100x1 or v5e-4")
    for name, default, help_ in (("head-dim", 128, "of attention"), ("group", 4, "query heads of a key-value head"),
                                 ("page-size", None, PAGE_SIZE_HELP)):  # fmt: skip
        kernels.add_argument(f"--{name}", type=int, default=default, metavar="N", help=help_)

    tune = _command(commands, "tune", run_tune, "measure the kernels' block sizes on this device and keep the best")
    tune.add_argument("--op", nargs="+", choices=TUNABLE, default=TUNABLE, help="which operations")
    tune.add_argument("--sizes", choices=["small", "full"], default="full", help="full: those of Llama 3 8B and 70B")
    tune.add_argument("--page-size", type=int, metavar="TOKENS", help=PAGE_SIZE_HELP)
    tune.add_argument("--out", type=Path, metavar="JSON", help="the table to write; None: in the user's cache folder")

    models = _command(commands, "models", run_models, "list the models on this machine, or inspect one")
    models.set_defaults(folder=[])
    about = models.add_subparsers(title="commands", metavar="COMMAND")
    listing = _command(about, "list", run_models, "list the models on this machine and the supported architectures")
    listing.add_argument("folder", nargs="*", type=Path, help="further folders to look in")
    inspect = _command(about, "inspect", run_inspect, "what a model needs of each device's memory, without loading it")
    _add_model(inspect)
    inspect.add_argument("--target", metavar="NAME", help="devices that are not here, such as h200x8, a100x1 or v5e-4")
    _add_engine_flags(inspect)

    top = _command(commands, "top", run_top, "watch a server: its queue, batch, pages and latencies")
    top.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="of the server")
    top.add_argument("--api-key", metavar="KEY", help="also read from JAXSERVE_API_KEY; of a server with several "
                     "keys: its admin key or metrics key")  # fmt: skip
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks")
    top.add_argument("--once", action="store_true", help="print one frame and end")

    from jaxserve import conversion_commands  # here, because these use this module
    from jaxserve.bench.commands import add_commands

    conversion_commands.add_commands(commands)
    bench = commands.add_parser("bench", help="measure a server, the engine, or a start")
    add_commands(bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True))
    return parser


def _command(commands: Any, name: str, run: Callable, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("-v", "--verbose", action="store_true", help="log in detail")
    command.set_defaults(run=run)
    return command


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="a folder in Hugging Face format, a hub id such as org/name, or 'demo'")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _add_engine_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("engine")
    defaults = {name: f.default for name, f in EngineConfig.__dataclass_fields__.items()}

    def flag(*names: str, field: str, **options: Any) -> None:
        group.add_argument(*names, dest=field, default=defaults[field], **options)

    flag("--revision", field="revision", metavar="NAME",
         help="branch, tag or commit of a hub id, as in org/name@NAME; None: its main branch")  # fmt: skip
    flag("--tokenizer", field="tokenizer", metavar="MODEL",
         help="folder, GGUF file or hub id with the tokenizer to use; None: the model's own")  # fmt: skip
    flag("--ignore-config-keys", field="ignore_config_keys", metavar="KEYS", type=_names,
         help="settings of config.json, with commas between them, that are not understood and that you know to change "
         "nothing")  # fmt: skip
    flag("--max-model-len", field="max_model_len", type=int, metavar="TOKENS",
         help="longest prompt and output together, in tokens; None: the model's own limit")  # fmt: skip
    flag("--max-num-seqs", field="max_num_seqs", type=int, metavar="N", help="most sequences in one step")
    flag("--max-num-batched-tokens", field="max_num_batched_tokens", type=int, metavar="TOKENS",
         help="most tokens in one step, prompts and decodes together; None: 2048, or 8192 on large GPUs")  # fmt: skip
    flag("--max-penalty-seqs", field="max_penalty_seqs", type=int, metavar="N",
         help="most sequences with penalties in one step; None: as many as 256 MiB of token counts hold")  # fmt: skip
    flag("--prefill-chunk", field="prefill_chunk", type=int, metavar="TOKENS",
         help="most tokens in a step with a prompt while others decode; None: 32 on CPU, else what "
         "--latency-goal-ms allows by the device's data sheet")  # fmt: skip
    flag("--decode-steps", field="decode_steps", type=int, metavar="N",
         help="most tokens that a sequence draws in one call of the devices, where nothing waits")  # fmt: skip
    flag("--latency-goal-ms", field="latency_goal_ms", type=float, metavar="MS",
         help="such a call takes no longer while a client streams, and 4 times as long otherwise; sets the default of "
         "--prefill-chunk; None: 40 on CPU, else 10")  # fmt: skip
    flag("--max-waiting", field="max_waiting", type=int, metavar="N",
         help="most completions in the queue, beyond which new requests get 503; None: 32 for each of "
         "--max-num-seqs, at least 8192")  # fmt: skip
    flag("--max-waiting-tokens", field="max_waiting_tokens", type=int, metavar="TOKENS",
         help="most tokens of prompts in the queue, beyond which new requests get 503; None: no limit")  # fmt: skip
    flag("--scheduling-policy", field="scheduling_policy", choices=["fcfs", "priority"],
         help="fcfs ignores requests' priorities; priority serves lower ones first, and preempts others")  # fmt: skip
    flag("--memory-utilization", "--gpu-memory-utilization", field="memory_utilization", type=float, metavar="FRACTION",
         help="of device memory, for weights, KV cache and temporaries together")  # fmt: skip
    flag("--kv-pages", field="kv_pages", type=int, metavar="PAGES",
         help="size of the KV cache in pages; None: what the memory allows, on CPU at most half of what is "
         "free")  # fmt: skip
    flag("--page-size", "--block-size", field="page_size", type=int, metavar="TOKENS",
         help="tokens per KV page, in which prompts share their beginnings; None: 128 on TPU, else 16")  # fmt: skip
    flag("--kv-cache-dtype", field="kv_cache_dtype", choices=["auto", "bf16", "fp8", "int8"],
         help="of cached keys and values, fp8 and int8 with scales; auto: that of the computation")  # fmt: skip
    flag("--dtype", field="dtype", choices=["auto", "float32", "bfloat16", "float16"],
         help="of weights, computation and cache; auto: float32 on CPU (weights in the checkpoint's 16 bits), else the "
         "checkpoint's 16-bit type")  # fmt: skip
    flag("--tensor-parallel-size", "-tp", field="tensor_parallel_size", type=int, metavar="DEVICES",
         help="devices that share each layer")  # fmt: skip
    flag("--attention-backend", field="attention_backend", choices=["auto", *BACKENDS],
         help="kernels for attention; auto: the first that runs here, see `jaxserve kernels`")  # fmt: skip
    flag("--matmul-backend", field="matmul_backend", choices=["auto", *BACKENDS],
         help="the same for products with quantized weights; auto rounds their inputs to 8 bits on CPU, cpu does "
         "not")  # fmt: skip
    flag("--activation-quantization", field="activation_quantization", choices=["auto", "none", "checkpoint"],
         help="where a checkpoint has the inputs of products rounded to 8 bits too (W8A8): auto rounds on devices that "
         "multiply such numbers, none never, checkpoint everywhere")  # fmt: skip
    flag("--quantization", field="quantization", metavar="NAME",
         help="of the weights; auto: as the checkpoint is; int8, int4, fp8, int8-dynamic or fp8-dynamic (inputs of "
         "products too): quantize one in floats while it is loaded; a format such as awq: insist on it")  # fmt: skip
    flag("--load-format", field="load_format", choices=["auto", "dummy"],
         help="auto: read the safetensors; dummy: random weights from config.json alone")  # fmt: skip
    flag("--seed", field="seed", type=int, help="for requests without a seed of their own, and for dummy weights")
    flag("--profile", "--profile-dir", field="profile_dir", metavar="DIR",
         help="folder for traces of JAX's profiler; serve with --admin-key then has POST /profile?steps=N; "
         "None: no traces")  # fmt: skip
    group.add_argument("--dequantize", action="store_true",
                       help="quantized weights become floats as they are loaded: more memory; "
                       "on CPU faster for long prompts")  # fmt: skip
    group.add_argument("--forbid-compile", action="store_true",
                       help="once ready, fail rather than compile (nothing should; for tests)")  # fmt: skip
    group.add_argument("--no-async-scheduling", dest="async_scheduling", action="store_false",
                       help="wait for each step before the next is scheduled")  # fmt: skip
    group.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false",
                       help="do not reuse the KV pages of equal prompt beginnings")  # fmt: skip


def _add_sampling_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=128, metavar="TOKENS", help="most new tokens")
    group.add_argument("--temperature", type=float, help="0: greedy; None: the model's recommendation, else 1")
    group.add_argument("--top-p", type=float, help="in (0, 1]; None: the model's recommendation, else 1")
    group.add_argument("--top-k", type=int, help="0: all; None: the model's recommendation, else all")
    group.add_argument("--sampling-seed", type=int, help="makes the output repeatable")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the output (up to 4 times)")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    config = EngineConfig(**{name: getattr(args, name) for name in EngineConfig.__dataclass_fields__})
    os.environ.setdefault(POOL_FRACTION, str(config.memory_utilization))  # JAX has not looked for devices yet
    return config


def run_serve(args: argparse.Namespace) -> int:
    from server.flags import server_options
    from server.run import serve

    return serve(engine_config(args), **server_options(args))


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
            except InvalidRequestError as error:  # a conversation that is too long, say, can begin anew
                print(f"jaxserve: {error}", file=sys.stderr)
                messages.pop()
    return 0


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(llm: Any, messages: list[dict[str, str]], params: Any) -> str:
    prompt = llm.tokenizer.encode(llm.tokenizer.render_chat(messages), add_special_tokens=False)
    text = ""
    try:
        for delta in llm.stream(prompt, params):
            print(delta.text, end="", flush=True)
            text += delta.text
    except KeyboardInterrupt:  # ends this answer, not the conversation
        pass
    print()
    return text


def run_batch(args: argparse.Namespace) -> int:
    from server.batch import answer_file, model_of

    args.model = args.model or model_of(args.input)
    return answer_file(engine_config(args), args.input, args.output)


def run_kernels(args: argparse.Namespace) -> int:
    import jax

    from jaxserve.kernels import describe
    from jaxserve.targets import target_devices
    from pallas_kernels.registry import Device

    device = (target_devices(args.target) if args.target else jax.devices())[0]
    print("\n".join(describe(Device.of(device), args.head_dim, args.group, args.page_size)))
    return 0


def run_tune(args: argparse.Namespace) -> int:
    from jaxserve.tune import tune

    return tune(args.op, args.sizes, args.page_size, args.out)


def run_models(args: argparse.Namespace) -> int:
    from checkpoints.hub import list_models
    from jaxserve.config import ConfigError
    from jaxserve.models.families import families
    from jaxserve.models.load import read_model

    for name, folder in list_models(args.folder):
        try:
            model = read_model(folder)
            what = f"{model.family}, {model.num_layers} layers, hidden {model.hidden_size}, {model.max_position} tokens"
        except ConfigError as error:
            what = f"cannot be served: {error}"
        print(f"{name:40} {what}")
    print("\nsupported architectures:")
    for family in families():
        print(f"  {family.name:12} {', '.join(family.architectures)}")
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    from jaxserve.plan import describe_model
    from jaxserve.targets import target_devices

    devices = target_devices(args.target) if args.target else None
    if devices and args.tensor_parallel_size == 1:
        args.tensor_parallel_size = len(devices)
    print("\n".join(describe_model(engine_config(args), devices)))
    return 0


def run_top(args: argparse.Namespace) -> int:
    from jaxserve.top import run

    key = args.api_key or os.environ.get("JAXSERVE_API_KEY")
    return run(args.url, key=key, interval=args.interval, once=args.once)


def _load_llm(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and the SamplingParams; mistakes in the flags are found before anything is loaded."""
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
