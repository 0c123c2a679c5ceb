"""The command line as users see it: help, whole runs, and one clear line for every mistake."""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import pytest
import yaml
from engines import make_engine

from jaxserve import LLM, SamplingParams
from jaxserve.commands.arguments import add_settings
from jaxserve.commands.cli import main, make_parser
from jaxserve.commands.config_file import ServeParser
from jaxserve.commands.help import TOPICS, CommandParser, setting_of, settings_page
from jaxserve.commands.serve_flags import read_serve
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.execution import memory
from jaxserve.execution.step_shape import StepShape
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.process.flags import server_options
from jaxserve.setting import between, check_settings, documented, in_range, list_of, setting, settings_of

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm" / "jaxserve"
CASE = "qwen3_tied"
SMALL = ["--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--max-model-len", "256", "--kv-pages", "32"]
GREEDY = ["--temperature", "0", "--max-tokens", "12"]
COMMANDS = ["serve", "generate", "chat", "batch", "quantize", "convert", "models", "kernels", "tune", "top"]


def run(*arguments):
    """The command as a process: (exit code, standard output, standard error without progress bars)."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in re.split(r"[\r\n]", done.stderr) if line and not line.startswith("loading weights")]
    return done.returncode, done.stdout, [line for line in lines if not line.startswith(("INFO", "WARNING"))]


@pytest.fixture
def call(capsys):
    """A function that runs a command in this process: (exit code, standard output, standard error)."""

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def refused(call, monkeypatch):
    """A function that runs a command which must fail with one line, before any model is loaded; returns the line."""

    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("jaxserve.engine.engine.Engine.load", load)

    def refused(*arguments):
        code, out, err = call(*arguments)
        assert (code, out) == (1, "")
        assert err.startswith("jaxserve: ")
        assert err.count("\n") == 1
        return err

    return refused


# Help


def test_help_lists_the_commands(call):
    code, out, _ = call("--help")
    assert code == 0
    assert all(f"    {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert out.startswith(f"usage: jaxserve {command}")


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "batch"])
def test_help_states_units_and_defaults(call, command):
    text = " ".join(call(command, "--help=all")[1].split())
    assert "--max-model-len TOKENS longest prompt and output together, in tokens; 32K: 32768 (default: the" in text
    assert re.search(r"--max-num-seqs N most sequences in one step \(default: 256\)", text)
    assert re.search(r"--memory-utilization, --gpu-memory-utilization FRACTION of device memory.*0\.9\)", text)
    assert re.search(r"--kv-pages, \S+ PAGES size of the KV cache in pages", text)
    assert "--tensor-parallel-size, -tp DEVICES" in text
    assert "--no-prefix-caching, --no-enable-prefix-caching do not reuse" in text
    assert re.search(r"--enable-lora serve LoRA adapters, each under a model name of its own --", text)


def test_every_setting_of_the_engine_has_a_flag(call):
    flags = set(re.findall(r"--(?:no-)?([a-z-]+)", call("serve", "--help=all")[1]))
    fields = {name.replace("_", "-") for name in EngineConfig.__dataclass_fields__} - {"model"}
    assert fields <= flags


def parser_of(command: str) -> argparse.ArgumentParser:
    commands = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices[command]


def test_each_flag_of_serve_has_one_topic():
    actions = [action for action in parser_of("serve")._actions if action.option_strings]
    flags = {action.option_strings[0]: setting_of(action) for action in actions}
    assert {flag for flag, known in flags.items() if known is None} == {"-h", "-v", "--model"}
    found = [known for known in flags.values() if known is not None]
    assert {known.topic for known in found} == set(TOPICS)
    assert 35 <= sum(known.usual for known in found) <= 50
    assert all(known.usual for known in found if known.short)


@pytest.mark.parametrize("columns", [80, 120])
def test_help_of_serve_is_short_and_fits_the_terminal(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, text, _ = call("serve", "--help")
    lines = text.splitlines()
    assert code == 0
    assert len(lines) <= 100
    assert max(map(len, lines)) <= columns
    assert "--help=all" in text
    assert "--port PORT" in text
    assert "--prefill-chunk" not in text
    for name in TOPICS:
        assert (f"--help={name}\n" in text) == (name not in ("hosts", "roles", "vllm")), "topics with usual flags"
    code, more, _ = call("serve", "--help=all")
    assert max(map(len, more.splitlines())) <= columns
    assert "--prefill-chunk TOKENS" in more


def test_help_on_a_topic_and_on_a_flag(call):
    code, text, _ = call("serve", "--help=hosts")
    assert code == 0
    assert re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE) == [
        "--coordinator", "--num-hosts", "--host-id", "--command-host", "--command-port", "--host-secret-file",
        "--host-timeout",
    ]  # fmt: skip
    for word in ("kv-pages", "--kv-pages", "kv_pages", "num-gpu-blocks-override"):
        code, text, _ = call("serve", f"--help={word}")
        assert (code, text.split()[0]) == (0, "--kv-pages,")
        assert "size of the KV cache in pages" in text
        assert "--max-num-seqs" not in text
    assert "one of auto, none," in " ".join(call("serve", "--help=tool-call-parser")[1].split())
    drains = re.findall(r"^  (--[a-z-]+)", call("serve", "--help=drain")[1], re.MULTILINE)
    assert drains == ["--drain-delay", "--drain-seconds"]
    code, text, _ = call("serve", "--help=nothing")
    assert code == 0
    assert all(f"--help={name} " in text for name in TOPICS)


def test_documents_have_the_settings_as_they_are():
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == settings_page(parser_of("serve")), "run `make settings`"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("port", "port"),
        ("hosts", "num_hosts"),
        ("dataParallelSize", "data_parallel_size"),
        ("pipelineParallelSize", "pipeline_parallel_size"),
        ("tensorParallelSize", "tensor_parallel_size"),
        ("role.kind", "role"),
        ("role.prefillServers", "prefill_servers"),
    ],
)
def test_values_of_the_helm_chart_are_those_of_settings(value, name):
    """Their defaults, lists of values and bounds."""
    default = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    for word in value.split("."):
        default = default[word]
        schema = schema["properties"][word]
    known = (settings_of(ServerSettings) | settings_of(EngineConfig))[name]
    if default is not None:  # null: computed from other values
        assert default == (list(known.default) if isinstance(known.default, tuple) else known.default)
    values = known.rule.values if known.rule is not None else ()
    assert tuple(schema.get("enum", ())) == values
    if known.rule is not None and known.rule.low is not None:
        assert schema["minimum"] == known.rule.low


def test_flags_in_the_helm_chart_are_those_of_serve():
    flags = {text for action in parser_of("serve")._actions for text in action.option_strings}
    set_by_chart = set(re.findall(r"^- (--[a-z-]+)=", (CHART / "templates" / "_helpers.tpl").read_text(), re.MULTILINE))
    schema = json.loads((CHART / "values.schema.json").read_text())
    pattern = schema["properties"]["args"]["items"]["not"]["pattern"]
    assert {"--host", "--tensor-parallel-size", "--role"} <= set_by_chart <= flags
    names = re.search(r"--\(([a-z|-]+)\)", pattern)
    assert names is not None
    assert {f"--{name}" for name in names[1].split("|")} <= flags


@dataclass(frozen=True, kw_only=True)
class Tea:
    minutes: float = setting(3.0, "time to draw", topic="batches", also="--steep", rule=in_range(0.5, 10, "minutes"))
    sorts: tuple[str, ...] = setting(("green",), "sorts, separated by commas", topic="batches", rule=list_of("sorts"))
    milk: bool = setting(True, "no milk", topic="batches", also="--no-cream")
    cup: Literal["small", "large"] = setting("small", "size of the cup", topic="batches", other_values={"big": "large"})
    water: int | None = setting(None, "millilitres; None: what fits", topic="batches", rule=between(1, 500))


def test_a_setting_is_said_once():
    """Its flag, its help, its values, its check and its documentation follow from one line."""
    parser = CommandParser(prog="tea")
    add_settings(parser, Tea)
    given = vars(parser.parse_args(["--steep", "5", "--sorts=mint, black", "--no-milk", "--cup", "big", "--water=20"]))
    assert given == {"minutes": 5.0, "sorts": ("mint", "black"), "milk": False, "cup": "large", "water": 20}
    assert Tea(**vars(parser.parse_args([]))) == Tea()
    check_settings(Tea())
    parser.use_topics()
    shown = " ".join(parser.format_help().split()), " ".join(settings_page(parser).split())
    assert "--water" not in shown[0], "only usual flags are in the short help"
    assert "| `--water` | millilitres (default: what fits). Values: between 1 and 500. |" in shown[1]
    for wrong, message in (
        ({"minutes": 11}, "a tea's minutes must be in [0.5, 10] minutes, got 11"),
        ({"minutes": "3"}, "a tea's minutes must be in [0.5, 10] minutes, got '3'"),
        ({"sorts": "green"}, "a tea's sorts must be sorts, got 'green'"),
        ({"cup": "huge"}, "a tea's cup must be one of small, large, got 'huge'"),
        ({"water": True}, "a tea's water must be between 1 and 500, got True"),
    ):
        with pytest.raises(ConfigError) as refusal:
            check_settings(Tea(**wrong), "a tea's ")
        assert str(refusal.value) == message
    assert {name: known.other_names for name, known in settings_of(Tea).items() if known.other_names} == {
        "minutes": ["steep"],
        "milk": ["cream"],
    }
    about = documented(Tea).__doc__ or ""
    assert "\n      milk: False: no milk.\n" in about
    assert "\n      water: millilitres; None: what fits.\n" in about


def test_help_of_other_commands_has_their_own_flags_first(call):
    for command, flag in (
        ("generate", "--max-tokens"),
        ("bundle", "--out"),
        ("plan", "--compare"),
        ("batch", "output"),
    ):
        lines = call(command, "--help")[1].splitlines()
        own = next(i for i, line in enumerate(lines) if line.startswith(f"  {flag} "))
        assert own < lines.index(next(line for line in lines if line.endswith("--help=model")))
        assert len(lines) <= 130


def test_names_of_vllm():
    """`Where vLLM has a flag for the same thing, accept its name as an alias`, also in a file."""
    parser = make_parser()
    usual = ["--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling", "--enable-auto-tool-choice",
             "--disable-log-requests", "--enable-prompt-tokens-details", "--enable-server-load-tracking"]  # fmt: skip
    assert vars(parser.parse_args(["serve", "demo", *usual])) == vars(parser.parse_args(["serve", "demo"]))
    others = ["--no-enable-prefix-caching", "--num-gpu-blocks-override", "50", "--disable-uvicorn-access-log"]
    args = parser.parse_args(["serve", "demo", *others])
    assert (args.prefix_caching, args.kv_pages, args.access_log) == (False, 50, False)
    for name, dtype in (("half", "float16"), ("float", "float32"), ("auto", "auto")):
        assert parser.parse_args(["serve", "demo", "--dtype", name]).dtype == dtype
    for name, dtype in (("fp8_e4m3", "fp8"), ("bfloat16", "bf16"), ("int8", "int8")):
        assert parser.parse_args(["serve", "demo", "--kv-cache-dtype", name]).kv_cache_dtype == dtype
    assert parser.parse_args(["serve", "demo", "--load-format", "safetensors"]).load_format == "auto"
    for text, tokens in (("32k", 32000), ("32K", 32768), ("100", 100)):
        assert parser.parse_args(["serve", "demo", "--max-model-len", text]).max_model_len == tokens
    reader = ServeParser(args.serve_parser)
    args = parser.parse_args(["serve", "demo", "--allowed-origins", '["https://a", "https://b"]', "--cors-origin", "*"])
    assert server_options(args)["cors_origins"] == ("https://a", "https://b", "*")
    values = {"enable-prefix-caching": False, "enable-auto-tool-choice": True}
    given = args.serve_parser.parse_args(["demo", *reader.arguments(values, Path("file"))])
    assert given.prefix_caching is False
    assert reader.chosen(given) == {"no-prefix-caching": True}


def test_the_model_by_a_flag(tmp_path):
    parser = make_parser().parse_args(["serve"]).serve_parser
    file = tmp_path / "flags.yaml"
    file.write_text("model: another\nlora-modules: [a=b]\n")
    named = ["--served-model-name", "a", "--model=demo"]
    for argv in (["--model", "demo"], ["demo"], ["demo", "--model", "demo"], named):
        args = read_serve(parser, argv)
        assert (args.model, "model" in args.flags, "named-model" in args.flags) == ("demo", False, False)
    args = read_serve(parser, ["--model", "demo", "--config", str(file)])
    assert (args.model, [module.name for module in args.lora_modules]) == ("demo", ["a"])
    with pytest.raises(ConfigError, match="two models: demo, and --model other"):
        read_serve(parser, ["demo", "--model", "other"])


def test_help_loads_nothing_heavy():
    code = (
        "import sys, jaxserve.commands.cli as c; c.make_parser(); assert not {'jax', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_version(call):
    assert re.fullmatch(r"jaxserve \d\S*\n", call("--version")[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["paint"], "invalid choice: 'paint'"),
        (["generate", "demo"], "the following arguments are required: prompt"),
        (
            ["generate", "demo", "x", "--page-size", "many"],
            "argument --page-size/--block-size: invalid int value: 'many'",
        ),
        (["generate", "demo", "x", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["generate", "demo", "x", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["generate", "demo", "x", "--deterministic-mode", "verify"], "unrecognized arguments: --deterministic-mode"),
        (["batch", "a"], "the following arguments are required: output"),
    ],
)
def test_usage(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: jaxserve")
    assert message in err


# Mistakes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--page-size", "17"], "page_size must be 8, 16, 32, 64, 128 or 256 tokens, got 17"),
        (["--max-model-len", "0"], "max_model_len must be between 1 and"),
        (["--memory-utilization", "90"], "memory_utilization must be in [0.05, 1.0], got 90.0"),
        (["-tp", "0"], "tensor_parallel_size must be between 1 and"),
        (["--temperature", "11"], "temperature must be in [0, 10], got 11.0"),
        (["--temperature", "nan"], "temperature must be a finite number"),
        (["--top-p", "-1"], "top_p must be in [0, 1], got -1.0"),
        (["--max-tokens", "-1"], "max_tokens must be between 0 and"),
        (["--stop", ""], "stop must hold non-empty strings"),
        (["--stop", "a"] * 65, "stop has 65 strings; at most 64 are allowed"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "demo", "x"], ["chat", "demo"]], ids=["generate", "chat"])
def test_bad_values(refused, command, flags, message):
    assert message in refused(*command, *flags)


def test_unknown_models(monkeypatch, call, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "file"
    file.touch()
    for model, message in {
        "nowhere": "no such model: 'nowhere' is neither an existing folder, nor a hub id like 'org/name', nor 'demo'",
        "./nowhere": "no such model: './nowhere'",
        "~nobody/else/model": "no such model: '~nobody/else/model'",
        "": "no such model: ''",
        "x" * 5000: "no such model",
        file: f"{file} is a file; give the folder that holds config.json",
        tmp_path: f"{tmp_path} holds no config.json: not a model folder in Hugging Face format",
    }.items():
        code, out, err = call("generate", model, "x")
        assert (code, out) == (1, "")
        assert err.startswith(f"jaxserve: {message}")


@pytest.mark.slow
def test_a_hub_id_without_the_hub():
    code, out, (*_, line) = run("generate", "some-org/no-such-model", "x")
    assert (code, out) == (1, "")
    assert "no-such-model" in line


@pytest.fixture
def broken(model_folders, tmp_path):
    return shutil.copytree(model_folders(CASE), tmp_path / "broken")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda raw: raw[:5000], "it is truncated"),
        ("model.safetensors", lambda raw: b"\xff" * 100, "is not a complete safetensors file"),
        ("model.safetensors", None, "holds no .safetensors files"),
        ("config.json", lambda raw: raw[:50], "config.json is not valid JSON"),
        ("config.json", None, "holds no config.json"),
        (
            "config.json",
            lambda raw: raw.replace(b"Qwen3", b"Quern"),
            "architectures=['QuernForCausalLM'] is not supported",
        ),
        ("config.json", lambda raw: raw.replace(b"128", b"96"), "but config.json asks for"),
        ("generation_config.json", lambda raw: b"{", "generation_config.json is not a valid generation config"),
        ("tokenizer.json", None, "no usable tokenizer in"),
    ],
)
def test_damaged_models(broken, call, name, damage, message):
    raw = (broken / name).read_bytes()
    (broken / name).unlink()
    if damage is not None:
        (broken / name).write_bytes(damage(raw))
    code, out, err = call("generate", broken, "x", *SMALL)
    assert (code, out) == (1, "")
    lines = [line for line in re.split(r"[\r\n]", err) if line and not line.startswith("loading weights")]
    assert len(lines) == 1 or name == "tokenizer.json"
    assert lines[0].startswith("jaxserve: ")
    assert message in lines[0]


def test_damage_is_one_line_without_a_traceback(broken):
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    code, out, errors = run("chat", broken, *SMALL)
    assert (code, out, len(errors)) == (1, "", 1)
    assert errors[0].startswith(f"jaxserve: {broken / 'model.safetensors'} is not a complete safetensors file")


# Runs


def test_generate(model_folders):
    folder = model_folders(CASE)
    code, out, errors = run("generate", folder, "in the beginning", *GREEDY, *SMALL)
    assert (code, errors) == (0, [])
    assert out.startswith("in the beginning")
    assert len(out.strip()) > len("in the beginning") + 4


@pytest.fixture(scope="module")
def small_llm(model_folders):
    llm = LLM(model_folders(CASE), max_num_seqs=1, max_num_batched_tokens=64, max_model_len=256, kv_pages=32)
    llm.engine.shapes = [StepShape.of(n, 1, 16, decode_only=n == 1) for n in (64, 1)]
    return llm


@pytest.fixture
def say(small_llm, call, monkeypatch):
    """A function that runs a command with `stdin` as its input, on a model that was loaded before."""
    monkeypatch.setattr("jaxserve.llm.LLM", lambda **config: small_llm)

    def say(*arguments, stdin):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        return call(*arguments)

    return say


@pytest.mark.slow
def test_generate_reads_standard_input(say, small_llm):
    code, out, err = say("generate", "x", "-", *GREEDY, stdin="in the beginning")
    (result,) = small_llm.generate("in the beginning", SamplingParams(temperature=0, max_tokens=12), progress=False)
    assert (code, out, err) == (0, f"in the beginning{result.outputs[0].text}\n", "")


def test_generate_refuses_an_empty_prompt(say):
    error = "jaxserve: prompt 0: the prompt is empty; it must have at least one token\n"
    assert say("generate", "x", "-", stdin="") == (1, "", error)


def test_chat(say):
    """Answers depend on earlier messages until /reset; too long a message is refused, and they go on."""
    said = ["hello", "hello", "/reset", "", "hello", "x y " * 300, "hello", "/exit", "never read"]
    code, out, err = say("chat", "x", *GREEDY, "--stop", "\n", stdin="\n".join(said))
    assert code == 0
    first, second, third, fourth, end = out.split("\n")
    assert first == third != second == fourth
    assert end == ""
    assert "maximum context length is 256 tokens" in err
    assert err.count("\n") == 1


def test_chat_with_a_system_message(say):
    """The system message comes first, also after /reset; the conversation ends with its input."""
    stdin = "hello\n/reset\nhello\n"
    code, out, err = say("chat", "x", "--system", "be brief", *GREEDY, "--stop", "\n", stdin=stdin)
    first, second, end = out.split("\n")
    assert (code, end, err) == (0, "", "")
    assert first == second
    assert first not in say("chat", "x", *GREEDY, "--stop", "\n", stdin=stdin)[1]


def test_models(model_folders, call, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    good = shutil.copytree(model_folders(CASE), tmp_path / "good")
    bad = tmp_path / "deep" / "bad"
    bad.mkdir(parents=True)
    (bad / "config.json").write_text(json.dumps({"architectures": ["Unheard"]}))
    code, out, err = call("models", "list", tmp_path)
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert lines[str(good)].endswith("qwen3, 2 layers, hidden 128, 512 tokens")
    assert "cannot be served: " in lines[str(bad)]
    assert "architectures=['Unheard'] is not supported" in lines[str(bad)]
    assert lines["demo"].split()[1] == "llama,"
    assert "LlamaForCausalLM" in lines["llama"]
    assert call("models", "list", tmp_path / "nowhere") == (
        1,
        "",
        f"jaxserve: no such folder: {tmp_path / 'nowhere'}\n",
    )


@pytest.mark.slow
def test_inspect(model_folders, call):
    """The report before loading agrees with the loaded engine."""
    folder = model_folders(CASE)
    for options in ({}, {"quantization": "int4", "kv_cache_dtype": "int8"}):
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        if options:  # the table has the checkpoint's weights, or the dummy ones
            flags.append("--load-format=dummy")
            options = options | {"load_format": "dummy"}
        code, out, _ = call("models", "inspect", folder, "--kv-pages=100", *flags)
        assert code == 0
        engine = make_engine(folder, kv_pages=100, **options)
        leaves = jax.tree.leaves(engine.runner.params)
        assert out.splitlines()[3] == memory.describe_weights(engine.runner.params)
        assert sum(memory.bytes_by_dtype(leaves).values()) == engine.runner.weight_bytes
        assert f"KV cache per token: {engine.runner.layout.token_bytes:,} bytes in" in out
        assert "tokens that fit the KV cache: 1,584" in out
